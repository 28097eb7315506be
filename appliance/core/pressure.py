"""How short memory is on this machine, in steps, and when a step is taken back.

    normal -> refuse low -> narrow -> unload idle

Pure: what was sampled and monotonic seconds are handed in. A step up is taken while memory is tight, one at
a time; a step down only after calm has lasted, and calm asks for more free memory than tight does, so a load that
sits on the border does not make the daemon swing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


class Step(IntEnum):
    """What is done about it; each step includes those before."""

    NORMAL = 0
    REFUSE_LOW = 1
    """Requests of low priority are refused."""
    NARROW = 2
    """Queues are halved and each worker runs one request at a time."""
    UNLOAD_IDLE = 3
    """Models that nobody uses at the moment are unloaded, and no spare worker is kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where tight begins and calm begins."""

    low_bytes: int
    """Less available memory than this is tight."""
    calm_bytes: int
    """At least this much is calm."""
    tight_stall: float = 20.0
    """Percent of the last 10 s in which something waited for memory (PSI, `some avg10`)."""
    calm_stall: float = 5.0
    up_s: float = 2.0
    """A step must have had this long to work before the next one."""
    down_s: float = 10.0
    """Calm must have lasted this long."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """The present step."""

    step: Step = Step.NORMAL
    stepped_at: float = float("-inf")
    calm_since: float | None = None

    def after(self, now: float, bounds: Bounds, *, available_bytes: int | None, stall: float | None) -> Pressure:
        """The step after one more sample; a figure that this machine does not have says nothing."""
        tight = _is(available_bytes, below=bounds.low_bytes) or _is(stall, from_=bounds.tight_stall)
        calm = not _is(available_bytes, below=bounds.calm_bytes) and not _is(stall, from_=bounds.calm_stall)
        if tight:
            if self.step < Step.UNLOAD_IDLE and now - self.stepped_at >= bounds.up_s:
                return Pressure(Step(self.step + 1), now)
            return replace(self, calm_since=None)
        if not calm:
            return replace(self, calm_since=None)
        since = now if self.calm_since is None else self.calm_since
        if self.step > Step.NORMAL and now - since >= bounds.down_s:
            return Pressure(Step(self.step - 1), now, calm_since=now)
        return replace(self, calm_since=since)


def _is(figure: float | None, *, below: float | None = None, from_: float | None = None) -> bool:
    if figure is None:
        return False
    return (below is not None and figure < below) or (from_ is not None and figure >= from_)
