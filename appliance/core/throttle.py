"""Whether this machine slows itself down, for heat or for want of power, and since when.

Pure: what was sampled and monotonic seconds are handed in. It begins with the first sample that shows it and ends when
none has for a while, so that a chip that goes to and fro every second is told of once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_CALM_S = 15.0
"""Without any sign of it for so long, it is over: three samples as the daemon takes them."""


@dataclass(frozen=True, slots=True)
class Throttle:
    """The present state; `reasons` are empty while the machine runs as fast as its power mode lets it."""

    reasons: tuple[str, ...] = ()
    since: float = 0.0
    """When it began; without meaning while there are no reasons."""
    times: int = 0
    """How often it began."""
    seen_at: float = float("-inf")
    events: Mapping[str, int] = field(default_factory=dict)

    def after(self, now: float, *, slowed_by: Sequence[str] = (), events: Mapping[str, int]) -> Throttle:
        """The state after one more sample.

        `slowed_by` are cooling devices that slow the chip down now; `events` counts since the chip was started, of
        which only a rise says something, because at the first sample nobody knows how old they are.
        """
        risen = [name for name, count in events.items() if count > self.events.get(name, count)]
        signs = tuple(sorted({*slowed_by, *risen}))
        if signs:
            begins = not self.reasons
            since, times = (now, self.times + 1) if begins else (self.since, self.times)
            return Throttle(signs, since, times, now, events)
        if self.reasons and now - self.seen_at >= _CALM_S:
            return Throttle(times=self.times, events=events)
        return replace(self, events=events)
