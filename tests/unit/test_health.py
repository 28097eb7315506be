"""The life of a worker: which state follows which event, which rung follows which fault, and how long one waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from appliance.core.faults import Fault
from appliance.core.health import (
    FIRST_WAIT_S,
    GIVE_UP_AFTER,
    LOAD_LIMIT_S,
    LONGEST_WAIT_S,
    PROOF_HOLDS_S,
    STALLED_S,
    TABLE,
    Event,
    Patience,
    Rung,
    State,
    WorkerHealth,
    failed,
)

pytestmark = pytest.mark.unit

ALL = frozenset(Rung)
ALONE: frozenset[Rung] = frozenset()
"""No engine, no other way."""
CALM_S = Patience().calm_s


def crash(health: WorkerHealth, now: float, fault: Fault = Fault.CRASH, able: Iterable[Rung] = ALONE) -> WorkerHealth:
    """The health after a crash and, as soon as allowed, a restart."""
    health = health.struck(fault, now, "it crashed", able=able)
    return health.after(Event.DUE, health.retry_at)


def ready(now: float = 0.0) -> WorkerHealth:
    return WorkerHealth().after(Event.BECAME_READY, now)


def climb(fault: Fault, able: Iterable[Rung], *, loads: bool) -> str:
    """The rungs tried against a fault that comes again at once, until the model is quarantined."""
    health, rungs = ready(), []
    while health.state is not State.QUARANTINED:
        there = set(able) - (set() if health.state is State.READY else {Rung.RETRY})
        health = health.struck(fault, health.retry_at + 0.1, "again", able=there)
        rungs.append(health.rung.value if health.rung else "quarantine")
        able = set(able) - {health.rung} if health.rung is Rung.FALL_BACK else able
        if health.state is State.WAITING:
            health = health.after(Event.DUE, health.retry_at)
            health = health.after(Event.BECAME_READY, health.since) if loads else health
    return " ".join(rungs)


def test_a_worker_loads_becomes_ready_crashes_and_loads_again() -> None:
    health = WorkerHealth()
    states = [health.state]
    health = health.after(Event.BECAME_READY, 1.0)
    states.append(health.state)
    health = health.struck(Fault.CRASH, 1.0, "it crashed")
    states.append(health.state)
    for event in (Event.DUE, Event.BECAME_READY):
        health = health.after(event, 1.0)
        states.append(health.state)
    assert states == [State.LOADING, State.READY, State.WAITING, State.LOADING, State.READY]
    assert (health.restarts, health.faults) == (1, 1)


def test_the_first_fault_is_answered_by_an_immediate_restart() -> None:
    health = ready(1.0).struck(Fault.CRASH, 5.0, "it crashed")
    assert (health.retry_at, health.reason, health.rung) == (5.0, "it crashed", Rung.RESTART)


def test_faults_in_a_row_wait_twice_as_long_each_time_up_to_a_bound_and_end_in_quarantine() -> None:
    health, now, waits = WorkerHealth(), 0.0, []
    while health.state is not State.QUARANTINED:
        health = health.struck(Fault.CRASH, now, "again")
        waits.append(health.retry_at - now)
        now = health.retry_at
        health = health if health.state is State.QUARANTINED else health.after(Event.DUE, now)
    assert waits[:4] == [0.0, FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits == sorted(waits)
    assert max(waits[:-1]) <= LONGEST_WAIT_S
    assert (len(waits), waits[-1]) == (GIVE_UP_AFTER, Patience().quarantine_s)


def test_a_worker_that_has_failed_for_years_still_waits_no_longer_than_the_bound() -> None:
    health = WorkerHealth(faults=10**9).struck(Fault.POISONED_CONTEXT, 5.0, "again")
    assert health.retry_at == 5.0 + LONGEST_WAIT_S


def test_a_quarantined_model_is_tried_again_rarely_and_once() -> None:
    patience = Patience(quarantine_s=100.0)
    health = replace(WorkerHealth(patience=patience), faults=GIVE_UP_AFTER - 1, tries={Rung.RESTART: 9}, way=1)
    health = health.struck(Fault.CRASH, 5.0, "again")
    assert (health.state, health.alarm_at, health.refuses) == (State.QUARANTINED, 105.0, True)
    health = health.after(Event.DUE, 105.0)
    assert (health.state, health.way) == (State.LOADING, 0)
    assert health.struck(Fault.CRASH, 106.0, "again").state is State.QUARANTINED
    well = health.after(Event.BECAME_READY, 106.0).struck(Fault.CRASH, 106.0 + CALM_S, "later")
    assert (well.state, well.faults) == (State.WAITING, 1)


def test_a_model_out_of_quarantine_tries_each_of_its_ways_once() -> None:
    health = replace(WorkerHealth(), state=State.QUARANTINED, faults=GIVE_UP_AFTER, tries={Rung.RESTART: 3}, way=1)
    health = health.after(Event.DUE, 5.0).struck(Fault.CRASH, 6.0, "again", able={Rung.FALL_BACK})
    assert (health.rung, health.way, health.state) == (Rung.FALL_BACK, 1, State.WAITING)
    assert health.after(Event.DUE, 6.0).struck(Fault.CRASH, 7.0, "again").state is State.QUARANTINED


def test_a_worker_that_crashes_soon_after_each_start_is_not_forgiven() -> None:
    health = WorkerHealth()
    for fault in range(1, 4):
        health = crash(health.after(Event.BECAME_READY, fault * 100.0), fault * 100.0 + CALM_S - 1)
        assert health.faults == fault


def test_a_worker_that_stayed_up_is_forgiven_its_earlier_faults() -> None:
    health = crash(crash(WorkerHealth(), 0.0), 1.0).after(Event.BECAME_READY, 10.0)
    assert health.faults == 2
    health = health.struck(Fault.CRASH, 10.0 + CALM_S, "later")
    assert (health.faults, health.retry_at) == (1, 10.0 + CALM_S)


def test_the_reason_stays_while_it_is_restarted_and_goes_when_it_is_ready() -> None:
    health = WorkerHealth().struck(Fault.PLAN_REFUSED, 1.0, "bad graph").after(Event.DUE, 2.0)
    assert (health.state, health.reason) == (State.LOADING, "bad graph")
    assert health.after(Event.BECAME_READY, 3.0).reason == ""


THRICE = "restart restart restart"


@pytest.mark.parametrize(
    ("fault", "able", "loads", "rungs"),
    [
        (Fault.CRASH, ALONE, True, f"{THRICE} {THRICE} restart quarantine"),
        (Fault.PLAN_REFUSED, {Rung.FALL_BACK}, False, f"fall-back {THRICE} {THRICE} restart quarantine"),
        (Fault.PLAN_REFUSED, ALL, False, f"rebuild fall-back rebuild {THRICE} {THRICE} quarantine"),
        (Fault.MODEL_ERROR, {Rung.RETRY}, True, "retry restart " * (GIVE_UP_AFTER - 1) + "retry quarantine"),
        (Fault.HANG, ALONE, True, f"{THRICE} reboot {THRICE} quarantine"),
        (
            Fault.POISONED_CONTEXT,
            ALL,
            True,
            f"{THRICE} rebuild fall-back {THRICE} rebuild reboot restart restart quarantine",
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Fault) else None,
)
def test_a_fault_that_comes_again_climbs_its_ladder_rung_by_rung(
    fault: Fault, able: frozenset[Rung], loads: bool, rungs: str
) -> None:
    assert climb(fault, able, loads=loads) == rungs


def test_a_bad_input_is_no_fault_of_the_worker() -> None:
    health = ready()
    assert health.struck(Fault.BAD_INPUT, 5.0, "no picture", able=ALL) is health


def test_a_failed_request_leaves_the_worker_ready_while_it_proves_itself() -> None:
    health = ready().struck(Fault.MODEL_ERROR, 5.0, "it failed", able=ALL)
    assert (health.state, health.rung, health.refuses) == (State.READY, Rung.RETRY, False)
    proven = health.after(Event.PROVEN, 5.5)
    assert (proven.rung, proven.reason, proven.faults, proven.since) == (None, "", 0, 0.0)
    assert proven.recoveries[Fault.MODEL_ERROR].last_s == 0.5
    assert not proven.worth_proving(Fault.MODEL_ERROR, 5.5 + PROOF_HOLDS_S / 2)
    assert proven.worth_proving(Fault.MODEL_ERROR, 5.5 + PROOF_HOLDS_S)
    assert not proven.worth_proving(Fault.HANG, 5.5 + PROOF_HOLDS_S)
    again = proven.struck(Fault.MODEL_ERROR, 7.0, "it failed", able=ALL)
    assert again.rung is Rung.RETRY


def test_a_failed_proof_costs_the_worker_its_place() -> None:
    health = ready().struck(Fault.MODEL_ERROR, 5.0, "it failed", able=ALL)
    assert health.struck(Fault.MODEL_ERROR, 5.1, "wrong answer", able={Rung.FALL_BACK}).rung is Rung.RESTART


def test_rungs_that_do_not_exist_are_passed_over_and_named() -> None:
    health = WorkerHealth().struck(Fault.PLAN_REFUSED, 5.0, "damaged", able={Rung.FALL_BACK})
    assert (health.rung, health.missing, health.way) == (Rung.FALL_BACK, (Rung.REBUILD,), 1)


def test_a_model_on_its_fallback_says_why_until_it_is_renewed() -> None:
    health = WorkerHealth().struck(Fault.PLAN_REFUSED, 5.0, "damaged", able={Rung.FALL_BACK})
    assert health.retry_at == 5.0
    health = health.after(Event.DUE, 5.0).after(Event.BECAME_READY, 6.0)
    assert (health.degraded, health.reason, health.way) == ("damaged", "", 1)
    health = health.struck(Fault.CRASH, 6.0 + CALM_S, "later")
    assert (health.degraded, health.way) == ("damaged", 1)
    health = health.renewed(20.0)
    assert (health.degraded, health.way, health.faults, health.alarm_at) == ("", 0, 0, 20.0)
    assert health.fault_counts == {Fault.PLAN_REFUSED: 1, Fault.CRASH: 1}


def test_time_to_recover_counts_from_the_first_fault_to_the_proof_of_the_worker_that_stays() -> None:
    health = crash(ready(), 10.0, Fault.HANG)
    health = crash(health, 11.0, Fault.PLAN_REFUSED)
    health = health.after(Event.BECAME_READY, 13.0)
    assert {fault: spent.last_s for fault, spent in health.recoveries.items()} == {Fault.PLAN_REFUSED: 3.0}
    health = crash(health, 20.0, Fault.PLAN_REFUSED).after(Event.BECAME_READY, 21.0)
    spent = health.recoveries[Fault.PLAN_REFUSED]
    assert (spent.count, spent.total_s, spent.last_s) == (2, 4.0, 1.0)


def test_faults_restarts_and_rungs_are_counted_by_kind() -> None:
    health = crash(crash(ready(), 10.0, Fault.HANG), 11.0)
    assert health.fault_counts == health.restart_counts == {Fault.HANG: 1, Fault.CRASH: 1}
    assert health.rung_counts == {Rung.RESTART: 2}


def test_a_reboot_is_asked_for_when_a_hang_survives_everything_else_and_no_longer_after_a_calm_time() -> None:
    health = ready()
    for now in (1.0, 2.0, 3.0, 4.0):
        health = crash(health, now, Fault.HANG).after(Event.BECAME_READY, now + 0.5)
    assert health.reboot_wanted == "it crashed"
    assert crash(health, 4.5 + CALM_S).reboot_wanted == ""


@pytest.mark.parametrize("state", State)
def test_a_worker_can_be_stopped_in_every_state_and_its_exit_is_then_no_fault(state: State) -> None:
    stopped = WorkerHealth(state).after(Event.STOP, 1.0).struck(Fault.CRASH, 2.0, "it exited")
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
        (State.QUARANTINED, Event.BECAME_READY),
        (State.STOPPED, Event.DUE),
    ],
)
def test_an_event_that_cannot_happen_is_a_fault_of_this_program(state: State, event: Event) -> None:
    with pytest.raises(KeyError):
        WorkerHealth(state).after(event, 1.0)


def test_the_daemon_has_failed_when_a_worker_was_not_looked_after_in_time() -> None:
    loading = WorkerHealth(since=0.0)
    quarantined = replace(loading, state=State.QUARANTINED, retry_at=1000.0)
    assert failed([ready(), loading, quarantined], LOAD_LIMIT_S + STALLED_S) == ""
    assert "loading should have been looked after" in failed([ready(), loading], LOAD_LIMIT_S + STALLED_S + 1)
    killed = ready().struck(Fault.HANG, 5.0, "it hung")
    assert "waiting" in failed([killed], 5.0 + STALLED_S + 1)
