"""What a version must show before it serves, and while it is on trial. Pure: figures in, a verdict out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.errors import BundleError, ModelError, NotReady, WorkerLost
from models.spec import Tensor

_SAMPLES = 512
"""Latencies that a tally remembers."""
_LEAST_SAMPLES = 20
"""Fewer say nothing of a 95th percentile."""
_LEAST_ERRORS = 3
"""Fewer may be chance, whatever their share."""
_LATENCY_SLACK_MS, _TRIAL_SLACK_MS = 2.0, 10.0
"""Differences that a busy neighbour makes: in a run, and in a request with all its waiting."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator asks of a new version."""

    latency_ratio: float = 1.5
    """Its P95 may be so many times that of the version before, on the same inputs."""
    shadow_agreement: float = 0.5
    """Share of what both answered that must agree."""
    trial_errors: float = 0.02
    """Share of requests that may fail by its fault."""
    trial_ratio: float = 2.0
    """P95 under live load may be so many times that of the version before."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict; `reason` is empty when it is good."""

    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def at_fault(error: BaseException) -> bool:
    """Whether a request failed by the fault of the model or its worker, and not of whoever asked or of the load."""
    return isinstance(error, (ModelError, WorkerLost, NotReady, BundleError))


class Tally:
    """Requests for one version: how many, how many failed by its fault, how long the latest took."""

    def __init__(self) -> None:
        """None yet."""
        self.requests = self.errors = 0
        self.ms: deque[float] = deque(maxlen=_SAMPLES)

    def count(self, seconds: float, error: BaseException | None) -> None:
        """One more; of those that failed only those `at_fault` are errors."""
        self.requests += 1
        if error is None:
            self.ms.append(seconds * 1e3)
        elif at_fault(error):
            self.errors += 1


def p95(ms: Sequence[float]) -> float:
    """The 95th percentile, by nearest rank; NaN of nothing."""
    return sorted(ms)[math.ceil(0.95 * len(ms)) - 1] if ms else math.nan


def memory(need_bytes: int, have_bytes: int) -> Judged:
    """Whether what was measured of it fits beside the other models once the version before is gone."""
    figures = {"need_bytes": float(need_bytes), "have_bytes": float(have_bytes)}
    if need_bytes <= have_bytes:
        return Judged("", figures)
    return Judged(f"it needs {need_bytes} bytes of memory and {have_bytes} would be free", figures)


def latency(pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]], rules: Rules) -> Judged:
    """Compare milliseconds of the same inputs by graph: (the version before, the new one)."""
    figures: dict[str, float] = {}
    slow = []
    for graph, (before_ms, new_ms) in pairs.items():
        before, new = p95(before_ms), p95(new_ms)
        figures |= {f"{graph}.before_p95_ms": round(before, 3), f"{graph}.new_p95_ms": round(new, 3)}
        if new > before * rules.latency_ratio + _LATENCY_SLACK_MS:
            slow.append(f"{graph} takes {new:.1f} ms where {before:.1f} ms were taken before (P95)")
    return Judged("; ".join(slow), figures)


def shadow(agreed: float, compared: int, rules: Rules) -> Judged:
    """Judge by the mean share in which `compared` answers agreed; none is no reason to refuse."""
    figures = {"compared": float(compared), "agreement": round(agreed / compared, 4) if compared else math.nan}
    if compared and agreed / compared < rules.shadow_agreement:
        return Judged(f"it agrees with the version before in {agreed / compared:.0%} of live answers", figures)
    return Judged("", figures if compared else {"compared": 0.0})


def agreement(before: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """How far two answers to the same request agree, between 0 and 1: the mean over outputs that both have.

    Of floats the largest element of each row counts (what a classifier says), of anything else each element.
    """
    theirs = {tensor.name: tensor.to_array() for tensor in new}
    shares = []
    for tensor in before:
        one, other = tensor.to_array(), theirs.get(tensor.name)
        if other is None or one.shape != other.shape or one.dtype.kind != other.dtype.kind:
            shares.append(0.0)
            continue
        if one.dtype.kind == "f" and one.ndim and one.shape[-1]:
            one, other = one.argmax(-1), other.argmax(-1)
        shares.append(float(np.mean(one == other)) if one.size else 1.0)
    return sum(shares) / len(shares) if shares else 1.0


def lines_agreement(before: Sequence[str], new: Sequence[str]) -> float:
    """How far two lists of texts agree: twice what is in both, by what is in either."""
    left = list(new)
    both = 0
    for text in before:
        if text in left:
            left.remove(text)
            both += 1
    return 2 * both / (len(before) + len(new)) if before or new else 1.0


def trial(before: Tally, new: Tally, rules: Rules, *, over: bool) -> Judged | None:
    """Judge a trial that runs, or with `over` has run its time; None while it may go on."""
    share = new.errors / new.requests if new.requests else 0.0
    figures: dict[str, float] = {"requests": new.requests, "errors": new.errors}
    if new.errors >= _LEAST_ERRORS and share > rules.trial_errors:
        return Judged(f"{new.errors} of {new.requests} requests failed on trial", figures)
    if not over:
        return None
    if min(len(before.ms), len(new.ms)) >= _LEAST_SAMPLES:
        was, now = p95(before.ms), p95(new.ms)
        figures |= {"before_p95_ms": round(was, 3), "new_p95_ms": round(now, 3)}
        if now > was * rules.trial_ratio + _TRIAL_SLACK_MS:
            return Judged(f"requests take {now:.1f} ms on trial and took {was:.1f} ms before (P95)", figures)
    return Judged("", figures)
