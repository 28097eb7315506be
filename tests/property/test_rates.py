"""Limits of clients: never more than allowed, nobody held back below it, nothing kept of those who are idle."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.rates import Rate, Rates
from models.errors import TooMany

pytestmark = pytest.mark.property

NO_BOUND = Rate(0, 10**9)
STEPS = st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from("ab")), max_size=200)


@given(STEPS, st.sampled_from([0.5, 1.0, 3.0, 10.0]))
def test_no_second_has_more_requests_than_allowed_and_one_burst(steps: list[tuple[float, str]], per_s: float) -> None:
    rates = Rates(client=Rate(per_s, 10**9), everyone=NO_BOUND)
    taken: dict[str, list[float]] = {"a": [], "b": []}
    now = 0.0
    for pause_s, client in steps:
        now += pause_s
        with contextlib.suppress(TooMany):
            rates.enter(client, now)
            taken[client].append(now)
    for times in taken.values():
        for i, start in enumerate(times):
            window = [at for at in times[i:] if at <= start + 1.0]
            assert len(window) <= 2 * max(per_s, 1) + 1


@given(st.sampled_from([0.5, 1.0, 3.0, 10.0]), st.integers(1, 60))
def test_who_keeps_to_the_pace_is_never_refused(per_s: float, count: int) -> None:
    rates = Rates(client=Rate(per_s, 1), everyone=Rate(per_s, 1))
    for i in range(count):
        rates.enter("a", i / per_s + 1e-6 * i)
        rates.leave("a")


@given(st.sampled_from([0.5, 2.0, 7.0]))
def test_who_waits_as_long_as_told_is_taken(per_s: float) -> None:
    rates = Rates(client=Rate(per_s, 10**9), everyone=NO_BOUND)
    for _ in range(int(max(per_s, 1))):
        rates.enter("a", 0.0)
    with pytest.raises(TooMany) as refused:
        rates.enter("a", 0.0)
    rates.enter("a", refused.value.retry_after_s + 1e-6)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=100))
def test_requests_in_hand_stay_within_both_bounds_and_all_come_free_again(steps: list[tuple[bool, str]]) -> None:
    rates = Rates(client=Rate(0, 2), everyone=Rate(0, 4))
    running = dict.fromkeys("abc", 0)
    for enters, client in steps:
        if not enters:
            if running[client]:
                rates.leave(client)
                running[client] -= 1
            continue
        full = running[client] == 2 or sum(running.values()) == 4
        try:
            rates.enter(client, 0.0)
        except TooMany:
            assert full
        else:
            assert not full
            running[client] += 1


def test_one_clients_greed_leaves_the_others_their_share() -> None:
    rates = Rates(client=Rate(1.0, 8), everyone=NO_BOUND)
    rates.enter("greedy", 0.0)
    with pytest.raises(TooMany, match="this client may make 1 requests a second"):
        rates.enter("greedy", 0.1)
    rates.enter("modest", 0.1)


def test_a_request_refused_for_all_is_not_charged_to_its_client() -> None:
    rates = Rates(client=Rate(1.0, 8), everyone=Rate(0, 1))
    rates.enter("a", 0.0)
    with pytest.raises(TooMany, match="all clients together may have 1 requests in hand"):
        rates.enter("b", 0.0)
    rates.leave("a")
    rates.enter("b", 0.0)


def test_clients_that_came_once_are_forgotten() -> None:
    rates = Rates(client=Rate(1.0, 8), everyone=NO_BOUND)
    for i in range(5000):
        rates.enter(f"client {i}", float(i))
        rates.leave(f"client {i}")
    assert len(rates._clients) <= 1025  # noqa: SLF001 - what is kept shows nowhere else
