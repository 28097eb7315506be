"""What the machine says about itself: files of /proc, and the kernel's clock state.

A fact that is missing is absent (None), never zero.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from models.errors import ConfigError

_STA_UNSYNC = 0x0040
_ADJTIMEX_ERROR = 5
_TIMEX_BYTES = 208  # sizeof(struct timex) on 64-bit Linux
_STATUS_OFFSET_BYTES = 40  # modes, offset, freq, maxerror, esterror come before `status`
_REBOOT_S = 30.0
_LONGEST_QUOTE = 200


class WallClock:
    """Unix time, and the step by which a drill pretends that it has jumped."""

    def __init__(self) -> None:
        """Tell the truth."""
        self._step_s = 0.0

    def __call__(self) -> float:
        """Seconds since 1970."""
        return time.time() + self._step_s

    def step(self, on: bool, step_s: float) -> None:
        """Jump by `step_s` from now on, or tell the truth again."""
        self._step_s = step_s if on else 0.0


def clock_synced() -> bool | None:
    """Whether the kernel takes its clock for synchronised; None when it does not say."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None).adjtimex(timex)
    if state < 0:
        return None
    status = int.from_bytes(timex.raw[_STATUS_OFFSET_BYTES : _STATUS_OFFSET_BYTES + 4], "little")
    return state != _ADJTIMEX_ERROR and not status & _STA_UNSYNC


def boot_id() -> str:
    """Names this start of the machine; empty where the kernel does not say."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def reboot(command: Sequence[str]) -> None:
    """Start the machine anew by running `command`; raises ConfigError where that cannot be done."""
    advice = "give the daemon's user the right to it, or set reboot_command"
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REBOOT_S, check=False)  # noqa: S603 - the operator's own
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"`{' '.join(command)}` does not work ({error}): {advice}"
        raise ConfigError(msg) from error
    if run.returncode:
        said = " ".join(run.stderr.decode(errors="replace").split())[:_LONGEST_QUOTE]
        msg = f"`{' '.join(command)}` failed with status {run.returncode} ({said}): {advice}"
        raise ConfigError(msg)


_MEMINFO = {"MemTotal": "total", "MemAvailable": "available", "NvMapMemUsed": "nvmap"}
"""The last is what the GPU holds on Jetson, where it comes out of the same memory; other kernels have no such line."""


def memory_bytes(meminfo: str | None = None) -> dict[str, int]:
    """`total` and `available` memory, and `nvmap` where there is one."""
    if meminfo is None:
        meminfo = _read("/proc/meminfo")
    found = {}
    for line in meminfo.splitlines():
        key, _colon, value = line.partition(":")
        name = _MEMINFO.get(key)
        if name and value.split():
            found[name] = int(value.split()[0]) * 1024
    return found


def memory_stall(pressure: str | None = None) -> float | None:
    """Percent of the last 10 s in which something waited for memory (PSI, `some avg10`); None without PSI."""
    if pressure is None:
        pressure = _read("/proc/pressure/memory")
    for line in pressure.splitlines():
        kind, *fields = line.split()
        if kind == "some":
            return next((float(field[6:]) for field in fields if field.startswith("avg10=")), None)
    return None


def process_bytes(pid: int, rollup: str | None = None) -> int | None:
    """Memory of a process (PSS: its own pages, and its share of those it shares); None when it is gone.

    The kernel walks every page for it, which takes milliseconds: not for the event loop.
    """
    if rollup is None:
        rollup = _read(f"/proc/{pid}/smaps_rollup")
    for line in rollup.splitlines():
        key, _colon, value = line.partition(":")
        if key == "Pss":
            return int(value.split()[0]) * 1024
    return None


def group_limit_bytes(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> int | None:
    """The smallest `memory.max` of our control group (v2) and those above; None where nothing limits us."""
    if membership is None:
        membership = _read("/proc/self/cgroup")
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "")
    limits = []
    folder = root / path.lstrip("/")
    while path and folder != root:
        text = _read(str(folder / "memory.max")).strip()
        if text.isdigit():
            limits.append(int(text))
        folder = folder.parent
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
