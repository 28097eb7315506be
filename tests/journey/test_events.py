"""What a running daemon tells of itself: server-sent events, log lines of requests, and the flight recorder."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.daemon import Daemon, StartDaemon, binary_request
from support.processes import eventually

pytestmark = pytest.mark.journey

ONE = np.ones((1, 2), np.float32)
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@contextmanager
def watched(daemon: Daemon) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of a daemon, as they come."""

    def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    with httpx.stream("GET", f"{daemon.url}/v1/events", trust_env=False, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer.iter_lines())


def test_events_tell_the_status_until_the_daemon_stops_which_waits_for_nobody(start_null: StartDaemon) -> None:
    daemon = start_null()
    with watched(daemon) as events:
        assert next(events)[0] == "history"
        name, status = next(events)
        assert (name, status["device_id"]) == ("status", daemon.status()["device_id"])
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        until = time.monotonic() + 20
        while not (status["recent_faults"] and status["recent_faults"][0]["recovery_s"]):
            assert time.monotonic() < until
            name, status = next(events)
        started = time.monotonic()
        daemon.stop()
        assert time.monotonic() - started < 10  # the grace period is 20 s


def test_whoever_leaves_makes_room_for_others_to_watch(tiny_daemon: Daemon) -> None:
    for _ in range(40):
        with watched(tiny_daemon) as events:
            next(events)

    def has_room() -> bool:
        with httpx.stream("GET", f"{tiny_daemon.url}/v1/events", trust_env=False, timeout=30) as answer:
            return answer.status_code == 200

    eventually(has_room, "there is room", 20)


def test_a_request_has_one_line_in_the_log_and_a_fault_leaves_a_flight(start_null: StartDaemon) -> None:
    daemon = start_null()
    content, headers = binary_request({"x": ONE}, id="from the body")
    given = {"x-request-id": "cam-7/17", "traceparent": TRACEPARENT}
    answer = daemon.http.post("/v2/models/null/infer", content=content, headers={**headers, **given})
    assert answer.headers["x-request-id"] == "cam-7/17"
    assert answer.headers["traceparent"][:35] == TRACEPARENT[:35]
    assert answer.headers["traceparent"] != TRACEPARENT
    daemon.http.post("/v2/models/null/infer", content=content, headers=headers)
    eventually(lambda: len(daemon.log("request")) == 2, "both are in the log", 20)
    first, second = sorted(daemon.log("request"), key=lambda line: line["request_id"])
    assert (first["request_id"], second["request_id"]) == ("cam-7/17", "from the body")
    assert (first["model_id"], first["trace_id"]) == ("null", TRACEPARENT[3:35])
    assert first["input_hash"] == hashlib.blake2b(ONE.tobytes(), digest_size=8).hexdigest()
    assert first["device_id"] == daemon.status()["device_id"]
    assert not {"error", "cuda_error_code", "left_out"} & first.keys()
    recorded = daemon.http.get("/v1/recorder", headers=daemon.authorized("operate")).json()["requests"]
    assert [one["request_id"] for one in recorded] == ["from the body", "cam-7/17"]
    assert recorded[0]["inputs"] == [["x", "FP32", [1, 2]]]
    os.kill(daemon.worker_pid(), signal.SIGKILL)
    flights = daemon.state_dir / "flights"
    eventually(lambda: list(flights.glob("*-null-crash.json")), "the flight is kept", 20)
    eventually(lambda: daemon.log("flights_kept"), "it is told", 20)
    document = json.loads(next(flights.iterdir()).read_bytes())
    assert [one["request_id"] for one in document["requests"]] == ["from the body", "cam-7/17"]
    assert document["status"]["models"][0]["name"] == "null"
    (fault,) = daemon.log("worker_fault")
    assert fault["model_id"] == "null"
    daemon.stop()


def test_traces_without_what_sends_them_stop_the_start_with_what_to_install(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.exporter'] = None")
    daemon = start_daemon(APPLIANCE_TRACES__ENDPOINT="http://127.0.0.1:1/v1/traces", PYTHONPATH=str(tmp_path))
    assert daemon.process.wait(30) == 1
    assert "install edge-appliance[traces]" in daemon.log_text
