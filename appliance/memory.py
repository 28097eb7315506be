"""Keeps all models within one memory budget: loads, unloads, evicts, swaps, recycles, and sheds load under pressure.

Runs on the event loop. What fits, who goes and which step is due is decided in `core.budget` and `core.pressure`;
this file samples, asks, and performs it. A model that was unloaded because nobody used it, or to make room, is loaded
again by its next request; one that an operator unloaded stays away until it is loaded by name.

Past 400 lines because one object must see every lease: loading, leaving and watching change the same few fields, and
a second object between them would only pass these to and fro.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog

from appliance.core import budget as rules
from appliance.core.budget import Admission, Budget, Holding, Lease, Need
from appliance.core.health import State
from appliance.core.pressure import Bounds, Pressure, Step
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.supervisor import Supervisor
from appliance.swap import Swap
from models.errors import ApplianceError, InsufficientMemory, NotFound, NotReady, Overloaded
from models.measurements import Memory

log = structlog.get_logger()

T = TypeVar("T")

MIB = 2**20
GUESSED_OVERHEAD_BYTES = 96 * MIB
"""Of a worker before the first one was measured on this device."""
_OVER_SAMPLES = 2
"""Samples in a row over its lease after which a worker is recycled: one may be a run that ends at this moment."""
_RETIRE_S = 60.0
_RETIRE_REPLACED_S = 3600.0
"""Nothing new comes to a worker that was replaced, so it ends as soon as the slowest of its requests does."""
_SQUEEZE_IDLE_S = 5.0
"""Under the last step of pressure a model that rested so long is unloaded."""
_SPARE = "spare worker"
_ON_CPU = ("onnxruntime-cpu", "openvino")
"""Runtimes that hold nothing on the GPU."""


class ModelState(Enum):
    """States of a model as Triton names them."""

    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


@dataclass(frozen=True, slots=True)
class Sample:
    """What the machine says at one moment; None where it says nothing."""

    available_bytes: int | None = None
    stall: float | None = None
    nvmap_bytes: int | None = None
    process_bytes: Mapping[int, int] = field(default_factory=dict)
    """By process id."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator has decided."""

    total_bytes: int
    """For all models together."""
    bounds: Bounds
    idle_unload_s: float = 1800.0
    sample_s: float = 0.5
    spare: bool = True
    """Keep one worker started, without a model, while a model waits to be loaded again."""


UNLIMITED = Rules(total_bytes=2**62, bounds=Bounds(low_bytes=0, calm_bytes=0), idle_unload_s=float("inf"), spare=False)
"""Everything fits, for ever."""


class Tenant(Protocol):
    """A model as its keeper sees it."""

    name: str
    digest: str | None
    """Identity of what is served; None for a bare file."""
    supervisor: Supervisor
    priority: int
    file_bytes: int
    runs: int
    """At the same time."""
    queue: int
    """Requests that may wait for it."""
    used_at: float
    """When a request was answered last, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a version stands that is loaded and proven, and does not serve yet."""

    need_bytes: int
    """By what was measured of it."""
    have_bytes: int
    """For it, once the version before is gone."""
    beside: bool
    """Whether the version before serves meanwhile."""


Judge = Callable[[Standing], Awaitable[None]]


class SpareWorker(Protocol):
    """A worker that is started and holds no model."""

    @property
    def pid(self) -> int | None:
        """Its process; None when there is none."""

    def keep(self) -> None:
        """Start one unless there is one."""

    def drop(self) -> None:
        """End it if there is one."""


@dataclass(slots=True, eq=False)
class Tenure:
    """What the keeper knows of one model, in one worker."""

    tenant: Tenant
    supervisor: Supervisor
    loaded: bool = True
    """Whether it has a worker, or is about to; until `Keeper.start` whoever made its supervisor answers for that."""
    leaving: bool = False
    wakes: bool = True
    """Whether its next request loads it."""
    reason: str = ""
    """Why it is not loaded."""
    lease: Lease | None = None
    used_bytes: int | None = None
    peak_bytes: int = 0
    predicted: Need | None = None
    """At its first load here."""
    gpu_floor_bytes: int = 2**62
    """The least that the GPU held since this is the only worker: what it held more is this worker's."""
    over: int = 0
    """Samples in a row."""
    waiters: int = 0
    """Requests that wait until it is loaded."""
    task: asyncio.Task[Any] | None = None
    """Its loading, leaving, or being replaced."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def moving(self) -> bool:
        """Whether its lease will soon be another, whatever others do."""
        return self.leaving or self.supervisor.health.state is State.LOADING


class Keeper:
    """The one that decides which models are in memory."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        rules_: Rules,
        *,
        sample: Callable[[Sequence[int]], Sample] = lambda _pids: Sample(),
        overhead_bytes: int | None = None,
        spare: SpareWorker | None = None,
        limit: Callable[[str, int, int], None] = lambda _name, _pid, _bytes: None,
        on_learned: Callable[[Tenant, Memory, int], None] = lambda _tenant, _memory, _overhead: None,
    ) -> None:
        """Keep `tenants` within `rules_`.

        `sample` is called in a thread with the process ids to look at. `overhead_bytes` is what a worker was measured
        to take here before it holds a model. `limit` is told name, process id and lease of a worker, for the kernel,
        `on_learned` what was measured: of a model, and of a worker without one.
        """
        self.budget = Budget(rules_.total_bytes)
        self.evictions = self.recycles = self.idle_unloads = 0
        self.pressure = Pressure()
        self._rules, self._sample, self._limit, self._on_learned = rules_, sample, limit, on_learned
        self._overhead_bytes = overhead_bytes or GUESSED_OVERHEAD_BYTES
        self._tenures = {tenant.name: Tenure(tenant, tenant.supervisor) for tenant in tenants}
        self._aside: set[Tenure] = set()
        """Workers that do not serve: of the next version while it is loaded, of the one before until it is done."""
        self._spare, self._spare_lease = spare, None if spare is None else self.budget.take(_SPARE, {})
        self._deciding = asyncio.Lock()
        self._seen = Sample()
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self._on_change: Callable[[], None] = lambda: None

    # What the service asks for

    def start(self, on_change: Callable[[], None]) -> None:
        """Load what fits; `on_change` is called after each change of a model."""
        self._on_change = on_change
        for tenure in sorted(self._tenures.values(), key=self._rank):
            tenure.loaded, tenure.reason = False, "waits to be loaded"
            self._begin(tenure, self._bring(tenure, may_evict=False))
        self._watching = asyncio.ensure_future(self._watch())

    async def stop(self, grace_s: float) -> None:
        """End every worker."""
        self._stopping = True
        if self._watching:
            self._watching.cancel()
        tasks = [tenure.task for tenure in self._all if tenure.task]
        for task in tasks:
            task.cancel()
        if self._spare:
            self._spare.drop()
        await asyncio.gather(*(tenure.supervisor.stop(grace_s) for tenure in self._all))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, name: str, *, dry_run: bool = False) -> Admission:
        """Load a model and wait until it serves; with `dry_run` only say what would be.

        Raises InsufficientMemory when it does not fit, NotReady when it cannot be loaded, NotFound.
        """
        tenure = self._tenure(name)
        admission = self._admission(tenure)
        if dry_run:
            return admission
        if not tenure.loaded and not admission.fits:
            raise rules.refusal(name, admission)
        tenure.wakes = True
        await self.wake(name, proven=True)
        health = self._tenure(name).supervisor.health
        if health.state is not State.READY:
            msg = (
                f"model {name!r} cannot be loaded ({health.reason or health.state.value}): repair it, it is tried again"
            )
            raise NotReady(msg)
        return admission

    def swap_admission(self, fresh: Tenant) -> Admission:
        """Whether `fresh` fits beside the version of it that serves.

        Where it does not, but would in its place, `would_evict` begins with its own name: a swap then leaves a gap.
        """
        old, new = self._tenure(fresh.name), Tenure(fresh, fresh.supervisor, loaded=False)
        beside = self._admission(new)
        if beside.fits or old.lease is None:
            return beside
        instead = self._admission(new, old.lease.size_bytes)
        return replace(beside, would_evict=(*([fresh.name] if instead.fits else []), *instead.would_evict))

    async def swap(self, fresh: Tenant, rebind: Callable[[], None], judge: Judge | None = None) -> Swap:
        """Load, warm and prove `fresh` beside the version that serves, then switch; returns after the switch.

        `rebind` is called in the moment of the switch and must only assign. `judge` is waited for before it, and
        raises an ApplianceError where `fresh` must not serve, which is raised again here. The old version answers what
        it holds, and leaves. Where memory holds only one of them the old one leaves first, and requests wait meanwhile.
        Swaps of one model wait for each other, and go on when the one who waits leaves.
        Raises NotReady when `fresh` cannot be proven, InsufficientMemory when it would not fit even alone, NotFound;
        the old version then serves on.
        """
        while (old := self._tenure(fresh.name)).task:
            await self._join(old)
        if self._stopping:
            raise NotReady("the appliance is stopping: swap models when it is back")
        new = Tenure(fresh, fresh.supervisor, loaded=False)
        return await asyncio.shield(self._begin(old, self._swap(old, new, rebind, may_evict=True, judge=judge)))

    async def unload(self, name: str) -> None:
        """Let a model answer what it holds, and end its worker; it stays away until it is loaded by name."""
        while (tenure := self._tenure(name)).task:
            tenure.wakes = False
            await self._join(tenure)
        tenure.wakes = False
        if tenure.loaded:
            self._begin(tenure, self._leave(tenure, "unloaded by request"))
            await self._join(tenure)
        tenure.reason = "unloaded by request"
        self._on_change()

    async def wake(self, name: str, *, proven: bool = False) -> None:
        """Return when the model can be asked, loading it if need be; with `proven` when it is known what became of it.

        Raises InsufficientMemory when it does not fit, NotReady when an operator has unloaded it, Overloaded when
        too many wait for it.
        """
        first = self._tenure(name)
        if first.waiters >= first.tenant.queue:
            msg = f"{first.waiters} requests wait until {name!r} is loaded: retry later"
            raise Overloaded(msg)
        first.waiters += 1
        try:
            while not self.awake(name) or (proven and self._tenure(name).task):
                tenure = self._tenure(name)
                if tenure.task is None:
                    if not tenure.wakes or self._stopping:
                        msg = f"model {name!r} is not loaded ({tenure.reason}): load it first"
                        raise NotReady(msg)
                    self._begin(tenure, self._bring(tenure, may_evict=True))
                error = await self._join(tenure)
                if error and not tenure.loaded:
                    raise error
        finally:
            first.waiters -= 1

    def awake(self, name: str) -> bool:
        """Whether a model can be asked at once."""
        tenure = self._tenures.get(name)
        return tenure is None or (tenure.loaded and not tenure.leaving)

    def check(self, priority: int) -> None:
        """Raise Overloaded for a request that memory pressure refuses."""
        if self.pressure.step >= Step.REFUSE_LOW and priority > DEFAULT_PRIORITY:
            raise Overloaded("memory is short, so requests of low priority are refused: retry later")

    def take(self, name: str, graph: str, input_bytes: int) -> Callable[[], None] | None:
        """Take what a run of this size is expected to need beyond the model's own lease; what gives it back.

        Raises InsufficientMemory, before anything is allocated, when it does not fit.
        """
        tenure = self._tenures.get(name)
        memory = tenure.supervisor.memory if tenure else None
        expected_bytes = rules.run_bytes_of(memory, graph, input_bytes)
        own_bytes = tenure.lease.terms.get("activations", 0) if tenure and tenure.lease else 0
        if expected_bytes <= own_bytes:
            return None
        return partial(self.budget.give_back, self.budget.take(name, {"batch": expected_bytes - own_bytes}))

    def state(self, name: str) -> tuple[ModelState, str]:
        """State of a model, and why it is not ready."""
        tenure = self._tenure(name)
        if tenure.leaving:
            return ModelState.UNLOADING, "finishes what it holds"
        if not tenure.loaded:
            return (ModelState.LOADING if tenure.task else ModelState.UNAVAILABLE), tenure.reason
        health = tenure.supervisor.health
        if health.state is State.READY:
            return ModelState.READY, ""
        state = ModelState.LOADING if health.state in {State.LOADING, State.BUILDING} else ModelState.UNAVAILABLE
        return state, health.reason or health.state.value

    def asleep(self, name: str) -> bool:
        """Whether a model is unloaded and the next request loads it, or nobody wants it: neither is a fault."""
        tenure = self._tenures.get(name)
        return tenure is not None and not tenure.loaded and tenure.task is None

    def wakes(self, name: str) -> bool:
        """Whether a request for this model is served, if need be after loading it."""
        tenure = self._tenures.get(name)
        return tenure is None or tenure.wakes

    @property
    def settled(self) -> bool:
        """Whether nothing is being loaded for the first time."""
        return not any(tenure.task and not tenure.loaded for tenure in self._tenures.values())

    def status(self) -> dict[str, Any]:
        """Plain data for operators."""
        return {
            "budget_bytes": self.budget.total_bytes,
            "leased_bytes": self.budget.leased_bytes,
            "available_bytes": self._seen.available_bytes,
            "nvmap_bytes": self._seen.nvmap_bytes,
            "stall_percent": self._seen.stall,
            "step": self.pressure.step.name.lower(),
            "evictions": self.evictions,
            "idle_unloads": self.idle_unloads,
            "recycles": self.recycles,
            "spare_pid": self._spare.pid if self._spare else None,
            "models": [self._model_status(tenure) for tenure in self._tenures.values()],
        }

    def _model_status(self, tenure: Tenure) -> dict[str, Any]:
        state, reason = self.state(tenure.tenant.name)
        predicted = tenure.predicted
        return {
            "name": tenure.tenant.name,
            "state": state.value,
            "reason": reason or None,
            "priority": tenure.tenant.priority,
            "need_bytes": sum(self._need(tenure).terms.values()),
            "lease_bytes": dict(self.budget.by_term(tenure.tenant.name)),
            "used_bytes": tenure.used_bytes,
            "peak_bytes": tenure.peak_bytes or None,
            "predicted_bytes": sum(predicted.terms.values()) if predicted else None,
        }

    def aside(self) -> list[dict[str, Any]]:
        """Workers that run but do not serve: of a next version, or of one that still answers what it holds."""
        return [
            {
                "pid": tenure.supervisor.pid,
                "bundle": tenure.tenant.name,
                "digest": tenure.tenant.digest,
                "state": "leaving" if tenure.leaving else tenure.supervisor.health.state.value,
                "running": tenure.supervisor.running,
                "waiting": tenure.supervisor.waiting,
            }
            for tenure in self._aside
            if tenure.loaded
        ]

    @contextlib.asynccontextmanager
    async def lease(
        self, holder: str, terms: Mapping[str, int], *, priority: int = DEFAULT_PRIORITY
    ) -> AsyncIterator[Lease]:
        """Memory for work that is no model, as compiling an engine; given back when the context ends.

        Models that are idle and less important go for it, and come back with their next request. What is being loaded
        or unloaded is waited for. `terms` are bytes by purpose. Raises InsufficientMemory when that is not enough.
        """

        def admission() -> Admission:
            have_bytes = self.budget.free_bytes + (self._spare_lease.size_bytes if self._spare_lease else 0)
            return rules.admit(sum(terms.values()), have_bytes, self._holdings(), priority=priority)

        async with self._room(holder, admission, may_evict=True):
            lease = self.budget.take(holder, terms)
        try:
            yield lease
        finally:
            self.budget.give_back(lease)

    # Loading and unloading

    @property
    def _all(self) -> list[Tenure]:
        return [*self._tenures.values(), *self._aside]

    def _tenure(self, name: str) -> Tenure:
        if name not in self._tenures:
            msg = f"there is no model {name[:100]!r}; known are {', '.join(sorted(self._tenures)) or 'none'}"
            raise NotFound(msg)
        return self._tenures[name]

    def _need(self, tenure: Tenure) -> Need:
        tenant = tenure.tenant
        return rules.need_of(
            tenure.supervisor.memory,
            overhead_bytes=self._overhead_bytes,
            file_bytes=tenant.file_bytes,
            runs=tenant.runs,
        )

    def _rank(self, tenure: Tenure) -> tuple[int, int]:
        """Where a model comes at the start: the most important first, then the biggest, which finds whole blocks.

        The GPU's memory of a Jetson comes to pieces: what loads right after boot may not load hours later.
        """
        return tenure.tenant.priority, -sum(self._need(tenure).loading_terms.values())

    def _holdings(self) -> list[Holding]:
        return [
            Holding(
                name=name,
                size_bytes=tenure.lease.size_bytes,
                priority=tenure.tenant.priority,
                used_at=max(tenure.tenant.used_at, tenure.supervisor.health.since),
                busy=tenure.task is not None or bool(tenure.supervisor.waiting + tenure.supervisor.running),
            )
            for name, tenure in self._tenures.items()
            if tenure.lease
        ]

    def _admission(self, tenure: Tenure, freed_bytes: int = 0) -> Admission:
        need, have_bytes = self._need(tenure), self.budget.free_bytes + freed_bytes
        if self._spare_lease:  # it is a worker for whoever needs one
            have_bytes += self._spare_lease.size_bytes
        if tenure.lease:
            have_bytes += tenure.lease.size_bytes
        need_bytes = sum((need.terms if tenure.loaded else need.loading_terms).values())
        others = [one for one in self._holdings() if one.name != tenure.tenant.name]
        return rules.admit(need_bytes, have_bytes, others, priority=tenure.tenant.priority)

    def _begin(self, tenure: Tenure, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        tenure.task = task
        task.add_done_callback(lambda task: self._ended(tenure, task))
        return task

    def _ended(self, tenure: Tenure, task: asyncio.Task[Any]) -> None:
        if tenure.task is task:
            tenure.task = None
        if not task.cancelled() and task.exception() and not isinstance(task.exception(), ApplianceError):
            log.error("memory_keeper_fault", model=tenure.tenant.name, exc_info=task.exception())
        self._on_change()

    @staticmethod
    async def _join(tenure: Tenure) -> BaseException | None:
        """Wait for what is done with a model, which goes on when the one who waits leaves; the error it ended with."""
        task = tenure.task
        if task is None:
            return None
        await asyncio.wait([task])
        return None if task.cancelled() else task.exception()

    async def _bring(self, tenure: Tenure, *, may_evict: bool, gentle: bool = False) -> None:
        """Make room for a model and start its worker; returns when it is ready or has failed for the first time."""
        tenant = tenure.tenant
        need = self._need(tenure)
        try:
            async with self._room_of(tenure, may_evict=may_evict):
                tenure.lease = self.budget.take(tenant.name, need.loading_terms)
            tenure.predicted = tenure.predicted or need
            tenure.loaded, tenure.over = True, 0
            await self._start(tenure, gentle=gentle)
            if not self._fit(tenure):
                async with self._room_of(tenure, may_evict=may_evict):
                    self._fit(tenure)
        except InsufficientMemory as error:
            log.warning("model_not_loaded", model=tenant.name, reason=str(error))
            if tenure.lease:  # it turned out to need more than was thought
                await self._leave(tenure, str(error))
            tenure.reason = str(error)
            raise

    async def _start(self, tenure: Tenure, *, gentle: bool) -> None:
        """Start a worker and wait for its first word."""
        supervisor = tenure.supervisor

        def changed() -> None:
            tenure.changed.set()
            self._on_change()

        def measured() -> None:
            self._fit(tenure)
            present = self._tenures[tenure.tenant.name]
            if present is not tenure and present.tenant is tenure.tenant:  # two workers of one model, side by side
                learned = present.supervisor
                if learned.memory and supervisor.memory:
                    learned.memory = learned.memory.joined(supervisor.memory)
                self._fit(present)

        supervisor.start(
            changed,
            run_limit_bytes=max(1, self.budget.total_bytes - self._overhead_bytes),
            on_measured=measured,
            gentle=gentle,
        )
        while supervisor.health.state is State.LOADING and supervisor.health.rung is None:
            tenure.changed.clear()
            await tenure.changed.wait()
        if supervisor.ready and supervisor.ready.overhead_bytes:
            self._overhead_bytes = supervisor.ready.overhead_bytes

    def _room_of(self, tenure: Tenure, *, may_evict: bool) -> contextlib.AbstractAsyncContextManager[None]:
        return self._room(tenure.tenant.name, lambda: self._admission(tenure), may_evict=may_evict, tenure=tenure)

    @contextlib.asynccontextmanager
    async def _room(
        self, name: str, admit: Callable[[], Admission], *, may_evict: bool, tenure: Tenure | None = None
    ) -> AsyncIterator[None]:
        """Evict what must go, and let nobody else take its place meanwhile; raises InsufficientMemory.

        `name` is who needs the room, as `tenure` unless it is no model.
        """
        while True:
            async with self._deciding:
                admission = admit()
                if admission.fits and (may_evict or not admission.would_evict):
                    self._lend_spare()
                    for leaver in admission.would_evict:
                        await self._evict(self._tenures[leaver], name)
                    yield
                    return
            # What others need to load is more than what they will keep, and who leaves will keep nothing. Nobody waits
            # here who holds a lease, so no two wait for each other.
            moving = [one.task for one in self._all if one.task and one.lease and one is not tenure and one.moving]
            moving = [task for task in moving if task is not asyncio.current_task()]
            if not moving:
                raise rules.refusal(name, admission)
            await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)

    async def _evict(self, tenure: Tenure, room_for: str) -> None:
        self.evictions += 1
        log.info("model_evicted", model=tenure.tenant.name, room_for=room_for)
        self._begin(tenure, self._leave(tenure, f"evicted for {room_for}, its next request loads it"))
        await self._join(tenure)

    async def _leave(self, tenure: Tenure, reason: str, retire_s: float = _RETIRE_S) -> None:
        """Let a model finish what it holds and end its worker."""
        tenure.leaving, tenure.reason = True, reason
        self._on_change()
        try:
            before_bytes = await self._available_bytes()
            await tenure.supervisor.retire(retire_s)
            after_bytes = await self._available_bytes()
            if before_bytes is not None and after_bytes is not None:
                rose_mib = (after_bytes - before_bytes) // MIB
                log.info("worker_left", model=tenure.tenant.name, why=reason, available_rose_mib=rose_mib)
        finally:
            self._aside.discard(tenure)
            tenure.leaving = tenure.loaded = False
            tenure.used_bytes = None
            if tenure.lease:
                self.budget.give_back(tenure.lease)
                tenure.lease = None

    async def _available_bytes(self) -> int | None:
        with contextlib.suppress(OSError):
            return (await asyncio.to_thread(self._sample, ())).available_bytes
        return None

    def _fit(self, tenure: Tenure) -> bool:
        """Make the lease what was measured; whether the budget allows that. If not, `_judge` sees what comes of it."""
        supervisor = tenure.supervisor
        if tenure.lease is None or tenure.leaving or supervisor.health.state is State.LOADING:
            return True
        if supervisor.memory:
            self._on_learned(tenure.tenant, supervisor.memory, self._overhead_bytes)
        try:
            tenure.lease = self.budget.change(tenure.lease, self._need(tenure).terms)
        except InsufficientMemory:
            return False
        return True

    async def _swap(
        self, old: Tenure, new: Tenure, rebind: Callable[[], None], *, may_evict: bool, judge: Judge | None = None
    ) -> Swap:
        """Put `new` in the place of `old`: beside it where memory allows, else after it. See `swap`."""
        began_at, gap_s = time.monotonic(), 0.0
        admission = self.swap_admission(new.tenant)
        new.task = asyncio.current_task()
        self._aside.add(new)
        try:
            try:
                await self._bring_proven(new, may_evict=may_evict, gentle=old.loaded)
                await self._judge_swap(new, old, judge)
            except InsufficientMemory as error:
                lease_bytes = old.lease.size_bytes if old.lease else 0
                if not lease_bytes or not self._admission(new, lease_bytes).fits:
                    raise
                log.warning(
                    "swap_leaves_a_gap",
                    model=new.tenant.name,
                    why="memory does not hold both versions at once",
                    need_bytes=error.need_bytes,
                    have_bytes=error.have_bytes,
                )
                gap_at = time.monotonic()
                await self._leave(old, "its next version takes its place")
                await self._bring_instead(new, old, may_evict=may_evict, judge=judge)
                gap_s = time.monotonic() - gap_at
            load_s = time.monotonic() - began_at
            began_ns = time.perf_counter_ns()
            self._tenures[new.tenant.name] = new
            rebind()
            switch_s = (time.perf_counter_ns() - began_ns) / 1e9
        finally:
            self._aside.discard(new)
            new.task = None
        if old.loaded:
            self._aside.add(old)
            self._begin(old, self._leave(old, "replaced", _RETIRE_REPLACED_S))
        return Swap(replace(admission, fits=not gap_s), load_s, switch_s, gap_s)

    async def _bring_proven(self, tenure: Tenure, *, may_evict: bool, gentle: bool = False) -> None:
        """Load a model; raises NotReady, with nothing left of it, unless it proves itself as it was meant to be."""
        await self._bring(tenure, may_evict=may_evict, gentle=gentle)
        health = tenure.supervisor.health
        if health.state is not State.READY or health.degraded:
            await self._leave(tenure, "not proven", retire_s=0)
            raise NotReady(health.degraded or health.reason or f"it is {health.state.value}")

    async def _judge_swap(self, new: Tenure, old: Tenure, judge: Judge | None) -> None:
        """Ask whether `new`, which is proven, may serve; where it may not nothing is left of it."""
        if judge is None:
            return
        own = sum(lease.size_bytes for lease in (new.lease, old.lease, self._spare_lease) if lease)
        need_bytes = sum(self._need(new).terms.values())
        standing = Standing(need_bytes, self.budget.free_bytes + own, beside=old.loaded)
        try:
            await judge(standing)
        except ApplianceError:
            await self._leave(new, "not taken", retire_s=0)
            raise

    async def _bring_instead(self, new: Tenure, old: Tenure, *, may_evict: bool, judge: Judge | None) -> None:
        """Load `new`, or when that cannot be, or may not serve, `old` again."""
        try:
            await self._bring_proven(new, may_evict=may_evict)
            await self._judge_swap(new, old, judge)
        except ApplianceError as error:
            with contextlib.suppress(InsufficientMemory):
                await self._bring(old, may_evict=may_evict)
            if not old.loaded or old.supervisor.health.state is not State.READY:
                msg = f"{error}; and the version before does not come back: {self.state(old.tenant.name)[1]}"
                raise NotReady(msg) from error
            raise

    async def _recycle(self, tenure: Tenure, reason: str) -> None:
        """Put a fresh worker of the same model in place of one that takes too much."""
        tenant = tenure.tenant
        twin = Tenure(tenant, tenure.supervisor.twin(), loaded=False)
        twin.predicted, twin.peak_bytes = tenure.predicted, tenure.peak_bytes

        def rebind() -> None:
            tenant.supervisor = twin.supervisor

        try:
            swap = await self._swap(tenure, twin, rebind, may_evict=False)
        except (InsufficientMemory, NotReady) as error:
            log.warning("worker_not_recycled", model=tenant.name, reason=str(error))
        else:
            log.info("worker_recycled", model=tenant.name, reason=reason, gap_s=round(swap.gap_s, 3))

    # Watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._rules.sample_s)
            try:
                pids = [pid for tenure in self._all if (pid := tenure.supervisor.pid)]
                self._judge(await asyncio.to_thread(self._sample, pids), time.monotonic())
            except Exception:  # whatever it is, the next sample must be taken
                log.exception("memory_watch_failed")

    def _judge(self, sample: Sample, now: float) -> None:
        """Do what the figures ask for."""
        self._seen = sample
        gpu_bytes, holders = sample.nvmap_bytes or 0, {lease.holder for lease in self.budget}
        for tenure in self._all:
            name, pid = tenure.tenant.name, tenure.supervisor.pid
            used_bytes = sample.process_bytes.get(pid) if pid else None
            # The GPU's pages are in no process's count, and no one can tell whose they are while there are several.
            alone = sample.process_bytes.keys() == {pid} and holders <= {name, _SPARE}
            its_own = alone and (ready := tenure.supervisor.ready) and ready.runtime not in _ON_CPU
            tenure.gpu_floor_bytes = min(tenure.gpu_floor_bytes, gpu_bytes) if its_own else gpu_bytes
            if used_bytes is None or tenure.lease is None or pid is None:
                continue
            used_bytes += gpu_bytes - tenure.gpu_floor_bytes
            tenure.used_bytes, tenure.peak_bytes = used_bytes, max(used_bytes, tenure.peak_bytes)
            allowed_bytes = sum(self.budget.by_term(name).values())
            if tenure.supervisor.explores:
                allowed_bytes += max(0, self.budget.free_bytes)
            self._limit(name, pid, allowed_bytes)
            tenure.over = tenure.over + 1 if used_bytes > allowed_bytes else 0
            if tenure.over >= _OVER_SAMPLES and tenure.task is None:
                tenure.over = 0
                self.recycles += 1
                reason = f"it takes {used_bytes // MIB} MiB, its lease is {allowed_bytes // MIB} MiB"
                log.warning("worker_over_lease", model=name, pid=pid, reason=reason)
                self._begin(tenure, self._recycle(tenure, reason))
        step = self.pressure.step
        self.pressure = self.pressure.after(
            now, self._rules.bounds, available_bytes=sample.available_bytes, stall=sample.stall
        )
        if self.pressure.step is not step:
            self._shed(step)
        self._unload_idle(now)
        self._tend_spare()

    def _shed(self, before: Step) -> None:
        step = self.pressure.step
        log.warning("memory_pressure", step=step.name.lower(), before=before.name.lower())
        for tenure in self._all:
            tenure.supervisor.narrow(step >= Step.NARROW)
        self._on_change()

    def _unload_idle(self, now: float) -> None:
        squeezed = self.pressure.step >= Step.UNLOAD_IDLE
        after_s = min(_SQUEEZE_IDLE_S, self._rules.idle_unload_s) if squeezed else self._rules.idle_unload_s
        for name in rules.idle(self._holdings(), now, after_s)[: 1 if squeezed else None]:
            tenure = self._tenures[name]
            why = "memory is short" if squeezed else f"nobody used it for {after_s:g} s"
            self.idle_unloads += 1
            log.info("model_unloaded", model=name, why=why)
            self._begin(tenure, self._leave(tenure, f"{why}, its next request loads it"))

    def _tend_spare(self) -> None:
        """A spare worker waits exactly while a model may come back and memory is no worry."""
        if self._spare is None or self._spare_lease is None:
            return
        wanted = any(tenure.wakes and self.asleep(name) for name, tenure in self._tenures.items())
        busy = any(tenure.task for tenure in self._tenures.values())
        if not wanted or self.pressure.step > Step.NORMAL:
            self._lend_spare()
            self._spare.drop()
        elif not busy and self._spare.pid is None:
            with contextlib.suppress(InsufficientMemory):
                self._spare_lease = self.budget.change(self._spare_lease, {"overhead": self._overhead_bytes})
                self._spare.keep()

    def _lend_spare(self) -> None:
        """Give the lease of the spare worker back: the model that is loaded now takes it over, lease and all."""
        if self._spare_lease is not None:
            self._spare_lease = self.budget.change(self._spare_lease, {})
