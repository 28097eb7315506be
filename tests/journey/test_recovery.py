"""Workers that die, hang or cannot start, deadlines, full queues: nobody waits in vain or gets nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, Floats, StartDaemon, assert_refused, binary_floats, binary_request
from support.processes import eventually

from models.spec import pack_bytes

pytestmark = pytest.mark.journey


def frame(value: float) -> Floats:
    return np.full((3, 5), value, np.float32)


def kill_worker(daemon: Daemon, number: signal.Signals = signal.SIGKILL, model: str = "") -> int:
    """Send a signal to the worker; its process id."""
    pid = daemon.worker_pid(model)
    os.kill(pid, number)
    return pid


def wait_running(daemon: Daemon, model: str, requests: int = 1) -> None:
    eventually(lambda: daemon.running_and_waiting(model)[0] >= requests, f"{requests} requests of {model} run", 30)


def wait_restarted(daemon: Daemon, restarts: int = 1, model: str = "") -> None:
    eventually(lambda: daemon.worker(model)["restarts"] == restarts, f"it was restarted {restarts} times", 30)
    eventually(lambda: daemon.worker(model)["state"] == "ready", "it is ready again", 30)


def assert_answered_or_lost(answer: httpx.Response, x: Floats) -> bool:
    """The answer is the right one, or says honestly that there is none; whether it is the right one."""
    if answer.status_code == 200:
        assert np.array_equal(binary_floats(answer), x)
        return True
    assert_refused(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    return False


def test_who_waits_for_a_worker_that_dies_is_usually_told_within_50_ms_and_the_next_request_succeeds(
    start_null: StartDaemon,
) -> None:
    daemon = start_null(delay_s=0.3)
    told_after_s = []

    def ask() -> tuple[httpx.Response, float]:
        return daemon.infer("null", frame(1)), time.monotonic()

    for restarts in (1, 2, 3):
        asked = daemon.run_later(ask)
        wait_running(daemon, "null")
        pid = daemon.worker_pid()
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        answer, told_at = asked.result(10)
        assert "died while it held this request" in assert_refused(answer, 503)
        told_after_s.append(told_at - killed_at)
        wait_restarted(daemon, restarts)
        assert np.array_equal(binary_floats(daemon.infer("null", frame(2))), frame(2))
    print(f"told after {[round(spent * 1e3, 1) for spent in told_after_s]} ms")
    assert statistics.median(told_after_s) < 0.05
    assert max(told_after_s) < 1
    daemon.stop()


def test_an_answer_that_is_on_its_way_arrives_whole_when_its_worker_dies(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_HTTP__BODY_LIMIT_BYTES=str(2**25))
    x = np.arange(2**22, dtype=np.float32).reshape(1024, 4096)  # more than the kernel holds for a connection
    body, headers = binary_request({"x": x})
    head = f"POST /v2/models/null/infer HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((daemon.http.base_url.host, daemon.http.base_url.port), 30) as client:
        client.sendall(
            (head + "".join(f"{name}: {said}\r\n" for name, said in headers.items()) + "\r\n").encode() + body
        )
        with client.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 200")
            kill_worker(daemon)
            wait_restarted(daemon)
            for value in range(3):
                other = np.full_like(x, value)
                assert np.array_equal(binary_floats(daemon.infer("null", other)), other)
            said = dict(line.rstrip().lower().split(b": ", 1) for line in iter(answer.readline, b"\r\n"))
            content = answer.read(int(said[b"content-length"]))
            tensor = content[int(said[b"inference-header-content-length"]) :]
            assert np.array_equal(np.frombuffer(tensor, np.float32).reshape(x.shape), x)
    daemon.stop()


def test_requests_that_wait_survive_the_death_of_the_worker(start_null: StartDaemon) -> None:
    daemon = start_null(delay_s=0.3)
    asked = [daemon.infer_later("null", frame(i)) for i in range(10)]
    eventually(lambda: daemon.running_and_waiting("null") == (4, 6), "four run and six wait")
    kill_worker(daemon)
    answered = [assert_answered_or_lost(answer.result(20), frame(i)) for i, answer in enumerate(asked)]
    assert Counter(answered) == {True: 6, False: 4}
    daemon.stop()


def test_a_worker_that_hangs_is_killed_and_replaced(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_LIMITS__HANG_S="1")
    pid = kill_worker(daemon, signal.SIGSTOP)
    started = time.monotonic()
    asked = daemon.infer_later("null", frame(1))
    assert_refused(asked.result(10), 503)
    assert 0.9 < time.monotonic() - started < 2
    wait_restarted(daemon)
    assert daemon.worker_pid() != pid
    assert np.array_equal(binary_floats(daemon.infer("null", frame(2))), frame(2))
    daemon.stop()
    assert [line["reason"] for line in daemon.log("worker_fault")] == ["it hung and was killed"]


@pytest.mark.long
def test_a_request_of_many_steps_is_not_taken_for_hung(start_daemon: StartDaemon, tmp_path: Path) -> None:
    bundle = tiny.blank_bundle(tmp_path / "blank")
    daemon = start_daemon("--bundle", str(bundle), APPLIANCE_LIMITS__HANG_S="1").wait_serving().wait_ready()
    blank = tiny.plain_picture(2000, 2000)
    spent_s, pictures = 0.0, 4
    while spent_s < 1.5 and pictures < 16:  # a slow machine needs fewer of them to take longer than a hang
        pictures *= 2
        images = pack_bytes([blank] * pictures)
        tensor = {"name": "image", "datatype": "BYTES", "shape": [pictures]}
        document = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(images)}}]}
        head = json.dumps(document).encode()
        headers = {"inference-header-content-length": str(len(head))}
        started = time.monotonic()
        answer = daemon.http.post("/v2/models/blank/infer", content=head + images, headers=headers)
        spent_s = time.monotonic() - started
        assert answer.status_code == 200, answer.text
    assert spent_s > 1
    assert daemon.worker()["restarts"] == 0
    daemon.stop()


def test_work_that_waits_for_clients_who_have_left_is_not_done(start_null: StartDaemon) -> None:
    daemon = start_null()
    pid = kill_worker(daemon, signal.SIGSTOP)
    body, headers = binary_request({"x": frame(1)})
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v2/models/null/infer HTTP/1.1\r\nHost: localhost\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    url = httpx.URL(daemon.url)
    with contextlib.ExitStack() as clients:
        for _ in range(10):
            sock = clients.enter_context(socket.create_connection((url.host, url.port or 0)))
            sock.sendall(head.encode() + body)
        eventually(lambda: daemon.running_and_waiting("null") == (4, 6), "four are sent and six wait")
    eventually(lambda: daemon.running_and_waiting("null") == (4, 0), "nobody waits any more")
    os.kill(pid, signal.SIGCONT)
    assert np.array_equal(binary_floats(daemon.infer("null", frame(2))), frame(2))
    daemon.stop()


def test_slow_requests_that_wait_their_turn_are_not_taken_for_hung(start_null: StartDaemon) -> None:
    daemon = start_null(delay_s=0.6, APPLIANCE_LIMITS__HANG_S="1")
    asked = [daemon.infer_later("null", frame(i)) for i in range(6)]
    for i, answer in enumerate(asked):
        assert np.array_equal(binary_floats(answer.result(20)), frame(i))
    assert daemon.worker()["restarts"] == 0
    daemon.stop()


def test_clients_that_insist_while_a_hung_worker_is_replaced_all_get_answers(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_LIMITS__HANG_S="0.5")
    enough = threading.Event()

    def insist(client: int) -> int:
        answered = 0
        while not enough.is_set():
            answered += assert_answered_or_lost(daemon.infer("null", frame(client)), frame(client))
        return answered

    clients = [daemon.run_later(insist, client) for client in range(8)]
    for restarts in (1, 2):
        kill_worker(daemon, signal.SIGSTOP)
        wait_restarted(daemon, restarts)
    enough.set()
    assert all(client.result(10) > 0 for client in clients)
    eventually(lambda: daemon.running_and_waiting("null") == (0, 0), "nothing is left over")
    daemon.stop()


def test_a_worker_that_cannot_start_is_tried_ever_less_often_and_stops_cleanly(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no model")
    daemon = start_daemon("--onnx", f"broken={broken}", APPLIANCE_RUNTIME="null").wait_serving()
    started = time.monotonic()
    eventually(lambda: daemon.worker()["restarts"] == 3, "it was tried again three times", 20)
    assert time.monotonic() - started > 1.4  # at once, after 0.5 s and after 1 s
    assert "not a null graph" in assert_refused(daemon.infer("broken", frame(1)), 503)
    assert daemon.http.get("/v2/health/live").status_code == 200
    daemon.stop(within_s=5)


def test_a_model_that_is_repaired_is_served_without_a_restart_of_the_daemon(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text("no model")
    daemon = start_daemon("--onnx", f"model={path}", APPLIANCE_RUNTIME="null").wait_serving()
    eventually(lambda: "not a null graph" in (daemon.model("model")["reason"] or ""), "status says why")
    tiny.null_model(path)
    daemon.wait_ready()
    assert np.array_equal(binary_floats(daemon.infer("model", frame(3))), frame(3))
    assert daemon.model("model")["reason"] is None


def test_other_models_do_not_notice_a_fault(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.null_model(tmp_path / "null.json", delay_s=0.2)
    daemon = start_daemon("--onnx", f"a={path}", "--onnx", f"b={path}", APPLIANCE_RUNTIME="null")
    daemon.wait_serving().wait_ready()
    asked = [daemon.infer_later("b", frame(i)) for i in range(6)]
    kill_worker(daemon, model="a")
    for i, answer in enumerate(asked):
        assert np.array_equal(binary_floats(answer.result(20)), frame(i))
    assert daemon.worker("b")["restarts"] == 0


def test_a_deadline_that_passes_while_a_request_waits_or_runs_is_told_in_time(start_null: StartDaemon) -> None:
    daemon = start_null(delay_s=0.8)
    busy = [daemon.infer_later("null", frame(i)) for i in range(4)]
    eventually(lambda: daemon.running_and_waiting("null") == (4, 0), "four requests run")
    body, headers = binary_request({"x": frame(9)}, parameters={"timeout": 200_000})
    started = time.monotonic()
    waited = daemon.http.post("/v2/models/null/infer", content=body, headers=headers)
    assert "deadline passed while the request waited" in assert_refused(waited, 504)
    assert 0.15 < time.monotonic() - started < 0.7
    assert all(answer.result(20).status_code == 200 for answer in busy)
    ran = daemon.http.post("/v2/models/null/infer", content=body, headers=headers)
    assert "deadline passed while the request ran" in assert_refused(ran, 504)
    assert daemon.worker()["restarts"] == 0


def test_a_full_queue_refuses_with_a_hint_when_to_retry_and_serves_who_waits(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_LIMITS__QUEUE="3")
    pid = kill_worker(daemon, signal.SIGSTOP)
    held = [daemon.infer_later("null", frame(i)) for i in range(7)]
    eventually(lambda: daemon.running_and_waiting("null") == (4, 3), "four are sent and three wait")
    refused = daemon.infer("null", frame(8))
    assert "3 requests wait already" in assert_refused(refused, 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert daemon.http.get("/v2/health/ready").status_code == 200
    os.kill(pid, signal.SIGCONT)
    for i, answer in enumerate(held):
        assert np.array_equal(binary_floats(answer.result(20)), frame(i))
    daemon.stop()


def test_of_each_camera_only_the_latest_frame_is_kept(start_daemon: StartDaemon, tmp_path: Path) -> None:
    bundle = tiny.blank_bundle(tmp_path / "blank")
    daemon = start_daemon("--bundle", str(bundle)).wait_serving().wait_ready()
    pid = kill_worker(daemon, signal.SIGSTOP)

    def send(source: str) -> Future[httpx.Response]:
        query = {"source": source} if source else {}
        return daemon.later("POST", "/v1/models/blank/predict", params=query, content=tiny.picture(32, 32))

    held = [send("") for _ in range(4)]
    eventually(lambda: daemon.running_and_waiting("blank") == (4, 0), "the worker is full")
    first = send("door")
    eventually(lambda: daemon.running_and_waiting("blank") == (4, 1), "a frame waits")
    other = send("yard")
    eventually(lambda: daemon.running_and_waiting("blank") == (4, 2), "a frame of another camera waits")
    latest = send("door")
    assert "a newer frame of source 'door'" in assert_refused(first.result(10), 429)
    assert daemon.running_and_waiting("blank") == (4, 2)
    os.kill(pid, signal.SIGCONT)
    for answer in (*held, other, latest):
        assert answer.result(20).json()["lines"] == []
    daemon.stop()


def test_a_deadline_may_come_with_a_picture(start_daemon: StartDaemon, tmp_path: Path) -> None:
    bundle = tiny.blank_bundle(tmp_path / "blank")
    daemon = start_daemon("--bundle", str(bundle)).wait_serving().wait_ready()
    pid = kill_worker(daemon, signal.SIGSTOP)
    late = daemon.http.post("/v1/models/blank/predict?deadline_ms=100", content=tiny.picture(32, 32))
    assert_refused(late, 504)
    os.kill(pid, signal.SIGCONT)
    late = daemon.http.post("/v1/models/blank/predict?deadline_ms=10000", content=tiny.picture(32, 32))
    assert late.status_code == 200
    daemon.stop()
