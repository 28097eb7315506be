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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.arena import Arena
from appliance.core.schedule import Ticket
from models.spec import Tensor

_OUTPUT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """Tensors whose payloads belong to the receiver, and where the time went."""

    tensors: list[Tensor]
    timing_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What a ticket carries."""

    graph: str
    tensors: Sequence[Tensor]
    outputs: tuple[str, ...] | None
    answer: asyncio.Future[Answer]


@dataclass(slots=True)
class Held:
    """A request that the worker holds; it begins them in the order sent, a few at a time."""

    ticket: Ticket[Work]
    began_at: float = float("inf")
    alive_at: float = 0.0
    """When the worker last said that it goes on."""

    @property
    def silent_since(self) -> float:
        """Since when nothing was heard of it; infinite before it began."""
        return max(self.began_at, self.alive_at)


class Life:
    """One worker process, its memory, its socket, and the requests it holds."""

    def __init__(self, arena_bytes: int) -> None:
        """Start the process with two arenas of that size; raises OSError, leaving nothing, when that cannot be done."""
        with contextlib.ExitStack() as undo:
            self.requests = Arena.create(arena_bytes)
            undo.callback(self.requests.close)
            self.answers = Arena.create(arena_bytes)
            undo.callback(self.answers.close)
            self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(self.sock)
            with theirs:
                self.process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                    # Isolated: neither the working directory nor PYTHONPATH decides which `models` it imports.
                    [sys.executable, "-I", "-m", "appliance.worker", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
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
        self.sock.setblocking(False)
        os.set_blocking(self.output.fileno(), False)
        self.backlog: deque[bytes] = deque()
        """Messages that the socket has not taken yet."""
        self.held: dict[int, Held] = {}
        self.reason = ""
        """Why it will end, where that is known before."""
        self.silent = False
        """Whether the worker has closed its output for good."""
        self._printed = b""

    @property
    def connected(self) -> bool:
        """Whether the worker can still be spoken to."""
        return self.sock.fileno() != -1

    @property
    def ended(self) -> bool:
        """Whether the worker was seen to be gone: what is sent now would never be answered."""
        return not self.connected or self.process.returncode is not None

    def printed_lines(self) -> list[str]:
        """What libraries in the worker have printed since the last call, as whole lines."""
        lines: list[bytes] = []
        while True:
            try:
                data = os.read(self.output.fileno(), _OUTPUT_BYTES)
            except BlockingIOError:
                break
            *whole, self._printed = (self._printed + data).split(b"\n")
            lines += whole
            if not data or len(self._printed) > _OUTPUT_BYTES:
                lines.append(self._printed)
                self._printed = b""
            if not data:
                self.silent = True
                break
        return [line.decode(errors="replace") for line in lines if line]

    def wait(self) -> str:
        """Take the exit status of a process that has ended; why it ended, for people."""
        status = self.process.wait()
        if self.reason:
            return self.reason
        return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it exited with status {status}"

    def close(self) -> None:
        """Give everything back; only after the process was reaped."""
        os.close(self.pidfd)
        self.output.close()
        self.requests.close()
        self.answers.close()
