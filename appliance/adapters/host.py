"""What the machine says about itself: files of /proc, and the kernel's clock state.

A fact that is missing is absent (None), never zero.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

_STA_UNSYNC = 0x0040
_ADJTIMEX_ERROR = 5
_TIMEX_BYTES = 208  # sizeof(struct timex) on 64-bit Linux
_STATUS_OFFSET_BYTES = 40  # modes, offset, freq, maxerror, esterror come before `status`


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


def memory_bytes(meminfo: str | None = None) -> dict[str, int]:
    """`total` and `available` memory."""
    if meminfo is None:
        try:
            meminfo = Path("/proc/meminfo").read_text()
        except OSError:
            meminfo = ""
    found = {}
    for line in meminfo.splitlines():
        key, _colon, value = line.partition(":")
        name = {"MemTotal": "total", "MemAvailable": "available"}.get(key)
        if name and value.split():
            found[name] = int(value.split()[0]) * 1024
    return found
