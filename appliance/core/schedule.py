"""Who runs next on one model: a bounded queue with deadlines, priorities and latest-frame-wins.

Pure: times are monotonic seconds handed in. A ticket leaves exactly once: by `next`, `expired`,
`withdraw`, as the one replaced by a newer frame of its source, or by `drain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from models.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")

DEFAULT_PRIORITY = 5


@dataclass(frozen=True, slots=True)
class Ticket(Generic[T]):
    """A request that waits or runs. Lower `priority` runs first; `source` "" replaces nothing."""

    id: int
    item: T
    admitted_at: float
    deadline_at: float
    priority: int = DEFAULT_PRIORITY
    source: str = ""


class Schedule(Generic[T]):
    """The queue of one model."""

    def __init__(self, *, capacity: int) -> None:
        """Hold at most `capacity` waiting tickets."""
        self.capacity = capacity
        self._waiting: dict[int, Ticket[T]] = {}  # in order of arrival; a newer frame stands where the older one stood

    def __len__(self) -> int:
        """Tickets that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket[T]]:
        """Tickets that wait, in line."""
        return iter(list(self._waiting.values()))

    def admit(self, ticket: Ticket[T]) -> Ticket[T] | None:
        """Queue `ticket`; return the older frame of its source that it replaces, if one was waiting.

        Raises DeadlineExceeded when it is late already, Overloaded when the queue is full.
        """
        if ticket.deadline_at <= ticket.admitted_at:
            raise DeadlineExceeded("the deadline had passed when the request arrived: allow more time")
        older = next((old for old in self._waiting.values() if ticket.source and old.source == ticket.source), None)
        if older is None and len(self._waiting) >= self.capacity:
            msg = f"{len(self._waiting)} requests wait already, the most this model queues: retry later or send fewer"
            raise Overloaded(msg)
        if older is None:
            self._waiting[ticket.id] = ticket
        else:
            # In the older one's place: at the end of the line a fast camera would never be served.
            self._waiting = {new.id: new for new in (ticket if old is older else old for old in self._waiting.values())}
        return older

    def expired(self, now: float) -> list[Ticket[T]]:
        """Remove and return the tickets whose deadline has passed."""
        late = [ticket for ticket in self._waiting.values() if ticket.deadline_at <= now]
        for ticket in late:
            del self._waiting[ticket.id]
        return late

    def next(self, now: float) -> Ticket[T] | None:
        """Remove and return the ticket to run now: most urgent priority, first in line, none that is late."""
        live = [ticket for ticket in self._waiting.values() if ticket.deadline_at > now]
        if not live:
            return None
        chosen = min(live, key=lambda ticket: ticket.priority)
        return self._waiting.pop(chosen.id)

    def withdraw(self, ticket_id: int) -> bool:
        """Remove a ticket whose client has gone; False when it is not waiting any more."""
        return self._waiting.pop(ticket_id, None) is not None

    def drain(self) -> list[Ticket[T]]:
        """Remove and return everything that waits."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting
