"""The life of one worker as a table: what an event does in a state, and when to try again.

    loading ──ready──> ready ──exited──> waiting ──due──> loading
    loading ──exited──> waiting          any ──stop──> stopped

A first fault is answered by an immediate restart; faults in a row wait twice as long each time,
so a model that cannot load does not burn a core for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

LOAD_LIMIT_S = 120.0
"""A worker that is not ready by then is taken for hung."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
CALM_S = 10.0
"""A worker that stayed up this long has its earlier faults forgiven."""


class State(Enum):
    """Where a worker stands."""

    LOADING = "loading"
    READY = "ready"
    WAITING = "waiting"
    STOPPED = "stopped"


class Event(Enum):
    """What happened to a worker."""

    BECAME_READY = "ready"
    EXITED = "exited"
    DUE = "due"
    STOP = "stop"


TABLE: Mapping[tuple[State, Event], State] = {
    (State.LOADING, Event.BECAME_READY): State.READY,
    (State.LOADING, Event.EXITED): State.WAITING,
    (State.READY, Event.EXITED): State.WAITING,
    (State.WAITING, Event.DUE): State.LOADING,
    **{(state, Event.STOP): State.STOPPED for state in State},
    (State.STOPPED, Event.BECAME_READY): State.STOPPED,  # it was loading when it was told to stop
    (State.STOPPED, Event.EXITED): State.STOPPED,
}


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """What is known of one worker; times are monotonic seconds."""

    state: State = State.LOADING
    since: float = 0.0
    faults: int = 0
    """Faults in a row, not yet forgiven."""
    restarts: int = 0
    retry_at: float = 0.0
    """When a waiting worker is started again."""
    reason: str = ""
    """Why it is not ready, for people."""

    @property
    def alarm_at(self) -> float:
        """When something must be done though nothing was heard: a start that is due, or a load that takes too long."""
        if self.state is State.WAITING:
            return self.retry_at
        return self.since + LOAD_LIMIT_S if self.state is State.LOADING else float("inf")

    def after(self, event: Event, now: float, reason: str = "") -> WorkerHealth:
        """The health after `event`; raises KeyError for an event that cannot happen in this state."""
        state = TABLE[self.state, event]
        moved = replace(self, state=state, since=now, reason=reason)
        if event is Event.EXITED and state is State.WAITING:
            calm = self.state is State.READY and now - self.since >= CALM_S
            faults = 1 if calm else self.faults + 1
            return replace(moved, faults=faults, retry_at=now + _wait_s(faults))
        if event is Event.DUE:
            return replace(moved, restarts=self.restarts + 1, reason=self.reason)
        return moved


def _wait_s(faults: int) -> float:
    if faults <= 1:
        return 0.0
    return float(min(FIRST_WAIT_S * 2 ** min(faults - 2, 16), LONGEST_WAIT_S))
