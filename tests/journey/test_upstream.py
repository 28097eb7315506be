"""The fleet's home as a real server: devices report while replicas die and databases are restored."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from support.broker import Listener as Publisher
from support.broker import Mosquitto, needs_mosquitto
from support.daemon import Daemon, StartDaemon
from support.postgres import Cluster, needs_postgres
from support.processes import eventually, free_port
from support.reporting import Reporter, deployment, order, running

from appliance.adapters.mqtt import Broker
from appliance.upstream.broker import Listener
from appliance.upstream.database import Database
from appliance.upstream.fleet import Fleet
from appliance.upstream.ingest import Ingest
from models import schema, sync
from models.sync import Answer, Batch

pytestmark = pytest.mark.journey

WAVES = [{"percent": 34, "canary": True}, {"percent": 100}]
CAMPAIGN = {"name": "n", "model": "m", "version": "2", "waves": WAVES}
WITHIN_S = 60.0


def asked(home: Daemon, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - JSON
    """What an administrator is answered."""
    answer = home.http.request(method, f"/v1/fleet{path}", headers=home.authorized("admin"), **request)
    assert answer.is_success, answer.text
    return answer.json()


def reporter(home: Daemon, device_id: str, urls: Callable[[], Iterable[str]] | None = None) -> Reporter:
    """A device with a token of its own, which tries each of `urls` in turn until one answers."""
    token = asked(home, "POST", "/tokens", json={"name": device_id, "role": "device", "device_id": device_id})["token"]
    headers = {"authorization": f"Bearer {token}", "content-encoding": "zstd"}

    def send(batch: Batch) -> Answer:
        content = zstandard.compress(json.dumps(schema.dump(batch)).encode())
        for url in urls() if urls else [home.url]:
            try:
                answer = home.http.post(f"{url}{sync.PATH}", content=content, headers=headers)
            except httpx.HTTPError:
                continue
            if answer.is_success:
                return sync.answer(answer.json())
        raise ConnectionError

    return Reporter(device_id, send)


def connected(home: Daemon, start_null: StartDaemon, folder: Path) -> None:
    """Start a real device, `dock-7`, that reports to a server."""
    asked_for = {"name": "dock-7", "role": "device", "device_id": "dock-7"}
    (folder / "token").write_text(asked(home, "POST", "/tokens", json=asked_for)["token"])
    told = {"URL": home.url, "TOKEN_FILE": str(folder / "token"), "INTERVAL_S": "0.5", "LABELS": '{"hall": "2"}'}
    settings = {f"APPLIANCE_UPSTREAM__{name}": value for name, value in {**told, "LONGEST_RETRY_S": "1"}.items()}
    start_null(APPLIANCE_DEVICE_ID="dock-7", **settings)


def versions(home: Daemon) -> dict[str, str]:
    """What each device runs, as far as its server knows."""
    shown = asked(home, "GET", "/devices")["devices"]
    return {one["device_id"]: one["versions"].get("m", {}).get("version", "") for one in shown}


class Reporting(threading.Thread):
    """A device that goes on reporting, whatever happens to its server, until it is told to stop."""

    def __init__(self, device: Reporter) -> None:
        super().__init__()
        self.device, self.stopping, self.told, self.fault = device, threading.Event(), 0, ""
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping.wait(0.05):
                self.told += 1
                self.device.tell("alarm", number=self.told)
                self._report()
            until = time.monotonic() + WITHIN_S
            while not self._report() or self.device.waiting:
                assert time.monotonic() < until, "what is left was not taken"
                time.sleep(0.05)
        except Exception as error:  # seen by the test
            self.fault = repr(error)

    def _report(self) -> bool:
        try:
            self.device.report()
        except ConnectionError:
            return False
        self.device.obey()
        return True

    def finish(self) -> None:
        """Report what is left."""
        self.stopping.set()
        self.join(2 * WITHIN_S)
        assert not self.fault, self.fault


@pytest.mark.long
def test_what_devices_told_is_known_after_the_server_was_killed(start_daemon: StartDaemon) -> None:
    home = start_daemon("--role", "upstream").wait_serving()
    device = reporter(home, "press-7")
    device.tell("alarm", text="hot")
    batch = device.batch()
    with home.http.stream("GET", "/v1/fleet/events") as events:
        lines = events.iter_lines()
        assert next(lines) == ": changes"
        device.send(batch)
        changed = next(line for line in lines if line.startswith("data:"))
        assert "devices" in json.loads(changed.partition(":")[2])["changed"]
    assert b"appliance_upstream_exchanges_total" in home.http.get("/metrics").content
    home.kill()
    again = start_daemon("--role", "upstream", "--http", home.url.removeprefix("http://")).wait_serving()
    device.send(batch)
    shown = asked(again, "GET", "/devices/press-7")
    assert [event["text"] for event in shown["timeline"] if event["kind"] == "alarm"] == ["hot"]
    again.stop()


@pytest.mark.long
def test_a_real_device_is_known_with_what_it_serves_and_answers_an_order_once(
    start_daemon: StartDaemon, start_null: StartDaemon, tmp_path: Path
) -> None:
    home = start_daemon("--role", "upstream", folder="home", APPLIANCE_FLEET__EXCHANGE_S="0.2").wait_serving()
    connected(home, start_null, tmp_path)

    def shown() -> Any:  # noqa: ANN401 - JSON
        found = asked(home, "GET", "/devices?label=hall%3D2")["devices"]
        return found and found[0]["health"] == "ready" and found[0]

    device = eventually(shown, "the device is known and well", WITHIN_S)
    assert (device["device_id"], list(device["versions"])) == ("dock-7", ["null"])
    # Nobody whom the device knows has signed it.
    made = asked(home, "POST", "/commands", json={"target": {"label": "hall=2"}, "envelope": order("dock-7", "o-1")})

    def answered() -> Any:  # noqa: ANN401 - JSON
        (result,) = asked(home, "GET", f"/commands/{made['id']}")["devices"]
        return result["status"] != "waiting" and result

    assert eventually(answered, "the order is answered", WITHIN_S)["status"] == "refused"
    asked(home, "PATCH", "/devices/dock-7", json={"pins": {"null": "2"}})
    eventually(lambda: asked(home, "GET", "/devices/dock-7")["desired"] == {"null": "2"}, "it is pinned", WITHIN_S)


@needs_mosquitto
def test_replicas_share_what_devices_report_by_mqtt_and_lose_nothing_when_one_ends(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'upstream.db'}")
    fleet = Fleet(database, time.time, 180.0)
    taken = [CountingIngest(database, time.time, lambda: 1.0) for _ in range(2)]
    mosquitto = Mosquitto(tmp_path / "broker").start()
    broker = Broker("127.0.0.1", mosquitto.port, session_expiry_s=60)
    listeners = [Listener(broker, ingest, f"r{i}", shared=True) for i, ingest in enumerate(taken)]
    try:
        with Publisher(mosquitto.port) as devices:
            devices.publish("appliance/early/state", {**running("1"), "session": 1}, retain=True)
            for listener in listeners:
                listener.start()
            eventually(lambda: all(listener.connected for listener in listeners), "both listen", WITHIN_S)
            for i in range(40):
                devices.publish(f"appliance/d{i % 4}/deployments", {**deployment("1", good=True), "id": i})
                if i == 20:
                    listeners[0].stop()

            def told() -> int:
                names = [one["device_id"] for one in fleet.devices()["devices"] if one["device_id"] != "early"]
                events = [event for name in names for event in fleet.device(name)["timeline"]]
                return sum(event["kind"] == "deployment" for event in events)

            eventually(lambda: told() == 40, "each report is there once", WITHIN_S)
            assert all(ingest.messages for ingest in taken)
            assert "early" in {one["device_id"] for one in fleet.devices()["devices"]}
    finally:
        for listener in listeners:
            listener.stop()
        mosquitto.close()
        database.close()


class CountingIngest(Ingest):
    """Counts what one replica takes in."""

    messages = 0

    def told(self, reports: Iterable[tuple[str, str, bytes, int, bool]]) -> None:
        found = list(reports)
        super().told(found)
        self.messages += len(found)


@pytest.mark.long
@needs_postgres
def test_a_replica_that_is_killed_in_the_middle_of_a_campaign_loses_nothing_and_doubles_nothing(
    start_daemon: StartDaemon, cluster: Cluster
) -> None:
    told = {"APPLIANCE_FLEET__DATABASE": cluster.database()}
    first = start_daemon("--role", "upstream", folder="first", **told).wait_serving()
    second = start_daemon("--role", "upstream", folder="second", **told).wait_serving()
    names = [f"d{i}" for i in range(6)]

    def urls() -> list[str]:  # the one that will be killed comes first
        return [first.url, second.url]

    devices = {name: reporter(first, name, urls) for name in names}
    for device in devices.values():
        device.report()
    begun = asked(first, "POST", "/campaigns", json=CAMPAIGN)
    threads = [Reporting(device) for device in devices.values()]
    try:
        eventually(
            lambda: any(one["committed"] for one in asked(second, "GET", f"/campaigns/{begun['id']}")["counts"]),
            "a canary has committed",
            WITHIN_S,
        )
        first.kill()
        eventually(lambda: asked(second, "GET", f"/campaigns/{begun['id']}")["state"] == "done", "it is done", WITHIN_S)
    finally:
        for thread in threads:
            thread.finish()
    for thread in threads:
        timeline = asked(second, "GET", f"/devices/{thread.device.device_id}")["timeline"]
        kinds = [event["kind"] for event in timeline]
        numbers = [event["payload"]["number"] for event in timeline if event["kind"] == "alarm"]
        assert len(numbers) == len(set(numbers))
        assert max(numbers) == thread.told
        assert kinds.count("deployment") == 1
    actions = [entry["action"] for entry in asked(second, "GET", "/audit?limit=1000")["audit"]]
    assert actions.count("campaign done") == 1
    second.stop()


@pytest.mark.long
def test_a_server_restored_from_a_copy_while_devices_report_loses_no_device_and_repeats_no_order(
    start_daemon: StartDaemon, start_null: StartDaemon, tmp_path: Path
) -> None:
    told = ("--role", "upstream", "--http", f"127.0.0.1:{free_port()}")
    home = start_daemon(*told, folder="home", APPLIANCE_FLEET__EXCHANGE_S="0.2").wait_serving()
    devices = [reporter(home, f"d{i}") for i in range(4)]
    late = reporter(home, "late")  # its token is in the copy, and itself is not
    threads = [Reporting(device) for device in devices]
    newest = {**{f"d{i}": "3" for i in range(4)}, "late": "1", "dock-7": ""}
    try:
        orders = [order(f"d{i}", f"before-{i}") for i in range(4)]
        eventually(lambda: len(asked(home, "GET", "/devices")["devices"]) == 4, "all have reported", WITHIN_S)
        for i, one in enumerate(orders):
            asked(home, "POST", "/commands", json={"target": {"device": f"d{i}"}, "envelope": one})
        connected(home, start_null, tmp_path)  # a real one, whose token is in the copy
        copy, live = tmp_path / "copy.db", home.state_dir / "upstream.db"
        source, target = sqlite3.connect(live), sqlite3.connect(copy)
        source.backup(target)  # while it is in use
        source.close()
        target.close()
        eventually(lambda: all(device.effects for device in devices), "every order had its effect", WITHIN_S)
        threads.append(Reporting(late))
        for device in devices:
            device.state = running("3")
        eventually(lambda: versions(home) == newest, "the newer states are known", WITHIN_S)
        home.kill()
        for left in live.parent.glob("upstream.db-*"):
            left.unlink()
        copy.rename(live)
        restored = start_daemon(*told, folder="home", APPLIANCE_FLEET__EXCHANGE_S="0.2").wait_serving()
        eventually(lambda: versions(restored) == newest, "every device is known, with its newest state", WITHIN_S)
    finally:
        for thread in threads:
            thread.finish()
    assert [dict(device.effects) for device in devices] == [{f"before-{i}": 1} for i in range(4)]
    assert [device.report().commands for device in devices] == [()] * 4
    actions = [entry["action"] for entry in asked(restored, "GET", "/audit?limit=1000")["audit"]]
    assert actions.count("restored") >= 5
    restored.stop()
