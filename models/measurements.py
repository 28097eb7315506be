"""What was measured of a bundle on one machine: advice about time, which nothing vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REFERENCE = "fp32"
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Measurements:
    """Latencies and the machine they were measured on; on any other they mean nothing."""

    machine: Mapping[str, str]
    latency_ms: Mapping[str, Mapping[str, float]]
    """Graph -> precision -> milliseconds of one run on one thread."""


def known_on(machine: Mapping[str, str], *measured: Measurements | None) -> Mapping[str, Mapping[str, float]]:
    """Latencies of the first of `measured` that holds for `machine`; empty when none does."""
    return next((one.latency_ms for one in measured if one and one.machine == machine), {})


def fastest(latency_ms: Mapping[str, float]) -> str:
    """The precision to serve, of those measured: float, unless another takes at most nine tenths of its time.

    Float is the reference that every other precision is compared with. A gain of a few percent is within what a
    busy neighbour does to a measurement, and a neighbour's load must not decide what text is read.
    """
    best = min(sorted(latency_ms), key=lambda precision: latency_ms[precision])
    gains = REFERENCE not in latency_ms or latency_ms[best] <= _WORTH * latency_ms[REFERENCE]
    return best if gains else REFERENCE
