"""The last hour at a glance, and the last faults: rings of fixed size. Pure: times are handed in, monotonic seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP_S = 5.0
"""A point of the history stands for so long."""
_POINTS = 720
"""An hour."""
_FAULTS = 20
_LATENCIES = 20_000
"""Of one step; of more, the latest tell the percentiles."""
_SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Point:
    """What happened in one step."""

    per_s: float
    """Requests that were answered."""
    p50_ms: float | None
    """Of the time to an answer, waiting included; None when nothing was answered."""
    p95_ms: float | None
    p99_ms: float | None
    waiting: int
    """The most that waited at one of the looks."""
    dropped: int
    """Requests that were refused, or given up at their deadline."""
    failed: int
    """Requests that a model or its worker failed."""


class History:
    """Counts until the next point, and the points of the last hour."""

    def __init__(self, now: float) -> None:
        """Nothing has happened yet."""
        self.points: deque[Point] = deque(maxlen=_POINTS)
        self.answered_s: deque[float] = deque(maxlen=_LATENCIES)
        """Append the time of each answer: it is all that a request costs here."""
        self.answered = self.dropped = self.failed = 0
        self._waiting, self._began_at = 0, now

    def look(self, now: float, waiting: int) -> Point | None:
        """Note how many wait now; the new point when a step is over."""
        self._waiting = max(self._waiting, waiting)
        spent_s = now - self._began_at
        if spent_s < STEP_S:
            return None
        ordered = sorted(self.answered_s)
        p50_ms, p95_ms, p99_ms = (
            round(ordered[int(share * (len(ordered) - 1))] * 1e3, 3) if ordered else None for share in _SHARES
        )
        per_s = round(self.answered / spent_s, 2)
        point = Point(per_s, p50_ms, p95_ms, p99_ms, self._waiting, self.dropped, self.failed)
        self.points.append(point)
        self.answered_s.clear()
        self.answered = self.dropped = self.failed = 0
        self._waiting, self._began_at = waiting, now
        return point


@dataclass(slots=True)
class Happened:
    """One fault of a worker; `recovery_s` is None until the worker has proven itself again."""

    at: float
    model: str
    version: str
    cause: str
    reason: str
    rung: str | None
    recovery_s: float | None = None


class LastFaults:
    """The last faults of all workers, read off what their status says whenever it has changed."""

    def __init__(self) -> None:
        """None yet."""
        self._faults: deque[Happened] = deque(maxlen=_FAULTS)
        self._counts: dict[str, Mapping[str, int]] = {}

    def see(self, workers: Sequence[Mapping[str, Any]], now: float) -> list[Happened]:
        """Look at the workers as the status describes them; the faults that are new."""
        fresh = []
        for worker in workers:
            before, counts = self._counts.get(worker["bundle"], {}), dict(worker["faults"])
            self._counts[worker["bundle"]] = counts
            fresh += [
                Happened(now, worker["bundle"], worker["version"], cause, worker["reason"] or "", worker["rung"])
                for cause, count in counts.items()
                if count > before.get(cause, 0)
            ]
        self._faults.extend(fresh)
        well = {worker["bundle"] for worker in workers if worker["cause"] is None}
        for fault in self._faults:
            if fault.recovery_s is None and fault.model in well:
                fault.recovery_s = round(now - fault.at, 3)
        return fresh

    def document(self, now: float) -> list[dict[str, Any]]:
        """Plain data, the newest first."""
        return [
            {
                "ago_s": round(now - fault.at, 1),
                "model": fault.model,
                "version": fault.version,
                "cause": fault.cause,
                "reason": fault.reason or None,
                "rung": fault.rung,
                "recovery_s": fault.recovery_s,
            }
            for fault in reversed(self._faults)
        ]
