"""The fleet page in a real browser and the fleet's commands, at a real upstream that devices report to."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import PHONE, browser, needs_chromium, opened, until
from support.daemon import Daemon, StartDaemon, appliance
from support.processes import eventually, new_mark

from models.orders import PAYLOAD_TYPE
from models.sync import PATH

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.journey, pytest.mark.long]

NARROW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OLD, NEW = "1.0.0", "2.0.0"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for this file."""
    with browser() as started:
        yield started


class Fleet:
    """An upstream that lets nobody in without a token, and devices that report what a test says."""

    def __init__(self, upstream: Daemon) -> None:
        self.upstream, self.url = upstream.wait_serving(), upstream.url
        self._admin = upstream.authorized("admin")
        self._numbers = itertools.count(1)
        self._tokens: dict[tuple[str, str], str] = {}

    def asked(self, method: str, path: str, document: object = None) -> Any:  # noqa: ANN401 - JSON
        answer = self.upstream.http.request(method, f"/v1/fleet/{path}", json=document, headers=self._admin)
        return answer.raise_for_status().json()

    def token(self, role: str, device: str = "") -> str:
        wish = {"name": new_mark(), "role": role} | ({"device_id": device} if device else {})
        return str(self.asked("POST", "tokens", wish)["token"])

    def _kept(self, role: str, device: str = "") -> str:
        """The same token each time."""
        if (role, device) not in self._tokens:
            self._tokens[role, device] = self.token(role, device)
        return self._tokens[role, device]

    def report(self, device: str, version: str, *, model: str = "reader", **deployment: object) -> None:
        """A device tells what it serves, and what became of a deployment."""
        token = self._kept("device", device)
        number = next(self._numbers)
        told = {"name": "reader", "version": NEW, "digest": "0" * 64, **deployment}
        item = {"number": number, "kind": "deployment", "at": time.time(), "payload": told}
        batch = {
            "batch_id": new_mark(),
            "device_id": device,
            "incarnation": "first",
            "sent_at": time.time(),
            "state": {"ready": True, "models": [{"name": model, "version": version, "digest": "0" * 64}]},
            "items": [item] if deployment else [],
        }
        headers = {"authorization": f"Bearer {token}"}
        self.upstream.http.post(PATH, json=batch, headers=headers).raise_for_status()

    def committed(self, device: str) -> None:
        self.report(device, NEW, step="good", committed=True)

    def refused(self, device: str) -> None:
        self.report(device, OLD, step="refused", failed_step="latency", committed=False, reason="40 ms against 2 ms")

    def command(self, *arguments: str, role: str = "operator", wanted: int = 0) -> str:
        """What an `appliance fleet` command prints."""
        env = {"APPLIANCE_URL": self.url, "APPLIANCE_TOKEN": self._kept(role)}
        ended = appliance("fleet", *arguments, env=env)
        assert ended.returncode == wanted, ended.stderr
        return ended.stdout + ended.stderr


@pytest.fixture
def fleet(start_daemon: StartDaemon) -> Iterator[Fleet]:
    upstream = start_daemon("--role", "upstream", APPLIANCE_HTTP__ANONYMOUS="false")
    fleet = Fleet(upstream)
    for device in ("press-1", "press-2"):
        fleet.report(device, OLD)
    fleet.asked("PATCH", "devices/press-1", {"groups": ["canary"], "labels": {"hall": "2"}})
    yield fleet
    upstream.stop()


@needs_chromium
def test_a_viewer_sees_devices_versions_a_campaign_as_it_goes_and_what_happened_on_a_device(
    chromium: Browser, fleet: Fleet
) -> None:
    viewer = {"username": "anybody", "password": fleet.token("viewer")}
    shown = "byId('devices').children.length === 2"
    with opened(chromium, fleet.url, shown=shown, http_credentials=viewer, viewport=PHONE, color_scheme="dark") as page:
        until(page, "/^2 devices, 2 online/.test(byId('summary').innerText)")
        assert "reader 1.0.0" in page.inner_text("#devices")
        assert "canary, hall=2" in page.inner_text("#devices")
        assert page.get_by_role("img", name="1.0.0 2").is_visible()
        assert "None yet" in page.inner_text("#campaigns")
        waves = [{"group": "canary", "canary": True}, {"percent": 100}]
        plan = {"name": "to the second", "model": "reader", "version": NEW, "waves": waves}
        fleet.asked("POST", "campaigns", plan)
        until(
            page,
            "/to the second ● running[^]*1. group canary \\(canary\\)[^]*waiting 1/.test(byId('campaigns').innerText)",
        )
        until(page, "/reader 2.0.0/.test(byId('devices').innerText)")  # what it should run
        fleet.committed("press-1")
        until(page, "/committed 1[^]*2. 100 %[^]*waiting 1/.test(byId('campaigns').innerText)")
        page.get_by_role("link", name="press-1").click()
        until(page, "/deployment reader 2.0.0 good/.test(byId('timeline').innerText)")
        fleet.refused("press-2")
        until(page, "/● stopped[^]*wave 2: 1 of 1 devices rolled back .100%./.test(byId('campaigns').innerText)")
        page.fill("#find", "press-2")
        until(page, "byId('devices').children.length === 1 && byId('found').innerText === '1 of 2'")
        assert page.evaluate(NARROW) == 0
        fleet.report("press-2", "method", model="__proto__")  # names are data, whatever they mean to a browser
        until(page, "/__proto__[^]*method/.test(byId('versions').innerText)")
        fleet.report("press-1", "4.0.0")
        until(page, "/4.0.0/.test(byId('versions').innerText)")


def test_the_commands_show_the_fleet_and_turn_a_campaign(fleet: Fleet, tmp_path: Path) -> None:
    assert "reader 1.0.0" in fleet.command("devices", role="viewer")
    assert [one["device_id"] for one in json.loads(fleet.command("devices", "--group", "canary", "--json"))] == [
        "press-1"
    ]
    assert "groups: hall-1" in fleet.command("device", "press-2", "--group", "hall-1", "--label", "hall=1")
    start = ("campaign", "start", "reader", NEW, "--canary", "group:canary", "--yes")
    assert "HTTP 403" in fleet.command(*start, role="viewer", wanted=1)
    began = json.loads(fleet.command(*start, "--json").splitlines()[0])
    which = began["id"]
    assert "is paused" in fleet.command("campaign", "pause", which)
    assert "is running" in fleet.command("campaign", "resume", which)
    assert "1 of 2" in fleet.command("campaign", "status", which)
    assert "is aborted" in fleet.command("campaign", "abort", which)
    assert "has ended" not in fleet.command("campaign", "status", "--wait", which, wanted=1)
    assert json.loads(fleet.command("campaign", "status", "--json"))[0]["state"] == "aborted"
    fleet.command(*start, "--wave", "group:hall-1")
    fleet.committed("press-1")
    eventually(lambda: fleet.asked("GET", "campaigns")["campaigns"][0]["wave"] == 2, "the second wave is asked", 20)
    fleet.committed("press-2")
    assert "2 of 2 devices committed" in fleet.command("campaign", "status", "--wait", str(int(which) + 1))
    assert "deployment" in fleet.command("device", "press-1")
    made = fleet.command("tokens", "create", "wall", "--role", "viewer", role="admin").strip()
    assert made.startswith("wall.")
    assert "wall" in fleet.command("tokens", "list", role="admin")
    assert "wall is revoked" in fleet.command("tokens", "revoke", "wall", role="admin")
    nonsense = tmp_path / "order.json"
    nonsense.write_text(json.dumps({"payloadType": PAYLOAD_TYPE}))
    assert "cannot be read" in fleet.command("command", str(nonsense), "--device", "press-1", wanted=1)
    shown = fleet.command("device", "press-1", "--pin", "other=3.0.0", "--pause")
    assert ("it begins no deployment" in shown, "other 3.0.0" in shown) == (True, True), shown
    shown = fleet.command("device", "press-1", "--pin", "other", "--resume")
    assert ("it begins no deployment" in shown, "should run: other" in shown) == (False, False)
    assert "changed" in fleet.command("audit", "--limit", "2")
    assert json.loads(fleet.command("audit", "--limit", "1", "--json"))[0]["detail"]["paused"] is False
    assert "HTTP 403" in fleet.command("audit", role="viewer", wanted=1)
    assert "press-2 is retired" in fleet.command("device", "press-2", "--retire")
    assert len(json.loads(fleet.command("devices", "--json"))) == 1
