"""The queue of a model against a plain list: nothing lost, nothing answered twice, the order kept."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.core.schedule import Schedule, Ticket
from models.errors import DeadlineExceeded, Overloaded

pytestmark = pytest.mark.property

WAITS = st.one_of(st.just(float("inf")), st.integers(-2, 20).map(float))


class ScheduleMachine(RuleBasedStateMachine):
    """Admits, hands out, expires and withdraws tickets while time goes on."""

    @initialize(capacity=st.integers(1, 6))
    def start(self, capacity: int) -> None:
        self.schedule: Schedule[str] = Schedule(capacity=capacity)
        self.ids = itertools.count(1)
        self.now = 100.0
        self.line: list[Ticket[str]] = []
        self.admitted: set[int] = set()
        self.left: list[int] = []

    @rule(wait_s=WAITS, priority=st.integers(1, 3), source=st.sampled_from(["", "", "gate", "door"]))
    def admit(self, wait_s: float, priority: int, source: str) -> None:
        ticket = Ticket(next(self.ids), f"{source} frame", self.now, self.now + wait_s, priority, source)
        older = next((old for old in self.line if source and old.source == source), None)
        if wait_s <= 0:
            with pytest.raises(DeadlineExceeded):
                self.schedule.admit(ticket)
        elif older is None and len(self.line) == self.schedule.capacity:
            with pytest.raises(Overloaded, match=f"{self.schedule.capacity} requests wait already"):
                self.schedule.admit(ticket)
        else:
            assert self.schedule.admit(ticket) is older
            self.admitted.add(ticket.id)
            if older is None:
                self.line.append(ticket)
            else:
                self.line[self.line.index(older)] = ticket
                self.left.append(older.id)

    @rule(seconds=st.integers(0, 8))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def hand_out(self) -> None:
        live = [ticket for ticket in self.line if ticket.deadline_at > self.now]
        urgent = [ticket for ticket in live if ticket.priority == min(other.priority for other in live)]
        chosen = self.schedule.next(self.now)
        assert chosen is (urgent[0] if urgent else None)
        if chosen is not None:
            self.leave([chosen])

    @rule()
    def expire(self) -> None:
        late = [ticket for ticket in self.line if ticket.deadline_at <= self.now]
        assert self.schedule.expired(self.now) == late
        self.leave(late)

    @rule(data=st.data())
    @precondition(lambda self: self.admitted)
    def withdraw(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(sorted(self.admitted)))
        waits = [ticket for ticket in self.line if ticket.id == ticket_id]
        assert self.schedule.withdraw(ticket_id) is bool(waits)
        self.leave(waits)

    @rule()
    def drain(self) -> None:
        assert self.schedule.drain() == self.line
        self.leave(list(self.line))

    def leave(self, tickets: list[Ticket[str]]) -> None:
        """Tickets that have left the queue for good."""
        for ticket in tickets:
            self.line.remove(ticket)
            self.left.append(ticket.id)

    @invariant()
    def nothing_is_lost_or_leaves_twice(self) -> None:
        if not hasattr(self, "line"):
            return
        assert list(self.schedule) == self.line
        assert len(self.left) == len(set(self.left))
        assert self.admitted == {*self.left, *(ticket.id for ticket in self.line)}

    @invariant()
    def the_bound_holds_and_a_source_waits_once(self) -> None:
        if not hasattr(self, "line"):
            return
        assert len(self.schedule) <= self.schedule.capacity
        sources = [ticket.source for ticket in self.schedule if ticket.source]
        assert len(sources) == len(set(sources))


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=100, stateful_step_count=40)


@given(frames=st.integers(1, 50), others=st.integers(0, 5))
@settings(max_examples=30)
def test_a_camera_that_is_faster_than_the_model_is_still_served_in_its_turn(frames: int, others: int) -> None:
    schedule: Schedule[str] = Schedule(capacity=20)
    ids = itertools.count()

    def admit(source: str) -> int:
        ticket = Ticket(next(ids), source, 0.0, float("inf"), source=source)
        schedule.admit(ticket)
        return ticket.id

    admit("camera")
    for _ in range(others):
        admit("")
    latest = [admit("camera") for _ in range(frames)][-1]
    first = schedule.next(0.0)
    assert first is not None
    assert first.id == latest
    assert len(schedule) == others


@given(st.lists(st.integers(1, 10), min_size=1, max_size=20))
def test_tickets_leave_by_priority_and_by_arrival_within_one(priorities: list[int]) -> None:
    schedule: Schedule[int] = Schedule(capacity=len(priorities))
    for i, priority in enumerate(priorities):
        schedule.admit(Ticket(i, i, float(i), float("inf"), priority))
    left = []
    while (ticket := schedule.next(1000.0)) is not None:
        left.append(ticket)
    assert [(ticket.priority, ticket.id) for ticket in left] == sorted((p, i) for i, p in enumerate(priorities))


@given(deadline_s=st.integers(1, 5), now_s=st.integers(0, 6))
def test_a_ticket_is_handed_out_before_its_deadline_and_expires_at_it(deadline_s: int, now_s: int) -> None:
    ticket = Ticket(1, "x", 0.0, float(deadline_s))
    for late, leave in ((now_s >= deadline_s, Schedule.expired), (now_s < deadline_s, Schedule.next)):
        schedule: Schedule[str] = Schedule(capacity=1)
        schedule.admit(ticket)
        assert leave(schedule, float(now_s)) in ([ticket], ticket) if late else not leave(schedule, float(now_s))
        assert len(schedule) == (not late)
