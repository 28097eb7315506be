"""A load client whose arrival times are drawn in advance: nothing it waits for makes it send later.

It runs as a process of its own: `python -m appliance.bench.openloop PLAN ANSWERS`, both files in the form of
`numpy.savez`. Latency counts from the moment at which a request was due, so a server that stalls is charged for all
who came meanwhile.
One thread, raw sockets and `select`, whose timeouts are finer than the millisecond of an event loop.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.errors import ApplianceError

Floats = npt.NDArray[np.float64]

_LEAD_S = 0.2
_LONGEST_S = 30.0
"""After the last arrival, for the last answers."""
_CHUNK_BYTES = 1 << 18
MOST_CONNECTIONS = 800
"""`select` takes no descriptor above 1023."""


@dataclass(frozen=True)
class Answers:
    """What became of each request, in the order in which they were due."""

    latency_s: Floats
    """From the moment it was due to the last byte of its answer; NaN for none."""
    status: npt.NDArray[np.int64]
    """0 for no answer."""
    hinted: npt.NDArray[np.bool_]
    """Whether the answer had a Retry-After."""
    late_s: Floats
    """How much later than due it was sent: the client's own fault."""


def run(
    address: tuple[str, int],
    request: bytes,
    due_s: Floats,
    *,
    at_once: int = MOST_CONNECTIONS,
    start_at: float = 0.0,
) -> Answers:
    """Send `request` at each moment of `due_s`, seconds from `start_at` in `time.perf_counter`; in a new process.

    It starts as soon as it can where `start_at` is past. With few connections `at_once` and all moments 0 it is a
    closed loop instead, for measuring capacity.
    `request` is all that is sent, headers too. Raises ApplianceError when the daemon is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, answers = Path(folder) / "plan.npz", Path(folder) / "answers.npz"
        body = np.frombuffer(request, np.uint8)
        np.savez(plan, host=address[0], port=address[1], due_s=due_s, request=body, at_once=at_once, start_at=start_at)
        ended = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-m", __name__, str(plan), str(answers)], stderr=subprocess.PIPE, text=True, check=False
        )
        if ended.returncode:
            why = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
            msg = f"the load client failed ({why}): see that the daemon is there"
            raise ApplianceError(msg)
        with np.load(answers) as found:
            return Answers(**{name: found[name] for name in found.files})


class _Connection:
    """One keep-alive connection, and the request that it carries."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.number = -1
        self.to_send = memoryview(b"")
        self.received = bytearray()
        self.expected_bytes = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    def start(self, number: int, request: bytes) -> None:
        self.number, self.to_send = number, memoryview(request)
        self.received.clear()
        self.expected_bytes = 0
        self.send()

    def send(self) -> None:
        try:
            while self.to_send:
                self.to_send = self.to_send[self.sock.send(self.to_send[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.to_send = memoryview(b"")  # `receive` will see it too

    def receive(self) -> bool:
        """Whether the answer is complete; raises ConnectionError when it never will be."""
        data = self.sock.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionResetError
        self.received += data
        if not self.expected_bytes:
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(self.received[:end]).lower()
            # With its line's start: the protocol has a header of its own that ends in these words.
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self.expected_bytes = end + 4 + int(length)
        return len(self.received) >= self.expected_bytes


class _Load:
    def __init__(self, address: tuple[str, int], request: bytes, due_s: Floats, at_once: int) -> None:
        self._address, self._request, self._due_s, self._at_once = address, request, due_s, at_once
        count = len(due_s)
        self.answers = Answers(
            np.full(count, np.nan), np.zeros(count, np.int64), np.zeros(count, np.bool_), np.zeros(count)
        )
        self._idle = deque(_Connection(address) for _ in range(min(at_once, 8)))
        self._busy: set[_Connection] = set()

    def go(self, start_at: float) -> None:
        start_at = max(start_at, time.perf_counter() + _LEAD_S)
        due_at = (self._due_s + start_at).tolist()
        give_up_at = due_at[-1] + _LONGEST_S
        following = 0
        while following < len(due_at) or self._busy:
            now = time.perf_counter()
            while following < len(due_at) and due_at[following] <= now and len(self._busy) < self._at_once:
                self._send(following)
                self.answers.late_s[following] = now - due_at[following]
                following += 1
                now = time.perf_counter()
            if now > give_up_at:
                return
            until = give_up_at
            if following < len(due_at) and len(self._busy) < self._at_once:
                until = due_at[following]
            writing = [one for one in self._busy if one.to_send]
            readable, writable, _ = select.select(self._busy, writing, (), max(until - now, 0.0))
            for connection in writable:
                connection.send()
            for connection in readable:
                self._receive(connection, due_at)

    def _send(self, number: int) -> None:
        connection = self._connection()
        self._busy.add(connection)
        connection.start(number, self._request)

    def _connection(self) -> _Connection:
        """An idle one that the server has not closed for being idle, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not select.select([connection], (), (), 0)[0]:
                return connection
            connection.sock.close()
        return _Connection(self._address)

    def _receive(self, connection: _Connection, due_at: Sequence[float]) -> None:
        try:
            if not connection.receive():
                return
        except ConnectionError:
            self._busy.discard(connection)
            return
        number = connection.number
        self.answers.latency_s[number] = time.perf_counter() - due_at[number]
        self.answers.status[number] = int(connection.received[9:12])
        self.answers.hinted[number] = b"\nretry-after:" in bytes(connection.received[:2000]).lower()
        self._busy.discard(connection)
        self._idle.append(connection)


def main(plan: str, answers: str) -> None:
    """Follow a plan."""
    with np.load(plan) as found:
        address = str(found["host"]), int(found["port"])
        load = _Load(address, found["request"].tobytes(), found["due_s"], int(found["at_once"]))
        start_at = float(found["start_at"])
    load.go(start_at)
    np.savez(answers, **vars(load.answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
