"""Lines that would be written too often: the first at once, and then no more than one in some time."""

from __future__ import annotations


class Seldom:
    """When to write a line of one kind. Times are monotonic seconds."""

    def __init__(self, every_s: float) -> None:
        """At most one in `every_s`."""
        self._every_s, self._last_at, self._left_out = every_s, float("-inf"), 0

    def due(self, now: float) -> bool:
        """Whether to write one now; one that is not written counts as left out."""
        if now - self._last_at < self._every_s:
            self._left_out += 1
            return False
        self._last_at = now
        return True

    def left_out(self) -> int:
        """How many were left out since this was asked last."""
        left_out, self._left_out = self._left_out, 0
        return left_out
