"""A static web server for trials of a repository: parts of files (ranges) too, so that downloads go on where they were.

For a workbench only: no TLS, no limits.
"""

from __future__ import annotations

import os
import re
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from models.errors import ConfigError

_RANGE = re.compile(r"bytes=(\d+)-")


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves files below a folder; a request for a range gets the rest of the file from there."""

    protocol_version = "HTTP/1.1"

    def send_head(self) -> BinaryIO | None:
        """Answer with the head, and return the file at the place from which it is to be sent."""
        wanted = _RANGE.fullmatch(self.headers.get("range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            return super().send_head()
        start, size_bytes = int(wanted[1]), path.stat().st_size
        if start >= size_bytes:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("content-range", f"bytes */{size_bytes}")
            self.send_header("content-length", "0")
            self.end_headers()
            return None
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("content-range", f"bytes {start}-{size_bytes - 1}/{size_bytes}")
        self.send_header("content-length", str(size_bytes - start))
        self.end_headers()
        file = path.open("rb")
        file.seek(start, os.SEEK_SET)
        return file

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the library
        """Requests are not news."""


class _Server(ThreadingHTTPServer):
    """One thread a connection."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left is no news, either."""


def server(folder: Path, host: str, port: int, handler: type[RangeHandler] = RangeHandler) -> ThreadingHTTPServer:
    """A server of `folder`, listening and not yet serving; port 0 takes a free one.

    Raises ConfigError where the address cannot be listened on.
    """
    try:
        return _Server((host, port), partial(handler, directory=str(folder)))
    except OSError as error:
        msg = f"cannot listen on {host}:{port} ({error.strerror}): stop its user, or choose another with --port"
        raise ConfigError(msg) from error
