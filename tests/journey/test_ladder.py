"""Faults that come again, on a real daemon: proofs, fallbacks, quarantine, and what a user is told of each."""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, Floats, StartDaemon, assert_refused, binary_floats
from support.processes import eventually, marked

from models.folder import BundleFolder, blob_path

pytestmark = pytest.mark.journey


def frame(value: float) -> Floats:
    return np.full((3, 5), value, np.float32)


def start_of(daemon: Daemon) -> float:
    """Seconds from the first line of the daemon to its first ready worker: what loading takes here and now."""
    first, ready = (datetime.fromisoformat(daemon.log(name)[0]["timestamp"]) for name in ("mqtt_off", "model_ready"))
    return (ready - first).total_seconds()


def first_right_answer(daemon: Daemon, since: float) -> float:
    """Seconds from `since` to the first right answer; until then only 503 is allowed."""
    while True:
        answer = daemon.infer("null", frame(1))
        if answer.status_code == 200:
            assert np.array_equal(binary_floats(answer), frame(1))
            return time.monotonic() - since
        assert_refused(answer, 503)
        time.sleep(0.005)


def test_service_is_usually_back_within_a_second_plus_the_load_time_after_a_sigkill_and_always_within_five(
    start_null: StartDaemon,
) -> None:
    daemon = start_null(APPLIANCE_LIMITS__CALM_S="0.01")
    load_s, back_s = start_of(daemon), []
    for _ in range(3):
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        back_s.append(first_right_answer(daemon, time.monotonic()))
    print(f"back after {[round(spent, 3) for spent in back_s]} s, the first start took {load_s:.3f} s")
    assert statistics.median(back_s) < load_s + 1
    assert max(back_s) < load_s + 5
    spent = daemon.worker()["recoveries"]["crash"]
    assert spent["count"] == 3
    assert spent["total_s"] <= sum(back_s)
    daemon.stop()


def test_a_hang_is_usually_detected_within_the_batch_deadline_plus_half_a_second_and_always_within_two(
    start_null: StartDaemon,
) -> None:
    daemon = start_null(APPLIANCE_LIMITS__HANG_S="1", APPLIANCE_LIMITS__CALM_S="0.01")
    detected_s = []
    for fault in (1, 2, 3):
        os.kill(daemon.worker_pid(), signal.SIGSTOP)
        started = time.monotonic()
        assert_refused(daemon.infer("null", frame(1)), 503)
        detected_s.append(time.monotonic() - started)
        eventually(lambda fault=fault: daemon.worker()["faults"] == {"hang": fault}, "it was taken for hung")
        daemon.wait_ready()
    print(f"detected after {[round(spent, 3) for spent in detected_s]} s, the batch deadline is 1 s")
    assert 1 <= statistics.median(detected_s) < 1.5
    assert max(detected_s) < 3
    daemon.stop()


def test_an_idle_worker_that_hangs_is_found_without_any_request(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_LIMITS__PROVE_IDLE_S="0.3", APPLIANCE_LIMITS__HANG_S="1")
    pid = daemon.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: daemon.worker()["faults"] == {"hang": 1}, "it was taken for hung", 20)
    daemon.wait_ready()
    assert daemon.worker_pid() != pid
    daemon.stop()


def test_an_idle_worker_whose_bundle_was_damaged_is_not_ready_any_more(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tiny.blank_bundle(tmp_path / "blank")
    daemon = start_daemon("--bundle", str(path), APPLIANCE_LIMITS__PROVE_IDLE_S="0.3").wait_serving().wait_ready()
    folder = BundleFolder(path)
    golden = blob_path(path, folder.manifest.graphs["det"].variants["fp32"].golden.outputs)
    whole = golden.read_bytes()
    golden.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    eventually(lambda: daemon.http.get("/v2/health/ready").status_code == 503, "it is not ready", 20)
    (fault, *_) = daemon.log("worker_fault")
    assert fault["reason"].startswith("its golden vector was not answered rightly: ")
    assert (fault["fault"], fault["skipped"]) == ("plan-refused", ["rebuild", "fall-back"])
    golden.write_bytes(whole)
    daemon.wait_ready()
    daemon.stop()


def test_a_bundle_that_its_runtime_refuses_is_served_by_onnxruntime_and_says_that_it_is_degraded(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    bundle = tiny.blank_bundle(tmp_path / "blank")
    daemon = start_daemon("--bundle", str(bundle), APPLIANCE_RUNTIME="null").wait_serving().wait_ready()
    answer = daemon.http.post("/v1/models/blank/predict", content=tiny.picture(32, 32)).json()
    assert answer["runtime"] == "onnxruntime-cpu"
    assert "not a null graph" in answer["degraded"]
    tensors = daemon.http.post(
        "/v2/models/blank.det/infer",
        json={"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 1, 1], "data": [1.0, 1.0, 1.0]}]},
    )
    assert "not a null graph" in tensors.headers["appliance-degraded"]
    assert daemon.model("blank")["degraded"] == answer["degraded"]
    assert (daemon.worker()["rungs"], daemon.worker()["restarts"]) == ({"fall-back": 1}, 1)
    metrics = daemon.http.get("/metrics").text
    assert 'appliance_model_degraded{model="blank",version="1.0.0"} 1.0' in metrics
    assert 'appliance_recovery_seconds_count{cause="plan-refused",model="blank",version="1.0.0"} 1.0' in metrics
    daemon.stop()


def test_a_model_that_makes_nan_of_good_input_says_so_and_stays_when_its_proof_is_right(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tiny.root_model(tmp_path / "root.onnx")
    daemon = start_daemon("--onnx", f"root={path}").wait_serving().wait_ready()
    pid = daemon.worker_pid()
    assert binary_floats(daemon.infer("root", frame(4)))[0, 0] == 2
    time.sleep(1.1)  # a proof holds for a second
    assert "'y' holds NaN or infinite values" in assert_refused(daemon.infer("root", frame(-1)), 500)
    eventually(lambda: daemon.worker()["recoveries"], "it has proven itself")
    assert daemon.worker()["rungs"] == {"retry": 1}
    assert np.isnan(binary_floats(daemon.infer("root", frame(np.nan)))).all()  # nonsense of nonsense is no fault
    assert (daemon.worker_pid(), daemon.worker()["restarts"]) == (pid, 0)
    daemon.stop()


def test_a_worker_whose_cuda_context_is_poisoned_is_killed_and_the_next_is_ready_only_once_it_has_proven_itself(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    bundle = tiny.scale_bundle(tmp_path / "scale", 3, null=True)
    daemon = start_daemon("--bundle", str(bundle), APPLIANCE_RUNTIME="null", APPLIANCE_FAULTS__ENABLED="true")
    pid = daemon.wait_serving().wait_ready().worker_pid()

    def inject(fault: str) -> None:
        order = {"fault": fault, "model": "scale", "for_s": 600}
        daemon.http.post("/v1/faults", json=order, headers=daemon.authorized("admin")).raise_for_status()

    golden = blob_path(bundle, BundleFolder(bundle).manifest.graphs["g"].variants["fp32"].golden.outputs)
    whole = golden.read_bytes()
    golden.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # so the next worker can prove nothing yet
    inject("cuda-error")
    assert "CUDA failure 700" in assert_refused(daemon.infer("scale.g", frame(1)), 500)
    eventually(lambda: len(daemon.log("worker_fault")) > 1, "the next worker was looked at", 20)
    fault, refused, *_ = daemon.log("worker_fault")
    assert (fault["fault"], fault["cuda_error_code"], fault["rung"]) == ("poisoned-context", 700, "restart")
    assert "is damaged" in refused["reason"]
    assert pid not in marked(daemon.mark)
    assert_refused(daemon.http.get("/v2/health/ready"), 503)
    golden.write_bytes(whole)
    inject("none")  # or it would go on trying to fall back to onnxruntime, which cannot open a null graph
    daemon.wait_ready()
    assert np.array_equal(binary_floats(daemon.infer("scale.g", frame(1))), frame(3))
    assert daemon.worker()["faults"]["poisoned-context"] == 1
    daemon.stop()


def test_systemd_is_told_that_the_daemon_is_well_for_as_long_as_it_is(start_null: StartDaemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        daemon = start_null(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="1500000")
        while (said := systemd.recv(100)) != b"READY=1":
            assert said == b"WATCHDOG=1"
        os.kill(daemon.worker_pid(), signal.SIGKILL)  # a model that fails is no reason to end its neighbours
        for _ in range(3):
            assert systemd.recv(100) == b"WATCHDOG=1"
        daemon.process.send_signal(signal.SIGSTOP)
        while True:  # what was sent before
            systemd.settimeout(1)
            try:
                systemd.recv(100)
            except TimeoutError:
                break
        daemon.process.send_signal(signal.SIGCONT)
        systemd.settimeout(10)
        assert systemd.recv(100) == b"WATCHDOG=1"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_model_that_can_never_load_ends_quarantined_and_is_tried_again_rarely(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "broken.json"
    path.write_text("no model")
    daemon = start_daemon(
        "--onnx", f"broken={path}", APPLIANCE_RUNTIME="null", APPLIANCE_LIMITS__QUARANTINE_S="20"
    ).wait_serving()
    eventually(lambda: daemon.worker()["state"] == "quarantined", "it is quarantined", 120)
    answer = daemon.infer("broken", frame(1))
    assert "is quarantined after 8 faults" in assert_refused(answer, 503)
    assert int(answer.headers["retry-after"]) > 5
    assert daemon.worker()["pid"] is None
    restarts = daemon.worker()["restarts"]
    eventually(lambda: daemon.worker()["restarts"] == restarts + 1, "it is tried once more", 40)
    eventually(lambda: daemon.worker()["state"] == "quarantined", "it is quarantined again", 40)
    tiny.null_model(path)
    daemon.wait_ready()
    daemon.stop()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_random_kills_under_load_lose_no_request_give_no_wrong_answer_and_leave_nothing_behind(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    names, kills = ("a", "b", "c"), 100
    path = tiny.null_model(tmp_path / "null.json", delay_s=0.01)
    models = [part for name in names for part in ("--onnx", f"{name}={path}")]
    daemon = start_daemon(*models, APPLIANCE_RUNTIME="null", APPLIANCE_LIMITS__CALM_S="0.05")
    daemon.wait_serving().wait_ready()
    for name in names:
        daemon.infer(name, frame(0))
    descriptors = daemon.descriptors()
    enough, outcomes = threading.Event(), Counter[str]()
    large = np.random.default_rng(1).random((64, 512), np.float32)  # 128 KiB: through shared memory

    def ask(name: str, client: int) -> None:
        value = 0
        while not enough.wait(0.02):
            value += 1
            x = large + value if value % 2 else frame(1000 * client + value)
            answer = daemon.infer(name, x)
            outcomes["asked"] += 1
            if answer.status_code == 200:
                outcomes["right" if np.array_equal(binary_floats(answer), x) else "wrong"] += 1
            else:
                assert_refused(answer, 503)
                outcomes["refused"] += 1

    clients = [daemon.run_later(ask, name, client) for client, name in enumerate(names * 2)]
    chance = random.Random(5)  # noqa: S311 - not for secrets
    dead: Counter[str] = Counter()
    while dead.total() < kills:
        name = chance.choice(names)
        worker = daemon.worker(name)
        loading = worker["state"] == "loading" and chance.random() < 0.1  # more of these in a row mean quarantine
        if worker["pid"] is not None and (worker["state"] == "ready" or loading):
            os.kill(worker["pid"], chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
            dead[name] += 1
        time.sleep(chance.uniform(0.05, 0.6))
    daemon.wait_ready()
    enough.set()
    for client in clients:
        client.result(20)
    print(dict(outcomes), dict(dead))
    assert outcomes["wrong"] == 0
    assert outcomes["asked"] == outcomes["right"] + outcomes["refused"]
    assert outcomes["right"] > kills
    eventually(lambda: daemon.descriptors() == descriptors, "no descriptor and no shared memory is left")
    assert len(marked(daemon.mark)) == 1 + len(names)
    daemon.stop()
