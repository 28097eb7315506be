"""One version of a model brought to a fleet in waves: which device belongs to which, and what happens next. Pure.

    running ──> done       every wave has passed
      │ ^ ├───> stopped    a limit of `Stop` was passed: its devices get back what they had
      v │ └───> aborted    an operator does not want it any more: likewise
    paused               no further device is asked; a limit that is passed stops it all the same

A wave passes when enough of its devices have committed and nobody is waited for any more: each of them has committed,
rolled back, or is stuck, which is silent for longer than the campaign's patience. So one stuck device blocks nothing,
as long as the others are enough, and what is stuck counts again when it comes back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models.errors import BadInput

RUNNING, PAUSED, STOPPED, DONE, ABORTED = "running", "paused", "stopped", "done", "aborted"
ENDED = frozenset({STOPPED, DONE, ABORTED})
COMMITTED, ROLLED_BACK = "committed", "rolled_back"
MOST_WAVES = 100
_LONGEST_NAME = 128
_ALL = 100.0
"""Per cent."""
_YEAR_S = 366 * 86400.0
LEAST_OPINIONS = 20
"""Of each version; fewer say nothing of how often two models agree."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Whom a wave takes, of those that no wave before it took; exactly one of percent, group and label is given."""

    percent: float = 0.0
    """Of the whole fleet, with those of the waves before: 100 takes all that are left."""
    group: str = ""
    label: str = ""
    """`key=value`."""
    canary: bool = False
    """Shown to operators; the rules are those of every wave."""


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends a campaign by itself; 0 does not look at it, except for rollbacks."""

    rollback_share: float = 0.1
    """Of a wave's devices; 0 allows none."""
    latency_ratio: float = 0.0
    """Median over the devices of how many times slower it answers than the version before it did."""
    agreement_drop: float = 0.0
    """By how much less often second opinions agree with it than with other versions."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an operator asks for."""

    name: str
    model: str
    version: str
    waves: tuple[Wave, ...]
    needed_share: float = 0.9
    """Of a wave's devices that must commit, rounded down, but one at least."""
    patience_s: float = 86400.0
    """A device that was asked and told nothing of it for so long is stuck."""
    stop: Stop = field(default_factory=Stop)


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the devices of a wave."""

    wanted: int = 0
    committed: int = 0
    rolled_back: int = 0
    stuck: int = 0

    @property
    def waiting(self) -> int:
        """Those that may still answer in time."""
        return self.wanted - self.committed - self.rolled_back - self.stuck


@dataclass(frozen=True, slots=True)
class Figures:
    """What is measured of the version; None where there is not enough to say."""

    latency_ratio: float | None = None
    agreement: float | None = None
    """Share of second opinions that agree with it,"""
    agreement_before: float | None = None
    """and with the versions that it replaces."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a campaign stands; `wave` counts those that were asked, so it is 0 before the first."""

    state: str = RUNNING
    wave: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What decides about a device's wave."""

    device_id: str
    groups: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)


def check(plan: Plan) -> Plan:
    """The plan, if it can be carried out; raises BadInput."""
    for name, text in (("name", plan.name), ("model", plan.model), ("version", plan.version)):
        _check(f"{name} must have 1 to {_LONGEST_NAME} characters", holds=0 < len(text) <= _LONGEST_NAME)
    _check(f"it must have 1 to {MOST_WAVES} waves", holds=0 < len(plan.waves) <= MOST_WAVES)
    percent = 0.0
    for i, wave in enumerate(plan.waves, 1):
        said = (wave.percent != 0, bool(wave.group), bool(wave.label))
        _check(f"wave {i} must say one of percent, group and label", holds=sum(said) == 1)
        _check(f"the label of wave {i} must be key=value", holds=not wave.label or "=" in wave.label)
        rising = not wave.percent or percent < wave.percent <= _ALL
        _check(f"wave {i} must take more per cent than the wave before, and at most 100", holds=rising)
        percent = wave.percent or percent
    for name, value, most in (
        ("needed_share", plan.needed_share, 1.0),
        ("stop.rollback_share", plan.stop.rollback_share, 1.0),
        ("stop.agreement_drop", plan.stop.agreement_drop, 1.0),
        ("stop.latency_ratio", plan.stop.latency_ratio, 1000.0),
    ):
        _check(f"{name} must be from 0 to {most:g}", holds=0 <= value <= most)
    _check("patience_s must be from 1 second to a year", holds=1 <= plan.patience_s <= _YEAR_S)
    return plan


def _check(rule: str, *, holds: bool) -> None:
    if not holds:
        msg = f"the campaign cannot be begun: {rule}"
        raise BadInput(msg)


def assigned(plan: Plan, devices: Iterable[Candidate]) -> dict[str, int]:
    """Device -> number of its wave, from 1, for those that a wave takes.

    Percentages go by an order that is the same for everybody who computes it, and another in each campaign, so that
    it is not always the same devices that are first.
    """

    def place(device: Candidate) -> bytes:
        return hashlib.sha256(f"{plan.name}\0{plan.version}\0{device.device_id}".encode()).digest()

    fleet = sorted(devices, key=place)
    waves = {device.device_id: wave_of(plan, device, i, len(fleet)) for i, device in enumerate(fleet)}
    return {device_id: wave for device_id, wave in waves.items() if wave}


def wave_of(plan: Plan, device: Candidate, place: int, fleet: int) -> int:
    """Number of the first wave that takes a device which is at `place`, from 0, in a fleet of so many; 0 for none.

    Who comes later is last.
    """
    for number, wave in enumerate(plan.waves, 1):
        key, _equals, value = wave.label.partition("=")
        if (
            place < math.ceil(wave.percent / _ALL * fleet - 1e-9)
            or (wave.group and wave.group in device.groups)
            or (wave.label and device.labels.get(key) == value)
        ):
            return number
    return 0


def step(plan: Plan, progress: Progress, tallies: Sequence[Tally], figures: Figures) -> Progress:
    """Where the campaign stands next; `tallies` has one for each wave.

    A wave more than before is to be asked now, and the devices of one that was stopped get back what they had.
    """
    if progress.state in ENDED:
        return progress
    broken = next(filter(None, (_broken(plan, i, tallies[i]) for i in range(progress.wave))), "")
    broken = broken or _worse(plan.stop, figures)
    if broken:
        return replace(progress, state=STOPPED, reason=broken)
    if progress.state == PAUSED:
        return progress
    waits = _waits(plan, progress.wave, tallies[progress.wave - 1]) if progress.wave else ""
    if waits:
        return replace(progress, reason=waits)
    if progress.wave < len(plan.waves):
        return Progress(RUNNING, progress.wave + 1)
    committed, wanted = sum(one.committed for one in tallies), sum(one.wanted for one in tallies)
    return replace(progress, state=DONE, reason=f"{committed} of {wanted} devices committed")


def needed(plan: Plan, wanted: int) -> int:
    """How many of a wave must commit."""
    return min(wanted, max(1, math.floor(plan.needed_share * wanted + 1e-9)))


def outcome(report: Mapping[str, Any]) -> str:
    """What the report of a deployment means to a campaign; empty where it is no verdict on the version."""
    if report.get("committed") is True:
        return COMMITTED
    condemned = report.get("step") == "undone" or (report.get("step") == "refused" and report.get("failed_step"))
    return ROLLED_BACK if condemned else ""


def latency_ratio(report: Mapping[str, Any]) -> float | None:
    """How many times slower the new version answers, by the live requests of its trial, else by those of the gate."""
    found: dict[str, float] = {}
    for verdict in tables(report.get("verdicts")):
        figures = table(verdict.get("figures"))
        for key, before in figures.items():
            new = figures.get(key.replace("before_p95_ms", "new_p95_ms"))
            if key.endswith("before_p95_ms") and isinstance(new, float | int) and isinstance(before, float | int):
                step = str(verdict.get("step"))
                found[step] = max(found.get(step, 0.0), new / before if before > 0 else 0.0)
    return found.get("trial", found.get("latency"))


def settled(state: Mapping[str, Any]) -> dict[str, str]:
    """Model -> version that a device serves and that is not on trial, by what it reports as its state."""
    latest = table(table(state.get("update")).get("latest"))
    models = {str(one.get("name")): str(one.get("version")) for one in tables(state.get("models"))}
    if latest and not latest.get("committed"):
        on_trial = str(latest.get("name")), str(latest.get("version"))
        models = {name: version for name, version in models.items() if (name, version) != on_trial}
    return models


def table(found: object) -> Mapping[str, Any]:
    """A part of a report, which may be of any form; empty where it is no table."""
    return found if isinstance(found, dict) else {}


def tables(found: object) -> list[Mapping[str, Any]]:
    """The tables in a part of a report that should be a list of them."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _broken(plan: Plan, index: int, tally: Tally) -> str:
    """Why the devices of a wave end the campaign; empty where they do not."""
    back, wanted = tally.rolled_back, tally.wanted
    where = f"wave {index + 1}: {back} of {wanted} devices rolled back"
    if back > plan.stop.rollback_share * wanted + 1e-9:
        return f"{where} ({back / wanted:.0%}), and {plan.stop.rollback_share:.0%} may"
    if wanted and wanted - back < needed(plan, wanted):
        return f"{where}, so {needed(plan, wanted)} can no longer commit"
    return ""


def _worse(stop: Stop, figures: Figures) -> str:
    if stop.latency_ratio and figures.latency_ratio is not None and figures.latency_ratio > stop.latency_ratio:
        return (
            f"it takes {figures.latency_ratio:.2f} times as long as the version before (median of the devices), "
            f"and {stop.latency_ratio:.2f} is allowed"
        )
    if stop.agreement_drop and figures.agreement is not None and figures.agreement_before is not None:
        drop = figures.agreement_before - figures.agreement
        if drop > stop.agreement_drop:
            return (
                f"second opinions agree with {figures.agreement:.1%} of its answers and agreed with "
                f"{figures.agreement_before:.1%} before; {stop.agreement_drop:.1%} less is allowed"
            )
    return ""


def _waits(plan: Plan, number: int, tally: Tally) -> str:
    """What a wave waits for; empty when it has passed."""
    enough = needed(plan, tally.wanted)
    if tally.committed >= enough and not tally.waiting:
        return ""
    stuck = f", {tally.stuck} stuck" if tally.stuck else ""
    return (
        f"wave {number}: {tally.committed} of {tally.wanted} devices committed, {enough} needed; "
        f"{tally.waiting} may still answer{stuck}"
    )
