"""What goes into a support bundle: one file that tells somebody far away how a device is, without its secrets."""

from __future__ import annotations

import io
import json
import platform
import re
import subprocess
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from appliance.recorder import FLIGHTS
from appliance.settings import Settings

_ANSWERS = {
    "status.json": "/v1/status",
    "deployments.json": "/v1/deployments",
    "statistics.json": "/v2/models/stats",
    "metrics.txt": "/metrics",
    "recorder.json": "/v1/recorder",
}
"""Part -> where the daemon tells it."""
_FACTS = ("/etc/os-release", "/etc/nv_tegra_release", "/proc/device-tree/model", "/proc/cpuinfo", "/proc/meminfo",
          "/proc/swaps", "/proc/loadavg", "/proc/pressure/memory", "/proc/mounts")  # fmt: skip
_JOURNAL = ("journalctl", "--unit=appliance", "--lines=5000", "--output=cat", "--no-pager")
_SECRET = re.compile(r"(?i)password|secret|token|passphrase")
_USER = re.compile(r"://[^/@\s]*@")
_REMOVED = "(removed)"


def collect(http: httpx.Client, told: Settings | None) -> tuple[dict[str, bytes], dict[str, str]]:
    """The parts by name, and why others could not be had."""
    parts: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for name, path in _ANSWERS.items():
        answer = _answer(http, path)
        if isinstance(answer, bytes):
            parts[name] = _cleaned(answer) if name.endswith(".json") else answer
        else:
            left_out[name] = answer
    if told:
        parts["settings.json"] = json.dumps(without_secrets(told.model_dump(mode="json")), indent=1).encode()
        for flight in sorted((told.state_dir / FLIGHTS).glob("*.json")):
            parts[f"{FLIGHTS}/{flight.name}"] = _cleaned(flight.read_bytes())
    else:
        left_out["settings.json"] = "they cannot be read"
    parts["host.txt"] = "\n".join(f"==> {path}\n{_text(path)}" for path in ("uname", *_FACTS)).encode()
    try:
        log = subprocess.run(_JOURNAL, capture_output=True, timeout=60, check=True)  # noqa: S603 - a fixed command
    except (OSError, subprocess.SubprocessError) as error:
        left_out["journal.jsonl"] = str(error)
    else:
        if log.stdout.strip():
            parts["journal.jsonl"] = b"".join(_cleaned(line) + b"\n" for line in log.stdout.splitlines())
        else:
            left_out["journal.jsonl"] = "the journal has no line of the unit appliance, or this user may not read it"
    return parts, left_out


def without_secrets(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Plain data without what is secret by its name, and addresses without the user and password in them."""
    if isinstance(value, Mapping):
        return {
            key: _REMOVED if inner and _SECRET.search(key) else without_secrets(inner) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    return _USER.sub("://", value) if isinstance(value, str) else value


def _cleaned(content: bytes) -> bytes:
    """JSON without secrets; of other text only the addresses are cleaned."""
    try:
        return json.dumps(without_secrets(json.loads(content)), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _USER.sub("://", content.decode(errors="replace")).encode()


def write(out: Path | None, parts: Mapping[str, bytes], left_out: Mapping[str, str], now: float) -> Path:
    """Write the file, readable for its owner only; `now` is Unix seconds. Raises OSError."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    device = json.loads(parts["status.json"])["device_id"] if "status.json" in parts else platform.node()
    path = out or Path(f"support-{device}-{stamp}.tar.gz")
    path.touch(0o600)
    with tarfile.open(path, "w:gz") as file:
        for name, content in {**parts, "left_out.json": json.dumps(left_out).encode()}.items():
            entry = tarfile.TarInfo(f"support/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(now), 0o600
            file.addfile(entry, io.BytesIO(content))
    return path


def _answer(http: httpx.Client, path: str) -> bytes | str:
    """What the daemon answers, or why it does not."""
    try:
        return http.get(path).raise_for_status().content
    except httpx.HTTPError as error:
        return str(error).splitlines()[0]


def _text(path: str) -> str:
    if path == "uname":
        return " ".join(platform.uname())
    try:
        return Path(path).read_text(errors="replace").replace("\0", "")
    except OSError:
        return "not here"
