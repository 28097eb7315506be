"""The double of upstream behind real HTTP on loopback."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import zstandard
from doubles.upstream import MemoryUpstream
from typing_extensions import Self

from models import schema, sync


class ServedUpstream:
    """As a context it serves at `url` whoever shows `token`."""

    def __init__(self, memory: MemoryUpstream, token: str = "") -> None:
        """Serve `memory`."""
        self.memory, self.token = memory, token
        self.packs, self.retry_after = True, ""
        self.headers: list[dict[str, str]] = []
        """Of each request."""
        self.connections = 0
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                upstream.connections += 1
                super().setup()

            def do_POST(self) -> None:
                upstream.answer(self)

            def log_message(self, *_said: Any) -> None:  # noqa: ANN401 - its base decides
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        """Serve."""
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One request."""
        packed = request.rfile.read(int(request.headers["content-length"]))
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        status, body = 404, sync.Refusal("there is nothing at this path")
        if request.path == sync.PATH:
            status, body = self._answer(request, packed)  # type: ignore[assignment] # either
        content = orjson.dumps(schema.dump(body))
        if self.packs:
            content = zstandard.ZstdCompressor().compress(content)
        request.send_response(status)
        request.send_header("content-length", str(len(content)))
        if self.packs:
            request.send_header("content-encoding", "zstd")
        if self.retry_after:
            request.send_header("retry-after", self.retry_after)
        request.end_headers()
        request.wfile.write(content)

    def _answer(self, request: BaseHTTPRequestHandler, packed: bytes) -> tuple[int, sync.Answer | sync.Refusal]:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return 401, sync.Refusal("no token of ours")
        if request.headers.get("content-encoding") != "zstd":
            return 415, sync.Refusal("compress with zstd")
        content = zstandard.ZstdDecompressor().decompress(packed, max_output_size=64 * 2**20)
        return self.memory.sync(orjson.loads(content), len(content))
