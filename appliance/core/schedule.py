"""Who runs next on one model: admission by predicted wait, priorities that age, fair shares, batches.

Pure: times are monotonic seconds handed in. A ticket that was admitted leaves exactly once: in a batch of `next`,
by `expired`, by `withdraw`, by `drain`, or as the frame that a newer one of its source replaced.

Priorities are levels: the level whose first ticket has aged most is served, `ageing_s` of waiting being worth one step.
Within a level sources share by self-clocked fair queueing (Golestani, "A self-clocked fair queueing scheme for
broadband applications", INFOCOM 1994): a ticket is tagged with the virtual time at which its source's share would have
paid for it, and the smallest tag goes first. Requests without a source share as one source.

Every operation costs O(log n). What leaves from the middle of a heap leaves its entry there until it surfaces.

The file has more than 400 lines because who gets in, who is next and what travels together read the same sums of
waiting work; each of the three alone is short.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from appliance.core.cost import Cost, smoothed
from appliance.core.limits import Limits
from models.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")

DEFAULT_PRIORITY = 5

DEPTH = 2
"""Batches for each thread of the worker: the next one is there when the one before it is done."""

FULL = 16
"""Requests whose work may wait.

Behind a longer queue, answers under overload would be later than those at 90 % load; a shorter one would refuse what
chance brings at 90 % load. With 16, one in 300 is refused there, and P99 under overload is 1.13 times P99 there
(tests/unit/test_schedule_elasticity.py plays it). So many in hand are admitted whatever they take: as many clients
that each wait for their answer are no overload.
"""
LEAST_WAIT_S = 0.05
"""Nobody is refused for less: a burst at a tiny model is over before its senders could ask again."""
SLICE_S = 0.001
"""Work that travels to the worker at once: less would cost more in messages than in computing."""
_UNMEASURED = 64
"""Requests that may wait while nothing is known of what they cost."""
_SLICE_TICKETS = 32
_SLICE_BYTES = 48 * 1024
_REMEMBERED_BUCKETS = 256
"""A client may send as many shapes as it likes."""
_ROOM = 64
"""Entries of the gone that a heap may hold beyond twice the tickets that wait."""


@dataclass(slots=True, eq=False)  # not frozen, which would take five times as long to make: there is one a request
class Ticket(Generic[T]):
    """A request that waits or runs. Lower `priority` runs first; `source` "" replaces nothing."""

    id: int
    item: T
    admitted_at: float
    deadline_at: float = float("inf")
    priority: int = DEFAULT_PRIORITY
    source: str = ""
    bucket: Hashable = ()
    """Requests of one bucket have the same shape, so they cost the same."""
    shares: bool = False
    """Whether it may share a run with others of its bucket."""
    size_bytes: int = 0


@dataclass(slots=True, eq=False)
class Batch(Generic[T]):
    """Tickets that go to the worker at once: computed in one run, or one after the other."""

    tickets: Sequence[Ticket[T]]
    one_run: bool


@dataclass(slots=True)
class _Level:
    """The line of one priority; `work_s` waits in it, `named_s` of that for sources with a name."""

    priority: int
    line: list[tuple[float, int, int]] = field(default_factory=list)
    """(tag, place, ticket id)"""
    tags: dict[str, float] = field(default_factory=dict)
    virtual_time: float = 0.0
    count: int = 0
    work_s: float = 0.0
    named_s: float = 0.0


@dataclass(slots=True)
class _Bucket:
    """What is known of requests of one shape, and the line of those that may share a run."""

    cost: Cost = field(default_factory=Cost)
    line: list[tuple[int, float, int, int]] = field(default_factory=list)
    """(priority, tag, place, ticket id)"""
    count: int = 0


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    """A ticket in line. A newer frame takes the place, the tag and the age of the one it replaces."""

    ticket: Ticket[T]
    level: _Level
    bucket: _Bucket
    place: int
    tag: float
    since: float
    give_up_at: float
    work_s: float


@dataclass(slots=True)
class _Held:
    """A batch in the worker."""

    left: int
    """Tickets that it has not answered yet."""
    one_run: bool
    work_s: float
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.left


class Schedule(Generic[T]):
    """The queue of one model."""

    def __init__(self, limits: Limits) -> None:
        """Hold what `limits` allow."""
        self._limits = limits
        self._waiting: dict[int, _Waiting[T]] = {}
        self._waiting_bytes = 0
        self._by_source: dict[str, _Waiting[T]] = {}
        self._levels: dict[int, _Level] = {}
        self._buckets: dict[Hashable, _Bucket] = {}
        self._expiry: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)
        self._service_s: float | None = None
        self._held: dict[int, tuple[_Bucket, _Held]] = {}
        self._held_s = 0.0
        self._batches = 0
        self.narrow(narrow=False)

    def __len__(self) -> int:
        """Tickets that wait."""
        return len(self._waiting)

    @property
    def service_s(self) -> float | None:
        """Mean seconds that a request takes in the worker; None until one was measured."""
        return self._service_s

    def narrow(self, narrow: bool) -> None:
        """Take less memory: half the queue, and one batch in the worker. What waits already may stay."""
        self._most_waiting = max(1, self._limits.queue // 2) if narrow else self._limits.queue
        self._most_batches = 1 if narrow else DEPTH * self._limits.concurrency

    def inherit(self, other: Schedule[T]) -> None:
        """Know what `other` has learned of the same model."""
        self._service_s = other._service_s
        self._buckets = {key: _Bucket(bucket.cost) for key, bucket in other._buckets.items()}

    def predicted_wait_s(self, priority: int = DEFAULT_PRIORITY, source: str = "") -> float:
        """Seconds that a request admitted now would wait: the work before it, shared by what runs at a time.

        A named source goes before all but one of the requests without a source, so their queue does not count.
        """
        at_once = self._limits.concurrency
        if not self._waiting and self._batches < at_once:
            return 0.0
        before_s = 0.0
        for level in self._levels.values():
            if level.priority <= priority:
                before_s += level.named_s if source else level.work_s
        # Of what runs, half is done on average.
        begun_s = self._held_s - min(self._batches, at_once) * (self._service_s or 0.0) / 2
        return (before_s + max(begun_s, 0.0)) / at_once

    def admit(self, ticket: Ticket[T]) -> Ticket[T] | None:
        """Queue `ticket`; return the older frame of its source that it replaces, if one was waiting.

        Raises DeadlineExceeded when it is late already, Overloaded when its turn would come too late or there is
        no room; then it was not admitted, and an older frame still waits.
        """
        now = ticket.admitted_at
        if ticket.deadline_at <= now:
            raise DeadlineExceeded("the deadline had passed when the request arrived: allow more time")
        older = self._by_source.get(ticket.source) if ticket.source else None
        bucket = self._bucket(ticket.bucket)
        work_s = self._work_s(bucket)
        self._check_room(ticket, older)
        give_up_at = min(ticket.deadline_at, now + self._limits.wait_s + FULL * work_s / self._limits.concurrency)
        if older is not None and older.level.priority <= ticket.priority:
            # In the older one's place: at the end of the line a fast camera would never be served.
            level, place, tag, since = older.level, older.place, older.tag, older.since
        else:
            level = self._levels.get(ticket.priority) or _Level(ticket.priority)
            place, since = next(self._numbers), now
            tag = max(level.virtual_time, level.tags.get(ticket.source, 0.0)) + work_s
            self._keep_tag(level, ticket.source, tag)
        self._insert(_Waiting(ticket, level, bucket, place, tag, since, give_up_at, work_s))
        if older is None:
            return None
        self._remove(older)
        return older.ticket

    def next(self, now: float) -> Batch[T] | None:
        """Remove and return what the worker should be handed now, none of it late; None when there is nothing.

        A worker holds at most twice as many batches as it computes at a time: one computes while the next is decoded.
        Each idle thread of the worker gets its own work before requests travel together.
        """
        if self._batches >= self._most_batches:
            return None
        first = self._first(now)
        if first is None:
            return None
        at_once = self._limits.concurrency
        if first.work_s > 0.0 and self._held_s + len(self._waiting) * first.work_s <= SLICE_S:
            # So little that a second thread, or a third message, would cost more than they save.
            at_once = 1
            if self._batches >= DEPTH:
                return None
        idle = max(at_once - self._batches, 1)
        together = 1
        if first.ticket.shares:
            together = first.bucket.cost.together(-(-first.bucket.count // idle), self._limits.batch)
        if together > 1:
            chosen = self._take_run(first, together, now)
        else:
            chosen = self._take_slice(first, -(-len(self._waiting) // idle), now)
        held = _Held(len(chosen), len(chosen) > 1 and together > 1, sum(one.work_s for one in chosen))
        self._batches += 1
        self._held_s += held.work_s
        for one in chosen:
            self._held[one.ticket.id] = (one.bucket, held)
        return Batch([one.ticket for one in chosen], held.one_run)

    def finished(self, ticket_id: int, took_s: float = 0.0) -> None:
        """The worker has done with a ticket, in a run of `took_s`; 0.0 when that says nothing of what others will take.

        A ticket that it does not hold is none of ours.
        """
        known = self._held.pop(ticket_id, None)
        if known is None:
            return
        bucket, held = known
        held.left -= 1
        if took_s > 0.0 and not (held.one_run and held.left):
            size = held.size if held.one_run else 1
            self._service_s = smoothed(self._service_s, took_s / size)
            bucket.cost.learn(size, took_s)
        if not held.left:
            self._batches -= 1
            self._held_s = self._held_s - held.work_s if self._batches else 0.0

    def lost(self) -> None:
        """The worker is gone, and with it all that it held."""
        self._held.clear()
        self._batches, self._held_s = 0, 0.0

    def expired(self, now: float) -> list[Ticket[T]]:
        """Remove and return the tickets whose deadline, or the longest wait of their bucket, has passed."""
        late = []
        while self._expiry and self._expiry[0][0] <= now:
            one = self._waiting.get(heapq.heappop(self._expiry)[1])
            if one is not None:
                self._remove(one)
                late.append(one.ticket)
        return late

    def next_expiry(self) -> float:
        """When `expired` will have something to return; infinite when nothing waits."""
        self._drop_gone(self._expiry)
        return self._expiry[0][0] if self._expiry else float("inf")

    def withdraw(self, ticket_id: int) -> bool:
        """Remove a ticket whose client has gone; False when it is not waiting any more."""
        one = self._waiting.get(ticket_id)
        if one is None:
            return False
        self._remove(one)
        return True

    def drain(self) -> list[Ticket[T]]:
        """Remove and return everything that waits."""
        waiting = list(self._waiting.values())
        for one in waiting:
            self._remove(one)
        return [one.ticket for one in waiting]

    def _check_room(self, ticket: Ticket[T], older: _Waiting[T] | None) -> None:
        if not self._waiting and self._batches < self._limits.concurrency:
            return  # its turn is now
        wait_s = self.predicted_wait_s(ticket.priority, ticket.source)
        if older is not None:
            wait_s = max(wait_s - older.work_s / self._limits.concurrency, 0.0)
        # Only the wait counts: were the run itself held against it, one slow run could keep all others out for ever.
        if ticket.admitted_at + wait_s > ticket.deadline_at:
            msg = f"its turn would come in {_spelled(wait_s)}, after its deadline: allow more time or send fewer"
            raise Overloaded(msg, wait_s)
        before_bytes = self._waiting_bytes - (older.ticket.size_bytes if older else 0)
        if before_bytes and before_bytes + ticket.size_bytes > self._limits.queue_bytes:
            msg = f"{before_bytes} bytes of requests wait already: retry later or send fewer"
            raise Overloaded(msg, wait_s)
        if older is not None:
            return
        if len(self._waiting) >= self._most_waiting or (self._service_s is None and len(self._waiting) >= _UNMEASURED):
            msg = f"{len(self._waiting)} requests wait already, the most this model queues: retry later or send fewer"
            raise Overloaded(msg, wait_s)
        limit_s = self._longest_wait_s()
        if wait_s > limit_s and len(self._waiting) + len(self._held) >= FULL:
            msg = f"it would wait {_spelled(wait_s)}, longest is {_spelled(limit_s)}: retry later or send fewer"
            raise Overloaded(msg, wait_s)

    def _longest_wait_s(self) -> float:
        """The longest predicted wait with which a request is admitted."""
        if self._limits.predicted_wait_s:
            return self._limits.predicted_wait_s
        return max(FULL * (self._service_s or 0.0) / self._limits.concurrency, LEAST_WAIT_S)

    def _bucket(self, key: Hashable) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _REMEMBERED_BUCKETS:
                idle = next((old for old, one in self._buckets.items() if not one.count), None)
                self._buckets.pop(idle, None)
            bucket = self._buckets[key] = _Bucket()
        return bucket

    def _work_s(self, bucket: _Bucket) -> float:
        return bucket.cost.service_s or self._service_s or 0.0

    def _keep_tag(self, level: _Level, source: str, tag: float) -> None:
        """Remember how far `source` has used its share; the past of those that are behind does not matter."""
        if len(level.tags) > 2 * level.count + _ROOM:
            level.tags = {name: known for name, known in level.tags.items() if known > level.virtual_time}
        level.tags[source] = tag

    def _insert(self, one: _Waiting[T]) -> None:
        ticket, level, bucket = one.ticket, one.level, one.bucket
        self._waiting[ticket.id] = one
        self._waiting_bytes += ticket.size_bytes
        self._levels[level.priority] = level
        self._push(level.line, (one.tag, one.place, ticket.id))
        self._push(self._expiry, (one.give_up_at, ticket.id))
        level.count += 1
        level.work_s += one.work_s
        bucket.count += 1
        if ticket.shares:
            self._push(bucket.line, (level.priority, one.tag, one.place, ticket.id))
        if ticket.source:
            level.named_s += one.work_s
            self._by_source[ticket.source] = one

    def _remove(self, one: _Waiting[T]) -> None:
        ticket, level, bucket = one.ticket, one.level, one.bucket
        del self._waiting[ticket.id]
        self._waiting_bytes -= ticket.size_bytes
        level.count -= 1
        level.work_s -= one.work_s
        if ticket.source:
            level.named_s -= one.work_s
            if self._by_source[ticket.source] is one:
                del self._by_source[ticket.source]
        if not level.count:
            del self._levels[level.priority]
        bucket.count -= 1
        if not bucket.count:
            bucket.line.clear()

    def _push(self, heap: list[Any], entry: tuple[Any, ...]) -> None:
        """Add an entry, which ends with a ticket's id; entries of the gone never outnumber the others for long."""
        if len(heap) > 2 * len(self._waiting) + _ROOM:
            heap[:] = [kept for kept in heap if kept[-1] in self._waiting]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def _drop_gone(self, heap: list[Any]) -> None:
        while heap and heap[0][-1] not in self._waiting:
            heapq.heappop(heap)

    def _head(self, heap: list[Any], now: float) -> _Waiting[T] | None:
        """The first in line that is not late; those before it leave the line, and are left to `expired`."""
        while heap:
            one = self._waiting.get(heap[0][-1])
            if one is not None and one.give_up_at > now:
                return one
            heapq.heappop(heap)
        return None

    def _first(self, now: float) -> _Waiting[T] | None:
        """The head of the level that has aged most."""
        first, first_key = None, (0.0, 0)
        for level in self._levels.values():
            head = self._head(level.line, now)
            if head is not None:
                key = (level.priority * self._limits.ageing_s + head.since, head.place)
                if first is None or key < first_key:
                    first, first_key = head, key
        return first

    def _take(self, one: _Waiting[T]) -> _Waiting[T]:
        one.level.virtual_time = max(one.level.virtual_time, one.tag)
        self._remove(one)
        return one

    def _take_run(self, first: _Waiting[T], most: int, now: float) -> list[_Waiting[T]]:
        """`first` and others of its bucket, to be computed in one run."""
        chosen = [self._take(first)]
        room_bytes = self._limits.body_bytes - first.ticket.size_bytes
        while len(chosen) < most and (one := self._head(first.bucket.line, now)):
            room_bytes -= one.ticket.size_bytes
            if room_bytes < 0:
                break
            chosen.append(self._take(one))
        return chosen

    def _take_slice(self, first: _Waiting[T], most: int, now: float) -> list[_Waiting[T]]:
        """`first` and whoever comes next, as long as all of it is little work and few bytes."""
        chosen = [self._take(first)]
        work_s, room_bytes = first.work_s, _SLICE_BYTES - first.ticket.size_bytes
        while len(chosen) < min(most, _SLICE_TICKETS) and (one := self._first(now)):
            work_s += one.work_s
            room_bytes -= one.ticket.size_bytes
            if not one.work_s or work_s > SLICE_S or room_bytes < 0:
                break
            chosen.append(self._take(one))
        return chosen


def _spelled(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
