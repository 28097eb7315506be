"""Looks at this machine's sensors, and tells whoever must know when it slows itself down.

Runs on the event loop and reads in a thread. What it means is decided in `core.throttle`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from appliance.adapters import host
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.core.throttle import Throttle
from models.errors import Overloaded

log = structlog.get_logger()

SAMPLE_S = 5.0
"""How often it looks: a chip takes longer than that to heat up, and every look costs milliseconds of a core."""


class Board:
    """The facts of this machine as they were at the latest look."""

    def __init__(self, read: Callable[[], Mapping[str, Any]] = host.board) -> None:
        """Ask `read`, which is called in a thread."""
        self._read = read
        self._facts: Mapping[str, Any] = {}
        self.throttle = Throttle()

    def status(self) -> dict[str, Any]:
        """For operators; nothing but how it is throttled before the first look."""
        throttle = self.throttle
        slowed_s = time.monotonic() - throttle.since if throttle.reasons else 0.0
        told = {"reasons": list(throttle.reasons), "for_s": round(slowed_s, 1), "times": throttle.times}
        return {**self._facts, "throttled": told}

    def check(self, priority: int) -> None:
        """Raise Overloaded for a request of low priority while the machine is slower than it should be."""
        if self.throttle.reasons and priority > DEFAULT_PRIORITY:
            why = ", ".join(self.throttle.reasons)
            msg = f"this machine slows itself down ({why}), so requests of low priority are refused: retry later"
            raise Overloaded(msg)

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Look for ever; `on_change` is called when it begins to be throttled, for other reasons, or not any more."""
        while True:
            try:
                self.judge(await asyncio.to_thread(self._read), time.monotonic(), on_change)
            except Exception:  # whatever it is, the next look must be taken
                log.exception("board_watch_failed")
            await asyncio.sleep(SAMPLE_S)

    def judge(self, facts: Mapping[str, Any], now: float, on_change: Callable[[], None]) -> None:
        """Take one look's facts."""
        before, self._facts = self.throttle, facts
        self.throttle = before.after(now, slowed_by=facts.get("slowed_by", ()), events=facts.get("power_events", {}))
        if self.throttle.reasons == before.reasons:
            return
        if self.throttle.reasons:
            heat = facts.get("temperatures_celsius")
            log.warning("throttled", reasons=self.throttle.reasons, celsius=max(heat.values()) if heat else None)
        else:
            log.info("throttling_over", lasted_s=round(now - before.since, 1))
        on_change()
