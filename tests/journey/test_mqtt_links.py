"""Bad links and bad brokers: what a device has to say arrives, and nothing that they do stops it from serving."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from support import tiny
from support.broker import HangsUp, Listener, Mosquitto, Wire, needs_mosquitto
from support.daemon import Daemon, StartDaemon, binary_floats
from support.documents import blocks
from support.processes import eventually

pytestmark = [pytest.mark.journey, needs_mosquitto]

DEVICE = "press-7"
CMD, RESULT = f"appliance/{DEVICE}/cmd", f"appliance/{DEVICE}/cmd/result"
TELEMETRY, AVAILABILITY = f"appliance/{DEVICE}/telemetry", f"appliance/{DEVICE}/availability"
ONE = np.ones((1, 2), np.float32)


def connect(start_null: StartDaemon, address: str, folder: str = "daemon", **settings: str) -> Daemon:
    """A daemon that speaks to the broker at `address` and tells no figures by itself; `settings` are those of MQTT."""
    chosen = {"LONGEST_RETRY_S": "0.5", "TELEMETRY_S": "0"} | settings
    env = {f"APPLIANCE_MQTT__{key}": value for key, value in chosen.items()}
    return start_null("--mqtt", address, folder=folder, APPLIANCE_DEVICE_ID=DEVICE, **env)


def connected(daemon: Daemon) -> bool:
    return bool(daemon.status()["mqtt"]["connected"])


def order(number: str) -> dict[str, Any]:
    return {"id": number, "command": "status"}


def serves(daemon: Daemon) -> None:
    assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)


@pytest.mark.long
def test_figures_of_an_outage_arrive_after_a_power_cut_and_in_order(start_null: StartDaemon, broker: Mosquitto) -> None:
    daemon = connect(start_null, broker.start().address, TELEMETRY_S="0.5")
    eventually(lambda: connected(daemon), "it is connected", 20)
    broker.stop()
    eventually(lambda: daemon.status()["mqtt"]["spool"]["waiting"]["telemetry"] >= 4, "figures wait", 30)
    commits = daemon.status()["mqtt"]["spool"]["commits"]
    eventually(lambda: daemon.status()["mqtt"]["spool"]["commits"] > commits, "they are on disk", 30)
    daemon.kill()
    broker.start()
    with Listener(broker.port) as listener:
        again = connect(start_null, broker.address)
        eventually(lambda: len(listener.on(TELEMETRY)) >= 4, "they arrive", 30)
        eventually(lambda: not again.status()["mqtt"]["spool"]["waiting_bytes"], "and are forgotten", 30)
        made_at = [message.document["at"] for message in listener.on(TELEMETRY)]
        assert made_at == sorted(set(made_at))
        sessions = {message.document["session"] for message in listener.on(TELEMETRY)}
        assert max(sessions) < again.status()["mqtt"]["session"]
        metrics = again.http.get("/metrics").text
        assert 'appliance_spool_waiting{kind="telemetry"} 0.0' in metrics
        assert 'appliance_spool_dropped_total{reason="full"} 0.0' in metrics
    again.stop()


@pytest.mark.parametrize("count", [5, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
def test_orders_that_came_while_a_device_was_away_are_all_answered_when_it_is_back(
    start_null: StartDaemon, tmp_path: Path, count: int
) -> None:
    broker = Mosquitto(tmp_path / "patient", more="max_queued_messages 0\nmax_inflight_messages 100\n")
    try:
        daemon = connect(start_null, broker.start().address)
        eventually(lambda: connected(daemon), "it is connected", 20)
        daemon.stop()
        with Listener(broker.port) as listener:
            wanted = {f"queued {number}" for number in range(count)}
            sent = [listener.publish(CMD, order(number), wait=False) for number in sorted(wanted)]
            eventually(lambda: all(one.is_published() for one in sent), "the broker has all of them", 120)
            began = time.monotonic()
            again = connect(start_null, broker.address)
            serves(again)
            eventually(  # the first part is cheap, and true when it is worth looking
                lambda: len(listener.heard) >= 2 * count and len(listener.on(RESULT)) >= count, "all are answered", 240
            )
            print(f"{count} orders answered in {time.monotonic() - began:.1f} s, the start of the daemon included")
            assert {message.document["id"] for message in listener.on(RESULT)} == wanted
            assert not again.log("mqtt_down")
            spool = again.status()["mqtt"]["spool"]
            assert spool["commits"] < 20 + (time.monotonic() - began) * 1.5
            serves(again)
        again.stop()
    finally:
        broker.close()


def test_garbage_that_a_broker_retains_is_refused_at_each_start_and_harms_nobody(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    with Listener(broker.start().port) as listener:
        listener.publish(CMD, bytes(2**20), retain=True)
        for number in range(2):
            daemon = connect(start_null, broker.address)
            eventually(lambda: listener.on(RESULT), "it is refused", 20)
            assert listener.on(RESULT)[-1].document["status"] == "refused"
            listener.publish(CMD, order(f"good {number}"))
            listener.wait_for(RESULT, id=f"good {number}", status="done")
            listener.heard.clear()
            serves(daemon)
            daemon.stop()


def test_a_broker_that_hangs_up_after_it_has_accepted_is_tried_again_but_not_in_a_hurry(
    start_null: StartDaemon,
) -> None:
    with HangsUp() as broker:
        daemon = connect(start_null, broker.address)
        eventually(lambda: len(broker.accepted_at) >= 5, "it is tried again", 30)
        assert broker.accepted_at[4] - broker.accepted_at[0] >= 4 * 0.1
        eventually(lambda: "lost" in (daemon.status()["mqtt"]["reason"] or ""), "status says why", 20)
        serves(daemon)
        daemon.stop()


def test_an_answer_for_which_a_broker_hangs_up_goes_to_our_own_topic_and_keeps_nothing_back(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    broker.start()
    deep = "/".join(["deep"] * 12)
    with Wire(broker.port, refused=deep.encode()) as wire, Listener(broker.port) as listener:
        daemon = connect(start_null, wire.address)
        eventually(lambda: connected(daemon), "it is connected", 20)
        for number in range(5):
            listener.publish(CMD, order(f"deep {number}"), reply_to=deep if number == 2 else "", wait=False)
        for number in range(5):
            listener.wait_for(RESULT, 60, id=f"deep {number}")
        eventually(lambda: not daemon.status()["mqtt"]["spool"]["waiting_bytes"], "nothing waits", 30)
        assert not listener.on(deep)
        assert wire.connections < 10
        serves(daemon)
    daemon.stop()


def test_over_a_slow_link_every_order_is_answered_once_and_the_connection_stays(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    with Wire(broker.start().port, delay_s=0.05) as wire, Listener(broker.port) as listener:
        daemon = connect(start_null, wire.address)
        eventually(lambda: connected(daemon), "it is connected", 20)
        wanted = {f"slow {number}" for number in range(60)}
        for number in wanted:
            listener.publish(CMD, order(number))
        eventually(lambda: len(listener.on(RESULT)) >= len(wanted), "all are answered", 60)
        eventually(lambda: not daemon.status()["mqtt"]["spool"]["waiting_bytes"], "and acknowledged", 60)
        assert sorted(message.document["id"] for message in listener.on(RESULT)) == sorted(wanted)
        assert wire.connections == 1
        serves(daemon)
        daemon.stop()


@pytest.mark.long
def test_a_link_that_has_gone_silent_is_noticed_and_what_was_said_meanwhile_arrives(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    with Wire(broker.start().port) as wire, Listener(broker.port) as listener:
        daemon = connect(start_null, wire.address, KEEPALIVE_S="5", TELEMETRY_S="0.5")
        eventually(lambda: listener.on(TELEMETRY), "it is heard", 20)
        wire.open.clear()
        began = time.time()
        eventually(lambda: not connected(daemon), "the silence is noticed", 30)
        serves(daemon)
        ended = time.time()
        wire.open.set()

        def meanwhile() -> list[float]:
            return [at for at in (one.document["at"] for one in listener.on(TELEMETRY)) if began < at < ended]

        eventually(lambda: connected(daemon), "it is back", 30)
        eventually(lambda: len(set(meanwhile())) >= (ended - began) / 0.5 / 4, "what was said meanwhile arrives", 30)
        eventually(lambda: listener.on(AVAILABILITY)[-1].payload == b"online", "and that it is online", 30)
        daemon.stop()


@pytest.mark.long
def test_two_devices_with_one_name_do_not_storm_the_broker_and_both_serve(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    with Wire(broker.start().port) as wire:
        twins = [connect(start_null, wire.address, f"twin-{number}", LONGEST_RETRY_S="60") for number in range(2)]
        for twin in twins:
            eventually(lambda: twin.log("mqtt_down"), "it lost the connection to the other", 60)  # noqa: B023
        began, before = time.monotonic(), wire.connections
        while time.monotonic() < began + 5:
            for twin in twins:
                serves(twin)
        assert wire.connections - before <= 10
        for twin in twins:
            twin.stop()


@pytest.mark.long
def test_answers_of_a_bundle_are_published_where_an_operator_wants_them(
    start_daemon: StartDaemon, broker: Mosquitto, tmp_path: Path
) -> None:
    daemon = start_daemon(
        "--bundle",
        str(tiny.blank_bundle(tmp_path / "blank")),
        "--mqtt",
        broker.start().address,
        APPLIANCE_DEVICE_ID=DEVICE,
        APPLIANCE_MQTT__RESULTS='["blank"]',
    ).wait_serving()
    daemon.wait_ready()
    with Listener(broker.port) as listener:
        answer = daemon.http.post("/v1/models/blank/predict?source=gate", content=tiny.picture(64, 32)).json()
        told = listener.wait_for(f"appliance/{DEVICE}/results/blank", source="gate").document
        assert {key: told[key] for key in ("model", "version", "runtime")} == {
            key: answer[key] for key in ("model", "version", "runtime")
        }
    daemon.stop()


@dataclass
class Secured:
    """A broker with the configuration of docs/fleet.md, and who may speak to it."""

    broker: Mosquitto
    authority: trustme.CA
    folder: Path

    def issue(self, name: str) -> Path:
        """A certificate with its key for `name`."""
        path = self.folder / f"{name}.pem"
        issued = self.authority.issue_cert(f"{name}@fleet.example", common_name=name)
        issued.private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def context(self, name: str) -> ssl.SSLContext:
        """TLS by which `name` calls."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        context.load_cert_chain(self.issue(name))
        return context


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """A broker that wants TLS and certificates, and lets nobody speak for others."""
    authority, folder = trustme.CA(), tmp_path / "secured"
    folder.mkdir()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    own = authority.issue_cert("127.0.0.1", "localhost")
    own.private_key_pem.write_to_path(str(folder / "broker.key"))
    own.cert_chain_pems[0].write_to_path(str(folder / "broker.pem"))
    settings, access = blocks("fleet.md", "conf")
    (folder / "acl").write_text(access)
    kept = [line for line in settings.splitlines() if not line.startswith("listener ")]
    broker = Mosquitto(folder, anonymous=False, more="\n".join(kept).replace("/etc/mosquitto", str(folder)) + "\n")
    try:
        yield Secured(broker.start(), authority, folder)
    finally:
        broker.close()


def test_with_tls_and_an_access_list_a_device_is_itself_and_an_answer_that_may_go_nowhere_else_goes_to_its_own_topic(
    start_null: StartDaemon, secured: Secured
) -> None:
    tls = {"TLS": "true", "CA": str(secured.folder / "ca.pem"), "CERTIFICATE": str(secured.issue(DEVICE))}
    daemon = connect(start_null, secured.broker.address, **tls)
    eventually(lambda: connected(daemon), "it is connected", 20)
    assert daemon.status()["mqtt"]["tls"]
    with ExitStack() as stack:
        office = stack.enter_context(Listener(secured.broker.port, secured.context("office")))
        other = stack.enter_context(Listener(secured.broker.port, secured.context("press-8")))
        office.publish(CMD, order("by the office"), reply_to="answers/office")
        assert office.wait_for("answers/office", id="by the office").document["status"] == "done"
        office.publish(CMD, order("to a foreign place"), reply_to="appliance/press-8/cmd")
        office.wait_for(RESULT, id="to a foreign place", status="done")
        other.publish(CMD, order("by another device"))
        office.publish(CMD, order("last"))
        office.wait_for(RESULT, id="last")
        assert "by another device" not in {message.document["id"] for message in office.on(RESULT)}
        assert not other.on(RESULT)
        assert daemon.status()["mqtt"]["spool"]["refused"] == 1
    daemon.stop()


def test_a_broker_with_the_certificate_of_somebody_else_is_not_spoken_to(
    start_null: StartDaemon, secured: Secured, tmp_path: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "foreign.pem"))
    daemon = connect(start_null, secured.broker.address, TLS="true", CA=str(tmp_path / "foreign.pem"))
    eventually(lambda: "certificate verify failed" in (daemon.status()["mqtt"]["reason"] or "").lower(), "it says why")
    serves(daemon)
    daemon.stop()
