"""A bundle on disk: reads and writes the folder that `models.bundle` describes.

Blobs are checked against their sha256 each time they are read.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.bundle import Blob, Manifest
from models.errors import BundleError
from models.spec import Array

MANIFEST = "manifest.json"


class BundleFolder:
    """An existing bundle folder with a parsed manifest."""

    def __init__(self, path: Path) -> None:
        """Open `path`; raises BundleError when it holds no readable manifest."""
        self.path = path
        try:
            content = (path / MANIFEST).read_bytes()
        except OSError as error:
            msg = f"{path} is no bundle: {MANIFEST} cannot be read ({error.strerror}); build one with `provision build`"
            raise BundleError(msg) from error
        self.manifest = Manifest.from_bytes(content)

    def read(self, blob: Blob) -> bytes:
        """Content of `blob`; raises BundleError when it is missing or damaged."""
        try:
            content = blob_path(self.path, blob).read_bytes()
        except OSError as error:
            msg = f"blob {blob.sha256[:12]} of {self.path} cannot be read ({error.strerror}): fetch or build it again"
            raise BundleError(msg) from error
        blob.check(content)
        return content

    def read_arrays(self, blob: Blob) -> dict[str, Array]:
        """Arrays of an npz blob, keyed by tensor name; raises BundleError when it is none."""
        content = self.read(blob)
        try:
            return unpack_arrays(content)
        except Exception as error:  # numpy and zipfile raise half a dozen unrelated types
            msg = f"blob {blob.sha256[:12]} of {self.path} holds no arrays ({error}): build the bundle again"
            raise BundleError(msg) from error

    def read_labels(self) -> list[str]:
        """Labels of the task in class order; empty when it has none. Raises BundleError when they are no text."""
        labels = self.manifest.task.labels
        if labels is None:
            return []
        try:
            return self.read(labels).decode().split("\n")
        except UnicodeDecodeError as error:
            msg = f"the labels of {self.path} are not UTF-8 text: build the bundle again"
            raise BundleError(msg) from error

    def measurements(self, target: str) -> dict[str, Any]:
        """What was measured on one machine for `target`; empty when nothing usable was written."""
        try:
            data = json.loads((self.path / "measurements" / f"{target}.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}


def blob_path(folder: Path, blob: Blob) -> Path:
    """Where `blob` lies in a bundle folder."""
    return folder / "blobs" / "sha256" / blob.sha256


def pack_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Bytes of an npz file, the same for the same arrays (numpy stamps no time into its zip entries)."""
    buffer = io.BytesIO()
    np.savez(buffer, **dict(sorted(arrays.items())))  # type: ignore[arg-type] # numpy types keywords as bool
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> dict[str, Array]:
    """Arrays of an npz file, keyed by name; pickled objects are refused."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def write_bundle(
    path: Path, manifest: Manifest, blobs: Mapping[str, bytes], measurements: Mapping[str, object]
) -> None:
    """Write a bundle into `path` (made when missing); the manifest goes last, so a torn write is no bundle.

    `blobs` maps sha256 to content; `measurements` maps a target's name to plain data.
    Blobs of an earlier bundle in the same folder that are no longer named are removed, and so are
    its measurements: they say nothing about this one.
    """
    wanted = {blob.sha256: blob for blob in manifest.blobs()}
    (path / MANIFEST).unlink(missing_ok=True)
    folder = path / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.name not in wanted:
            old.unlink()
    for sha256, blob in wanted.items():
        blob.check(blobs[sha256])
        write_file(folder / sha256, blobs[sha256])
    (path / "measurements").mkdir(exist_ok=True)
    for old in (path / "measurements").iterdir():
        old.unlink()
    for target, data in measurements.items():
        write_file(path / "measurements" / f"{target}.json", json.dumps(data, indent=1, sort_keys=True).encode())
    write_file(path / MANIFEST, manifest.to_bytes())


def write_file(path: Path, content: bytes) -> None:
    """Replace `path` with `content` so that a power cut leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
