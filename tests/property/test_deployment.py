"""Deployments under every order of failures and power cuts: what serves is old or new and verified, and all ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from appliance.core import deployment as rules
from appliance.core.deployment import Deployment, Event, Slot, SlotState, Step

pytestmark = pytest.mark.property

NAME = "scale"
GIVEN = "given"
"""Digest of the folder that the daemon was given."""
EVENTS = st.sampled_from([Event.PASSED] * 30 + [Event.FAILED, Event.LATER, Event.REVOKED, Event.SUPERSEDED])
"""Mostly passed: a trial comes after nine steps."""
MOST_BEGINS = 400


@dataclass
class Disk:
    """What survives a power cut: the journal, and the files of slots."""

    deployments: dict[int, Deployment] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    whole: dict[str, bool] = field(default_factory=dict)

    def note(self, deployment: Deployment) -> None:
        """One transaction."""
        self.deployments[deployment.id] = deployment
        slot = rules.slot_of(deployment, self.slots.get(deployment.digest))
        if slot:
            self.slots[slot.digest] = slot

    def to_serve(self, without: str = "") -> str:
        """Digest that a daemon serves which starts now."""
        slot = rules.to_serve([slot for slot in self.slots.values() if slot.digest != without], NAME)
        return slot.digest if slot else GIVEN


class Device(RuleBasedStateMachine):
    """A device whose daemon is killed between any two things that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.serving = GIVEN
        self.candidate = ""
        """Digest that a worker beside holds, in memory."""
        self.old = GIVEN
        """What a start would have served before the active deployment."""
        self.now = 0.0

    @property
    def active(self) -> Deployment | None:
        return next((one for one in self.disk.deployments.values() if not one.ended), None)

    @precondition(lambda self: self.active is None)
    @rule(version=st.integers(1, 2))
    def offered(self, version: int) -> None:
        digest = f"digest-{version}"
        if digest != self.serving:
            number, self.old = len(self.disk.deployments) + 1, self.disk.to_serve()
            self.disk.note(Deployment(number, NAME, f"{version}.0.0", digest, self.serving, started_at=self.now))

    @precondition(lambda self: self.active is not None)
    @rule(event=EVENTS, cut=st.sampled_from([""] * 18 + ["begun", "done"]))
    def stepped(self, event: Event, cut: str) -> None:
        active = self.active
        assert active
        begun = rules.begin(active, self.now)
        self.disk.note(begun)
        if cut == "begun":
            self.restarted()
        elif begun.at is active.at:
            event = self.perform(begun, event)
            if cut == "done":
                self.restarted()
            else:
                self.disk.note(rules.after(begun, event, self.now, reason="because"))

    def perform(self, begun: Deployment, event: Event) -> Event:
        """What a step does to disk and memory; the event that it really ends with."""
        if (begun.at, event) not in rules.TABLE:
            event = Event.FAILED
        slot = self.disk.slots.get(begun.digest)
        if begun.at in {Step.RESERVE, Step.FETCH} and not (slot and slot.state == SlotState.GOOD.value):
            self.disk.whole[begun.digest] = begun.at is Step.FETCH and event is Event.PASSED
        if begun.at is Step.VERIFY and event is Event.PASSED and not self.disk.whole.get(begun.digest):
            event = Event.FAILED
        if begun.at is Step.PROVE and event is Event.PASSED:
            self.candidate = begun.digest
        if begun.at in {Step.MEMORY, Step.LATENCY, Step.SHADOW, Step.SWITCH}:
            assert self.candidate == begun.digest
        if event is not Event.PASSED:
            self.candidate = ""
        if begun.at is Step.SWITCH and event is Event.PASSED:
            self.serving = begun.digest
        if begun.at is Step.BACK and event is Event.PASSED:
            back = rules.to_go_back_to(begun, self.disk.slots.values())
            self.serving = GIVEN if back is None or begun.previous == GIVEN else back.digest
        return event

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def power_cut(self, really: bool) -> None:
        if really:
            self.restarted()

    def restarted(self) -> None:
        for one in rules.resume(self.disk.deployments.values(), self.now):
            self.disk.note(one)
        self.serving, self.candidate = self.disk.to_serve(), ""

    @precondition(lambda self: self.active is None and self.disk.slots.get(self.serving))
    @rule(event=st.sampled_from([Event.FAILED, Event.REVOKED]))
    def wanted_back(self, event: Event) -> None:
        brought = [one for one in self.disk.deployments.values() if one.digest == self.serving]
        latest = max(brought, key=lambda one: one.id)
        if latest.at is Step.GOOD:
            self.old = self.disk.to_serve(without=self.serving)
            self.disk.note(rules.after(latest, event, self.now, reason="wanted back"))

    @invariant()
    def what_a_start_would_serve_is_old_or_new_and_verified(self) -> None:
        served = self.disk.to_serve()
        if served != GIVEN:
            assert self.disk.whole[served]
            assert self.disk.slots[served].state in {SlotState.TRIAL.value, SlotState.GOOD.value}
        if self.active:
            assert served in {self.active.digest, self.old}
            assert self.active.at is not Step.BACK or served != self.active.digest

    @invariant()
    def every_slot_that_is_not_bad_is_whole(self) -> None:
        assert all(self.disk.whole.get(slot.digest) for slot in self.disk.slots.values() if slot.state != "bad")

    @invariant()
    def what_serves_now_is_what_was_meant(self) -> None:
        active = self.active
        if active and active.at is Step.TRIAL:
            assert self.serving == active.digest
        if self.serving != GIVEN:
            assert self.disk.whole[self.serving]

    @invariant()
    def one_deployment_is_under_way_at_most(self) -> None:
        assert sum(not one.ended for one in self.disk.deployments.values()) <= 1

    @invariant()
    def what_may_be_needed_is_kept(self) -> None:
        kept = rules.kept(list(self.disk.slots.values()), self.disk.deployments.values(), [self.serving])
        assert {self.serving, self.disk.to_serve()} - {GIVEN} <= kept
        if self.active:
            assert {self.active.digest, self.active.previous} <= kept


Device.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestDevice = Device.TestCase


@given(st.lists(st.sampled_from([*Event]), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_over_and_over_a_deployment_ends(events: list[Event]) -> None:
    deployment = Deployment(1, NAME, "2.0.0", "digest-2", GIVEN, started_at=0.0)
    for count, event in enumerate(itertools.cycle(events)):
        if deployment.ended:
            break
        assert count < MOST_BEGINS, deployment
        begun = rules.begin(deployment, 0.0)
        if begun.at is deployment.at:
            begun = rules.after(begun, event if (begun.at, event) in rules.TABLE else Event.FAILED, 0.0)
        deployment = begun
    assert sum(deployment.begins.values()) <= MOST_BEGINS


@given(st.lists(st.sampled_from([*Event]), max_size=30))
def test_a_version_serves_for_good_only_if_every_step_passed(events: list[Event]) -> None:
    deployment = Deployment(1, NAME, "2.0.0", "digest-2", GIVEN, started_at=0.0)
    for event in events:
        if not deployment.ended:
            deployment = rules.after(rules.begin(deployment, 0.0), event, 0.0)
    if deployment.at is Step.GOOD:
        passed = {one.step for one in deployment.verdicts if one.event == Event.PASSED.value}
        assert passed == {step.value for step, event in rules.TABLE if event is Event.PASSED} - {Step.BACK.value}
