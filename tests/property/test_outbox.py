"""Whatever happens to a link, the outbox keeps its promises."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from appliance.core.clock import RELEASED_AT
from appliance.core.outbox import Kind, Outbox, Publication, Rules

pytestmark = pytest.mark.property

RULES = Rules(most_bytes=3000, age_s=100.0, window=4, replay_per_s=2.0)
MOST_TELEMETRY = 1000


class Link(RuleBasedStateMachine):
    """A device that puts, and a broker that takes, acknowledges, refuses and goes away."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox, self.now, self.number = Outbox(RULES), 1000.0, 0
        self.results: set[int] = set()
        """Put, and not settled."""
        self.sent: list[Publication] = []
        """On this connection, not acknowledged."""
        self.telemetry_sent_at: list[float] = []

    @rule(kind=st.sampled_from(Kind), size_bytes=st.integers(0, MOST_TELEMETRY))
    def put(self, kind: Kind, size_bytes: int) -> None:
        self.number += 1
        dropped = self.outbox.put(Publication(self.number, kind, "t", bytes(size_bytes), RELEASED_AT + self.now))
        assert not self.results & set(dropped)
        if kind is Kind.RESULT:
            self.results.add(self.number)

    @rule(passed_s=st.floats(0, 200))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        assert not self.results & set(self.outbox.aged(RELEASED_AT + self.now))

    @rule(window=st.integers(1, 8))
    def send(self, window: int) -> None:
        taken = self.outbox.take(self.now, window)
        assert not {one.number for one in taken} & {one.number for one in self.sent}
        assert len(self.sent) + len(taken) <= max(window, len(self.sent))
        self.sent += taken
        self.telemetry_sent_at += [self.now for one in taken if one.kind is Kind.TELEMETRY]
        kinds = [one.kind for one in taken]
        assert kinds == sorted(kinds, key=list(Kind).index)
        if not taken and self.outbox.wait_s(self.now, window) is None:
            assert self.outbox.in_flight == len(self.outbox) or self.outbox.in_flight >= min(window, RULES.window)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sent))
        self.sent.remove(one)
        self.results.discard(one.number)
        self.outbox.settled(one.number)

    @rule()
    def lose_the_link(self) -> None:
        self.sent.clear()
        assert not self.results & set(self.outbox.disconnected())

    @invariant()
    def every_result_is_there_until_the_broker_has_it(self) -> None:
        assert {one.number for one in self.outbox if one.kind is Kind.RESULT} == self.results

    @invariant()
    def the_window_holds(self) -> None:
        assert self.outbox.in_flight == len(self.sent) <= RULES.window

    @invariant()
    def telemetry_keeps_within_its_bounds(self) -> None:
        held = list(self.outbox)
        assert self.outbox.size_bytes == sum(one.size_bytes for one in held)
        flying = {one.number for one in self.sent}
        spare = [one for one in held if one.kind is Kind.TELEMETRY and one.number not in flying]
        assert not spare or self.outbox.size_bytes <= RULES.most_bytes

    @invariant()
    def telemetry_keeps_its_pace(self) -> None:
        lately = [at for at in self.telemetry_sent_at if at > self.now - 10]
        assert len(lately) <= RULES.window + 10 * RULES.replay_per_s + 1


TestLink = Link.TestCase
