"""The daemon's end of the socket to a worker: never blocks, and keeps what the socket does not take yet."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

from appliance import wire


class Link:
    """Sends and receives whole messages on the event loop."""

    def __init__(self, sock: socket.socket, *, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Take over `sock`; `on_data` gets each message, `on_end` is called when the other end is closed.

        `on_end` is to call `close`, and `on_data` may.
        """
        sock.setblocking(False)
        self._sock, self._on_data, self._on_end = sock, on_data, on_end
        self._backlog: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read_one)

    @property
    def connected(self) -> bool:
        """Whether the worker can still be spoken to, as far as is known."""
        return self._sock.fileno() != -1

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, later if need be; descriptors only with the first one. A worker that is gone gets nothing."""
        if self._backlog:
            self._backlog.append(data)
            return
        try:
            wire.send_with_fds(self._sock, data, fds) if fds else self._sock.send(data)
        except BlockingIOError:
            self._backlog.append(data)
            self._loop.add_writer(self._sock, self._write)
        except OSError:
            pass  # the worker is gone; its end of the socket says so to `read`

    def read(self) -> None:
        """Hand on whatever has come."""
        while self.connected and self._read_one():
            pass

    def _read_one(self) -> bool:
        """Hand on one message; whether there was one. The loop calls again while there is more."""
        try:
            data = self._sock.recv(wire.MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if data:
            self._on_data(data)
        else:
            self._on_end()
        return bool(data)

    def close(self) -> None:
        """Hang up; once more does nothing."""
        if self.connected:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _write(self) -> None:
        while self._backlog:
            try:
                self._sock.send(self._backlog[0])
            except BlockingIOError:
                return
            except OSError:
                self._backlog.clear()
                break
            self._backlog.popleft()
        self._loop.remove_writer(self._sock)
