"""What the daemon keeps between runs: one folder, used by one daemon at a time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from models import schema
from models.errors import ConfigError
from models.folder import write_file

DEVICE_ID = r"[A-Za-z0-9._-]{1,64}"
"""It stands in MQTT topics."""


class Store:
    """The state folder, locked for as long as this object lives."""

    def __init__(self, path: Path) -> None:
        """Make and lock `path`; raises ConfigError when it cannot be used or another daemon has it."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
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

    def latency_ms(self, digest: str, machine: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Latencies measured on this machine for a bundle: graph -> precision -> milliseconds; {} when none are."""
        try:
            data = json.loads(self._measurements(digest).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return latencies(data, machine)

    def keep_latency_ms(
        self, digest: str, machine: Mapping[str, str], latency_ms: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Remember what `latency_ms` returns."""
        path = self._measurements(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"machine": dict(machine), "latency_ms": latency_ms}).encode())

    def close(self) -> None:
        """Let another daemon use the folder."""
        os.close(self._lock)

    def _measurements(self, digest: str) -> Path:
        return self.path / "engines" / digest / "cpu" / "measurements.json"


def latencies(data: object, machine: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """What `data`, a document of measurements, says about `machine`; {} when that is nothing, or makes no sense.

    Measurements are advice that nothing vouches for: a broken one may cost time, but no model.
    """
    if not isinstance(data, dict) or data.get("machine") != dict(machine):
        return {}
    try:
        return schema.load(dict[str, dict[str, float]], data.get("latency_ms"))
    except schema.SchemaError:
        return {}
