"""What the daemon keeps between runs: one folder, used by one daemon at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.engine import ENGINES
from models.errors import ConfigError
from models.folder import make_folder, read_measurements, write_file, write_measurements
from models.measurements import Measurements

_OVERHEAD, _CONFIGURED = "process_overhead.json", "configured.json"
JOURNAL, SLOTS, METADATA = "journal.db", "slots", "repository"
"""In the state folder: deployments and slots, bundles by digest, and signed metadata that was accepted."""
DEVICE_ID = r"[A-Za-z0-9._-]{1,64}"
"""It stands in MQTT topics."""


class Store:
    """The state folder, locked for as long as this object lives."""

    def __init__(self, path: Path) -> None:
        """Make and lock `path`; raises ConfigError when it cannot be used or another daemon has it."""
        self.path, self._pretends_full = path, False
        try:
            make_folder(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            msg = f"the state folder {path} cannot be used ({error.strerror}): give another with --state-dir"
            raise ConfigError(msg) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            msg = f"another daemon uses the state folder {path}: stop it, or give another with --state-dir"
            raise ConfigError(msg) from error

    def device_id(self) -> str:
        """This device's name in the fleet, made once; raises ConfigError when it cannot be kept or is none."""
        path = self.path / "device_id"
        try:
            if not path.exists():
                write_file(path, f"device-{uuid.uuid4().hex[:12]}".encode())
            name = path.read_text(errors="replace").strip()
        except OSError as error:
            msg = f"the name of this device cannot be kept in {path} ({error.strerror}): set device_id, or make room"
            raise ConfigError(msg) from error
        if not re.fullmatch(DEVICE_ID, name):
            msg = f"{path} holds no name that a device may have: use up to 64 of A-Z a-z 0-9 . _ -, or delete the file"
            raise ConfigError(msg)
        return name

    def measurements(self, digest: str) -> Measurements | None:
        """What was measured here for a bundle, if that was kept and can be read."""
        return read_measurements(self._measurements(digest))

    def keep_measurements(self, digest: str, measurements: Measurements) -> None:
        """Remember what `measurements` returns."""
        if self._pretends_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = self._measurements(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_measurements(path, measurements)

    def configured(self) -> dict[str, Any]:
        """Settings that were changed by order, by their full names."""
        try:
            found = json.loads((self.path / _CONFIGURED).read_bytes())
        except (OSError, ValueError):  # none, or none that can be read: what files say holds
            return {}
        return found if isinstance(found, dict) else {}

    def keep_configured(self, changes: Mapping[str, Any]) -> None:
        """Remember what `configured` returns; raises OSError."""
        if self._pretends_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(self.path / _CONFIGURED, json.dumps(dict(changes)).encode())

    def pretend_full(self, on: bool, _amount: float) -> None:
        """Fault injection: fail to keep anything, as on a full disk."""
        self._pretends_full = on

    def overhead_bytes(self, runtime: str) -> int | None:
        """What a worker of `runtime` was measured to take here before it holds a model."""
        try:
            known = json.loads((self.path / _OVERHEAD).read_bytes())[runtime]
        except (OSError, ValueError, KeyError, TypeError):  # it is measured again
            return None
        return known if isinstance(known, int) and known > 0 else None

    def keep_overhead_bytes(self, runtime: str, overhead_bytes: int) -> None:
        """Remember what `overhead_bytes` returns."""
        write_file(self.path / _OVERHEAD, json.dumps({runtime: overhead_bytes}).encode())

    def close(self) -> None:
        """Let another daemon use the folder."""
        os.close(self._lock)

    def _measurements(self, digest: str) -> Path:
        return self.path / ENGINES / digest / "cpu" / "measurements.json"
