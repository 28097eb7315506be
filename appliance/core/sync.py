"""How much a device tells its upstream at once, and in a day. Pure: moments are monotonic seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from models import sync

HOUR_S = 3600.0
_HOURS = 25
"""With the one that is not over yet: they cover any 24 hours."""


class Allowance:
    """Bytes that may be exchanged in any 24 hours, whatever the wall clock shows."""

    def __init__(self, day_bytes: int, now: float, spent_bytes: int = 0) -> None:
        """`day_bytes` 0 is no limit. What was spent before a restart counts as if it were spent now."""
        self.day_bytes = day_bytes
        self._spent = {int(now // HOUR_S): spent_bytes}
        """By hour."""

    def spend(self, now: float, size_bytes: int) -> None:
        """So much was exchanged."""
        hour = int(now // HOUR_S)
        self._spent = {at: spent for at, spent in self._spent.items() if at > hour - _HOURS}
        self._spent[hour] = self._spent.get(hour, 0) + size_bytes

    def spent_bytes(self, now: float) -> int:
        """In the last day."""
        return sum(spent for at, spent in self._spent.items() if at > now // HOUR_S - _HOURS)

    def left_bytes(self, now: float) -> float:
        """What may still be exchanged; infinite without a limit."""
        return max(0, self.day_bytes - self.spent_bytes(now)) if self.day_bytes else math.inf

    def wait_s(self, now: float, need_bytes: int) -> float:
        """Seconds until there are `need_bytes`, 0 where there are; a day where there never will be."""
        for at in (None, *sorted(self._spent)):
            then = now if at is None else (at + _HOURS) * HOUR_S
            if then >= now and self.left_bytes(then) >= need_bytes:
                return then - now
        return 24 * HOUR_S


@dataclass(slots=True)
class Fit:
    """How much goes into one batch, by what the server says to those before.

    One that it does not understand is halved until a single item stands alone. That one is given up only when it was
    refused twice, and a batch without any understood after each time: what is wrong with all batches, or was for a
    moment, must not cost an item.
    """

    most_bytes: int = sync.MOST_BYTES
    most_items: int = sync.MOST_ITEMS
    suspect: int | None = None
    """Number of the item that was refused alone last."""
    doubted: int | None = None
    """Number of the item after whose refusal a batch without any passed."""

    def passed(self, most_bytes: int) -> int | None:
        """A batch was taken, and the next may have `most_bytes`; the number of the item to give up, if there is one."""
        self.most_bytes, self.most_items = most_bytes, min(sync.MOST_ITEMS, max(1, 2 * self.most_items))
        suspect, self.suspect = self.suspect, None
        if suspect is None or suspect == self.doubted:
            return suspect
        self.doubted = suspect
        return None

    def too_large(self, most_bytes: int) -> None:
        """A batch was too large; 0: the server does not say for what."""
        self.most_bytes = most_bytes if 0 < most_bytes < self.most_bytes else max(1, self.most_bytes // 2)

    def not_understood(self, numbers: list[int]) -> None:
        """A batch with the items `numbers` was refused for ever."""
        if len(numbers) > 1:
            self.most_items = len(numbers) // 2
        elif numbers:
            self.most_items, self.suspect = 0, numbers[0]
        else:
            self.most_items, self.suspect = 1, None
