"""What runtimes make of graphs for this machine, kept in files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from appliance.runtime.machine import machine

_KEPT = 32
"""Prepared graphs; those that were not opened for longest go."""


class Prepared:
    """Graphs as a runtime has optimised them for this machine, kept because that is half the work of opening one.

    A file is named `<digest of what it was made of and for>.<digest of its content>`: a damaged or half written one is
    found out, and one of another graph, machine or runtime is not found at all. Graphs go by their sha256.
    """

    def __init__(self, folder: Path, runtime: str) -> None:
        """Keep what `runtime` makes in `folder`, which is made when it is missing."""
        self._folder, self._runtime = folder, runtime

    def find(self, graph: str) -> Path | None:
        """What `graph` was made into; None where that is not known, or damaged."""
        for path in self._folder.glob(f"{self._key(graph)}.*"):
            with contextlib.suppress(OSError):
                if path.suffix == f".{_digest_of(path)}":
                    os.utime(path)
                    return path
        return None

    @contextlib.contextmanager
    def making(self, graph: str) -> Iterator[Path]:
        """A path to write to what `graph` is made into; kept when the context ends well. Raises OSError."""
        key = self._key(graph)
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._folder / f".{uuid.uuid4().hex}"
        try:
            yield fresh
            for old in self._folder.glob(f"{key}.*"):
                old.unlink(missing_ok=True)
            fresh.replace(self._folder / f"{key}.{_digest_of(fresh)}")
        finally:
            fresh.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another worker tidies, too: the next one does what is left
            known = sorted(self._folder.glob("*.*"), key=lambda path: path.stat().st_mtime)
            for old in known[:-_KEPT]:
                old.unlink(missing_ok=True)

    def _key(self, graph: str) -> str:
        return digest(_here(self._runtime) + graph.encode())


@lru_cache
def _here(runtime: str) -> bytes:
    """What a prepared graph is good for."""
    return json.dumps(machine(runtime=runtime)).encode()


def digest(content: bytes | mmap.mmap) -> str:
    """The sha256 by which a graph goes."""
    return hashlib.sha256(content).hexdigest()


def _digest_of(path: Path) -> str:
    """The digest of a file that is not copied into memory for it; of an empty one that of nothing."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return digest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return digest(content)
