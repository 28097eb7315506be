"""uvicorn's HTTP/1.1 protocol, with the limits that it lacks and with errors in our form."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from appliance.adapters.answers import JOINED_BYTES, Parts

if TYPE_CHECKING:
    from fastapi import Response

    from appliance.adapters.straight import Straight

HEAD_LIMIT_BYTES = 64 * 1024
FRAMING_LIMIT_BYTES = 1024 * 1024
"""Some 65,000 chunks of the usual form; Triton's bound is 65,536."""
UNREAD_LIMIT_BYTES = 64 * 1024 * 1024
"""A client that has sent a body of usual size before it looks for the answer still finds it."""
_ACKED_AT = slice(120, 128)
"""Of `tcpi_bytes_acked` in Linux's `struct tcp_info` (include/uapi/linux/tcp.h)."""


class Http1(HttpToolsProtocol):
    """One connection.

    A head (request line and headers) that does not end is given up, not kept in memory, and so is a
    client that owes a request, or the rest of one, and says nothing for `silence_s`, or that reads no
    answer for so long. A body is cut off when what frames it (sizes of chunks, their extensions, trailers) outgrows
    its limit, and so is the rest of one that was refused. Small requests may go `straight`, past the parser and ASGI.
    `scope["client_certificate"]` is the common name of a certificate that TLS has verified, and `scope["connection"]`
    is this object, for `when_gone`.
    """

    _in_head = False
    _head_bytes = 0
    _owes = True
    """Whether the client is expected to send something: a first request, or the rest of one."""
    _heard_at = 0.0
    _silence: asyncio.TimerHandle | None = None
    """Set while the client owes something; it looks at `_heard_at` when it goes off, and is not set for every byte."""
    _unread: asyncio.TimerHandle | None = None
    """Set while an answer waits for its client to read."""
    _framing_bytes = 0
    """Of the present request: its head, and all around its body."""
    _unread_bytes = 0
    """Of a body that nobody reads, because it was answered already."""
    _certificate: str | None = None
    in_hand = False
    """Whether a request went the straight way, and is not answered yet."""
    _between = True
    """Whether the parser has read no part of a request that is to come."""
    _early = b""
    """What has come of a request for the straight way, or behind one that is in hand; the parser has not seen it."""
    _leaves = False
    """Whether the server stops: the request in hand is the last."""
    _answered_at = 0.0
    _idle: asyncio.TimerHandle | None = None
    """Set after the straight way; it looks at `_answered_at` when it goes off, and is not set for every request."""
    _gone = False
    _when_gone: Callable[[], None] | None = None

    def __init__(
        self,
        *uvicorns: Any,  # noqa: ANN401 - handed on
        silence_s: float,
        straight: Straight | None = None,
        **uvicorns_too: Any,  # noqa: ANN401 - handed on
    ) -> None:
        """Made by uvicorn, which is given this class with `silence_s` and `straight` filled in."""
        super().__init__(*uvicorns, **uvicorns_too)
        self._silence_s, self._straight = silence_s, straight

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn narrows it too
        """Called when a client has connected."""
        super().connection_made(transport)
        self._joining = _Joining(transport, self.loop)
        self.transport = self._joining  # type: ignore[assignment] # all of a transport that uvicorn uses
        self._socket = transport.get_extra_info("socket")
        transport.set_write_buffer_limits(high=1)  # so that `pause_writing` tells of each answer that is not read
        self._certificate = _common_name(transport)
        if self._certificate is not None:
            self._straight = None
        self.address = self.client[0] if self.client else "local"
        """Of the client, as its rates are counted."""
        self._listen()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is no more."""
        for timer in (self._silence, self._idle, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)
        self._gone, self.in_hand = True, False
        if self._when_gone:
            self._when_gone()

    def pause_writing(self) -> None:
        """Called when the client does not read as fast as it is answered: what waits for it holds memory."""
        super().pause_writing()
        self._look_if_read(-1)

    def resume_writing(self) -> None:
        """Called when all is sent."""
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def _look_if_read(self, before_bytes: int) -> None:
        """Cut off a client that has taken nothing for so long: the kernel knows, and under TLS nobody else does."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT.stop)
        acked_bytes = int.from_bytes(info[_ACKED_AT], sys.byteorder)
        if acked_bytes != before_bytes:
            self._unread = self.loop.call_later(self._silence_s, self._look_if_read, acked_bytes)
        else:
            self._joining.abort()

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Have `call` called when the client has gone, at once if it has; None for nothing.

        It costs next to nothing, where waiting for the message of ASGI takes two tasks a request.
        """
        self._when_gone = call
        if call and self._gone:
            call()

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._owes, self._between = True, 0, True, False
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key] # of our own
        if self._certificate is not None:
            self.scope["client_certificate"] = self._certificate  # type: ignore[typeddict-unknown-key] # of our own

    def on_message_complete(self) -> None:
        """Called by the parser at the last byte of a request. Idle connections after it are uvicorn's to close."""
        super().on_message_complete()
        self._owes, self._framing_bytes, self._unread_bytes, self._between = False, 0, 0, True

    def on_response_complete(self) -> None:
        """Called when the last piece of an answer was written."""
        self._joining.flush()
        super().on_response_complete()

    def on_headers_complete(self) -> None:
        """Called by the parser after the empty line that ends a head."""
        self._in_head = False
        super().on_headers_complete()
        self.headers = []  # for trailers behind a body, which say nothing to us

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a piece of a body."""
        self._framing_bytes -= len(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        early, self._early = self._early, b""
        if self.in_hand:
            self._early = early + data
            self.flow.pause_reading()
        elif not self._went_straight(early + data, rest=bool(early and data)):
            self._feed(early + data)

    @property
    def _rests(self) -> bool:
        """Whether the parser is between two requests, and every one that it has read is answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return self._between and not self.pipeline and (cycle is None or cycle.response_complete)

    def _went_straight(self, data: bytes, *, rest: bool) -> bool:
        """Whether `data` is a request that was taken in hand, or the beginning of one that may be.

        Clients send a body by itself. More pieces, of which `rest` is the second, are the parser's to wait for.
        """
        if self._straight is None or not self._rests or self.flow.write_paused:
            return False
        head = self._straight.head(data)
        if head is None or len(data) > head.size_bytes:
            return False
        if len(data) < head.size_bytes and rest:
            return False
        self._unset_keepalive_if_required()
        if len(data) < head.size_bytes:
            self._early, self._owes = data, True
            self._listen()
            return True
        self.in_hand = True
        if self._straight.take(self, head, data[head.body_at :]):
            self._owes = False
            return True
        self.in_hand = False
        return False

    def answer(self, response: Response, fault: BaseException | None = None) -> None:
        """Answer the request in hand, if its client is still there.

        `fault` is one of ours: it goes to the server's log, and the connection with it, as uvicorn does.
        """
        if fault:
            self.logger.error("Exception in ASGI application\n", exc_info=fault)
        if not self.in_hand:
            return
        self.in_hand, self._when_gone = False, None
        head = _head_of(response.status_code, tuple(response.raw_headers), self._leaves)
        parts = response.parts if isinstance(response, Parts) else [response.body]
        if len(parts) == 1:
            self._joining.write_now(b"".join((head, parts[0])))
        else:
            for part in (head, *parts):
                self._joining.write_now(part)
        self.server_state.total_requests += 1
        if self._leaves or fault:
            self.transport.close()
            return
        self._answered_at = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_if_idle)
        if self._early:
            self.flow.resume_reading()
            self.loop.call_soon(self._go_on)

    def fail(self, fault: BaseException) -> None:
        """Close the connection whose request in hand cannot be answered, by a fault of ours, which goes to the log."""
        self.logger.error("Exception in ASGI application\n", exc_info=fault)
        self.transport.close()

    def _go_on(self) -> None:
        if self._early and not self._gone:
            self.data_received(b"")

    def _look_if_idle(self) -> None:
        """Close a connection that was idle for so long; one that took the ordinary way since is uvicorn's to close."""
        self._idle = None
        idle = self._rests and not self._owes and not self.in_hand and self.timeout_keep_alive_task is None
        if not idle or self.transport.is_closing():
            return
        left_s = self.timeout_keep_alive - (self.loop.time() - self._answered_at)
        if left_s > 0:
            self._idle = self.loop.call_later(left_s, self._look_if_idle)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Called by the server when it stops: no connection is closed before its request is answered."""
        if self.in_hand:
            self._leaves = True
            return
        if self._early:  # the parser hears of a request that has begun, so that its rest is waited for
            early, self._early = self._early, b""
            self._feed(early)
        super().shutdown()

    def _feed(self, data: bytes) -> None:
        headers = self.headers  # each head has a list of its own
        self._framing_bytes += len(data)
        super().data_received(data)
        self._listen()
        if self.transport.is_closing():
            return
        if self._unread_bytes > UNREAD_LIMIT_BYTES:
            self.transport.close()
        elif self._framing_bytes > FRAMING_LIMIT_BYTES:
            self._refuse(413, f"over {FRAMING_LIMIT_BYTES} bytes frame the body: send it in fewer chunks")
        if self._in_head and self.headers is headers:  # all of `data` belongs to a head that has not ended yet
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
                self._refuse(431, f"path and headers are over the limit of {HEAD_LIMIT_BYTES} bytes: send fewer")

    def _listen(self) -> None:
        """Wait for the next bytes, but not for ever."""
        self._heard_at = self.loop.time()
        if self._owes and self._silence is None:
            self._silence = self.loop.call_later(self._silence_s, self._give_up)

    def _give_up(self) -> None:
        self._silence = None
        # While the application does not read, the transport is paused: the silence is ours then, not the client's.
        if not self._owes or self.transport.is_closing():
            return
        silent_s = 0.0 if self.flow.read_paused else self.loop.time() - self._heard_at
        if silent_s < self._silence_s:
            self._silence = self.loop.call_later(self._silence_s - silent_s, self._give_up)
        else:
            self._refuse(408, f"nothing came for {self._silence_s:g} s: send the request without such pauses")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base class's signature
        """Called for bytes that the parser cannot read."""
        self._refuse(400, "this is not HTTP/1.1 as it should be: check what the client sends")

    def _refuse(self, status: int, sentence: str) -> None:
        content = orjson.dumps({"error": sentence})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[status] + head + content)
        self.transport.close()


class _Joining:
    """A transport that sends small pieces which are written in one go, as a head and its body, at one call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []
        self.is_closing, self.get_extra_info = transport.is_closing, transport.get_extra_info
        self.abort = transport.abort

    def write(self, data: bytes) -> None:
        if len(data) > JOINED_BYTES:
            self.flush()
            self.write_now(data)
            return
        if not self._pieces:
            self._loop.call_soon(self.flush)
        self._pieces.append(data)

    def write_now(self, data: bytes | bytearray | memoryview) -> None:
        """Write what is all of an answer, or too much to join."""
        self._transport.write(data)

    def flush(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._transport.write(b"".join(pieces))

    def close(self) -> None:
        self.flush()
        self._transport.close()


@lru_cache(maxsize=256)
def _head_of(status: int, headers: tuple[tuple[bytes, bytes], ...], last: bool) -> bytes:
    """An answer up to its body, as uvicorn writes it; `last` says that none follows on that connection."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b%b%b\r\n" % (STATUS_LINE[status], lines, b"connection: close\r\n" if last else b"")


def _common_name(transport: asyncio.BaseTransport) -> str | None:
    tls = transport.get_extra_info("ssl_object")
    certificate = tls.getpeercert() if tls else None
    for part in (certificate or {}).get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return None
