"""The fleet's side: availability, state and orders through a real broker, and brokers that come, go and refuse."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.broker import Listener, Mosquitto, needs_mosquitto
from support.daemon import Daemon, StartDaemon, binary_floats
from support.processes import eventually

pytestmark = [pytest.mark.journey, needs_mosquitto]

DEVICE = "bench-7"
CMD, RESULT = f"appliance/{DEVICE}/cmd", f"appliance/{DEVICE}/cmd/result"
AVAILABILITY, STATE = f"appliance/{DEVICE}/availability", f"appliance/{DEVICE}/state"
ONE = np.ones((1, 2), np.float32)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Mosquitto]]:
    """A daemon that serves the null model and is connected, shared by the tests of orders."""
    folder = tmp_path_factory.mktemp("fleet")
    mosquitto = Mosquitto(folder / "broker").start()
    model = tiny.null_model(folder / "null.json")
    env = {"APPLIANCE_RUNTIME": "null", "APPLIANCE_DEVICE_ID": DEVICE}
    arguments = ["--onnx", f"null={model}", "--mqtt", mosquitto.address]
    try:
        with Daemon(folder / "daemon", *arguments, env=env) as daemon:
            wait_connected(daemon)
            yield daemon, mosquitto
            assert daemon.status()["mqtt"]["connected"]
    finally:
        mosquitto.close()


@pytest.fixture
def listener(fleet: tuple[Daemon, Mosquitto]) -> Iterator[Listener]:
    """Somebody at the broker of `fleet`."""
    with Listener(fleet[1].port) as heard:
        yield heard


def connect(start_null: StartDaemon, mosquitto: Mosquitto, **env: str) -> Daemon:
    """A daemon of its own that speaks to `mosquitto` and retries often."""
    return start_null(
        "--mqtt", mosquitto.address, APPLIANCE_DEVICE_ID=DEVICE, APPLIANCE_MQTT__LONGEST_RETRY_S="0.5", **env
    )


def wait_connected(daemon: Daemon) -> None:
    eventually(lambda: daemon.status()["mqtt"]["connected"], "it is connected to its broker")


def order(number: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A status order with `changes`."""
    return {"id": number, "command": "status", "issued_at": time.time(), **changes}


def test_a_device_is_online_while_it_runs_and_offline_after_a_clean_stop(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    daemon = connect(start_null, broker.start())
    wait_connected(daemon)
    with Listener(broker.port) as late:
        eventually(lambda: late.on(AVAILABILITY), "who comes later still learns it")
        assert [(message.payload, message.retained) for message in late.on(AVAILABILITY)] == [(b"online", True)]
        daemon.stop()
        eventually(lambda: late.on(AVAILABILITY)[-1].payload == b"offline", "it says goodbye")
    with Listener(broker.port) as later:
        eventually(lambda: later.on(AVAILABILITY), "who comes later still learns it")
        assert later.on(AVAILABILITY)[-1].payload == b"offline"


def test_a_device_that_loses_its_power_is_reported_offline_by_the_broker(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    daemon = connect(start_null, broker.start())
    wait_connected(daemon)
    with Listener(broker.port) as listener:
        eventually(lambda: listener.on(AVAILABILITY), "it is online")
        daemon.kill()
        eventually(lambda: listener.on(AVAILABILITY)[-1].payload == b"offline", "the broker speaks for it")


def test_the_state_of_a_device_is_retained_with_its_models(listener: Listener) -> None:
    state = listener.wait_for(STATE, device_id=DEVICE, ready=True)
    assert state.retained
    (model,) = state.document["models"]
    assert (model["name"], model["version"], model["ready"], model["runtime"]) == ("null", "1", True, "null")
    assert {"digest", "trust", "precision"} <= set(model)
    assert "synced" in state.document["clock"]
    assert (state.document["memory_step"], state.document["throttled"]) == ("normal", [])


def test_a_change_of_a_model_is_reported_at_once(start_daemon: StartDaemon, broker: Mosquitto, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text("no model")
    daemon = start_daemon(
        "--onnx", f"m={model}", "--mqtt", broker.start().address, APPLIANCE_RUNTIME="null", APPLIANCE_DEVICE_ID=DEVICE
    ).wait_serving()
    with Listener(broker.port) as listener:
        eventually(lambda: "not a null graph" in str(listener.on(STATE)[-1:]), "the fault is reported")
        tiny.null_model(model)
        listener.wait_for(STATE, ready=True)
        daemon.stop()


def test_an_order_that_is_traced_is_answered_as_a_span_of_that_trace(listener: Listener) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    listener.publish(CMD, order("traced"), traceparent=f"00-{trace_id}-{parent_id}-01")
    version, given, span_id, flags = listener.wait_for(RESULT, id="traced").traceparent.split("-")
    assert (version, given, flags) == ("00", trace_id, "01")
    assert span_id != parent_id
    listener.publish(CMD, order("not traced"), traceparent="nonsense")
    assert listener.wait_for(RESULT, id="not traced").traceparent == ""


def test_a_status_order_is_answered_where_the_sender_asks_with_its_correlation(listener: Listener) -> None:
    listener.publish(CMD, order("with reply"), reply_to="office/answers", correlation=b"\x00\x01\xff")
    answer = listener.wait_for("office/answers", id="with reply")
    assert answer.correlation == b"\x00\x01\xff"
    assert not answer.retained
    assert answer.document["status"] == "done"
    assert answer.document["result"]["device_id"] == DEVICE
    assert answer.document["result"]["models"][0]["name"] == "null"
    assert not [message for message in listener.on(RESULT) if message.document["id"] == "with reply"]


def test_an_order_without_a_place_for_the_answer_is_answered_at_the_devices_own(listener: Listener) -> None:
    listener.publish(CMD, order("no reply"))
    assert listener.wait_for(RESULT, id="no reply").document["status"] == "done"
    listener.publish(CMD, order("reply to everybody"), reply_to="office/#")
    assert listener.wait_for(RESULT, id="reply to everybody").document["status"] == "done"


@pytest.mark.parametrize("topic", [AVAILABILITY, STATE, CMD, "a/" * 300], ids=["availability", "state", "cmd", "deep"])
def test_an_answer_goes_nowhere_where_it_would_mislead_others_or_cost_the_connection(
    fleet: tuple[Daemon, Mosquitto], listener: Listener, topic: str
) -> None:
    listener.publish(CMD, order(f"reply to {topic[:30]}"), reply_to=topic)
    assert listener.wait_for(RESULT, id=f"reply to {topic[:30]}").document["status"] == "done"
    assert not fleet[0].log("mqtt_down")


def test_an_order_that_comes_twice_gets_the_same_answer_twice(listener: Listener) -> None:
    for _ in range(2):
        listener.publish(CMD, order("twice"))
    eventually(lambda: len([1 for message in listener.on(RESULT) if b'"twice"' in message.payload]) == 2, "two answers")
    first, second = (message for message in listener.on(RESULT) if message.document["id"] == "twice")
    assert first.document == second.document


def test_a_retained_order_is_refused_now_and_at_every_reconnect(start_null: StartDaemon, broker: Mosquitto) -> None:
    daemon = connect(start_null, broker.start())
    wait_connected(daemon)
    with Listener(broker.port) as listener:
        listener.publish(CMD, order("for ever"), retain=True)
        answer = listener.wait_for(RESULT, id="for ever")
        assert answer.document["status"] == "refused"
        assert "retain" in answer.document["reason"]
    daemon.stop()
    with Listener(broker.port) as listener:
        connect(start_null, broker)
        answer = listener.wait_for(RESULT, id="for ever")
        assert answer.document["status"] == "refused"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"expires_at": 1.0}, "expired", id="expired"),
        pytest.param({"device_id": "another"}, "for 'another'", id="for another device"),
        pytest.param({"command": "explode"}, "no order 'explode'", id="unknown"),
    ],
)
def test_an_order_that_may_not_be_carried_out_is_refused_with_a_reason(
    listener: Listener, request: pytest.FixtureRequest, changes: dict[str, Any], reason: str
) -> None:
    listener.publish(CMD, order(request.node.name, **changes))
    answer = listener.wait_for(RESULT, id=request.node.name).document
    assert answer["status"] == "refused"
    assert reason in answer["reason"]


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x00\xff" * 100, id="bytes"),
        pytest.param(b"[" * 50_000, id="deep"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'{"id": 7, "command": "status"}', id="id is a number"),
        pytest.param(b'{"id": "", "command": "status"}', id="no id"),
        pytest.param(b'{"id": "%s", "command": "status"}' % (b"x" * 5000), id="long id"),
        pytest.param(b'{"id": "a", "command": "status", "sudo": true}', id="unknown key"),
        pytest.param(b'{"id": "\\ud800", "command": "status"}', id="half a character"),
        pytest.param(b'{"id": "a", "command": "status", "expires_at": NaN}', id="no number"),
        pytest.param(b'{"id": "a", "command": "status", "expires_at": 1%s}' % (b"0" * 400), id="huge number"),
        pytest.param(b'{"id": "a", "command": ["status"]}', id="command is a list"),
        pytest.param(bytes(200_000), id="200 kB of zeros"),
    ],
)
def test_what_is_no_order_is_refused_and_harms_nobody(
    fleet: tuple[Daemon, Mosquitto], listener: Listener, payload: bytes
) -> None:
    listener.publish(CMD, payload, reply_to="office/garbage")
    eventually(lambda: listener.on("office/garbage"), "it is answered")
    answer = listener.on("office/garbage")[0].document
    assert answer["status"] == "refused"
    assert answer["reason"]
    daemon, _mosquitto = fleet
    assert daemon.status()["mqtt"]["connected"]
    assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)


def test_an_offline_of_an_earlier_session_that_comes_late_is_put_right(
    fleet: tuple[Daemon, Mosquitto], listener: Listener
) -> None:
    session = fleet[0].status()["mqtt"]["session"]
    eventually(lambda: listener.on(AVAILABILITY), "it is online")
    assert listener.on(AVAILABILITY)[-1].session == str(session)
    assert listener.wait_for(STATE, ready=True).document["session"] == session
    listener.publish(AVAILABILITY, b"offline", retain=True, session=str(session - 1))
    eventually(lambda: [one.payload for one in listener.on(AVAILABILITY)[-2:]] == [b"offline", b"online"], "it is told")
    assert listener.on(AVAILABILITY)[-1].session == str(session)


def test_an_order_that_is_too_large_is_refused_and_the_connection_stays(
    fleet: tuple[Daemon, Mosquitto], listener: Listener
) -> None:
    listener.publish(CMD, bytes(2**20), reply_to="office/large")
    eventually(lambda: listener.on("office/large"), "it is answered", 20)
    answer = listener.on("office/large")[0].document
    assert (answer["status"], "262144 are the most" in answer["reason"]) == ("refused", True)
    listener.publish(CMD, bytes(3 * 2**20))  # the broker was told to keep such to itself
    listener.publish(CMD, order("after the large ones"))
    listener.wait_for(RESULT, id="after the large ones", status="done")
    assert not fleet[0].log("mqtt_down")


def test_an_order_by_http_is_carried_out_once_and_has_the_same_answer_again(fleet: tuple[Daemon, Mosquitto]) -> None:
    daemon, before = fleet[0], fleet[0].worker_pid("null")
    document = {"id": "once", "command": "restart-model", "args": {"name": "null"}}

    def give() -> dict[str, Any]:
        answer = daemon.http.post("/v1/commands", json=document, headers=daemon.authorized("admin"))
        return dict(answer.raise_for_status().json())

    first = give()
    assert (first["id"], first["status"]) == ("once", "done"), first
    eventually(lambda: daemon.worker("null")["pid"] not in {None, before}, "another worker", 20)
    pid = daemon.wait_ready().worker_pid("null")
    assert give() == first
    assert daemon.http.get("/v1/commands/once", headers=daemon.authorized("admin")).json() == first
    assert daemon.worker_pid("null") == pid
    assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)


def test_many_orders_at_once_are_all_answered(listener: Listener) -> None:
    wanted = {f"burst {number}" for number in range(100)}
    for number in sorted(wanted):
        listener.publish(CMD, order(number))
    eventually(lambda: wanted <= {message.document["id"] for message in listener.on(RESULT)}, "all are answered", 20)


def test_without_its_broker_a_device_serves_and_connects_when_it_appears(
    start_null: StartDaemon, broker: Mosquitto
) -> None:
    daemon = connect(start_null, broker)
    eventually(lambda: "refused" in (daemon.status()["mqtt"]["reason"] or "").lower(), "status says why")
    assert daemon.status()["mqtt"]["broker"] == broker.address
    assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)
    broker.start()
    wait_connected(daemon)
    with Listener(broker.port) as listener:
        listener.wait_for(STATE, ready=True)
    daemon.stop()


def test_a_device_comes_back_when_its_broker_was_restarted(start_null: StartDaemon, broker: Mosquitto) -> None:
    daemon = connect(start_null, broker.start())
    wait_connected(daemon)
    for _ in range(2):
        broker.stop()
        eventually(lambda: not daemon.status()["mqtt"]["connected"], "the loss is noticed")
        assert daemon.status()["mqtt"]["reason"]
        assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)
        broker.start()
        wait_connected(daemon)
    with Listener(broker.port) as listener:
        listener.publish(CMD, order("after the restart"))
        assert listener.wait_for(RESULT, id="after the restart").document["status"] == "done"
        assert listener.on(AVAILABILITY)[-1].payload == b"online"
    daemon.stop()


def test_a_broker_that_refuses_is_told_in_status_and_tried_again(start_null: StartDaemon, tmp_path: Path) -> None:
    closed = Mosquitto(tmp_path / "closed", anonymous=False)
    try:
        daemon = connect(start_null, closed.start())
        eventually(
            lambda: "refused the connection: Not authorized" in (daemon.status()["mqtt"]["reason"] or ""),
            "status says why",
        )
        assert not daemon.status()["mqtt"]["connected"]
        eventually(lambda: closed.log.count("not authorised") >= 3, f"it keeps trying; {closed.log}")
        assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)
        daemon.stop()
        assert len(daemon.log("mqtt_down")) == 1
    finally:
        closed.close()


def test_a_broker_that_never_answers_holds_up_neither_requests_nor_the_stop(start_null: StartDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        daemon = start_null("--mqtt", f"127.0.0.1:{silent.getsockname()[1]}")
        connection, _address = silent.accept()
        with connection:
            assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)
            assert not daemon.status()["mqtt"]["connected"]
            daemon.stop(within_s=5)
