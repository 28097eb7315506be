"""The end of the daemon, and its word with systemd: what runs is answered, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import tiny
from support.daemon import StartDaemon, assert_refused, binary_floats
from support.processes import eventually, marked

pytestmark = pytest.mark.journey

ONE = np.ones((1, 2), np.float32)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_at_a_stop_running_work_is_answered_and_new_work_refused(
    start_null: StartDaemon, number: signal.Signals
) -> None:
    daemon = start_null(delay_s=1.0)
    running = daemon.infer_later("null", ONE)
    eventually(lambda: daemon.running_and_waiting("null") == (1, 0), "the request runs")
    daemon.process.send_signal(number)

    def refuses() -> bool:
        try:
            return httpx.get(f"{daemon.url}/v2/health/live", trust_env=False).status_code != 200
        except httpx.TransportError:
            return True

    eventually(refuses, "new work is refused")
    assert not running.done()
    assert np.array_equal(binary_floats(running.result(10)), ONE)
    daemon.stop()


def test_a_stop_that_reaches_the_whole_process_group_loses_no_running_request(start_null: StartDaemon) -> None:
    daemon = start_null(delay_s=0.5)
    asked = daemon.infer_later("null", ONE)
    eventually(lambda: daemon.running_and_waiting("null") == (1, 0), "it runs")
    for pid in marked(daemon.mark):  # as a terminal or a plain `systemctl stop` does
        os.kill(pid, signal.SIGTERM)
    assert np.array_equal(binary_floats(asked.result(10)), ONE)
    assert daemon.process.wait(10) == 0
    assert not daemon.log("worker_fault")


def test_systemd_is_told_once_that_it_is_ready_when_no_model_loads_any_more(
    start_null: StartDaemon, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        daemon = start_null(delay_s=0.0, NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert systemd.recv(100) == b"READY=1"
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        eventually(lambda: daemon.worker()["restarts"] == 1, "it was restarted")
        daemon.stop()
        assert systemd.recv(100) == b"STOPPING=1"


def test_at_a_stop_every_waiting_request_gets_an_answer(start_null: StartDaemon) -> None:
    daemon = start_null(delay_s=0.2)
    asked = [daemon.infer_later("null", ONE * i) for i in range(12)]
    eventually(lambda: daemon.running_and_waiting("null")[1] > 0, "requests wait")
    daemon.stop()
    for i, answer in enumerate(asked):
        response = answer.result(1)
        if response.status_code == 200:
            assert np.array_equal(binary_floats(response), ONE * i)
        else:
            assert "stopping" in assert_refused(response, 503)


def test_it_stops_cleanly_while_a_model_loads(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.null_model(tmp_path / "slow.json", delay_s=0.5)
    daemon = start_daemon("--onnx", f"slow={path}", APPLIANCE_RUNTIME="null").wait_serving()
    daemon.stop()


def test_after_a_power_cut_no_worker_survives_and_the_next_start_has_the_same_identity(
    start_null: StartDaemon,
) -> None:
    first = start_null(delay_s=0.2)
    device_id = first.status()["device_id"]
    first.infer_later("null", ONE)
    first.kill()
    eventually(lambda: not marked(first.mark), "the worker noticed that its daemon is gone")
    assert start_null().status()["device_id"] == device_id


def test_after_a_power_cut_not_even_a_worker_that_hangs_survives(start_null: StartDaemon) -> None:
    daemon = start_null()
    os.kill(daemon.worker_pid(), signal.SIGSTOP)
    daemon.kill()
    eventually(lambda: not marked(daemon.mark), "the worker is gone with its daemon")


def test_a_stop_takes_no_longer_than_the_grace_period_whoever_hangs(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.null_model(tmp_path / "null.json")
    models = [part for name in ("a", "b", "c") for part in ("--onnx", f"{name}={path}")]
    daemon = start_daemon(*models, APPLIANCE_RUNTIME="null", APPLIANCE_SHUTDOWN_GRACE_S="2").wait_serving().wait_ready()
    url = httpx.URL(daemon.url)
    with socket.create_connection((url.host, url.port or 0)) as half:
        half.sendall(b"POST /v2/models/a/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
        for name in ("a", "b", "c"):
            os.kill(daemon.worker_pid(name), signal.SIGSTOP)
        started = time.monotonic()
        daemon.stop()
    assert time.monotonic() - started < 2 + 1 + 2  # the grace, the least that workers get, and our own slowness
    assert len(daemon.log("worker_killed")) == 3
