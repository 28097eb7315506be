"""What a worker holds against a plain list: who is told of a deadline, and when a worker counts as hung."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.core.schedule import Ticket
from appliance.core.watch import NEVER, Watch

pytestmark = pytest.mark.property

HANG_S = 5.0
IDLE_S = 7.0


@dataclass(slots=True)
class Run:
    """A request that a worker holds, as a test remembers it."""

    ticket: Ticket[str]
    heard_at: float | None = None
    told: bool = False


class WatchMachine(RuleBasedStateMachine):
    """Hands over, answers and hears of requests while time goes on."""

    @initialize(concurrency=st.integers(1, 3))
    def start(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.watch: Watch[str] = Watch(concurrency=concurrency, hang_s=HANG_S, idle_s=IDLE_S)
        self.rests_at: float | None = None
        self.ids = itertools.count(1)
        self.now = 100.0
        self.held: list[Run] = []

    def begin(self) -> None:
        """The first few run, in the order handed over."""
        for run in self.held[: self.concurrency]:
            run.heard_at = self.now if run.heard_at is None else run.heard_at

    @rule(wait_s=st.one_of(st.just(NEVER), st.integers(1, 12).map(float)))
    def take(self, wait_s: float) -> None:
        ticket = Ticket(next(self.ids), "x", self.now, self.now + wait_s)
        self.watch.take(ticket, self.now)
        self.held.append(Run(ticket))
        self.begin()

    @rule()
    def becomes_ready(self) -> None:
        self.watch.rest(self.now)
        self.rests_at = self.now

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def answer(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.held))
        assert self.watch.leave(run.ticket.id, self.now).ticket is run.ticket
        self.held.remove(run)
        self.rests_at = self.now
        self.begin()
        with pytest.raises(KeyError):
            self.watch.leave(run.ticket.id, self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def progress(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.held[: self.concurrency]))
        self.watch.heard(run.ticket.id, self.now)
        run.heard_at = self.now

    @rule()
    def deadlines(self) -> None:
        late = [run for run in self.held if run.ticket.deadline_at <= self.now and not run.told]
        assert self.watch.overdue(self.now) == [run.ticket for run in late]
        for run in late:
            run.told = True

    @rule()
    def lose(self) -> None:
        assert self.watch.clear() == [run.ticket for run in self.held]
        self.held.clear()

    @invariant()
    def a_worker_is_hung_exactly_when_a_begun_request_was_silent_for_too_long(self) -> None:
        if not hasattr(self, "held"):
            return
        silent = [run for run in self.held if run.heard_at is not None and self.now - run.heard_at >= HANG_S]
        assert self.watch.hung(self.now) is bool(silent)
        assert len(self.watch) == len(self.held)

    @invariant()
    def a_worker_is_idle_exactly_when_nothing_was_asked_of_it_for_long(self) -> None:
        if not hasattr(self, "held"):
            return
        idle = not self.held and self.rests_at is not None and self.now - self.rests_at >= IDLE_S
        assert self.watch.idle(self.now) is idle

    @invariant()
    def nothing_new_happens_before_the_next_moment_and_something_does_at_it(self) -> None:
        if not hasattr(self, "held"):
            return
        assert self.watch.deadline_at == min(
            (run.ticket.deadline_at for run in self.held if not run.told), default=NEVER
        )
        rests = [] if self.held or self.rests_at is None else [self.rests_at + IDLE_S]
        hangs = [run.heard_at + HANG_S for run in self.held if run.heard_at is not None]
        assert self.watch.alarm_at == min([*rests, *hangs], default=NEVER)


TestWatch = WatchMachine.TestCase
TestWatch.settings = settings(max_examples=60, stateful_step_count=30)


@given(count=st.integers(1, 8), concurrency=st.integers(1, 4), run_s=st.floats(0.1, HANG_S * 0.9))
def test_requests_that_only_wait_their_turn_are_never_taken_for_hung(
    count: int, concurrency: int, run_s: float
) -> None:
    watch: Watch[int] = Watch(concurrency=concurrency, hang_s=HANG_S)
    now = 0.0
    for i in range(count):
        watch.take(Ticket(i, i, now, NEVER), now)
    for first in range(0, count, concurrency):
        now += run_s
        assert not watch.hung(now)
        for i in range(first, min(first + concurrency, count)):
            watch.leave(i, now)
    assert watch.alarm_at == NEVER


def test_a_request_that_leaves_before_its_place_in_line_had_begun_by_then() -> None:
    watch: Watch[str] = Watch(concurrency=1, hang_s=HANG_S)
    for number in (1, 2):
        watch.take(Ticket(number, "x", 0.0, NEVER), 0.0)
    assert watch.leave(2, 3.0).began_at == 3.0
    assert watch.leave(1, 4.0).began_at == 0.0
