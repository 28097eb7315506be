"""The daemon's end of one worker process, from its start until it was reaped.

The two arenas belong to one life of one worker. They are made before it starts and closed only
after its exit was reaped, so a dying worker can never write into memory that serves somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from appliance import wire
from appliance.arena import Arena, Slot
from appliance.core.faults import Fault
from appliance.hardware import Seats
from appliance.link import Link
from models.spec import Payload

_OUTPUT_BYTES = 16 * 1024
_OUTPUT_LINES = 50
"""Printed lines told at once; a worker that prints without end must neither stop the loop nor fill the log."""
_LENT_FROM_BYTES = 256 * 1024
"""Answers from this size on are cheaper to lend than to copy."""
_LENT_SHARE = 8
"""So much of `answers` may be lent, a part of that many: clients that read slowly leave room for those that do not."""


class StartLife(Protocol):
    """Starts a worker process, or hands out one that waits; as `Life` itself does."""

    def __call__(
        self,
        arena_bytes: int,
        runtime: str,
        *,
        on_data: Callable[[Life, bytes], None],
        on_end: Callable[[Life], None],
        gentle: bool = False,
    ) -> Life:
        """See `Life`."""


class Life:
    """One worker process, its memory, the link to it, and what it prints."""

    def __init__(
        self,
        arena_bytes: int,
        runtime: str,
        *,
        on_data: Callable[[Life, bytes], None],
        on_end: Callable[[Life], None],
        gentle: bool = False,
        seats: Seats | None = None,
    ) -> None:
        """Start the process with two arenas of that size; raises OSError, leaving nothing, when that cannot be done.

        It runs on the device that `seats` gives it, and loads the libraries of `runtime` while it waits to be told its
        model. `on_data` and `on_end` are those of its `Link`, and may be changed. A `gentle` one leaves the processors
        to others until then.
        """
        self.on_data, self.on_end = on_data, on_end
        module = "appliance.gently" if gentle else "appliance.worker"
        self._seats = seats or Seats()
        with contextlib.ExitStack() as undo:
            self.device, environment = self._seats.take()
            """CUDA_VISIBLE_DEVICES where it was chosen here."""
            undo.callback(self._seats.leave, self.device)
            self.requests = Arena.create(arena_bytes)
            undo.callback(self.requests.close)
            self.answers = Arena.create(arena_bytes)
            undo.callback(self.answers.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(ours)
            with theirs:
                self.process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                    # Isolated: neither the working directory nor PYTHONPATH decides which `models` it imports.
                    [sys.executable, "-I", "-c", f"from {module} import main; main()", runtime, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            assert self.process.stdout  # noqa: S101 - a pipe was asked for
            self.output = undo.enter_context(self.process.stdout)
            self.pidfd = os.pidfd_open(self.process.pid)
            undo.pop_all()
        self.link = Link(ours, on_data=lambda data: self.on_data(self, data), on_end=lambda: self.on_end(self))
        os.set_blocking(self.output.fileno(), False)
        self.fault = Fault.CRASH
        """What it will end of, where it has said so."""
        self.reason = ""
        """Why it will end, where that is known before."""
        self.silent = False
        """Whether the worker has closed its output for good."""
        self._printed = b""
        self._lent_bytes = 0
        self._loop = asyncio.get_running_loop()

    @property
    def ended(self) -> bool:
        """Whether the worker is gone or was given up: what is sent now would never be answered."""
        return not self.link.connected or self.process.returncode is not None

    def take(self, payloads: Sequence[Payload], slots: Sequence[Slot]) -> list[Payload]:
        """The payloads of one message, to be kept as long as need be, and their slots to be the worker's again.

        Small ones are copied. A large one stays where it lies until the last view of it has gone, whatever becomes of
        the worker meanwhile.
        """
        if not slots:
            return [bytes(payload) for payload in payloads]
        size_bytes = sum([slot.length for slot in slots])
        if size_bytes < _LENT_FROM_BYTES or self._lent_bytes + size_bytes > self.answers.capacity_bytes // _LENT_SHARE:
            taken: list[Payload] = [bytes(payload) for payload in payloads]
            self._free(slots)
            return taken
        places = iter(slots)
        return [bytes(one) if isinstance(memoryview(one).obj, bytes) else self._lend(next(places)) for one in payloads]

    def _lend(self, slot: Slot) -> memoryview:
        self._lent_bytes += slot.length

        def take_back() -> None:
            self._lent_bytes -= slot.length
            self._free([slot])

        def gone() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(take_back)

        return self.answers.lend(slot, gone)

    def _free(self, slots: Sequence[Slot]) -> None:
        if not self.ended:
            self.link.send(wire.encode(wire.Free(tuple((slot.offset, slot.length, slot.generation) for slot in slots))))

    def printed_lines(self) -> list[str]:
        """Some of what libraries in the worker have printed, as whole lines; none when there is no more for now."""
        try:
            data = os.read(self.output.fileno(), _OUTPUT_BYTES)
        except BlockingIOError:
            return []
        *lines, self._printed = (self._printed + data).split(b"\n")
        if not data or len(self._printed) > _OUTPUT_BYTES:
            lines.append(self._printed)
            self._printed = b""
        self.silent = not data
        told = [line.decode(errors="replace") for line in lines if line]
        return told if len(told) <= _OUTPUT_LINES else [*told[:_OUTPUT_LINES], f"and {len(told) - _OUTPUT_LINES} more"]

    def wait(self) -> str:
        """Take the exit status of a process that has ended; why it ended, for people."""
        status = self.process.wait()
        if status >= 0:
            return f"it exited with status {status}"
        try:
            return f"it was ended by {signal.Signals(-status).name}"
        except ValueError:  # one of the many without a name
            return f"it was ended by signal {-status}"

    def close(self) -> None:
        """Give everything back; only after the process was reaped."""
        self._seats.leave(self.device)
        os.close(self.pidfd)
        self.output.close()
        self.requests.close()
        self.answers.close()
