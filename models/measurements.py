"""What was measured of a bundle on one machine: advice about time, memory and likeness, which nothing vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

REFERENCE = "fp32"
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Memory:
    """What a bundle takes in one process of its runtime, beyond the process itself."""

    weights_bytes: int
    """While nothing runs."""
    load_peak_bytes: int
    """The most while it loaded and proved itself."""
    run_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Graph ("predict" for the bundle's task) -> bucket of input bytes -> the most that one run took above the weights.

    A bucket is a power of two, written as text.
    """

    def learned(self, graph: str, bucket_bytes: int, run_bytes: int) -> Memory:
        """With what one more run took: of each bucket the most is kept."""
        buckets = self.run_bytes.get(graph, {})
        bucket = str(bucket_bytes)
        most = max(run_bytes, buckets.get(bucket, 0))
        return replace(self, run_bytes={**self.run_bytes, graph: {**buckets, bucket: most}})

    def joined(self, other: Memory) -> Memory:
        """With what another process of the same model has learned about runs."""
        known = self
        for graph, buckets in other.run_bytes.items():
            for bucket, run_bytes in buckets.items():
                known = known.learned(graph, int(bucket), run_bytes)
        return known


@dataclass(frozen=True, slots=True)
class Measurements:
    """Figures and the machine they were measured on; on any other they mean nothing."""

    machine: Mapping[str, str]
    latency_ms: Mapping[str, Mapping[str, float]]
    """Graph -> precision -> milliseconds of one run on one thread."""
    memory: Memory | None = None
    """With the precisions that are served on that machine."""


@dataclass(frozen=True, slots=True)
class Answering:
    """One of two bundles that were compared, in the precision that answered."""

    name: str
    version: str
    digest: str
    precision: str
    kv_heads: int = 0
    """Key and value heads that its attention shares; 0 where none are shared."""

    def __str__(self) -> str:
        """Like "INT8, 2 KV heads"."""
        precision = "float" if self.precision == REFERENCE else self.precision.upper()
        return precision + (f", {self.kv_heads} KV heads" if self.kv_heads else "")


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a device's bundle answers as the one upstream does, to the same samples: advice before a rollout.

    Differences are device minus upstream in points, hundredths of a share: below 0 the device does worse.
    """

    device: Answering
    upstream: Answering
    measure: str
    """What `points` is of: "exact match" where lines of text are read, otherwise "likeness of outputs"."""
    points: float
    on: str
    """What both were shown: "67 lines"."""
    runtime: str
    machine: Mapping[str, str]
    interval_points: tuple[float, ...] = ()
    """95 % interval, low and high; empty where there is none."""
    agreement: float | None = None
    """Share of the lines that both read the same; None where no lines are read."""

    def __str__(self) -> str:
        """One sentence for whoever is about to roll the device's bundle out."""
        other = (self.upstream.name, self.upstream.version)
        which = "" if other == (self.device.name, self.device.version) else " {} {}".format(*other)
        interval = " to ".join(f"{one:+.1f}" for one in self.interval_points)
        within = f"95 % interval {interval}, " if interval else ""
        alike = "" if self.agreement is None else f"; both read the same on {self.agreement:.1%}"
        return (
            f"{self.device} on the device against {self.upstream}{which} upstream: {self.points:+.1f} points of "
            f"{self.measure} ({within}{self.on}){alike}"
        )


def known_on(machine: Mapping[str, str], *measured: Measurements | None) -> Mapping[str, Mapping[str, float]]:
    """Latencies of the first of `measured` that holds for `machine`; empty when none does."""
    return next((one.latency_ms for one in measured if one and one.machine == machine), {})


def memory_on(machine: Mapping[str, str], *measured: Measurements | None) -> Memory | None:
    """Memory by the first of `measured` that knows it for `machine`; None when none does."""
    return next((one.memory for one in measured if one and one.memory and one.machine == machine), None)


def fastest(latency_ms: Mapping[str, float]) -> str:
    """The precision to serve, of those measured: float, unless another takes at most nine tenths of its time.

    Float is the reference that every other precision is compared with. A gain of a few percent is within what a
    busy neighbour does to a measurement, and a neighbour's load must not decide what text is read.
    """
    best = min(sorted(latency_ms), key=lambda precision: latency_ms[precision])
    gains = REFERENCE not in latency_ms or latency_ms[best] <= _WORTH * latency_ms[REFERENCE]
    return best if gains else REFERENCE
