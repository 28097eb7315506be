"""A repository with its keys in a folder, and a web server of it that can be told to misbehave."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import Self

from models.folder import BundleFolder
from provisioning.keys import Keys
from provisioning.publish import Repository, Shape
from provisioning.serve import RangeHandler, server

ONE = Shape()
SMALL: Mapping[str, Shape] = {"root": ONE, "targets": ONE, "snapshot": ONE, "timestamp": ONE}


class Mirror:
    """What is published, and the server that devices ask; as a context it serves."""

    def __init__(self, folder: Path, shapes: Mapping[str, Shape] = SMALL) -> None:
        """Publish into `folder` with keys beside it."""
        self.folder, self.keys = folder / "repository", Keys([folder / "keys"], lambda: b"passphrase")
        self.at: datetime | None = None
        """When it is for the one who publishes; None for now."""
        self.repository = Repository(self.folder, self.keys, lambda: self.at or datetime.now(timezone.utc))
        self.root = self.repository.init(shapes)
        self.cuts: dict[str, int] = {}
        """Pattern of a path -> after so many bytes the connection is cut, each time."""
        self.bodies: dict[str, bytes] = {}
        """Pattern of a path -> what is sent in its place."""
        self.stalled: str = ""
        """Pattern of paths that are answered only when `mended` is set."""
        self.mended = threading.Event()
        self.asked: list[tuple[str, str]] = []
        """Path and range of every request."""
        self.sent_bytes = 0
        """Of blobs."""
        self._server = server(self.folder, "127.0.0.1", 0, _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, bundle: Path, channel: str = "stable") -> str:
        """Publish a bundle; its digest."""
        return self.repository.add(BundleFolder(bundle), channel).digest

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_fault: object) -> None:
        self.mended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(mirror: Mirror) -> type[RangeHandler]:
    class Handler(RangeHandler):
        """Serves as the mirror was told."""

        def do_GET(self) -> None:  # noqa: N802 - the name in the library
            mirror.asked.append((self.path, self.headers.get("range", "")))
            body = next((body for pattern, body in mirror.bodies.items() if re.search(pattern, self.path)), None)
            if body is not None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            if mirror.stalled and re.search(mirror.stalled, self.path):
                mirror.mended.wait(60)
            super().do_GET()

        def copyfile(self, source: Any, outputfile: BinaryIO) -> None:  # type: ignore[override] # noqa: ANN401 - typeshed's is wider
            limit = next((count for pattern, count in mirror.cuts.items() if re.search(pattern, self.path)), None)
            with closing(source):
                content = source.read(limit if limit is not None else -1)
            if "/blobs/" in self.path:
                mirror.sent_bytes += len(content)
            outputfile.write(content)
            if limit is not None:
                self.close_connection = True

    return Handler
