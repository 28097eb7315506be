"""The queue of a model against plain lists: nothing lost, nothing handed out twice, the order kept, the bounds held."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.core.limits import Limits
from appliance.core.schedule import DEPTH, FULL, LEAST_WAIT_S, SLICE_S, Batch, Schedule, Ticket
from models.errors import DeadlineExceeded, Overloaded

pytestmark = pytest.mark.property

NEVER = float("inf")
WAITS = st.one_of(st.just(NEVER), st.integers(-2, 20).map(float))
SOURCES = ["", "", "", "gate", "door", "yard"]
SERVICES_S = [0.0002, 0.02, 2.0]


@dataclass(eq=False, slots=True)
class Place:
    """A place in line, as a test remembers it."""

    ticket: Ticket[str]
    number: int
    since: float
    priority: int


class ScheduleMachine(RuleBasedStateMachine):
    """Admits, hands out, finishes, loses, expires and withdraws tickets while time goes on."""

    @initialize(queue=st.sampled_from([1, 5, 12, 30]), concurrency=st.integers(1, 3), batch=st.sampled_from([1, 4]))
    def start(self, queue: int, concurrency: int, batch: int) -> None:
        self.limits = Limits(
            queue=queue, queue_bytes=90, concurrency=concurrency, batch=batch, body_bytes=20, wait_s=5.0, ageing_s=1.0
        )
        self.schedule: Schedule[str] = Schedule(self.limits)
        self.numbers = itertools.count(1)
        self.now = 100.0
        self.line: list[Place] = []
        self.running: list[Batch[str]] = []
        self.admitted: set[int] = set()
        self.left: list[int] = []
        self.started: dict[tuple[str, int, object], int] = {}
        self.most_waiting, self.most_batches = queue, DEPTH * concurrency

    @rule(
        wait_s=WAITS,
        priority=st.integers(1, 3),
        source=st.sampled_from(SOURCES),
        width=st.sampled_from([320, 640]),
        shares=st.booleans(),
        size_bytes=st.integers(0, 12),
    )
    def admit(self, wait_s: float, priority: int, source: str, width: int, shares: bool, size_bytes: int) -> None:
        number = next(self.numbers)
        ticket = Ticket(
            number, "frame", self.now, self.now + wait_s, priority, source, (width, shares), shares, size_bytes
        )
        older = next((old for old in self.line if source and old.ticket.source == source), None)
        before = [place.ticket.id for place in self.line]
        in_hand = len(self.line) + sum(len(batch.tickets) for batch in self.running)
        predicted_s = self.schedule.predicted_wait_s(priority, source)
        room_s = max(FULL * (self.schedule.service_s or 0.0) / self.limits.concurrency, LEAST_WAIT_S)
        try:
            replaced = self.schedule.admit(ticket)
        except DeadlineExceeded:
            assert wait_s <= 0
        except Overloaded:
            held_bytes = self.waiting_bytes() - (older.ticket.size_bytes if older else 0)
            assert (
                (older is None and len(self.line) >= self.most_waiting)
                or (held_bytes and held_bytes + size_bytes > self.limits.queue_bytes)
                or (older is None and predicted_s > room_s and in_hand >= FULL)
                or predicted_s > wait_s
            )
            assert [place.ticket.id for place in self.line] == before
        else:
            assert wait_s > 0
            assert older is not None or len(self.line) < self.most_waiting
            assert older is not None or predicted_s <= room_s or in_hand < FULL
            assert replaced is (older.ticket if older else None)
            self.admitted.add(number)
            if older is None:
                self.line.append(Place(ticket, number, self.now, priority))
            else:
                self.left.append(older.ticket.id)
                if priority < older.priority:
                    self.line.remove(older)
                    self.line.append(Place(ticket, number, self.now, priority))
                else:
                    older.ticket = ticket

    @rule(seconds=st.sampled_from([0, 0, 1, 3, 8]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def hand_out(self) -> None:
        live = [place for place in self.line if self.gives_up_at(place) > self.now]
        self.expected_s = {ticket_id: one.work_s for ticket_id, one in self.schedule._waiting.items()}  # noqa: SLF001
        full = len(self.running) >= self.most_batches
        batch = self.schedule.next(self.now)
        if batch is None:
            assert full or not live
            return
        assert not full
        chosen = [next(place for place in live if place.ticket is ticket) for ticket in batch.tickets]
        if batch.one_run:
            assert 1 < len(chosen) <= self.limits.batch
            assert all(ticket.shares for ticket in batch.tickets)
            assert len({ticket.bucket for ticket in batch.tickets}) == 1
            assert sum(ticket.size_bytes for ticket in batch.tickets) <= self.limits.body_bytes
        elif len(chosen) > 1:
            assert sum(self.work_s(place) for place in chosen) <= SLICE_S
        for place in chosen:
            self.keeps_its_order(place)
            self.line.remove(place)
            self.left.append(place.ticket.id)
        self.running.append(batch)

    def keeps_its_order(self, place: Place) -> None:
        """Frames of one source start in the order in which they came, whatever their priority and shape.

        So do requests without a source, of which many wait, within one priority and shape.
        """
        ticket = place.ticket
        for key, number in {
            (ticket.source, 0, ()): ticket.id if ticket.source else 0,
            (ticket.source, place.priority, ticket.bucket): place.number,
        }.items():
            assert number > self.started.get(key, 0) or not number
            self.started[key] = number

    @rule(data=st.data(), service_s=st.sampled_from(SERVICES_S))
    @precondition(lambda self: self.running)
    def finish(self, data: st.DataObject, service_s: float) -> None:
        batch = data.draw(st.sampled_from(self.running))
        self.running.remove(batch)
        for ticket in batch.tickets:
            self.schedule.finished(ticket.id, service_s)

    @rule()
    def lose_the_worker(self) -> None:
        self.schedule.lost()
        self.running.clear()

    @rule(narrow=st.booleans())
    def memory_grows_short_or_not(self, narrow: bool) -> None:
        self.schedule.narrow(narrow)
        self.most_waiting = max(1, self.limits.queue // 2) if narrow else self.limits.queue
        self.most_batches = 1 if narrow else DEPTH * self.limits.concurrency

    @rule()
    def an_answer_to_nothing(self) -> None:
        self.schedule.finished(-1, 7.0)

    @rule()
    def expire(self) -> None:
        late = [place for place in self.line if self.gives_up_at(place) <= self.now]
        assert set(self.schedule.expired(self.now)) == {place.ticket for place in late}
        self.leave(late)

    @rule(data=st.data())
    @precondition(lambda self: self.admitted)
    def withdraw(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(sorted(self.admitted)))
        waits = [place for place in self.line if place.ticket.id == ticket_id]
        assert self.schedule.withdraw(ticket_id) is bool(waits)
        self.leave(waits)

    @rule()
    def drain(self) -> None:
        assert set(self.schedule.drain()) == {place.ticket for place in self.line}
        self.leave(list(self.line))

    def leave(self, places: list[Place]) -> None:
        """Tickets that have left the queue for good."""
        for place in places:
            self.line.remove(place)
            self.left.append(place.ticket.id)

    def waiting_bytes(self) -> int:
        """Payloads that wait."""
        return sum(place.ticket.size_bytes for place in self.line)

    def work_s(self, place: Place) -> float:
        """What a waiting ticket is expected to take."""
        return self.expected_s[place.ticket.id]

    def gives_up_at(self, place: Place) -> float:
        """When a ticket is given up: known exactly only where it has a deadline before its bucket's longest wait."""
        return self.schedule._waiting[place.ticket.id].give_up_at  # noqa: SLF001 - depends on what was learned when

    @invariant()
    def nothing_is_lost_or_leaves_twice(self) -> None:
        if not hasattr(self, "line"):
            return
        assert len(self.schedule) == len(self.line)
        assert len(self.left) == len(set(self.left))
        assert self.admitted == {*self.left, *(place.ticket.id for place in self.line)}

    @invariant()
    def the_bounds_hold_and_a_source_waits_once(self) -> None:
        if not hasattr(self, "line"):
            return
        assert len(self.schedule) <= self.limits.queue
        assert self.waiting_bytes() <= self.limits.queue_bytes
        sources = [place.ticket.source for place in self.line if place.ticket.source]
        assert len(sources) == len(set(sources))

    @invariant()
    def nothing_waits_beyond_its_deadline_or_the_longest_wait(self) -> None:
        if not hasattr(self, "line"):
            return
        moments = [self.gives_up_at(place) for place in self.line]
        assert self.schedule.next_expiry() == min(moments, default=NEVER)
        longest_s = self.limits.wait_s + FULL * max(SERVICES_S) / self.limits.concurrency + 1e-6
        for place, at in zip(self.line, moments, strict=True):
            assert at <= min(place.ticket.deadline_at, place.ticket.admitted_at + longest_s)

    @invariant()
    def an_idle_worker_means_no_wait(self) -> None:
        if hasattr(self, "line") and not self.line and len(self.running) < self.limits.concurrency:
            assert self.schedule.predicted_wait_s() == 0.0


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=120, stateful_step_count=40)


def simple(**limits: float) -> Schedule[int]:
    """A schedule of one thread that knows that a request takes a second."""
    schedule: Schedule[int] = Schedule(Limits(**{"concurrency": 1, "wait_s": 1000.0, **limits}))  # type: ignore[arg-type]
    schedule.admit(Ticket(0, 0, 0.0))
    hand_out(schedule, 0.0)
    return schedule


def hand_out(schedule: Schedule[int], now: float) -> Ticket[int]:
    """The one ticket that comes next, computed in a second."""
    batch = schedule.next(now)
    assert batch is not None
    (ticket,) = batch.tickets
    schedule.finished(ticket.id, 1.0)
    return ticket


@given(frames=st.integers(1, 50), others=st.integers(0, 5))
@settings(max_examples=30)
def test_a_camera_that_is_faster_than_the_model_is_still_served_in_its_turn(frames: int, others: int) -> None:
    schedule = simple()
    numbers = itertools.count(1)

    def admit(source: str) -> int:
        ticket = Ticket(next(numbers), 0, 0.0, source=source)
        schedule.admit(ticket)
        return ticket.id

    admit("camera")
    for _ in range(others):
        admit("")
    latest = [admit("camera") for _ in range(frames)][-1]
    assert hand_out(schedule, 0.0).id == latest
    assert len(schedule) == others


@given(cameras=st.integers(1, 4), flood=st.integers(1, 10))
@settings(max_examples=30)
def test_a_flood_without_a_name_leaves_each_camera_its_share(cameras: int, flood: int) -> None:
    schedule = simple()
    numbers = itertools.count(1)
    for _ in range(flood):
        schedule.admit(Ticket(next(numbers), 0, 0.0))
    served: list[str] = []
    for second in range(40):
        for camera in range(cameras):
            schedule.admit(Ticket(next(numbers), 0, float(second), source=f"camera {camera}"))
        if len(schedule) < flood + cameras:
            schedule.admit(Ticket(next(numbers), 0, float(second)))
        served.append(hand_out(schedule, float(second)).source)
    shares = [served.count(f"camera {camera}") for camera in range(cameras)]
    assert min(shares) >= 40 // (cameras + 1) - 1
    assert served.count("") >= 40 // (cameras + 1) - 1


@given(st.lists(st.integers(1, 10), min_size=1, max_size=16))  # of one second each, as many as may wait
def test_tickets_that_came_together_leave_by_priority_and_by_arrival_within_one(priorities: list[int]) -> None:
    schedule = simple()
    for i, priority in enumerate(priorities, start=1):
        schedule.admit(Ticket(i, 0, i / 1e6, priority=priority))
    left = [hand_out(schedule, 1.0) for _ in priorities]
    assert [(ticket.priority, ticket.id) for ticket in left] == sorted((p, i) for i, p in enumerate(priorities, 1))


@given(priority=st.integers(2, 10), ageing_s=st.sampled_from([0.1, 1.0, 5.0]), crowd=st.integers(1, 10))
@settings(max_examples=40)
def test_nobody_starves_behind_an_endless_stream_of_the_most_urgent(priority: int, ageing_s: float, crowd: int) -> None:
    schedule = simple(ageing_s=ageing_s)
    patient = Ticket(1, 0, 0.0, priority=priority)
    schedule.admit(patient)
    numbers = itertools.count(2)
    now = 0.0
    for _ in range(crowd):
        schedule.admit(Ticket(next(numbers), 0, now, priority=1))
    while hand_out(schedule, now) is not patient:
        now += 1.0
        schedule.admit(Ticket(next(numbers), 0, now, priority=1))
    assert now <= (priority - 1) * ageing_s + crowd + 1


@given(deadline_s=st.integers(1, 5), now_s=st.integers(0, 6))
def test_a_ticket_is_handed_out_before_its_deadline_and_expires_at_it(deadline_s: int, now_s: int) -> None:
    schedule = simple()
    ticket = Ticket(1, 0, 0.0, float(deadline_s))
    schedule.admit(ticket)
    if now_s >= deadline_s:
        assert schedule.next(now_s) is None
        assert schedule.expired(now_s) == [ticket]
    else:
        assert schedule.expired(now_s) == []
        assert hand_out(schedule, now_s) is ticket
    assert len(schedule) == 0


@given(waiting=st.integers(1, 15), deadline_s=st.floats(0.5, 20))
def test_a_request_whose_turn_would_come_after_its_deadline_is_refused_with_a_hint(
    waiting: int, deadline_s: float
) -> None:
    schedule = simple()
    for i in range(waiting):
        schedule.admit(Ticket(i + 1, 0, 0.0))
    late = Ticket(100, 0, 0.0, deadline_s)
    if deadline_s < waiting:
        with pytest.raises(Overloaded, match="after its deadline") as refusal:
            schedule.admit(late)
        assert refusal.value.retry_after_s == pytest.approx(waiting)
    else:
        assert schedule.admit(late) is None


def test_one_slow_run_does_not_keep_requests_with_a_deadline_out_for_ever() -> None:
    schedule = simple()
    schedule.admit(Ticket(1, 0, 0.0, deadline_at=0.01))
    assert hand_out(schedule, 0.0).id == 1


@given(st.integers(1, 8))
def test_a_longest_wait_is_the_same_number_of_requests_whatever_they_take(concurrency: int) -> None:
    schedule = simple(concurrency=concurrency)
    for i in range(1, FULL + 2):
        schedule.admit(Ticket(i, 0, 0.0))
    assert schedule.predicted_wait_s() == pytest.approx((FULL + 1) / concurrency)
    with pytest.raises(Overloaded, match="it would wait"):
        schedule.admit(Ticket(100, 0, 0.0))
    assert schedule.predicted_wait_s(priority=1) == 0.0
    assert schedule.admit(Ticket(101, 0, 0.0, priority=1)) is None


def test_the_schedule_of_the_next_worker_knows_what_the_one_before_has_learned() -> None:
    before = simple()
    after: Schedule[int] = Schedule(Limits(concurrency=1))
    after.inherit(before)
    after.admit(Ticket(1, 0, 0.0))
    assert after.predicted_wait_s() == pytest.approx(1.0)


@given(narrow_s=st.floats(0.01, 1), times=st.floats(2, 20), concurrency=st.integers(1, 4))
@settings(max_examples=40)
def test_a_wide_bucket_has_a_longest_wait_of_its_own(narrow_s: float, times: float, concurrency: int) -> None:
    schedule: Schedule[int] = Schedule(Limits(concurrency=concurrency, wait_s=1.0))
    took_s = {320: narrow_s, 1280: narrow_s * times}
    for number, (width, seconds) in enumerate(took_s.items()):
        schedule.admit(Ticket(number, 0, 0.0, bucket=width))
        assert schedule.next(0.0) is not None
        schedule.finished(number, seconds)
    waiting = {width: Ticket(width, 0, 10.0, bucket=width) for width in took_s}
    for ticket in waiting.values():
        schedule.admit(ticket)
    for width, ticket in waiting.items():
        at = 10.0 + 1.0 + FULL * took_s[width] / concurrency
        assert schedule.next_expiry() == pytest.approx(at)
        assert schedule.expired(at - 1e-6) == []
        assert schedule.expired(at + 1e-6) == [ticket]
