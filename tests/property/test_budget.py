"""The memory budget against a plain dict: leases are returned once, the sum keeps to the total, evictions are few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.core.budget import MIB, Budget, Holding, Lease, admit, bucket_of, idle, need_of, run_bytes_of
from appliance.core.pressure import Bounds, Pressure, Step
from models.errors import InsufficientMemory
from models.measurements import Memory

pytestmark = pytest.mark.property

TERMS = st.dictionaries(st.sampled_from(["weights", "activations", "load", "batch"]), st.integers(0, 60), max_size=3)
HOLDINGS = st.lists(
    st.builds(
        Holding,
        name=st.uuids().map(str),
        size_bytes=st.integers(0, 100),
        priority=st.integers(1, 4),
        used_at=st.integers(0, 9).map(float),
        busy=st.booleans(),
    ),
    max_size=7,
)


class BudgetMachine(RuleBasedStateMachine):
    """Takes, changes and returns leases in any order."""

    @initialize(total_bytes=st.integers(0, 150))
    def start(self, total_bytes: int) -> None:
        self.budget = Budget(total_bytes)
        self.out: dict[int, Lease] = {}
        self.returned: list[Lease] = []

    @property
    def free_bytes(self) -> int:
        return self.budget.total_bytes - sum(lease.size_bytes for lease in self.out.values())

    @rule(holder=st.sampled_from("ab"), terms=TERMS)
    def take(self, holder: str, terms: Mapping[str, int]) -> None:
        size_bytes = sum(terms.values())
        if size_bytes > self.free_bytes:
            with pytest.raises(InsufficientMemory) as refused:
                self.budget.take(holder, terms)
            assert (refused.value.need_bytes, refused.value.have_bytes) == (size_bytes, self.free_bytes)
            return
        lease = self.budget.take(holder, terms)
        assert lease.id not in self.out
        self.out[lease.id] = lease

    @precondition(lambda self: self.out)
    @rule(data=st.data(), terms=TERMS)
    def change(self, data: st.DataObject, terms: Mapping[str, int]) -> None:
        lease = data.draw(st.sampled_from(list(self.out.values())))
        if sum(terms.values()) > self.free_bytes + lease.size_bytes:
            with pytest.raises(InsufficientMemory):
                self.budget.change(lease, terms)
            return
        changed = self.budget.change(lease, terms)
        assert (changed.id, changed.holder, dict(changed.terms)) == (lease.id, lease.holder, dict(terms))
        self.out[lease.id] = changed

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.out.values())))
        self.budget.give_back(lease)
        del self.out[lease.id]
        self.returned.append(lease)

    @precondition(lambda self: self.returned)
    @rule(data=st.data())
    def give_back_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.returned))
        with pytest.raises(KeyError):
            self.budget.give_back(lease)
        with pytest.raises(KeyError):
            self.budget.change(lease, {})

    @invariant()
    def the_sum_is_that_of_the_leases_and_never_above_the_total(self) -> None:
        if not hasattr(self, "out"):
            return
        assert list(self.budget) == list(self.out.values())
        assert self.budget.leased_bytes + self.budget.free_bytes == self.budget.total_bytes
        assert self.budget.free_bytes == self.free_bytes >= 0
        for holder in "ab":
            assert sum(self.budget.by_term(holder).values()) == sum(
                lease.size_bytes for lease in self.out.values() if lease.holder == holder
            )


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=60, stateful_step_count=30)


def freed(names: Sequence[str], holdings: Sequence[Holding]) -> int:
    return sum(one.size_bytes for one in holdings if one.name in names)


@given(need=st.integers(0, 300), have=st.integers(0, 100), holdings=HOLDINGS, priority=st.integers(1, 4))
def test_an_eviction_makes_room_and_nobody_goes_needlessly(
    need: int, have: int, holdings: list[Holding], priority: int
) -> None:
    before = list(holdings)
    admission = admit(need, have, holdings, priority=priority)
    assert holdings == before
    assert (admission.need_bytes, admission.have_bytes) == (need, have)
    evicted = admission.would_evict
    may_go = [one for one in holdings if not one.busy and one.priority >= priority]
    assert admission.fits is (have + freed([one.name for one in may_go], holdings) >= need)
    if admission.fits:
        assert set(evicted) <= {one.name for one in may_go}
    if admission.fits or evicted:
        assert have + freed(evicted, holdings) >= need
        for name in evicted:
            assert have + freed([other for other in evicted if other != name], holdings) < need
    else:
        assert have + freed([one.name for one in holdings], holdings) < need


@given(holdings=HOLDINGS, missing=st.integers(1, 20))
def test_of_models_of_one_size_the_least_important_goes_first_then_the_one_idle_for_longest(
    holdings: list[Holding], missing: int
) -> None:
    alike = [Holding(one.name, 10, one.priority, one.used_at) for one in holdings]
    admission = admit(missing, 0, alike, priority=1)
    order = sorted(alike, key=lambda one: (-one.priority, one.used_at, one.name))
    count = -(-missing // 10)
    expected = [one.name for one in order[:count]] if len(order) >= count else []
    assert list(admission.would_evict) == expected


@given(holdings=HOLDINGS, now=st.integers(0, 20).map(float), after_s=st.integers(1, 10).map(float))
def test_idle_models_are_those_that_nobody_used_for_long_enough(
    holdings: list[Holding], now: float, after_s: float
) -> None:
    found = idle(holdings, now, after_s)
    assert set(found) == {one.name for one in holdings if not one.busy and one.used_at <= now - after_s}
    used_at = {one.name: one.used_at for one in holdings}
    assert [used_at[name] for name in found] == sorted(used_at[name] for name in found)


@given(
    runs=st.dictionaries(st.integers(1, 2**40), st.integers(0, 2**40), max_size=5),
    weights=st.integers(0, 2**40),
    peak=st.integers(0, 2**40),
    overhead=st.integers(0, 2**33),
    at_once=st.integers(1, 8),
)
def test_the_lease_for_loading_covers_both_the_peak_of_loading_and_serving_afterwards(
    runs: Mapping[int, int], weights: int, peak: int, overhead: int, at_once: int
) -> None:
    memory = Memory(weights, peak)
    for input_bytes, run in runs.items():
        memory = memory.learned("g", bucket_of(input_bytes), run)
    need = need_of(memory, overhead_bytes=overhead, file_bytes=1, runs=at_once)
    serving, loading = sum(need.terms.values()), sum(need.loading_terms.values())
    assert loading >= serving >= overhead + weights + at_once * max(runs.values(), default=0) + 32 * MIB
    assert loading >= overhead + peak + 32 * MIB
    for input_bytes, run in runs.items():
        assert run_bytes_of(memory, "g", input_bytes) >= min(run, need.run_bytes)


@given(sizes=st.lists(st.integers(1, 2**30), min_size=2, max_size=2))
def test_a_larger_request_is_never_expected_to_take_less_than_the_largest_that_was_measured(sizes: list[int]) -> None:
    small, large = sorted(sizes)
    memory = Memory(0, 0).learned("g", bucket_of(small), 1000)
    assert run_bytes_of(memory, "g", small) == 1000
    assert run_bytes_of(memory, "g", large) >= 1000 * bucket_of(large) // bucket_of(small)


BOUNDS = Bounds(low_bytes=100, calm_bytes=200)
SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 5.0]),
        st.one_of(st.none(), st.integers(0, 300)),
        st.one_of(st.none(), st.integers(0, 40).map(float)),
    ),
    max_size=60,
)


@given(samples=SAMPLES)
def test_steps_are_climbed_one_by_one_while_memory_is_tight_and_descended_after_lasting_calm(
    samples: list[tuple[float, int | None, float | None]],
) -> None:
    pressure, now, calm_for_s = Pressure(), 0.0, 0.0
    for passed_s, available, stall in samples:
        now += passed_s
        tight = (available is not None and available < 100) or (stall is not None and stall >= 20)
        calm = not tight and (available is None or available >= 200) and (stall is None or stall < 5)
        calm_for_s = calm_for_s + passed_s if calm else 0.0
        later = pressure.after(now, BOUNDS, available_bytes=available, stall=stall)
        change = later.step - pressure.step
        assert abs(change) <= 1
        if change > 0:
            assert tight
        if change < 0:
            assert calm_for_s >= BOUNDS.down_s
        pressure = later


def test_memory_that_stays_tight_reaches_the_last_step_and_calm_leads_back_to_normal() -> None:
    pressure = Pressure()
    steps = []
    for now in range(60):
        pressure = pressure.after(float(now), BOUNDS, available_bytes=50 if now < 10 else 250, stall=0.0)
        steps.append(pressure.step)
    assert steps[0] is Step.REFUSE_LOW
    assert steps[4] is Step.UNLOAD_IDLE
    assert steps[9] is Step.UNLOAD_IDLE
    assert steps[-1] is Step.NORMAL
