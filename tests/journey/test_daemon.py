"""The daemon's life: start, readiness, refusal to start, large requests without leaks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import tiny
from support.daemon import APPLIANCE, Daemon, Floats, StartDaemon, appliance, assert_refused, binary_floats
from support.disk import COMPILER, needs_compiler
from support.processes import clean_environment, eventually, marked

pytestmark = pytest.mark.journey

ONE = np.ones((1, 2), np.float32)
MIB = 2**20


def noise(size_bytes: int, seed: int) -> Floats:
    """A tensor of that many bytes that no other seed gives."""
    return np.random.default_rng(seed).random((size_bytes // 1024, 256), np.float32)


def refused_to_run(*arguments: str, folder: Path, **env: str) -> str:
    """Run a daemon that must refuse with status 1; the one sentence it prints."""
    config = folder / "nothing.toml"
    config.touch()
    own = ["--config", str(config), "--state-dir", str(folder / "state"), "--http", "127.0.0.1:0"]
    ended = appliance("run", *own, *arguments, env=env)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("appliance run: ")
    return line


def test_it_serves_within_five_seconds_of_its_start(start_daemon: StartDaemon, tmp_path: Path) -> None:
    started = time.monotonic()
    daemon = start_daemon("--onnx", f"linear={tiny.linear_model(tmp_path / 'linear.onnx')}").wait_serving().wait_ready()
    x = np.eye(16, dtype=np.float32)[:3]
    assert np.allclose(binary_floats(daemon.infer("linear", x)), tiny.WEIGHTS[:3])
    assert time.monotonic() - started < 5
    daemon.stop()


SLOW_DISK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static int slowly(int call, int file) {
    if (!access(getenv("SLOW_DISK"), F_OK))
        usleep(1500000);
    return syscall(call, file);
}
int fsync(int file) { return slowly(SYS_fsync, file); }
int fdatasync(int file) { return slowly(SYS_fdatasync, file); }
"""
"""Preloaded: while the file that SLOW_DISK names is there, a sync takes one and a half seconds."""


@needs_compiler
@pytest.mark.long
def test_inference_is_as_fast_as_before_while_the_disk_takes_a_second_for_each_sync(tmp_path: Path) -> None:
    library, slow = tmp_path / "slow.so", tmp_path / "slow"
    source = [COMPILER or "cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(source, input=SLOW_DISK, text=True, check=True)
    model = tiny.linear_model(tmp_path / "linear.onnx")
    env = {"LD_PRELOAD": str(library), "SLOW_DISK": str(slow)}
    x = np.eye(16, dtype=np.float32)[:3]
    with Daemon(tmp_path / "daemon", "--onnx", f"linear={model}", env=env) as daemon:

        def asked(enough: Callable[[], bool]) -> tuple[float, float]:
            """Median seconds of a request, and the longest."""
            spent_s: list[float] = []
            while len(spent_s) < 200 or not enough():
                started = time.monotonic()
                assert np.allclose(binary_floats(daemon.infer("linear", x)), tiny.WEIGHTS[:3])
                spent_s.append(time.monotonic() - started)
                time.sleep(0.01)
            return statistics.median(spent_s), max(spent_s)

        def order(name: str) -> float:
            """Seconds that an order took, which is written down before and after it is carried out."""
            document = {"id": name, "command": "load", "args": {"name": "linear"}}
            answer = daemon.http.post("/v1/commands", json=document, headers=admin)
            assert answer.json()["status"] == "done", answer.text
            return answer.elapsed.total_seconds()

        admin = daemon.authorized("admin")
        order("the first, for which the journal is made")
        before = asked(lambda: True)
        slow.touch()
        ordered = daemon.run_later(order, "the second")
        median_s, longest_s = asked(ordered.done)
        assert ordered.result(0) > 3  # the disk was slow, and more than once
        lag = daemon.status()["event_loop"]
        slow.unlink()
        after = asked(lambda: True)
        assert median_s < 2 * max(before[0], after[0]) + 0.005
        assert longest_s < 1.2  # none has waited for a sync
        assert 0 <= lag["lag_p99_ms"] <= lag["lag_max_ms"] < 1200


def test_the_address_it_names_takes_connections_at_once(start_daemon: StartDaemon) -> None:
    daemon = start_daemon().wait_serving()
    assert daemon.http.get("/v2/health/live").json() == {"live": True}


def test_a_model_is_not_ready_before_it_has_answered_once(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.null_model(tmp_path / "slow.json", delay_s=1.0)
    daemon = start_daemon("--onnx", f"slow={path}", APPLIANCE_RUNTIME="null").wait_serving()
    assert daemon.http.get("/v2/health/live").status_code == 200
    assert "slow: loading" in assert_refused(daemon.http.get("/v2/health/ready"), 503)
    assert_refused(daemon.http.get("/v2/models/slow/ready"), 503)
    assert "not known" in assert_refused(daemon.http.get("/v2/models/slow"), 503)
    raw = {"inference-header-content-length": "0"}
    assert "not known" in assert_refused(daemon.http.post("/v2/models/slow/infer", content=b"x", headers=raw), 503)
    daemon.wait_ready()
    assert daemon.http.get("/v2/models/slow/ready").json() == {"name": "slow", "ready": True}


def test_a_request_that_comes_while_the_model_loads_is_answered(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.null_model(tmp_path / "slow.json", delay_s=0.5)
    daemon = start_daemon("--onnx", f"slow={path}", APPLIANCE_RUNTIME="null").wait_serving()
    assert np.array_equal(binary_floats(daemon.infer("slow", ONE)), ONE)


def test_a_model_that_could_not_be_tried_becomes_ready_with_its_first_answer(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon("--onnx", f"elevens={tiny.elevens_model(tmp_path / 'elevens.onnx')}").wait_serving()
    eventually(lambda: "not tried yet" in (daemon.model("elevens")["reason"] or ""), "it says that it was not tried")
    assert "send a request" in assert_refused(daemon.http.get("/v2/health/ready"), 503)
    x = np.arange(22, dtype=np.float32)
    assert np.array_equal(binary_floats(daemon.infer("elevens", x)), x.reshape(2, 11))
    daemon.wait_ready()
    daemon.stop()


def test_every_log_line_after_the_start_names_the_device(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_DEVICE_ID="camera-7")
    assert {line["device_id"] for line in daemon.log()} == {"camera-7"}


def test_a_client_that_stops_in_the_middle_of_a_request_is_given_up(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_HTTP__SILENCE_S="0.3")
    host, port = daemon.url.removeprefix("http://").split(":")
    for said in (b"", b"POST /v2/models/null/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nhalf"):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(said)
            assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
            assert client.recv(1000) == b""
    assert np.array_equal(binary_floats(daemon.infer_later("null", ONE).result(10)), ONE)


def test_a_log_that_nobody_takes_any_more_stops_nothing(tmp_path: Path) -> None:
    model = tiny.null_model(tmp_path / "null.json")
    (tmp_path / "config.toml").touch()
    own = ["--config", str(tmp_path / "config.toml"), "--state-dir", str(tmp_path / "state"), "--http", "127.0.0.1:0"]
    process = subprocess.Popen(
        [str(APPLIANCE), "run", *own, "--onnx", f"null={model}"],
        env=clean_environment() | {"APPLIANCE_RUNTIME": "null"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr
        with process.stderr as log:
            url = next(line["http"] for line in map(json.loads, log) if line["event"] == "serving")

        def worker(state: str, restarts: int) -> int:
            (found,) = httpx.get(f"{url}/v1/status", trust_env=False).json()["workers"]
            return int(found["pid"]) if (found["state"], found["restarts"]) == (state, restarts) else 0

        os.kill(eventually(lambda: worker("ready", 0), "a worker is ready"), signal.SIGKILL)
        eventually(lambda: worker("ready", 1), "it was restarted, although nobody could be told")
        process.terminate()
        assert process.wait(20) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_an_answer_that_shared_memory_cannot_hold_is_refused_at_once(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.wide_model(tmp_path / "wide.onnx", width=2**20)
    daemon = start_daemon("--onnx", f"wide={path}", APPLIANCE_HTTP__BODY_LIMIT_BYTES="1024").wait_serving().wait_ready()
    started = time.monotonic()
    refused = daemon.infer("wide", np.ones((1, 1), np.float32))
    assert "larger than the memory shared with the daemon" in assert_refused(refused, 500)
    assert time.monotonic() - started < 5
    daemon.stop()


def test_guessed_sizes_never_take_more_memory_than_a_request_could(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.elevens_model(tmp_path / "deep.onnx", dimensions=5)
    daemon = start_daemon("--onnx", f"deep={path}").wait_serving()
    eventually(lambda: "not tried yet" in (daemon.model("deep")["reason"] or ""), "it is loaded")
    assert daemon.infer("deep", np.ones((1, 1, 1, 1, 11), np.float32)).status_code == 200
    assert daemon.model("deep")["ready"]
    daemon.stop()


def test_a_model_with_more_outputs_than_can_be_told_says_so(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tiny.crowded_model(tmp_path / "crowded.onnx", outputs=4000)
    daemon = start_daemon("--onnx", f"crowded={path}").wait_serving()
    eventually(
        lambda: "more than fits in a message" in (daemon.model("crowded")["reason"] or ""), "status says why", 30
    )
    daemon.stop()


def test_a_second_daemon_on_the_same_state_folder_says_so_and_ends(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon().wait_serving()
    line = refused_to_run("--state-dir", str(daemon.state_dir), folder=tmp_path)
    assert "another daemon uses the state folder" in line
    assert str(daemon.state_dir) in line


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refused_to_run("--http", address, folder=tmp_path)


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refused_to_run("--bundle", str(tmp_path / "none"), folder=tmp_path)


def test_a_missing_onnx_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.onnx") in refused_to_run("--onnx", f"m={tmp_path / 'none.onnx'}", folder=tmp_path)


def test_a_misspelt_setting_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    assert "APPLIANCE_LIMITS__HANG_S" in refused_to_run(folder=tmp_path, APPLIANCE_LIMITS__HANGS="1")


def test_it_refuses_to_serve_the_whole_network(tmp_path: Path) -> None:
    assert "loopback" in refused_to_run("--http", "0.0.0.0:0", folder=tmp_path)


def test_the_address_that_client_commands_read_from_the_environment_is_no_obstacle(start_daemon: StartDaemon) -> None:
    start_daemon(APPLIANCE_URL="http://127.0.0.1:8080").wait_serving().stop()


@pytest.mark.parametrize(
    "arguments", [["--no-such-flag"], ["--http", "8080"], ["--onnx", "model.onnx"], ["--precision", "fp64"]]
)
def test_wrong_usage_ends_with_status_2_and_says_what_was_wrong(arguments: list[str]) -> None:
    ended = appliance("run", *arguments)
    assert ended.returncode == 2
    assert "usage: appliance run" in ended.stderr
    assert arguments[-1] in ended.stderr


def test_a_broken_model_leaves_the_daemon_up_and_says_why(start_daemon: StartDaemon, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"this is no model")
    good = tiny.null_model(tmp_path / "good.json")
    daemon = start_daemon("--onnx", f"broken={broken}", "--onnx", f"good={good}", APPLIANCE_RUNTIME="null")
    daemon.wait_serving()
    eventually(lambda: "not a null graph" in (daemon.model("broken")["reason"] or ""), "status says why")
    assert "broken: " in assert_refused(daemon.http.get("/v2/health/ready"), 503)
    assert "not a null graph" in assert_refused(daemon.http.get("/v2/models/broken/ready"), 503)
    assert np.array_equal(binary_floats(daemon.infer("good", ONE)), ONE)
    eventually(lambda: daemon.worker("broken")["restarts"] >= 2, "it is tried again")
    assert "not a null graph" in assert_refused(daemon.infer("broken", ONE), 503)
    daemon.stop()


def test_a_broken_onnx_file_is_named_by_onnxruntime(start_daemon: StartDaemon, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"this is no model")
    daemon = start_daemon("--onnx", f"broken={broken}").wait_serving()
    eventually(lambda: "onnxruntime cannot load" in (daemon.model("broken")["reason"] or ""), "status says why")
    daemon.stop()


def test_what_libraries_print_in_a_worker_becomes_a_log_line_that_names_the_model(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon("--bundle", str(tiny.blank_bundle(tmp_path / "blank"))).wait_serving().wait_ready()
    pid = daemon.worker_pid()
    damaged = bytearray(tiny.picture(64, 64))
    damaged[100:200] = bytes(100)
    assert_refused(daemon.http.post("/v1/models/blank/predict", content=bytes(damaged)), 400)
    (line,) = eventually(lambda: daemon.log("worker_output"), "it is logged")
    assert (line["model"], line["pid"]) == ("blank", pid)
    assert "libpng" in line["line"]
    daemon.stop()


def test_a_daemon_without_any_model_is_ready(start_daemon: StartDaemon) -> None:
    daemon = start_daemon().wait_serving()
    assert daemon.http.get("/v2/health/ready").json() == {"ready": True}
    assert daemon.status()["models"] == []
    assert "served are none" in assert_refused(daemon.infer("any", ONE), 404)
    daemon.stop()


def test_every_log_line_is_one_json_document_even_after_faulty_clients(start_null: StartDaemon) -> None:
    daemon = start_null()
    port = httpx.URL(daemon.url).port
    assert port
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"no http at all\r\n\r\n")
        client.recv(1000)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /v2/models/null/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
    assert np.array_equal(binary_floats(daemon.infer("null", ONE)), ONE)
    daemon.stop()
    assert {"level", "timestamp", "event"} <= set.intersection(*(set(line) for line in daemon.log()))
    assert [line["http"] for line in daemon.log("serving")] == [daemon.url]


def test_it_says_once_that_no_broker_is_configured(start_daemon: StartDaemon) -> None:
    daemon = start_daemon().wait_serving()
    assert daemon.status()["mqtt"] is None
    daemon.stop()
    assert len(daemon.log("mqtt_off")) == 1


def test_large_tensors_come_back_right_from_many_clients_at_once(start_null: StartDaemon) -> None:
    daemon = start_null()
    sent = [noise(2 * MIB, seed) for seed in range(24)]
    asked = [daemon.infer_later("null", x) for x in sent]
    for x, answer in zip(sent, asked, strict=True):
        assert np.array_equal(binary_floats(answer.result(60)), x)
    daemon.stop()


def test_a_tensor_just_under_the_body_limit_comes_back_right(start_null: StartDaemon) -> None:
    x = noise(16 * MIB - 4096, seed=1)
    assert np.array_equal(binary_floats(start_null().infer("null", x)), x)


def test_two_hundred_large_requests_leave_no_descriptor_memory_or_process_behind(start_null: StartDaemon) -> None:
    daemon = start_null()
    x = noise(MIB, seed=3)

    def ask(count: int) -> None:
        asked = [daemon.infer_later("null", x) for _ in range(count)]
        assert all(np.array_equal(binary_floats(answer.result(60)), x) for answer in asked)

    at_once = 15  # never too many, however slow the machine is
    ask(at_once)
    descriptors, memory_kib = daemon.descriptors(), resident_kib(daemon)
    for _ in range(14):
        ask(at_once)
    assert daemon.descriptors() == descriptors
    assert len(marked(daemon.mark)) == 2
    assert resident_kib(daemon) < memory_kib + 64 * 1024
    daemon.stop()


def resident_kib(daemon: Daemon) -> int:
    """Memory of the daemon's own process."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


def test_a_precision_that_no_graph_of_a_bundle_has_is_refused_at_start(tmp_path: Path) -> None:
    bundle = str(tiny.blank_bundle(tmp_path / "blank"))
    reason = refused_to_run("--bundle", bundle, "--precision", "int8", folder=tmp_path)
    assert reason == f"appliance run: {bundle} holds no graph in int8: choose auto or fp32"
