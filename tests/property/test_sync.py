"""How much is told at once and in a day: bounds that hold at every moment, whatever the server answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.sync import HOUR_S, Allowance, Fit
from models.sync import MOST_ITEMS

pytestmark = pytest.mark.property

SPENDING = st.lists(st.tuples(st.floats(0, 30 * HOUR_S), st.integers(0, 2000)), max_size=60)


@given(SPENDING, st.integers(1000, 20_000))
def test_in_no_24_hours_is_more_exchanged_than_allowed(steps: list[tuple[float, int]], day_bytes: int) -> None:
    now, allowance, spent = 5.0, Allowance(day_bytes, 5.0), list[tuple[float, int]]()
    for passed_s, wanted_bytes in steps:
        now += passed_s
        taken = min(wanted_bytes, int(allowance.left_bytes(now)))
        allowance.spend(now, taken)
        spent.append((now, taken))
        assert sum(size for at, size in spent if at > now - 24 * HOUR_S) <= day_bytes


@given(SPENDING, st.integers(1000, 20_000), st.integers(1, 1000))
def test_after_the_wait_that_is_told_there_is_enough(
    steps: list[tuple[float, int]], day_bytes: int, need_bytes: int
) -> None:
    now, allowance = 5.0, Allowance(day_bytes, 5.0)
    for passed_s, size_bytes in steps:
        now += passed_s
        allowance.spend(now, size_bytes)
    wait_s = allowance.wait_s(now, need_bytes)
    assert 0 <= wait_s <= 25 * HOUR_S
    assert allowance.left_bytes(now + wait_s + 1e-3) >= need_bytes
    assert (wait_s == 0) == (allowance.left_bytes(now) >= need_bytes)


def test_without_a_limit_there_is_always_more() -> None:
    allowance = Allowance(0, 0.0)
    allowance.spend(0.0, 10**12)
    assert allowance.left_bytes(1.0) == float("inf")
    assert allowance.wait_s(1.0, 10**12) == 0


@given(st.integers(1, MOST_ITEMS), st.data())
def test_of_a_batch_with_one_bad_item_that_one_is_found_and_the_others_pass(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(1, count))
    waiting, fit, tries = list(range(1, count + 1)), Fit(), 0
    while bad in waiting:
        tries += 1
        assert tries < 60 + 3 * count
        batch = waiting[: fit.most_items]
        if bad in batch:
            fit.not_understood(batch)
            continue
        waiting = waiting[len(batch) :]
        guilty = fit.passed(1000)
        if guilty is not None:
            assert guilty == bad
            waiting.remove(guilty)
    assert fit.suspect is None


def test_an_item_that_is_refused_once_is_tried_again() -> None:
    fit = Fit()
    fit.not_understood([7])
    assert (fit.most_items, fit.passed(1000)) == (0, None)
    fit.not_understood([7])
    assert fit.passed(1000) == 7


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_a_batch_that_was_too_large_is_followed_by_a_smaller_one(said: list[int]) -> None:
    fit = Fit()
    for most_bytes in said:
        before = fit.most_bytes
        fit.too_large(most_bytes)
        assert 1 <= fit.most_bytes < before or fit.most_bytes == 1
