"""How late the event loop comes to what is due: whatever blocks it shows here, and every request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

_EVERY_S = 0.02
_SAMPLES = 3000
"""The last minute."""


class Lag:
    """The latest samples."""

    def __init__(self) -> None:
        """Nothing was measured yet."""
        self._samples_s: deque[float] = deque(maxlen=_SAMPLES)

    async def measure(self) -> None:
        """Take a sample again and again; a loop that was blocked for long counts once for each that it missed."""
        due_at = time.monotonic()  # the loop's own time stands still while it is busy
        while True:
            due_at += _EVERY_S
            await asyncio.sleep(due_at - time.monotonic())  # at once when that is past
            self._samples_s.append(max(0.0, time.monotonic() - due_at))

    def status(self) -> dict[str, Any]:
        """Milliseconds of the last minute: half of the samples were below the first, and so on."""
        ordered = sorted(self._samples_s) or [0.0]
        return {
            f"lag_{name}_ms": round(ordered[int(share * (len(ordered) - 1))] * 1e3, 3)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        }


@contextlib.contextmanager
def watched_loop() -> Iterator[Lag]:
    """Measure the running event loop."""
    lag = Lag()
    task = asyncio.get_running_loop().create_task(lag.measure())
    try:
        yield lag
    finally:
        task.cancel()
