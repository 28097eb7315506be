"""A campaign against a fleet that does as it likes: it never hurries, never hangs, and stops when it should."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import campaign as rules
from appliance.core.campaign import Candidate, Figures, Plan, Progress, Stop, Tally, Wave

pytestmark = pytest.mark.property

GOOD, BACK, SILENT = "good", "back", "silent"
SHARES = st.integers(0, 20).map(lambda twentieth: twentieth / 20)
NOTHING = Figures()


def tally(wanted: int, committed: int, back: int, stuck: int) -> Tally:
    return Tally(wanted, committed, back, stuck)


TALLIES = st.lists(st.integers(0, 12), min_size=4, max_size=4).map(
    lambda parts: tally(sum(parts), parts[0], parts[1], parts[2])
)


def plan(waves: int, needed_share: float = 0.9, rollback_share: float = 0.1) -> Plan:
    each = tuple(Wave(percent=100 * (i + 1) / waves) for i in range(waves))
    return rules.check(Plan("n", "m", "2", each, needed_share, 60.0, Stop(rollback_share)))


PLANS = st.builds(plan, st.integers(1, 4), SHARES, SHARES)


@dataclass
class Fleet:
    """Devices by wave, and what each will do when it is asked; one answers at a time, in a drawn order."""

    devices: list[list[str]]
    answered: list[tuple[int, int]] = field(default_factory=list)
    over: bool = False
    """Whether the patience with those that are silent has ended."""

    def tallies(self) -> list[Tally]:
        return [
            Tally(
                len(wave),
                *(sum(self._said(i, j, word) for j in range(len(wave))) for word in (GOOD, BACK)),
                stuck=sum(self.over and (i, j) not in self.answered for j in range(len(wave))),
            )
            for i, wave in enumerate(self.devices)
        ]

    def _said(self, wave: int, device: int, word: str) -> bool:
        return (wave, device) in self.answered and self.devices[wave][device] == word

    def can_answer(self, asked: int) -> list[tuple[int, int]]:
        return [
            (i, j)
            for i, wave in enumerate(self.devices[:asked])
            for j, word in enumerate(wave)
            if word != SILENT and (i, j) not in self.answered
        ]


FLEETS = st.lists(st.lists(st.sampled_from([GOOD, GOOD, GOOD, BACK, SILENT]), max_size=8), min_size=4, max_size=4)


@given(plan=PLANS, devices=FLEETS, data=st.data())
def test_a_campaign_comes_to_rest_and_each_wave_waits_for_the_one_before(
    plan: Plan, devices: list[list[str]], data: st.DataObject
) -> None:
    fleet, progress = Fleet(devices[: len(plan.waves)]), Progress()
    for _step in range(200):
        tallies = fleet.tallies()
        after = rules.step(plan, progress, tallies, NOTHING)
        assert progress.wave <= after.wave <= progress.wave + 1
        if after.wave > progress.wave > 0:
            before = tallies[progress.wave - 1]
            assert before.waiting == 0
            assert before.committed >= rules.needed(plan, before.wanted)
        moved, progress = after.wave > progress.wave, after
        if moved:
            continue
        waiting = fleet.can_answer(progress.wave)
        if progress.state in rules.ENDED:
            break
        if waiting:
            fleet.answered.append(data.draw(st.sampled_from(waiting)))
        elif not fleet.over:
            fleet.over = True
        else:  # all have answered who ever will: what it waits for are too many silent ones
            stuck = fleet.tallies()[progress.wave - 1]
            assert stuck.committed < rules.needed(plan, stuck.wanted)
            assert stuck.stuck
            break
    else:
        pytest.fail("it goes on for ever")
    if progress.state == rules.DONE:
        assert all(one.rolled_back <= plan.stop.rollback_share * one.wanted + 1e-6 for one in fleet.tallies())
    if progress.state == rules.STOPPED:
        assert any(one.rolled_back for one in fleet.tallies()[: progress.wave])
        assert "rolled back" in progress.reason


@given(plan=PLANS, wave=st.integers(0, 4), tallies=st.lists(TALLIES, min_size=4, max_size=4))
def test_what_has_ended_stays_ended_and_a_pause_asks_nobody(plan: Plan, wave: int, tallies: list[Tally]) -> None:
    wave = min(wave, len(plan.waves))
    for state in rules.ENDED:
        ended = Progress(state, wave, "why")
        assert rules.step(plan, ended, tallies, NOTHING) == ended
    paused = rules.step(plan, Progress(rules.PAUSED, wave), tallies, NOTHING)
    assert paused.wave == wave
    assert paused.state in {rules.PAUSED, rules.STOPPED}


@given(wanted=st.integers(2, 500))
def test_one_stuck_device_blocks_no_wave_by_default(wanted: int) -> None:
    passed = rules.step(plan(2), Progress(rules.RUNNING, 1), [tally(wanted, wanted - 1, 0, 1), Tally(1)], NOTHING)
    assert (passed.state, passed.wave) == (rules.RUNNING, 2)


@given(plan=PLANS, count=st.integers(1, 60))
def test_percentages_take_what_they_say_and_the_same_devices_whoever_computes_it(plan: Plan, count: int) -> None:
    devices = [Candidate(f"d{i}") for i in range(count)]
    waves = rules.assigned(plan, devices)
    assert waves == rules.assigned(plan, reversed(devices))
    assert set(waves) == {device.device_id for device in devices}  # the last wave takes all
    for number, wave in enumerate(plan.waves, 1):
        taken = sum(found <= number for found in waves.values())
        assert count * wave.percent / 100 <= taken + 1e-6
        assert taken < count * wave.percent / 100 + 1


@given(
    groups=st.lists(st.frozensets(st.sampled_from("abc"), max_size=2), min_size=1, max_size=20),
    order=st.permutations("abc"),
)
def test_a_device_of_several_groups_is_in_the_first_wave_that_takes_it(
    groups: list[frozenset[str]], order: list[str]
) -> None:
    by_group = Plan("n", "m", "2", tuple(Wave(group=name) for name in order))
    waves = rules.assigned(by_group, [Candidate(f"d{i}", found) for i, found in enumerate(groups)])
    for i, found in enumerate(groups):
        expected = min((order.index(name) + 1 for name in found), default=None)
        assert waves.get(f"d{i}") == expected
