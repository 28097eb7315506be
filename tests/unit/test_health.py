"""The life of a worker: which state follows which event, and how long a faulty one waits."""

from __future__ import annotations

import pytest

from appliance.core.health import CALM_S, FIRST_WAIT_S, LONGEST_WAIT_S, TABLE, Event, State, WorkerHealth

pytestmark = pytest.mark.unit


def crash(health: WorkerHealth, now: float) -> WorkerHealth:
    """The health after a crash and, as soon as allowed, a restart."""
    health = health.after(Event.EXITED, now, "it crashed")
    return health.after(Event.DUE, health.retry_at)


def test_a_worker_loads_becomes_ready_crashes_and_loads_again() -> None:
    health = WorkerHealth()
    states = [health.state]
    for event in (Event.BECAME_READY, Event.EXITED, Event.DUE, Event.BECAME_READY):
        health = health.after(event, 1.0)
        states.append(health.state)
    assert states == [State.LOADING, State.READY, State.WAITING, State.LOADING, State.READY]
    assert (health.restarts, health.faults) == (1, 1)


def test_the_first_fault_is_answered_by_an_immediate_restart() -> None:
    health = WorkerHealth().after(Event.BECAME_READY, 1.0).after(Event.EXITED, 5.0, "it crashed")
    assert (health.retry_at, health.reason) == (5.0, "it crashed")


def test_faults_in_a_row_wait_twice_as_long_each_time_up_to_a_bound() -> None:
    health, now, waits = WorkerHealth(), 0.0, []
    for _ in range(12):
        health = health.after(Event.EXITED, now)
        waits.append(health.retry_at - now)
        now = health.retry_at
        health = health.after(Event.DUE, now)
    assert waits[:4] == [0.0, FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits[-1] == LONGEST_WAIT_S
    assert waits == sorted(waits)


def test_a_worker_that_has_failed_for_years_still_waits_no_longer_than_the_bound() -> None:
    health = WorkerHealth(faults=10**9).after(Event.EXITED, 5.0)
    assert health.retry_at == 5.0 + LONGEST_WAIT_S


def test_a_worker_that_crashes_soon_after_each_start_is_not_forgiven() -> None:
    health = WorkerHealth()
    for fault in range(1, 4):
        health = crash(health.after(Event.BECAME_READY, fault * 100.0), fault * 100.0 + CALM_S - 1)
        assert health.faults == fault


def test_a_worker_that_stayed_up_is_forgiven_its_earlier_faults() -> None:
    health = crash(crash(WorkerHealth(), 0.0), 1.0).after(Event.BECAME_READY, 10.0)
    assert health.faults == 2
    health = health.after(Event.EXITED, 10.0 + CALM_S)
    assert (health.faults, health.retry_at) == (1, 10.0 + CALM_S)


def test_the_reason_stays_while_it_is_restarted_and_goes_when_it_is_ready() -> None:
    health = WorkerHealth().after(Event.EXITED, 1.0, "bad graph").after(Event.DUE, 2.0)
    assert (health.state, health.reason) == (State.LOADING, "bad graph")
    assert health.after(Event.BECAME_READY, 3.0).reason == ""


@pytest.mark.parametrize("state", State)
def test_a_worker_can_be_stopped_in_every_state_and_its_exit_is_then_no_fault(state: State) -> None:
    stopped = WorkerHealth(state).after(Event.STOP, 1.0).after(Event.EXITED, 2.0)
    assert (stopped.state, stopped.faults) == (State.STOPPED, 0)


def test_a_worker_that_was_loading_when_it_was_told_to_stop_may_still_say_that_it_is_ready() -> None:
    assert WorkerHealth().after(Event.STOP, 1.0).after(Event.BECAME_READY, 2.0).state is State.STOPPED


def test_a_stopped_worker_never_comes_back() -> None:
    assert {after for (before, _event), after in TABLE.items() if before is State.STOPPED} == {State.STOPPED}


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.READY, Event.BECAME_READY),
        (State.READY, Event.DUE),
        (State.WAITING, Event.EXITED),
        (State.STOPPED, Event.DUE),
    ],
)
def test_an_event_that_cannot_happen_is_a_fault_of_this_program(state: State, event: Event) -> None:
    with pytest.raises(KeyError):
        WorkerHealth(state).after(event, 1.0)
