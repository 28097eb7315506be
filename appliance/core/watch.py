"""What one worker holds, and until when it is waited for.

Pure: times are monotonic seconds handed in. A worker begins requests in the order in which it got
them, a few at a time; the clock of a hang starts when a request begins, not when it was handed over.
A proof on a golden vector is held like a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from appliance.core.schedule import Ticket

T = TypeVar("T")

NEVER = float("inf")


@dataclass(slots=True)
class Held(Generic[T]):
    """A request that the worker holds."""

    ticket: Ticket[T]
    began_at: float = NEVER
    alive_at: float = 0.0
    """When the worker last said that it goes on."""

    @property
    def silent_since(self) -> float:
        """Since when nothing was heard of it; `NEVER` before it began."""
        return max(self.began_at, self.alive_at)


class Watch(Generic[T]):
    """The requests that one worker holds, by ticket id."""

    def __init__(self, *, concurrency: int, hang_s: float, idle_s: float = NEVER) -> None:
        """Watch a worker that runs `concurrency` requests at a time, each of which may be silent for `hang_s`.

        It is idle after `idle_s` without a request, counted from `rest`.
        """
        self._concurrency, self._hang_s, self._idle_s = concurrency, hang_s, idle_s
        self._rests_at = NEVER
        self._held: dict[int, Held[T]] = {}
        self._due: dict[int, Ticket[T]] = {}
        """Those with a deadline, until their caller knows that it has passed."""

    def __len__(self) -> int:
        """Requests that the worker holds."""
        return len(self._held)

    def __iter__(self) -> Iterator[Held[T]]:
        """What it holds, in the order handed over."""
        return iter(list(self._held.values()))

    def rest(self, now: float) -> None:
        """The worker is ready, or was asked something: it is not idle yet."""
        self._rests_at = now

    def take(self, ticket: Ticket[T], now: float) -> None:
        """The worker was handed `ticket`."""
        self._held[ticket.id] = Held(ticket, now if len(self._held) < self._concurrency else NEVER)
        if ticket.deadline_at != NEVER:
            self._due[ticket.id] = ticket

    def heard(self, ticket_id: int, now: float) -> None:
        """The worker says that it goes on with one; raises KeyError when it holds no such ticket."""
        self._held[ticket_id].alive_at = now

    def leave(self, ticket_id: int, now: float) -> Held[T]:
        """The worker has answered one; raises KeyError when it holds no such ticket."""
        held = self._held.pop(ticket_id)
        self._due.pop(ticket_id, None)
        held.began_at = min(held.began_at, now)  # a few that run may be answered out of their order
        if len(self._held) >= self._concurrency:
            for begun in self._begun:  # one of those that waited has its place now
                begun.began_at = min(begun.began_at, now)
        self._rests_at = now
        return held

    def clear(self) -> list[Ticket[T]]:
        """The worker is gone: remove and return all that it held."""
        lost = [held.ticket for held in self._held.values()]
        self._held.clear()
        self._due.clear()
        return lost

    def overdue(self, now: float) -> list[Ticket[T]]:
        """Tickets whose deadline has passed since the last call; the worker still holds them."""
        late = [ticket for ticket in self._due.values() if ticket.deadline_at <= now]
        for ticket in late:
            del self._due[ticket.id]
        return late

    def hung(self, now: float) -> bool:
        """Whether the worker was silent about a begun request for too long."""
        return any(now >= held.silent_since + self._hang_s for held in self._begun)

    def idle(self, now: float) -> bool:
        """Whether nothing was asked of the worker for so long that it should prove itself again."""
        return not self._held and now >= self._rests_at + self._idle_s

    @property
    def deadline_at(self) -> float:
        """The next moment at which `overdue` says something; `NEVER` when there is none."""
        return min([ticket.deadline_at for ticket in self._due.values()]) if self._due else NEVER

    @property
    def alarm_at(self) -> float:
        """The moment from which it is `hung` or `idle` unless something is heard before."""
        if not self._held:
            return self._rests_at + self._idle_s
        return min([held.silent_since for held in self._begun]) + self._hang_s

    @property
    def _begun(self) -> Iterator[Held[T]]:
        """Those that run: always the first few, for whoever leaves makes room for the next in line."""
        return islice(self._held.values(), self._concurrency)
