"""Models that want more memory than there is: who is loaded, who goes, what is refused, and what a leak costs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, Floats, StartDaemon, binary_floats
from support.processes import eventually, marked

pytestmark = pytest.mark.journey

MIB = 2**20
WEIGHTS_BYTES = 100 * MIB


def frame(value: float) -> Floats:
    return np.full((3, 5), value, np.float32)


def start(start_daemon: StartDaemon, folder: Path, models: dict[str, dict[str, Any]], **env: str) -> Daemon:
    """A daemon with null models of these sizes."""
    arguments = []
    for name, sizes in models.items():
        arguments += ["--onnx", f"{name}={tiny.null_model(folder / f'{name}.json', **sizes)}"]
    settings = {"APPLIANCE_RUNTIME": "null", "APPLIANCE_MEMORY__SAMPLE_S": "0.1", **env}
    return start_daemon(*arguments, **settings).wait_serving()


def memory(daemon: Daemon) -> dict[str, Any]:
    """The memory section of the status."""
    return dict(daemon.status()["memory"])


def kept(daemon: Daemon, name: str) -> dict[str, Any]:
    """What the memory section says of one model."""
    (found,) = (model for model in memory(daemon)["models"] if model["name"] == name)
    return dict(found)


def states(daemon: Daemon) -> dict[str, str]:
    """Each model with its state."""
    return {model["name"]: model["state"] for model in memory(daemon)["models"]}


def assert_echoes(daemon: Daemon, name: str, value: float) -> None:
    assert np.array_equal(binary_floats(daemon.infer(name, frame(value))), frame(value))


def settle(daemon: Daemon) -> None:
    eventually(lambda: "LOADING" not in states(daemon).values(), "no model is loading", 60)


THREE: dict[str, dict[str, Any]] = {name: {"weights_bytes": WEIGHTS_BYTES} for name in ("a", "b", "c")}


def test_of_three_models_in_a_budget_for_two_the_one_used_least_recently_makes_room(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    budget = {"APPLIANCE_MEMORY__BUDGET_BYTES": str(430 * MIB)}
    daemon = start(start_daemon, tmp_path, THREE, **budget)
    settle(daemon)
    for round_ in range(2):
        for name in THREE:
            assert_echoes(daemon, name, round_)
    seen = memory(daemon)
    assert seen["leased_bytes"] <= seen["budget_bytes"]
    assert sorted(states(daemon).values()) == ["READY", "READY", "UNAVAILABLE"]
    assert states(daemon)["c"] == "READY"
    assert seen["evictions"] >= 2
    assert len(daemon.log("model_evicted")) == seen["evictions"]
    assert daemon.http.get("/v2/health/ready").status_code == 200
    assert len(marked(daemon.mark)) <= 4  # the daemon, two workers, and one that waits
    daemon.stop()


def test_a_model_that_fits_only_in_place_of_a_busy_one_is_refused_with_the_figures(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    models = {"busy": {"weights_bytes": WEIGHTS_BYTES, "delay_s": 3.0}, "late": {"weights_bytes": WEIGHTS_BYTES}}
    daemon = start(start_daemon, tmp_path, models, APPLIANCE_MEMORY__BUDGET_BYTES=str(300 * MIB))
    settle(daemon)
    if states(daemon)["busy"] != "READY":
        assert_echoes(daemon, "busy", 0)
    assert states(daemon) == {"busy": "READY", "late": "UNAVAILABLE"}
    asked = daemon.infer_later("busy", frame(1))
    eventually(lambda: daemon.running_and_waiting("busy")[0] == 1, "it runs")
    refused = daemon.infer("late", frame(1))
    assert refused.status_code == 507
    told = refused.json()
    assert "late needs" in told["error"]
    assert "busy would have to go" in told["error"]
    assert told["need_bytes"] > told["have_bytes"] > 0
    assert told["would_evict"] == ["busy"]
    assert np.array_equal(binary_floats(asked.result(20)), frame(1))
    assert_echoes(daemon, "late", 2)
    daemon.stop()


def test_a_leaking_model_is_recycled_before_it_outgrows_its_lease_and_loses_no_request(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start(start_daemon, tmp_path, {"leak": {"leak_bytes": 2 * MIB, "delay_s": 0.005}})
    settle(daemon)
    pid = daemon.worker_pid("leak")
    enough = threading.Event()
    outcomes: Counter[bool] = Counter()
    largest = 0

    def ask(client: int) -> None:
        while not enough.is_set():
            answer = daemon.infer("leak", frame(client))
            outcomes[answer.status_code == 200 and bool((binary_floats(answer) == client).all())] += 1

    clients = [daemon.run_later(ask, client) for client in range(2)]
    try:
        until = time.monotonic() + 60
        while memory(daemon)["recycles"] < 3:
            assert time.monotonic() < until, memory(daemon)
            largest = max(largest, kept(daemon, "leak")["used_bytes"] or 0)
            time.sleep(0.02)
    finally:
        enough.set()
    for client in clients:
        client.result(20)
    lease_bytes = sum(kept(daemon, "leak")["lease_bytes"].values())
    print(f"{dict(outcomes)}; at most {largest / MIB:.0f} MiB, lease {lease_bytes / MIB:.0f} MiB")
    assert outcomes[True] > 50
    assert outcomes[False] == 0
    assert largest < 3 * lease_bytes
    assert daemon.worker_pid("leak") != pid
    assert all(line["gap_s"] == 0 for line in daemon.log("worker_recycled"))
    eventually(lambda: len(marked(daemon.mark)) == 2, "old workers are gone")
    daemon.stop()


def test_where_memory_holds_no_second_worker_a_leaking_one_is_replaced_with_a_short_gap_and_no_lost_request(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start(
        start_daemon,
        tmp_path,
        {"leak": {"weights_bytes": 40 * MIB, "leak_bytes": 4 * MIB, "delay_s": 0.005}},
        APPLIANCE_MEMORY__BUDGET_BYTES=str(270 * MIB),
    )
    settle(daemon)
    outcomes: Counter[int] = Counter()
    until = time.monotonic() + 60
    while memory(daemon)["recycles"] < 1 or not daemon.log("worker_recycled"):
        assert time.monotonic() < until, memory(daemon)
        outcomes[daemon.infer("leak", frame(1)).status_code] += 1
    assert outcomes.keys() == {200}
    assert daemon.log("worker_recycled")[0]["gap_s"] > 0
    daemon.stop()


def test_an_idle_model_is_unloaded_and_its_next_request_loads_it_at_least_three_times_faster_than_a_cold_start(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    path = tiny.linear_model(tmp_path / "linear.onnx")
    daemon = start_daemon(
        "--onnx", f"linear={path}", APPLIANCE_MEMORY__IDLE_UNLOAD_S="1", APPLIANCE_MEMORY__SAMPLE_S="0.1"
    )
    daemon.wait_serving().wait_ready()
    x = np.ones((1, 16), np.float32)
    cold_s, reload_s = [], []
    for i in range(4):
        eventually(lambda: states(daemon)["linear"] == "UNAVAILABLE", "it is unloaded", 20)
        assert daemon.http.get("/v2/health/ready").status_code == 200
        spare = int(eventually(lambda: memory(daemon)["spare_pid"], "a worker waits", 20))
        if i % 2:  # as when the daemon starts: a process must be started first
            os.kill(spare, signal.SIGKILL)
        else:
            wait_loaded(spare, "onnxruntime")
        began = time.monotonic()
        assert binary_floats(daemon.infer("linear", x)).shape == (1, 16)
        (cold_s if i % 2 else reload_s).append(time.monotonic() - began)
    print(f"with a new process {cold_s}, with the one that waits {reload_s}")
    assert min(cold_s) >= 3 * min(reload_s)
    daemon.stop()


def wait_loaded(pid: int, library: str) -> None:
    """Wait until a process has mapped a library and come to rest."""
    process = Path(f"/proc/{pid}")

    def rests() -> bool:
        asleep = (process / "stat").read_text().rpartition(")")[2].split()[0] == "S"
        return asleep and library in (process / "maps").read_text()

    eventually(rests, f"a worker waits with {library}", 20)
