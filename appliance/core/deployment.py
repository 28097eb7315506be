"""One attempt to move a bundle to another version, as a table of steps and events. Pure: times are Unix seconds.

    check ─> reserve ─> fetch ─> verify ─> compile ─> prove ─> memory ─> latency ─> shadow ─> switch ─> trial ─> good
      │         │         │         │         │         │         │         │          │         │        │
      └─────────┴─────────┴─────────┴── failed: refused ┴─────────┴─────────┴──────────┴─────────┘        │
                                                                               undone <─ back <─ failed ──┘

    check     this device may and can run it: signed, not revoked, served here, not condemned before
    reserve   its slot is marked bad before a byte is written, so whatever is cut leaves no slot that looks whole
    fetch     only what is missing
    verify    every byte again, from disk
    compile   its engines are made, where this device makes some
    prove     a worker of its own opens it and answers the golden vectors
    memory    what was measured of it fits beside the other models
    latency   against the version that serves, on the same inputs
    shadow    a share of live requests is answered by both, and compared
    switch    all names at once, with the slot marked trial first
    trial     it serves and is watched
    back      the version before serves again; also when an operator or a revocation asks for that much later

Each step is written down before it is begun and after it has ended (`begin`, `after`), so after a restart the same
two functions continue: what only lives in a process (prove to switch) is done again from `verify`, a trial goes on.
Beginning a step counts, and each step may be begun a limited number of times in one deployment: so no loop is endless.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Step(str, Enum):
    """Where a deployment stands."""

    CHECK = "check"
    RESERVE = "reserve"
    FETCH = "fetch"
    VERIFY = "verify"
    COMPILE = "compile"
    PROVE = "prove"
    MEMORY = "memory"
    LATENCY = "latency"
    SHADOW = "shadow"
    SWITCH = "switch"
    TRIAL = "trial"
    BACK = "back"
    GOOD = "good"
    REFUSED = "refused"
    UNDONE = "undone"


class Event(str, Enum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    """The version is to blame, or the device cannot run it."""
    LATER = "later"
    """Nobody is to blame: no link, no room. The step is begun again after a wait."""
    RESTARTED = "restarted"
    """The daemon has begun anew meanwhile."""
    REVOKED = "revoked"
    """The version may not be run any more."""
    SUPERSEDED = "superseded"
    """Its channel holds another version by now."""
    ABORTED = "aborted"
    """An operator does not want it any more."""


class SlotState(str, Enum):
    """What the place of a bundle on disk is good for."""

    BAD = "bad"
    """Not whole, not proven here, or condemned: never served."""
    STAGED = "staged"
    """Whole and verified, not tried."""
    TRIAL = "trial"
    """Served and watched."""
    GOOD = "good"
    """Passed its trial."""


ENDS = frozenset({Step.GOOD, Step.REFUSED, Step.UNDONE})
_LOADED = (Step.PROVE, Step.MEMORY, Step.LATENCY, Step.SHADOW, Step.SWITCH)
"""A worker holds the candidate, which no restart survives."""
_BEFORE_SERVING = (Step.CHECK, Step.RESERVE, Step.FETCH, Step.VERIFY, Step.COMPILE, *_LOADED)
_ORDER = (*_BEFORE_SERVING, Step.TRIAL, Step.GOOD)

TABLE: Mapping[tuple[Step, Event], Step] = {
    **{(step, Event.PASSED): after for step, after in itertools.pairwise(_ORDER)},
    **{(step, Event.FAILED): Step.REFUSED for step in _BEFORE_SERVING},
    **{(step, Event.REVOKED): Step.REFUSED for step in _BEFORE_SERVING},
    **{(step, Event.ABORTED): Step.REFUSED for step in _BEFORE_SERVING},
    **{(step, Event.SUPERSEDED): Step.REFUSED for step in (Step.CHECK, Step.FETCH, Step.PROVE)},
    **{(step, Event.LATER): step for step in (Step.CHECK, Step.FETCH, Step.VERIFY, Step.COMPILE, Step.BACK)},
    **{(step, Event.LATER): Step.VERIFY for step in _LOADED},
    **{(step, Event.RESTARTED): step for step in (Step.CHECK, Step.RESERVE, Step.FETCH, Step.VERIFY, Step.COMPILE)},
    **{(step, Event.RESTARTED): Step.VERIFY for step in _LOADED},
    (Step.TRIAL, Event.RESTARTED): Step.TRIAL,
    (Step.TRIAL, Event.FAILED): Step.BACK,
    (Step.TRIAL, Event.REVOKED): Step.BACK,
    (Step.GOOD, Event.FAILED): Step.BACK,  # an operator wants the version before
    (Step.GOOD, Event.REVOKED): Step.BACK,
    (Step.BACK, Event.PASSED): Step.UNDONE,
    (Step.BACK, Event.FAILED): Step.UNDONE,  # it cannot be loaded now: what serves at the next start is still that
    (Step.BACK, Event.RESTARTED): Step.BACK,
    (Step.BACK, Event.REVOKED): Step.BACK,
}
BEGINS: Mapping[Step, int] = {
    Step.FETCH: 100,  # a flaky link brings more each time
    Step.CHECK: 100,
    Step.TRIAL: 3,
}
"""How often a step may be begun in one deployment; `_BEGINS` where it is not listed."""
_BEGINS = 5
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 3600.0
"""Before a step that could not be done is begun again; doubled each time."""

_CONDEMNS = frozenset({Step.CHECK, Step.COMPILE, *_LOADED, Step.TRIAL, Step.GOOD})
"""Who fails there would fail again: the device does not try that version again by itself."""


INTERRUPTIBLE = frozenset({Step.CHECK, Step.FETCH, Step.VERIFY, Step.COMPILE, *_LOADED}) - {Step.SWITCH}
"""An order may end the work of these at any moment."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one step ended, with the figures that it was decided by."""

    step: str
    event: str
    at: float
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One attempt; `previous` is the digest that serves before it, and again when it goes back."""

    id: int
    name: str
    version: str
    digest: str
    previous: str
    started_at: float
    step: str = Step.CHECK.value
    begun: bool = False
    """Whether the step was begun and its end is not known."""
    begins: Mapping[str, int] = field(default_factory=dict)
    """Step -> how often it was begun."""
    not_before: float = 0.0
    """The step waits until then."""
    reason: str = ""
    """Why it failed; empty while it has not."""
    failed_step: str = ""
    verdicts: tuple[Verdict, ...] = ()
    ordered_by: str = ""
    """Who asked for it; empty when the device found it by itself."""

    @property
    def at(self) -> Step:
        """Where it stands."""
        return Step(self.step)

    @property
    def ended(self) -> bool:
        """Whether nothing will happen any more."""
        return self.at in ENDS

    @property
    def condemns(self) -> bool:
        """Whether this device should not try that version again by itself."""
        return bool(self.failed_step) and Step(self.failed_step) in _CONDEMNS


def begin(deployment: Deployment, now: float) -> Deployment:
    """The deployment with its step begun, or failed because that was begun too often; to be written down first."""
    step = deployment.at
    allowed = _unless_exhausted(deployment, now)
    if allowed.at is not step:
        return allowed
    tries = deployment.begins.get(step.value, 0)
    return replace(deployment, begun=True, begins={**deployment.begins, step.value: tries + 1})


def _unless_exhausted(deployment: Deployment, now: float) -> Deployment:
    step = deployment.at
    tries = deployment.begins.get(step.value, 0)
    if tries < BEGINS.get(step, _BEGINS):
        return deployment
    return after(deployment, Event.FAILED, now, reason=f"{step.value} was begun {tries} times and never ended well")


def after(
    deployment: Deployment,
    event: Event,
    now: float,
    *,
    reason: str = "",
    figures: Mapping[str, float] | None = None,
) -> Deployment:
    """The deployment after its step ended with `event`; an event that its step does not know changes nothing."""
    step = deployment.at
    following = TABLE.get((step, event))
    if following is None:
        return deployment
    said = deployment.verdicts
    if event is not Event.RESTARTED or deployment.begun:
        said = (*said, Verdict(step.value, event.value, now, reason, dict(figures or {})))
    wait_s = 0.0
    if event is Event.LATER:
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (deployment.begins.get(step.value, 1) - 1))
    failed = event in {Event.FAILED, Event.REVOKED} and step is not Step.BACK
    told = failed or event in {Event.SUPERSEDED, Event.ABORTED}
    return replace(
        deployment,
        step=following.value,
        begun=False,
        not_before=now + wait_s if wait_s else 0.0,
        reason=reason if told else deployment.reason,
        failed_step=step.value if failed else deployment.failed_step,
        verdicts=said,
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """What is known of the place of a bundle on disk."""

    digest: str
    name: str
    version: str
    state: str
    deployment: int
    """Id of the one that made it so: the higher the later."""


def slot_of(deployment: Deployment, before: Slot | None = None) -> Slot | None:
    """The slot of the deployment's bundle, which was `before`, as its step makes it; None while that is left as it was.

    One that is good stays good while its version is brought again: its files are whole, and only what is missing is
    fetched. Until it is on trial, or its files are found to be damaged, a start may need it.
    """
    step = deployment.at
    if step is Step.CHECK or (step is Step.REFUSED and Step.RESERVE.value not in deployment.begins):
        return None
    unharmed = step is Step.REFUSED and not deployment.condemns and deployment.failed_step != Step.VERIFY.value
    if before and before.state == SlotState.GOOD.value and (step in _BEFORE_SERVING or unharmed):
        return None
    if step is Step.GOOD:
        state = SlotState.GOOD
    elif step is Step.TRIAL:
        state = SlotState.TRIAL
    elif step in {Step.COMPILE, *_LOADED}:
        state = SlotState.STAGED
    else:
        state = SlotState.BAD
    return Slot(deployment.digest, deployment.name, deployment.version, state.value, deployment.id)


def resume(deployments: Iterable[Deployment], now: float) -> list[Deployment]:
    """Those of `deployments` that had not ended, as a daemon that has just started goes on with them.

    A trial that was begun too often goes back before anything is served: the version may be what ends the daemon.
    """
    found = []
    for one in deployments:
        if not one.ended:
            again = after(one, Event.RESTARTED, now, reason="the daemon was started anew")
            found.append(_unless_exhausted(again, now) if again.at is Step.TRIAL else again)
    return found


def to_serve(slots: Iterable[Slot], name: str, revoked: Mapping[str, str] | None = None) -> Slot | None:
    """What a daemon that starts serves of bundle `name`: the one on trial, else the latest good one, if any.

    None means the folder that the daemon was given.
    """
    ours = [slot for slot in slots if slot.name == name and slot.digest not in (revoked or {})]
    for state in (SlotState.TRIAL, SlotState.GOOD):
        found = [slot for slot in ours if slot.state == state.value]
        if found:
            return max(found, key=lambda slot: slot.deployment)
    return None


def to_go_back_to(
    deployment: Deployment, slots: Iterable[Slot], revoked: Mapping[str, str] | None = None
) -> Slot | None:
    """What serves when a deployment goes back: the version before it, or where that is gone, the latest good one.

    None means the folder that the daemon was given.
    """
    others = [slot for slot in slots if slot.digest != deployment.digest]
    before = [slot for slot in others if slot.digest == deployment.previous]
    return to_serve(before, deployment.name, revoked) or to_serve(others, deployment.name, revoked)


def kept(slots: Sequence[Slot], deployments: Iterable[Deployment], serving: Iterable[str]) -> frozenset[str]:
    """Digests whose files stay.

    What serves, what is under way and where it came from, one good one to go back, and of each bundle what the latest
    attempt has fetched if that was refused for no fault of the version: it is tried again.
    """
    deployments = list(deployments)
    stay = set(serving)
    stay |= {digest for one in deployments if not one.ended for digest in (one.digest, one.previous)}
    latest = {one.name: one for one in sorted(deployments, key=lambda one: one.id)}
    stay |= {one.digest for one in latest.values() if one.at is Step.REFUSED and not one.condemns}
    good = [slot for slot in slots if slot.state == SlotState.GOOD.value and slot.digest not in stay]
    spare = {found.digest for name in {slot.name for slot in good} if (found := to_serve(good, name))}
    return frozenset(stay | spare)


def condemned(deployments: Iterable[Deployment], digest: str) -> str:
    """Why this device does not take a version by itself any more; empty when it may."""
    latest = max(
        (one for one in deployments if one.digest == digest and one.ended), key=lambda one: one.id, default=None
    )
    return latest.reason if latest and latest.condemns else ""


def document(deployment: Deployment) -> dict[str, Any]:
    """Plain data for operators."""
    return {
        "id": deployment.id,
        "name": deployment.name,
        "version": deployment.version,
        "digest": deployment.digest,
        "previous": deployment.previous,
        "step": deployment.step,
        "committed": deployment.at is Step.GOOD,
        "ended": deployment.ended,
        "reason": deployment.reason or None,
        "failed_step": deployment.failed_step or None,
        "started_at": round(deployment.started_at),
        "not_before": round(deployment.not_before) or None,
        "ordered_by": deployment.ordered_by or None,
        "begins": dict(deployment.begins),
        "verdicts": [
            {
                "step": one.step,
                "event": one.event,
                "at": round(one.at, 3),
                "reason": one.reason or None,
                "figures": dict(one.figures),
            }
            for one in deployment.verdicts
        ],
    }
