"""One budget for the memory of all models: who may hold how much, and who has to go when a model does not fit.

Pure: sizes are facts handed in, times are monotonic seconds. A lease is taken once and returned once;
the sum of all leases is never above the total.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from models.errors import InsufficientMemory
from models.measurements import Memory

MIB = 2**20
PREDICT = "predict"
"""Name under which the runs of a bundle's task are measured; their input is the decoded picture."""
PICTURE_COPIES = 2

LEAST_SLACK_BYTES = 32 * MIB
SLACK = 0.1
"""Share of what was measured that a worker may take on top: heaps have holes, threads have stacks."""

UNKNOWN_WEIGHTS = 2.0
"""Bytes in memory a byte of a graph's file, when nothing was measured: weights are often packed a second time."""
UNKNOWN_RUN_BYTES = 64 * MIB
"""Of one run of a model that was never measured."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a loaded model takes in one worker, in separate terms."""

    overhead_bytes: int
    """The process before it holds a model: interpreter, libraries, a runtime's context. Measured once a device."""
    weights_bytes: int
    load_peak_bytes: int
    """Above the overhead while it loads and proves itself: several precisions may be open at once."""
    run_bytes: int
    """Activations of one run of the largest known shape."""
    runs: int = 1
    """At the same time."""

    @property
    def terms(self) -> Mapping[str, int]:
        """Bytes by term while it serves."""
        activations_bytes = self.run_bytes * self.runs
        used_bytes = self.overhead_bytes + self.weights_bytes + activations_bytes
        return {
            "overhead": self.overhead_bytes,
            "weights": self.weights_bytes,
            "activations": activations_bytes,
            "slack": _slack_bytes(used_bytes),
        }

    @property
    def loading_terms(self) -> Mapping[str, int]:
        """Bytes by term while it loads: as much as it will take to serve, or more for a while."""
        serving_bytes = sum(self.terms.values())
        loading_bytes = self.overhead_bytes + self.load_peak_bytes
        loading_bytes += _slack_bytes(loading_bytes)
        return {**self.terms, "load": max(0, loading_bytes - serving_bytes)}


def _slack_bytes(used_bytes: int) -> int:
    return max(LEAST_SLACK_BYTES, round(SLACK * used_bytes))


def need_of(memory: Memory | None, *, overhead_bytes: int, file_bytes: int, runs: int) -> Need:
    """The need of a model whose `memory` was measured, or a guess from the size of its files where it was not."""
    if memory is None:
        weights_bytes = round(UNKNOWN_WEIGHTS * file_bytes)
        return Need(overhead_bytes, weights_bytes, weights_bytes + UNKNOWN_RUN_BYTES, UNKNOWN_RUN_BYTES, runs)
    proven_bytes = max(0, memory.load_peak_bytes - memory.weights_bytes)  # loading ran each graph once
    largest = max((size for buckets in memory.run_bytes.values() for size in buckets.values()), default=proven_bytes)
    return Need(overhead_bytes, memory.weights_bytes, memory.load_peak_bytes, largest, runs)


@dataclass(frozen=True, slots=True)
class Lease:
    """Bytes granted, by term; whoever took it gives it back exactly once."""

    id: int
    holder: str
    terms: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """All terms together."""
        return sum(self.terms.values())


class Budget:
    """The leases that are out."""

    def __init__(self, total_bytes: int) -> None:
        """Grant at most `total_bytes` at any time."""
        self.total_bytes = total_bytes
        self._out: dict[int, Lease] = {}
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[Lease]:
        """Leases that are out, oldest first."""
        return iter(list(self._out.values()))

    @property
    def leased_bytes(self) -> int:
        """Granted and not returned."""
        return sum(lease.size_bytes for lease in self._out.values())

    @property
    def free_bytes(self) -> int:
        """What may still be granted."""
        return self.total_bytes - self.leased_bytes

    def take(self, holder: str, terms: Mapping[str, int]) -> Lease:
        """Grant a lease; raises InsufficientMemory when it does not fit, ValueError for less than nothing."""
        lease = Lease(next(self._ids), holder, _checked(terms))
        self._fit(lease, held_bytes=0)
        self._out[lease.id] = lease
        return lease

    def change(self, lease: Lease, terms: Mapping[str, int]) -> Lease:
        """Grant other sizes in place of `lease`, which counts as returned.

        Raises InsufficientMemory when they do not fit (`lease` is then still out), KeyError when it is not out.
        """
        held = self._out[lease.id]
        changed = Lease(lease.id, lease.holder, _checked(terms))
        self._fit(changed, held_bytes=held.size_bytes)
        self._out[lease.id] = changed
        return changed

    def give_back(self, lease: Lease) -> None:
        """Return a lease, however often it was changed; raises KeyError when it is not out."""
        del self._out[lease.id]

    def by_term(self, holder: str) -> Mapping[str, int]:
        """Bytes that a holder has, by term."""
        found: dict[str, int] = {}
        for lease in self._out.values():
            if lease.holder == holder:
                for term, size_bytes in lease.terms.items():
                    found[term] = found.get(term, 0) + size_bytes
        return found

    def _fit(self, lease: Lease, held_bytes: int) -> None:
        have_bytes = self.free_bytes + held_bytes
        if lease.size_bytes > have_bytes:
            raise refusal(lease.holder, Admission(False, lease.size_bytes, have_bytes, ()))


def _checked(terms: Mapping[str, int]) -> Mapping[str, int]:
    if any(size_bytes < 0 for size_bytes in terms.values()):
        msg = f"a lease cannot hold less than nothing: {terms}"
        raise ValueError(msg)
    return dict(terms)


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a model can be loaded, and at whose cost."""

    fits: bool
    need_bytes: int
    have_bytes: int
    """Free now."""
    would_evict: tuple[str, ...]
    """When it fits: the models that go for it. When it does not: those whose unloading would make room, but that are
    busy or more important; none when nothing would help."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A loaded model as eviction sees it. Lower `priority` is more important, as with requests."""

    name: str
    size_bytes: int
    priority: int
    used_at: float
    """When its last request was answered or it became ready."""
    busy: bool = False
    """Whether requests wait for it or run, or it is loading: then it stays."""


def admit(need_bytes: int, have_bytes: int, holdings: Sequence[Holding], *, priority: int) -> Admission:
    """Whether `need_bytes` for a model of `priority` fit into `have_bytes`, after evicting the fewest that do.

    The least important go first, among equals the one idle for longest. Nobody busy goes, and nobody more important.
    """
    may_go = [one for one in holdings if not one.busy and one.priority >= priority]
    for candidates, fits in ((may_go, True), (holdings, False)):
        chosen = _fewest(need_bytes - have_bytes, candidates)
        if chosen is not None:
            return Admission(fits, need_bytes, have_bytes, tuple(one.name for one in chosen))
    return Admission(False, need_bytes, have_bytes, ())


def _fewest(missing_bytes: int, candidates: Iterable[Holding]) -> list[Holding] | None:
    """Candidates in the order of eviction that free `missing_bytes`, none of them needless; None when all do not."""
    chosen: list[Holding] = []
    for one in sorted(candidates, key=lambda one: (-one.priority, one.used_at, one.name)):
        if missing_bytes <= 0:
            break
        chosen.append(one)
        missing_bytes -= one.size_bytes
    if missing_bytes > 0:
        return None
    for one in reversed(chosen):  # a large one that came late may make small ones before it needless
        if missing_bytes + one.size_bytes <= 0:
            chosen = [other for other in chosen if other is not one]
            missing_bytes += one.size_bytes
    return chosen


def refusal(name: str, admission: Admission) -> InsufficientMemory:
    """The error that says what is missing for `name`."""
    need, have = (f"{size_bytes / MIB:.0f} MiB" for size_bytes in (admission.need_bytes, admission.have_bytes))
    if admission.would_evict:
        hint = f"{', '.join(admission.would_evict)} would have to go, but may not now: unload by hand, or retry later"
    else:
        hint = "unloading others would not help: give models more memory with memory.budget_bytes, or serve fewer"
    return InsufficientMemory(
        f"{name} needs {need} of memory, free are {have}; {hint}",
        need_bytes=admission.need_bytes,
        have_bytes=admission.have_bytes,
        would_evict=admission.would_evict,
    )


def idle(holdings: Iterable[Holding], now: float, after_s: float) -> list[str]:
    """Models that nobody has used for `after_s`, longest idle first."""
    unused = [one for one in holdings if not one.busy and now - one.used_at >= after_s]
    return [one.name for one in sorted(unused, key=lambda one: (one.used_at, one.name))]


def bucket_of(size_bytes: int) -> int:
    """The size class of a request: the power of two that holds its input."""
    return 1 << max(0, size_bytes - 1).bit_length()


def run_bytes_of(memory: Memory | None, graph: str, input_bytes: int) -> int:
    """Activations that a run is expected to take, from what was measured of `graph`; 0 where nothing was.

    Between measured buckets the next larger one is taken. Beyond the largest, tensors grow with their input, which is
    right for convolutions; a picture is scaled by its task, so only copies of it grow.
    """
    sizes, bucket = memory.run_bytes.get(graph) if memory else None, bucket_of(input_bytes)
    if not sizes:
        return 0
    if (same := sizes.get(str(bucket))) is not None:
        return same
    measured = {int(known): size for known, size in sizes.items()}
    largest = max(measured)
    if bucket <= largest:
        return measured[min(known for known in measured if known >= bucket)]
    if graph == PREDICT:
        return measured[largest] + PICTURE_COPIES * (bucket - largest)
    return -(-measured[largest] * bucket // largest)
