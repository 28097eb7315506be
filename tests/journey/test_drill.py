"""Fault injection: off unless wanted, whole again afterwards, and a drill that shows how each is recovered from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.broker import Mosquitto
from support.daemon import Daemon, Floats, StartDaemon, appliance, assert_refused, binary_floats
from support.processes import eventually

from appliance.faults import OF_DAEMON, OF_WORKERS

pytestmark = [pytest.mark.journey, pytest.mark.long]

DRILL = {"APPLIANCE_FAULTS__ENABLED": "true", "APPLIANCE_RUNTIME": "null", "APPLIANCE_LIMITS__HANG_S": "1.5"}


def frame(value: float) -> Floats:
    return np.full((3, 5), value, np.float32)


def inject(daemon: Daemon, fault: str, **more: object) -> None:
    answer = daemon.http.post("/v1/faults", json={"fault": fault, **more}, headers=daemon.authorized("admin"))
    assert answer.status_code == 200, answer.text


def test_faults_cannot_be_injected_unless_the_operator_has_allowed_it(start_null: StartDaemon) -> None:
    daemon = start_null()
    order = {"fault": "crash", "model": "null"}
    assert "token of role admin" in assert_refused(daemon.http.post("/v1/faults", json=order), 401)
    answer = daemon.http.post("/v1/faults", json=order, headers=daemon.authorized("admin"))
    assert "fault injection is off" in assert_refused(answer, 404)
    drill = appliance("doctor", "--drill", "--url", daemon.url)
    assert (drill.returncode, "fault injection is off" in drill.stderr) == (1, True)
    assert daemon.worker()["faults"] == {}
    assert daemon.status()["faults_enabled"] is False
    daemon.stop()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"fault": "fire"}', "there is no fault 'fire'; known are hang, crash,"),
        (b'{"fault": "crash"}', "needs the name of a model"),
        (b'{"fault": "broker-loss"}', "what it breaks is not configured here"),
        (b'{"fault": "crash", "model": "null", "for_s": 0}', "a fault lasts more than 0"),
        (b'{"fault": "slow", "model": "null", "amount": -1}', "its amount is no less than 0"),
        (b'{"fault": 3}', "is no fault to inject"),
        (b"", "is no fault to inject"),
    ],
)
def test_what_cannot_be_broken_is_refused(drilled: Daemon, body: bytes, sentence: str) -> None:
    assert sentence in assert_refused(
        drilled.http.post("/v1/faults", content=body, headers=drilled.authorized("admin")), 400
    )


def test_a_fault_of_a_model_that_is_not_served_is_refused(drilled: Daemon) -> None:
    answer = drilled.http.post(
        "/v1/faults", json={"fault": "crash", "model": "none"}, headers=drilled.authorized("admin")
    )
    assert "there is no model 'none'" in assert_refused(answer, 404)


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - a generator of daemons
    """A daemon that may be broken, with one null model."""
    folder = tmp_path_factory.mktemp("drilled")
    path = tiny.null_model(folder / "null.json")
    with Daemon(folder / "daemon", "--onnx", f"null={path}", env=DRILL) as daemon:
        yield daemon


def test_an_injected_fault_is_seen_by_callers_and_mended_on_demand(drilled: Daemon) -> None:
    inject(drilled, "slow", model="null", amount=0.4, for_s=600)
    slow = drilled.infer("null", frame(1))
    assert slow.elapsed.total_seconds() > 0.4
    inject(drilled, "none")
    quick = min(drilled.infer("null", frame(1)).elapsed.total_seconds() for _ in range(5))
    assert quick < 0.4


def test_an_injected_fault_ends_by_itself(drilled: Daemon) -> None:
    inject(drilled, "clock-step", amount=1e9, for_s=0.3)
    stepped = drilled.status()["clock"]["now"]
    assert stepped > 2.5e9
    eventually(lambda: drilled.status()["clock"]["now"] < 2.5e9, "the clock tells the truth again")
    assert np.array_equal(binary_floats(drilled.infer("null", frame(2))), frame(2))


def test_a_model_that_computes_nan_is_caught_by_its_proof_and_replaced(drilled: Daemon) -> None:
    before = drilled.worker()
    eventually(lambda: drilled.infer("null", frame(1)).status_code == 200, "it is well")
    inject(drilled, "nan", model="null", for_s=600)

    def replaced() -> bool:
        answer = drilled.infer("null", frame(1))
        if answer.status_code == 200:
            assert np.array_equal(binary_floats(answer), frame(1))
        return drilled.worker()["restarts"] == before["restarts"] + 1 and answer.status_code == 200

    eventually(replaced, "it was replaced and answers", 30)
    assert drilled.worker()["faults"]["model-error"] == 2  # the run, and the proof
    inject(drilled, "none")


def test_a_spoiled_load_is_seen_and_the_next_one_serves(start_daemon: StartDaemon, tmp_path: Path) -> None:
    bundle = tiny.blank_bundle(tmp_path / "blank")
    daemon = start_daemon("--bundle", str(bundle), APPLIANCE_FAULTS__ENABLED="1").wait_serving().wait_ready()
    inject(daemon, "corrupt-plan", model="blank")
    eventually(lambda: daemon.worker()["faults"] == {"plan-refused": 1}, "it is refused", 20)
    daemon.wait_ready()
    assert daemon.http.post("/v1/models/blank/predict", content=tiny.picture(32, 32)).json()["lines"] == []
    assert "is damaged" in daemon.log("worker_fault")[0]["reason"]
    daemon.stop()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_drill_lists_every_fault_with_its_recovery_time_and_leaves_everything_whole(
    start_daemon: StartDaemon, tmp_path: Path, broker: Mosquitto
) -> None:
    broker.start()
    daemon = start_daemon(
        "--onnx",
        f"linear={tiny.linear_model(tmp_path / 'linear.onnx')}",
        "--mqtt",
        f"127.0.0.1:{broker.port}",
        APPLIANCE_FAULTS__ENABLED="true",
        APPLIANCE_LIMITS__HANG_S="3",
        APPLIANCE_MQTT__LONGEST_RETRY_S="2",
    )
    daemon.wait_serving().wait_ready()
    eventually(lambda: daemon.status()["mqtt"]["connected"], "the broker is there")
    token = {"APPLIANCE_TOKEN": daemon.token("admin")}
    drill = daemon.run_later(lambda: appliance("doctor", "--drill", "--json", "--url", daemon.url, env=token)).result(
        300
    )
    assert drill.returncode == 0, drill.stderr
    document = json.loads(drill.stdout)
    assert (document["model"], document["passed"]) == ("linear", True)
    results = {one["fault"]: one for one in document["faults"]}
    print(drill.stdout)
    assert results.keys() == {*OF_WORKERS, *OF_DAEMON}
    found = ("crash", "hang", "nan", "corrupt-plan", "cuda-error", "leak", "broker-loss")
    assert {results[fault]["verdict"] for fault in found} == {"recovered"}
    assert {results[fault]["verdict"] for fault in ("clock-step", "disk-full")} == {"not felt"}
    for fault, cause in (
        ("crash", "crash"),
        ("hang", "hang"),
        ("nan", "model-error"),
        ("corrupt-plan", "plan-refused"),
        ("cuda-error", "poisoned-context"),
    ):
        assert results[fault]["detected_by"].startswith(cause)
        assert 0 < results[fault]["recovery_s"] < 60
    assert results["hang"]["recovery_s"] > 3
    assert results["leak"]["detected_by"] == "over its lease"
    assert "504" in results["slow"]["answers"]
    x = np.eye(16, dtype=np.float32)
    assert np.allclose(binary_floats(daemon.infer("linear", x)), tiny.WEIGHTS, atol=1e-5)
    daemon.stop()
