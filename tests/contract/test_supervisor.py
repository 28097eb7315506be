"""What a supervisor does when the machine or its worker is broken."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import tiny

from appliance import wire
from appliance.arena import Arena
from appliance.core.faults import Fault
from appliance.core.health import Rung, State
from appliance.core.limits import Limits
from appliance.supervisor import Supervisor
from models.errors import BundleError, NotReady
from models.spec import Array, Tensor

pytestmark = pytest.mark.contract

NONSENSE = """#!{python}
import socket, sys
sock = socket.socket(fileno=int(sys.argv[-1]))
sock.recv(1024)
sock.send({message!r})
sock.recv(1024)
"""


def of_null(folder: Path) -> Supervisor:
    order = wire.Open(name="null", runtime="null", onnx=str(tiny.null_model(folder / "null.json")))
    return Supervisor([order], Limits(body_bytes=1024), on_ready=lambda _ready: None)


async def reach(supervisor: Supervisor, state: State) -> None:
    until = time.monotonic() + 20
    while supervisor.health.state is not state:
        assert time.monotonic() < until, supervisor.health
        await asyncio.sleep(0.005)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_worker_that_cannot_be_started_leaks_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        supervisor = of_null(tmp_path)
        before = open_descriptors()
        monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
        supervisor.start(on_change=lambda: None)
        assert supervisor.health.state is State.WAITING
        assert "no worker can be started: No such file" in supervisor.health.reason
        assert open_descriptors() == before
        monkeypatch.undo()
        await reach(supervisor, State.READY)
        await supervisor.stop(5)
        assert open_descriptors() == before

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "message",
    [b"\xff", wire.encode(wire.Done(7, (), {})), wire.encode(wire.Free(((0, 1, 1),)))],
    ids=["no message", "an answer to nothing", "memory it never had"],
)
def test_a_worker_that_talks_nonsense_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    script = tmp_path / "nonsense"
    script.write_text(NONSENSE.format(python=sys.executable, message=message))
    script.chmod(0o755)

    async def scenario() -> None:
        supervisor = of_null(tmp_path)
        monkeypatch.setattr(sys, "executable", str(script))
        supervisor.start(on_change=lambda: None)
        await reach(supervisor, State.WAITING)
        assert supervisor.health.reason == "it sent what cannot be understood"
        monkeypatch.undo()
        await reach(supervisor, State.READY)
        await supervisor.stop(5)

    asyncio.run(scenario())


def test_an_engine_is_built_again_when_it_is_refused_and_requests_are_refused_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "null.json"
    path.write_text("damaged")
    order = wire.Open(name="null", runtime="null", onnx=str(path))
    may_build = asyncio.Event()

    async def build(wanted: wire.Open) -> None:
        assert wanted == order
        await may_build.wait()
        tiny.null_model(path)

    async def scenario() -> None:
        supervisor = Supervisor([order], Limits(body_bytes=1024), on_ready=lambda _ready: None, rebuild=build)
        supervisor.start(on_change=lambda: None)
        await reach(supervisor, State.BUILDING)
        with pytest.raises(NotReady, match="the engine of model 'null' is built again after a fault"):
            await supervisor.submit("model", ())
        may_build.set()
        await reach(supervisor, State.READY)
        assert supervisor.health.rung_counts == {Rung.REBUILD: 1}
        assert supervisor.health.recoveries[Fault.PLAN_REFUSED].count == 1
        await supervisor.stop(5)

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_built_again_is_a_fault_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "null.json"
    path.write_text("damaged")

    async def build(_wanted: wire.Open) -> None:
        raise BundleError("no room for the builder")

    async def scenario() -> None:
        order = wire.Open(name="null", runtime="null", onnx=str(path))
        supervisor = Supervisor([order], Limits(body_bytes=1024), on_ready=lambda _ready: None, rebuild=build)
        seen: list[str] = []
        supervisor.start(on_change=lambda: seen.append(supervisor.health.reason))
        until = time.monotonic() + 20
        while "the engine could not be built again: no room for the builder" not in seen:
            assert time.monotonic() < until, seen
            await asyncio.sleep(0.005)
        tiny.null_model(path)
        await reach(supervisor, State.READY)
        await supervisor.stop(5)

    asyncio.run(scenario())


def test_a_model_is_renewed_without_a_fault_and_without_losing_what_runs(tmp_path: Path) -> None:
    order = wire.Open(name="null", runtime="null", onnx=str(tiny.null_model(tmp_path / "null.json", delay_s=0.3)))
    x = Tensor.from_array("x", np.ones((1, 1), np.float32))

    async def scenario() -> None:
        supervisor = Supervisor([order], Limits(body_bytes=1024), on_ready=lambda _ready: None)
        supervisor.start(on_change=lambda: None)
        await reach(supervisor, State.READY)
        pid = supervisor.pid
        runs = asyncio.ensure_future(supervisor.submit("model", [x]))
        await asyncio.sleep(0)  # it is handed over
        supervisor.renew()
        waits = asyncio.ensure_future(supervisor.submit("model", [x]))
        for answer in (await runs, await waits):
            assert np.array_equal(answer.tensors[0].to_array(), x.to_array())
        assert supervisor.pid != pid
        assert (supervisor.health.fault_counts, supervisor.health.faults) == ({}, 0)
        await supervisor.stop(5)

    asyncio.run(scenario())


def test_a_large_answer_stays_as_it_was_after_its_worker_has_gone_and_leaves_no_memory_mapped(tmp_path: Path) -> None:
    def arenas() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("appliance-arena")

    async def scenario() -> None:
        order = wire.Open(name="null", runtime="null", onnx=str(tiny.null_model(tmp_path / "null.json")))
        supervisor = Supervisor([order], Limits(body_bytes=8 * 2**20), on_ready=lambda _ready: None)
        supervisor.start(on_change=lambda: None)
        await reach(supervisor, State.READY)

        async def asked(value: float) -> Array:
            x = np.full((512, 512), value, np.float32)
            return (await supervisor.submit("model", [Tensor.from_array("x", x)])).tensors[0].to_array()

        kept = await asked(1)
        for _ in range(100):  # more than its memory holds
            assert (await asked(2) == 2).all()
        assert supervisor.pid
        os.kill(supervisor.pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while not supervisor.health.recoveries:
            assert time.monotonic() < until, supervisor.health
            await asyncio.sleep(0.005)
        for _ in range(10):
            assert (await asked(3) == 3).all()
        assert (kept == 1).all()
        await supervisor.stop(5)

    before = arenas()
    gc.disable()  # what is only found by a collection would hold the worker's memory for too long
    try:
        asyncio.run(scenario())
        assert arenas() == before
    finally:
        gc.enable()


@contextmanager
def spoken_to(order: wire.Open) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes], Arena]]:
    """A worker that is ready, the socket on which it is spoken to, and the memory for its requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, closing(Arena.create(4096)) as requests, closing(Arena.create(4096)) as answers:
        with theirs:
            worker = subprocess.Popen(
                [sys.executable, "-I", "-c", "from appliance.worker import main; main()", "null", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        ours.settimeout(20)
        wire.send_with_fds(ours, wire.encode(order), [requests.fd, answers.fd])
        assert isinstance(wire.decode(ours.recv(wire.MESSAGE_BYTES))[0], wire.Ready)
        yield ours, worker, requests
    worker.wait(20)


def test_a_worker_that_dies_of_a_python_error_says_which(tmp_path: Path) -> None:
    order = wire.Open(name="null", runtime="null", onnx=str(tiny.null_model(tmp_path / "null.json")))
    with spoken_to(order) as (sock, worker, _requests):
        sock.send(b"\xff")
        last, _payloads, _slots = wire.decode(sock.recv(wire.MESSAGE_BYTES))
        assert isinstance(last, wire.Failed)
        assert last.message.startswith("it failed: ")
        assert "struct.error" in last.message or "error: unpack" in last.message
        assert worker.wait(20) == 1


def test_an_answer_that_became_late_while_it_was_computed_is_not_sent(tmp_path: Path) -> None:
    path = tiny.null_model(tmp_path / "null.json", delay_s=1.0)
    x = Tensor.from_array("x", np.ones((1, 1), np.float32))
    with spoken_to(wire.Open(name="null", runtime="null", onnx=str(path))) as (sock, _worker, requests):
        for number, allowed_s, kind in ((1, 60.0, wire.Done), (2, 0.7, wire.Skipped)):
            started = time.monotonic()
            run = wire.Run(number, wire.BARE_GRAPH, wire.heads([x]), deadline_at=started + allowed_s)
            sock.send(wire.pack([(run, [x.data])], requests))
            said: wire.Message = wire.Stop()
            while not isinstance(said, wire.Done | wire.Skipped):
                said, _payloads, _slots = wire.decode(sock.recv(wire.MESSAGE_BYTES))
            assert isinstance(said, kind)
            assert time.monotonic() - started >= 1, "it was computed"
