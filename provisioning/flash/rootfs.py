"""What an overlay has laid over the root file system of the BSP folder stays there until the next run takes it back."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from models.errors import ConfigError
from models.folder import write_file

_STATE = "var/lib/appliance"
_LAID = ".appliance-flash-overlay.json"
"""In the BSP folder: paths below rootfs."""


def make_way(bsp: Path, archive: Path, sha256: str) -> None:
    """Take back the overlay before, and note what `archive` brings; ConfigError where it is not the planned one."""
    if not archive.is_file() or hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        msg = f"{archive} is not the overlay that was planned: plan again, or bring back the one of SHA-256 {sha256}"
        raise ConfigError(msg)
    take_back(bsp)
    root = (bsp / "rootfs").resolve()
    try:
        with tarfile.open(archive) as overlay:
            paths = [one.name for one in overlay if not one.isdir()]
    except (tarfile.TarError, EOFError) as error:
        msg = f"{archive} is no whole archive ({error}): make it again with `provision image`"
        raise ConfigError(msg) from error
    own = next((path for path in paths if (root / path).is_relative_to(root / _STATE)), None)
    if own:
        msg = f"{archive} brings {own}, the state of one device, to every board: make it with `provision image`"
        raise ConfigError(msg)
    # A link of the root file system may lead out of it, to where this host has its own.
    astray = next((path for path in paths if not (root / path).parent.resolve().is_relative_to(root)), None)
    if astray:
        msg = f"{archive} brings {astray}, which a link of the root file system leads to this host: leave it out"
        raise ConfigError(msg)
    write_file(bsp / _LAID, json.dumps(paths).encode())  # before they are there: a run may be cut meanwhile


def take_back(bsp: Path) -> None:
    """Delete what an earlier overlay has brought, as keys that log in; folders stay."""
    root, note = (bsp / "rootfs").resolve(), bsp / _LAID
    try:
        paths = [str(path) for path in json.loads(note.read_bytes())]
    except FileNotFoundError:
        return
    except (ValueError, TypeError) as error:
        msg = f"{note} cannot be read, so what an earlier overlay has brought is not known: unpack a new BSP folder"
        raise ConfigError(msg) from error
    for path in paths:
        file = root / path
        # A link of the root file system may lead out of it, to where this host has its own.
        if file.parent.resolve().is_relative_to(root):
            file.unlink(missing_ok=True)
    note.unlink(missing_ok=True)
