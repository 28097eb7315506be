"""uvicorn's HTTP/1.1 protocol, with the limit that it lacks and with errors in our form."""

from __future__ import annotations

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_LIMIT_BYTES = 64 * 1024


class Http1(HttpToolsProtocol):
    """One connection. A head (request line and headers) that does not end is given up, not kept in memory."""

    _in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Called by the parser after the empty line that ends a head."""
        self._in_head = False
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for a header, and for trailers behind a body, which say nothing to us."""
        if self._in_head:
            super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        headers = self.headers  # each request has a list of its own
        super().data_received(data)
        if self._in_head and self.headers is headers:  # all of `data` belongs to a head that has not ended yet
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
                self._refuse(431, f"path and headers are over the limit of {HEAD_LIMIT_BYTES} bytes: send fewer")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base class's signature
        """Called for bytes that the parser cannot read."""
        self._refuse(400, "this is not HTTP/1.1 as it should be: check what the client sends")

    def _refuse(self, status: int, sentence: str) -> None:
        content = orjson.dumps({"error": sentence})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[status] + head + content)
        self.transport.close()
