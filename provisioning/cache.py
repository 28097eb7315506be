"""Results of earlier steps, kept by what went into them, so that building again only does what changed.

An entry is the sha256 of its content in hexadecimal, a line break, and the content.
Whatever is wrong with an entry or its folder, the step is simply done again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from models.folder import write_file


class Cache:
    """A folder of entries, or nothing at all when `folder` is None."""

    def __init__(self, folder: Path | None) -> None:
        """Use `folder`, which need not exist."""
        self.folder = folder

    @classmethod
    def of_user(cls) -> Cache:
        """$XDG_CACHE_HOME/edge-appliance, by default ~/.cache/edge-appliance."""
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(base) / "edge-appliance")

    def get(self, key: str) -> bytes | None:
        """The content kept under `key`, or None."""
        if self.folder is None:
            return None
        try:
            digest, _, content = (self.folder / key).read_bytes().partition(b"\n")
        except OSError:
            return None
        return content if digest.decode("ascii", "replace") == hashlib.sha256(content).hexdigest() else None

    def put(self, key: str, content: bytes) -> None:
        """Keep `content` under `key`, if it can be kept."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / key, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        except OSError:
            return
