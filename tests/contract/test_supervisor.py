"""What a supervisor does when the machine or its worker is broken."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from support import tiny

from appliance import wire
from appliance.core.health import State
from appliance.core.limits import Limits
from appliance.supervisor import Supervisor

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
    return Supervisor(order, Limits(body_bytes=1024), on_ready=lambda _ready: None)


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
    [b"\xff", wire.encode(wire.Done(7, (), {}))[0], wire.encode(wire.Free(((0, 1, 1),)))[0]],
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
