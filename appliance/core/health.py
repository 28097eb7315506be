"""The life of a worker as a table, and the ladder that a fault climbs. Pure: times are monotonic seconds.

    loading ──ready──> ready ──exited──> waiting ──due──> loading        any ──stop──> stopped
    loading ──exited──> waiting ──build──> building ──due──> loading
    loading, ready, waiting, building ──gave up──> quarantined ──due──> loading

A fault is answered by the lowest rung of its ladder that exists here and has tries left:

    retry       prove the worker that is there on a golden vector, and leave it if it answers rightly
    restart     a new process; the first at once, then after waits that double
    rebuild     make the engine again, where engines exist
    fall back   open the model in another way: other precision, other runtime; answers then say `degraded`
    reboot      ask the operator for one, and go on trying

When all are spent and the faults in a row are many, the model is quarantined: tried again rarely, so that what
cannot load does not burn a core for ever. A worker that stayed up for a while has its faults forgiven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from appliance.core.faults import Fault

_K = TypeVar("_K")

LOAD_LIMIT_S = 120.0
"""A worker that is not ready by then is taken for hung."""
BUILD_LIMIT_S = 3600.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
GIVE_UP_AFTER = 8
"""Faults in a row after which a model that has no other way is quarantined."""
PROOF_HOLDS_S = 0.5
"""A worker that was proven so recently is not proven again for one more failed request."""
STALLED_S = 10.0
"""What is overdue for longer will not happen any more."""
NEVER = float("inf")


class State(Enum):
    """Where a worker stands."""

    LOADING = "loading"
    READY = "ready"
    WAITING = "waiting"
    BUILDING = "building"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"


class Event(Enum):
    """What happened to a worker."""

    BECAME_READY = "ready"
    PROVEN = "proven"
    EXITED = "exited"
    GAVE_UP = "gave up"
    DUE = "due"
    BUILD = "build"
    STOP = "stop"


class Rung(Enum):
    """A step against a fault."""

    RETRY = "retry"
    RESTART = "restart"
    REBUILD = "rebuild"
    FALL_BACK = "fall-back"
    REBOOT = "reboot"


LADDER: Mapping[Fault, tuple[Rung, ...]] = {
    Fault.BAD_INPUT: (),
    Fault.MODEL_ERROR: (Rung.RETRY, Rung.RESTART, Rung.REBUILD, Rung.FALL_BACK),
    Fault.OUT_OF_MEMORY: (Rung.RETRY, Rung.RESTART, Rung.FALL_BACK),
    Fault.HANG: (Rung.RESTART, Rung.FALL_BACK, Rung.REBOOT),
    Fault.POISONED_CONTEXT: (Rung.RESTART, Rung.REBUILD, Rung.FALL_BACK, Rung.REBOOT),
    Fault.DRIVER_GONE: (Rung.RESTART, Rung.FALL_BACK, Rung.REBOOT),
    Fault.PLAN_REFUSED: (Rung.REBUILD, Rung.FALL_BACK),
    Fault.CRASH: (Rung.RESTART, Rung.REBUILD, Rung.FALL_BACK),
}
DOUBTFUL = frozenset(fault for fault, rungs in LADDER.items() if Rung.RETRY in rungs)
"""After these the worker may still be well: a proof tells."""
TRIES: Mapping[Rung, int] = {Rung.RETRY: 1, Rung.RESTART: 3, Rung.REBUILD: 1, Rung.REBOOT: 1}
"""Of each rung until the faults are forgiven; there are as many falls as there are other ways."""
EVERYWHERE = frozenset({Rung.RESTART, Rung.REBOOT})
"""Rungs that exist whatever the model is."""

UP = frozenset({State.LOADING, State.READY})
"""There is a worker, and it is meant to be there."""
TABLE: Mapping[tuple[State, Event], State] = {
    (State.LOADING, Event.BECAME_READY): State.READY,
    (State.READY, Event.PROVEN): State.READY,
    **{(state, Event.EXITED): State.WAITING for state in (*UP, State.BUILDING)},
    **{(state, Event.GAVE_UP): State.QUARANTINED for state in (*UP, State.BUILDING)},
    **{(state, Event.DUE): State.LOADING for state in (State.WAITING, State.BUILDING, State.QUARANTINED)},
    (State.WAITING, Event.BUILD): State.BUILDING,
    **{(state, Event.STOP): State.STOPPED for state in State},
    **{(State.STOPPED, event): State.STOPPED for event in (Event.BECAME_READY, Event.PROVEN)},  # it was told too late
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long faults count."""

    calm_s: float = 10.0
    """A worker that stayed up this long has its earlier faults forgiven."""
    quarantine_s: float = 600.0
    """A quarantined model is tried again after this."""


@dataclass(frozen=True, slots=True)
class Recoveries:
    """How long it took to be ready again after one class of faults."""

    count: int = 0
    total_s: float = 0.0
    last_s: float = 0.0

    def and_one(self, spent_s: float) -> Recoveries:
        """These and one more."""
        return Recoveries(self.count + 1, self.total_s + spent_s, spent_s)


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """What is known of one worker."""

    state: State = State.LOADING
    since: float = 0.0
    faults: int = 0
    """Faults in a row, not yet forgiven."""
    restarts: int = 0
    retry_at: float = 0.0
    """When a waiting or quarantined worker is started again."""
    reason: str = ""
    """Why it is not ready, for people."""
    cause: Fault | None = None
    """What it recovers from; None when it is well."""
    fault_at: float = 0.0
    """When that began."""
    rung: Rung | None = None
    """What is tried against it."""
    missing: tuple[Rung, ...] = ()
    """Lower rungs that were passed over because they do not exist here."""
    tries: Mapping[Rung, int] = field(default_factory=dict)
    """Tries of each rung, not yet forgiven."""
    way: int = 0
    """Which of the ways to open the model is used; above 0 are those it falls back to."""
    degraded: str = ""
    """Why it does not serve as it was meant to."""
    reboot_wanted: str = ""
    """Why the device should be started anew."""
    proven_at: float = 0.0
    """When it last answered a golden vector rightly."""
    fault_counts: Mapping[Fault, int] = field(default_factory=dict)
    restart_counts: Mapping[Fault, int] = field(default_factory=dict)
    rung_counts: Mapping[Rung, int] = field(default_factory=dict)
    recoveries: Mapping[Fault, Recoveries] = field(default_factory=dict)
    patience: Patience = Patience()

    @property
    def alarm_at(self) -> float:
        """When something must be done though nothing was heard: a start that is due, or a load that takes too long."""
        if self.state is State.READY:
            return NEVER  # nearly always: members of an enumeration are hashed in Python
        if self.state in {State.WAITING, State.QUARANTINED}:
            return self.retry_at
        limit_s = {State.LOADING: LOAD_LIMIT_S, State.BUILDING: BUILD_LIMIT_S}.get(self.state, NEVER)
        return self.since + limit_s

    @property
    def refuses(self) -> bool:
        """Whether a request would wait in vain: after a first fault the new worker is awaited, after more it is not."""
        if self.state is State.READY:
            return False
        return self.state in {State.QUARANTINED, State.BUILDING} or (self.state is State.WAITING and self.faults > 1)

    def after(self, event: Event, now: float) -> WorkerHealth:
        """The health after `event`; raises KeyError for an event that cannot happen in this state."""
        state = TABLE[self.state, event]
        moved = replace(self, state=state, since=now)
        if event is Event.PROVEN or (event is Event.BECAME_READY and state is State.READY):
            since = self.since if event is Event.PROVEN else now
            return _recovered(replace(moved, since=since, proven_at=now, reason="", rung=None), now)
        if event is Event.DUE:
            again = replace(moved, restarts=self.restarts + 1, restart_counts=_plus(self.restart_counts, self.cause))
            return replace(again, way=0, degraded="") if self.state is State.QUARANTINED else again
        return moved

    def struck(
        self, fault: Fault, now: float, reason: str, *, able: Iterable[Rung] = (), began_at: float | None = None
    ) -> WorkerHealth:
        """The health after a fault: waiting for the next rung, quarantined, or still ready when that is RETRY.

        `able` are the rungs besides EVERYWHERE that exist now. A stopped worker stays stopped, whatever happens to it.
        """
        if fault is Fault.BAD_INPUT or self.state is State.STOPPED:
            return self
        calm = self.state is State.READY and now - self.since >= self.patience.calm_s
        known = self.forgiven() if calm else self
        rung, missing = _next_rung(known, fault, {*EVERYWHERE, *able})
        began_at = now if began_at is None else began_at
        hit = replace(
            known,
            reason=reason,
            cause=fault,
            fault_at=began_at if known.cause is None else known.fault_at,
            rung=rung,
            missing=missing,
            fault_counts=_plus(known.fault_counts, fault),
            rung_counts=_plus(known.rung_counts, rung),
            tries=_plus(known.tries, rung),
        )
        if rung is Rung.RETRY:
            return hit
        state = TABLE[self.state, Event.GAVE_UP if rung is None else Event.EXITED]
        faults = known.faults + 1
        moved = replace(hit, state=state, since=now, faults=faults, retry_at=now + _wait_s(faults))
        if rung is None:
            return replace(moved, retry_at=now + self.patience.quarantine_s)
        if rung is Rung.FALL_BACK:
            # The other way gets restarts of its own, but a model out of quarantine tries each way only once.
            fresh: dict[str, Any] = {} if faults > GIVE_UP_AFTER else {"faults": 0, "tries": {}}
            return replace(moved, way=self.way + 1, degraded=reason, retry_at=now, **fresh)
        if rung is Rung.REBUILD:
            return replace(moved, retry_at=now)
        return replace(moved, reboot_wanted=reason) if rung is Rung.REBOOT else moved

    def worth_proving(self, fault: Fault, now: float) -> bool:
        """Whether a proof could tell if the worker, rather than the request, is to blame for `fault`."""
        return fault in DOUBTFUL and now - self.proven_at >= PROOF_HOLDS_S

    def renewed(self, now: float) -> WorkerHealth:
        """All is forgiven and the model is started as it was meant to be, at once; counts of the past stay."""
        waiting = replace(self.forgiven(), state=State.WAITING, since=now, retry_at=now)
        return replace(waiting, way=0, degraded="", rung=None, missing=())

    def forgiven(self) -> WorkerHealth:
        """Earlier faults count no more against the worker."""
        return replace(self, faults=0, tries={}, reboot_wanted="")


def failed(healths: Iterable[WorkerHealth], now: float) -> str:
    """Why the daemon as a whole cannot be relied on any more, so that it should be started anew; empty when it can.

    A model that is quarantined is no such reason: its neighbours serve, and it would be no better in a new daemon.
    """
    late = next((health for health in healths if health.alarm_at + STALLED_S < now), None)
    return f"a worker that is {late.state.value} should have been looked after long ago" if late else ""


def _next_rung(health: WorkerHealth, fault: Fault, able: set[Rung]) -> tuple[Rung | None, tuple[Rung, ...]]:
    """The rung to try, None when there is no hope; and those passed over because they do not exist."""
    missing: list[Rung] = []
    for rung in LADDER[fault]:
        if rung not in able:
            missing += [rung] if rung is not Rung.RETRY else []  # it exists, but not for a process that is gone
        elif health.tries.get(rung, 0) < TRIES.get(rung, GIVE_UP_AFTER):
            return rung, tuple(missing)
    return (Rung.RESTART if health.faults + 1 < GIVE_UP_AFTER else None), tuple(missing)


def _recovered(health: WorkerHealth, now: float) -> WorkerHealth:
    if health.cause is None:
        return health
    spent = health.recoveries.get(health.cause, Recoveries()).and_one(now - health.fault_at)
    tries: Mapping[Rung, int] = {rung: count for rung, count in health.tries.items() if rung is not Rung.RETRY}
    return replace(health, cause=None, missing=(), tries=tries, recoveries={**health.recoveries, health.cause: spent})


def _plus(counts: Mapping[_K, int], key: _K | None) -> Mapping[_K, int]:
    return counts if key is None else {**counts, key: counts.get(key, 0) + 1}


def _wait_s(faults: int) -> float:
    if faults <= 1:
        return 0.0
    return float(min(FIRST_WAIT_S * 2 ** min(faults - 2, 16), LONGEST_WAIT_S))
