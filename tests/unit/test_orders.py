"""Orders about models and the device itself, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from doubles.service import MemoryService

from appliance import orders
from appliance.adapters.store import Store
from appliance.core.command import Command, CommandResult
from appliance.orders import Orders, changed_by_order
from appliance.settings import Settings
from models.errors import BadInput, ConfigError, NotFound
from models.orders import COMMANDS

pytestmark = pytest.mark.unit

NOW = 1_800_000_000.0


class Device:
    """A service that obeys, and what it was configured to."""

    def __init__(self, store: Store, **given: Any) -> None:  # noqa: ANN401 - settings
        self.service, self.store, self.given = MemoryService(), store, Settings(**given)
        self.configured: list[Settings] = []
        made = Orders(self.service, self.given, store, now=lambda: NOW, parts=(self,))  # type: ignore[arg-type] # its double
        self.service.orders |= made.by_name()

    def configure(self, config: Settings) -> None:
        self.configured.append(config)

    def give(self, command: str, **args: Any) -> CommandResult:  # noqa: ANN401 - JSON
        """Give an order that no other has the id of."""
        self.number = getattr(self, "number", 0) + 1
        return asyncio.run(self.service.execute(Command(str(self.number), command, args)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "state")) as made:
        yield made


@pytest.fixture
def device(store: Store) -> Device:
    return Device(store)


def test_a_model_is_unloaded_and_loaded_by_order(device: Device) -> None:
    assert device.give("unload", name="echo").result == {"name": "echo"}
    assert not device.service.model("echo").ready
    assert device.give("load", name="echo").result["fits"] is True
    assert device.service.model("echo").ready


@pytest.mark.parametrize("command", ["load", "unload", "restart-model"])
def test_an_order_about_a_model_names_one_that_is_served(device: Device, command: str) -> None:
    with pytest.raises(NotFound):
        device.give(command, name="missing")
    with pytest.raises(BadInput, match=f"order '{command}' needs the name of a model"):
        device.give(command)


def test_a_snapshot_tells_the_state_and_the_latest_deployments(device: Device) -> None:
    device.service.deployments = lambda: [{"id": number} for number in range(20, 0, -1)]
    found = device.give("snapshot").result
    assert found["at"] == NOW
    assert found["status"]["device_id"] == device.service.device_id
    assert [one["id"] for one in found["deployments"]] == [20, 19, 18, 17, 16]


def test_settings_that_are_changed_hold_at_once_and_after_a_restart(device: Device, store: Store) -> None:
    answer = device.give("configure", settings={"update.window": "22:00-04:30", "mqtt.telemetry_s": 10})
    assert answer.result == {"configured": {"update.window": "22:00-04:30", "mqtt.telemetry_s": 10}}
    assert (device.configured[-1].update.window, device.configured[-1].mqtt.telemetry_s) == ("22:00-04:30", 10)
    again = changed_by_order(device.given, store)
    assert (again.update.window, again.mqtt.telemetry_s) == ("22:00-04:30", 10)
    device.give("configure", settings={"update.window": None})
    assert device.configured[-1].update.window == device.given.update.window
    assert device.configured[-1].mqtt.telemetry_s == 10


def test_a_password_survives_a_change_of_other_settings(store: Store) -> None:
    device = Device(store, mqtt={"password": "correct horse"})
    device.give("configure", settings={"update.channel": "canary"})
    assert device.configured[-1].mqtt.password.get_secret_value() == "correct horse"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"http.host": "::1"}, "http.host cannot be changed by order"),
        ({"update.windows": "x"}, "did you mean update.window?"),
        ({"update.window": "25:00-26:00"}, "update.window: String should match pattern"),
        ({"update.channel": "nightly"}, "update.channel: Input should be 'dev', 'canary' or 'stable'"),
        ({}, "configure takes args like"),
        ([], "configure takes args like"),
    ],
)
def test_a_setting_that_may_not_be_changed_or_has_no_such_value_is_refused_and_nothing_changes(
    device: Device, store: Store, wanted: object, reason: str
) -> None:
    with pytest.raises(BadInput) as refused:
        device.give("configure", settings=wanted)
    assert reason in str(refused.value)
    assert device.configured == []
    assert store.configured() == {}


def test_changes_that_another_version_kept_do_not_keep_a_device_from_starting(device: Device, store: Store) -> None:
    store.keep_configured({"update.colour": "red"})
    assert changed_by_order(device.given, store) == device.given


def test_a_device_that_runs_on_after_a_reboot_says_that_it_does_not_know(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_GOES_DOWN_S", 0.0)
    assert Device(store, reboot_command=["true"]).give("reboot").status == "unknown"


@pytest.mark.parametrize("command", [["false"], ["no such program"]])
def test_a_reboot_that_cannot_be_done_is_told(store: Store, command: list[str]) -> None:
    with pytest.raises(ConfigError, match="give the daemon's user the right to it, or set reboot_command"):
        Device(store, reboot_command=command).give("reboot")


def test_every_order_of_the_vocabulary_is_carried_out_by_somebody(device: Device) -> None:
    of_the_updater = {"update", "rollback", "pause", "resume", "abort"}
    assert set(COMMANDS) == set(device.service.orders) | of_the_updater
