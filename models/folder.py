"""A bundle on disk: reads and writes the folder that `models.bundle` describes.

Blobs are checked against their sha256 each time they are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from models import schema
from models.bundle import Blob, Manifest
from models.errors import BundleError
from models.measurements import Measurements, Parity
from models.spec import Array

MANIFEST = "manifest.json"
REPORTS = ("report.html", "report.json")
"""What the gate measured, for people and for programs: advisory, outside the digest."""
_PARITY = "parity"
"""Among the measurements, and no target's name."""
_OURS = re.compile(
    r"blobs|blobs/sha256|measurements"
    r"|(blobs/sha256/\.?[0-9a-f]{64}|measurements/\.?[a-z0-9-]+\.json|\.?(manifest|report)\.json|\.?report\.html)(\.new)?"
)
"""What `write_bundle` writes, under its name or the one it has while it is written."""


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

    def check_content(self) -> None:
        """Read every blob; raises BundleError naming the first that is missing or damaged."""
        for blob in self.manifest.blobs():
            self.read(blob)

    def measurements(self, target: str) -> Measurements | None:
        """What was measured on one machine for `target`, if anything usable was written."""
        return read_measurements(_measurements_path(self.path, target))

    def parity(self) -> Parity | None:
        """What `keep_parity` wrote for this content; None when there is nothing usable, or it was for another."""
        try:
            found = schema.load(Parity, json.loads(_measurements_path(self.path, _PARITY).read_bytes()))
        except (OSError, ValueError, RecursionError):
            return None
        return found if found.device.digest == self.manifest.digest else None

    def keep_parity(self, parity: Parity) -> Path:
        """Write it beside the bundle; where. It goes when another bundle is built into this folder. Raises OSError."""
        path = _measurements_path(self.path, _PARITY)
        path.parent.mkdir(exist_ok=True)
        write_file(path, json.dumps(schema.dump(parity), indent=1, sort_keys=True).encode())
        return path


def blob_path(folder: Path, blob: Blob) -> Path:
    """Where `blob` lies in a bundle folder."""
    return folder / "blobs" / "sha256" / blob.sha256


def _measurements_path(folder: Path, target: str) -> Path:
    return folder / "measurements" / f"{target}.json"


def pack_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Bytes of an npz file, the same for the same arrays: zip entries that are opened by name carry no time.

    `numpy.savez` writes the same, but takes names as keywords, which "file" already is.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in sorted(arrays.items()):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> dict[str, Array]:
    """Arrays of an npz file, keyed by name; pickled objects are refused."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def read_measurements(path: Path) -> Measurements | None:
    """Measurements kept in a file; None when it is missing or broken: that may cost time, but no model."""
    try:
        return schema.load(Measurements, json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def measurements_bytes(measurements: Measurements) -> bytes:
    """What `read_measurements` reads."""
    return json.dumps(schema.dump(measurements), indent=1, sort_keys=True).encode()


def write_measurements(path: Path, measurements: Measurements) -> None:
    """Write what `read_measurements` reads."""
    write_file(path, measurements_bytes(measurements))


def write_bundle(
    path: Path,
    manifest: Manifest,
    blobs: Mapping[str, bytes],
    measurements: Mapping[str, Measurements],
    reports: Mapping[str, bytes] | None = None,
) -> None:
    """Write a bundle into `path` (made when missing), from which it replaces an earlier one.

    `blobs` maps sha256 to content, `measurements` a target's name to what was measured there, `reports` a name of
    `REPORTS` to its content. Until the new manifest stands everything that the earlier one names is there, so a full
    disk or a power cut leaves the old bundle or the new one. What only the earlier one had goes last. When writing
    fails or is interrupted before the new manifest stands, what was not there before is taken away again.
    Raises OSError, also while another process writes into `path`.
    """
    wanted = {blob.sha256: blob for blob in manifest.blobs()}
    for sha256, blob in wanted.items():
        blob.check(blobs[sha256])
    files = {blob_path(path, blob): blobs[sha256] for sha256, blob in wanted.items()}
    beside = {_measurements_path(path, target): measurements_bytes(one) for target, one in measurements.items()}
    beside |= {path / name: content for name, content in (reports or {}).items()}
    folders = [path / "blobs" / "sha256", path / "measurements"]
    missing = [folder for each in folders for folder in (each, *each.parents) if not folder.exists()]
    new = [file for file in (*files, *beside, path / MANIFEST) if not file.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for file, content in files.items():
                if not _holds(file, content):  # a damaged one is written again
                    write_file(file, content)
            for file, content in beside.items():
                write_file(file, content)
            write_file(path / MANIFEST, manifest.to_bytes())
        except BaseException:
            if not _holds(path / MANIFEST, manifest.to_bytes()):
                _take_away(new, missing)
            raise
        kept = {*files, *beside, path / MANIFEST}
        for file in path.rglob("*"):
            if file not in kept and file.is_file() and _OURS.fullmatch(file.relative_to(path).as_posix()):
                file.unlink(missing_ok=True)


def is_torn(path: Path) -> bool:
    """Whether a folder holds only what `write_bundle` leaves behind when it is cut short."""
    return all(_OURS.fullmatch(entry.relative_to(path).as_posix()) for entry in path.rglob("*"))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(errno.EBUSY, "another build is writing into it") from error
        yield
    finally:
        os.close(held)


def _take_away(files: Iterable[Path], folders: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def write_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace `path` with `content` so that a power cut leaves the old file or the new one, and a fault no third.

    `mode` is that of the file, less what the process's umask takes away.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make `path` and what is missing above it, so that a power cut does not take it away again."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder safe from a power cut; of what the files hold only their own sync does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
