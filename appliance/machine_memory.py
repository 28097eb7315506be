"""The keeper's view of this machine: the budget that settings and the kernel leave, samples, and what was measured.

Measurements of a bundle are kept in the store under its digest, those of a worker without a model under its runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace

import structlog

from appliance import settings, wire
from appliance.adapters import cgroup, host
from appliance.adapters.store import Store
from appliance.core.pressure import Bounds
from appliance.life import StartLife
from appliance.memory import Keeper, Rules, Sample, Tenant
from appliance.spare import Spare
from models.measurements import Measurements, Memory

log = structlog.get_logger()

_LEAST_RESERVE_BYTES, _MOST_RESERVE_BYTES = 256 * 2**20, 2 * 2**30
"""Of memory that is left to the system, unless set."""
_CHANGE_BYTES = 2 * 2**20
"""Of a process's memory that is worth a look; a lease has at least 32 MiB of slack."""


class Notebook:
    """What was measured of one bundle here, written down as it becomes known."""

    def __init__(self, store: Store, digest: str, known: Measurements) -> None:
        self._store, self._digest, self._known = store, digest, known
        self._writing = threading.Lock()

    def latency(self, ready: wire.Ready) -> None:
        """Note what a worker has measured when it was loaded."""
        if ready.latency_ms:
            self._note(replace(self._known, latency_ms={**self._known.latency_ms, **ready.latency_ms}))

    def memory(self, memory: Memory) -> None:
        """Note what the model takes."""
        if memory != self._known.memory:
            self._note(replace(self._known, memory=memory))

    def _note(self, known: Measurements) -> None:
        self._known = known
        asyncio.get_running_loop().run_in_executor(None, self._write)

    def _write(self) -> None:
        try:
            with self._writing:
                self._store.keep_measurements(self._digest, self._known)
        except OSError as error:  # a full disk costs a measurement at the next start, no more
            log.warning("measurements_not_kept", digest=self._digest, reason=str(error))


class MachineMemory:
    """The memory that models may have on this machine, and those who look after it."""

    def __init__(self, config: settings.Settings, spare: Spare, store: Store) -> None:
        """`spare` holds the worker of the first model; later ones wait in it only where settings allow it."""
        self._config, self._store = config, store
        self.notebooks: dict[str, Notebook] = {}
        """By digest."""
        self._spare = spare if config.memory.spare_worker else None
        self.start_life: StartLife = spare.start_life

    def keeper(self, bundles: Sequence[Tenant]) -> Keeper:
        """The keeper of `bundles`."""
        known_bytes = self._store.overhead_bytes(self._config.runtime)
        groups = cgroup.find()
        if isinstance(groups, str):
            log.info("workers_not_in_groups", why=groups)
        return Keeper(
            bundles,
            self._rules(),
            sample=Sampler(),
            overhead_bytes=known_bytes,
            spare=self._spare,
            limit=(lambda _name, _pid, _bytes: None) if isinstance(groups, str) else groups.limit,
            on_learned=self._learned,
        )

    def _rules(self) -> Rules:
        chosen, total_bytes = self._config.memory, host.memory_bytes().get("total", 0)
        total_bytes = min(total_bytes, host.group_limit_bytes() or total_bytes)
        reserve_bytes = chosen.reserve_bytes
        if reserve_bytes is None:
            reserve_bytes = min(max(total_bytes // 8, _LEAST_RESERVE_BYTES), _MOST_RESERVE_BYTES)
        low_bytes = reserve_bytes // 4 if chosen.low_available_bytes is None else chosen.low_available_bytes
        return Rules(
            total_bytes=chosen.budget_bytes or max(total_bytes - reserve_bytes, 0),
            bounds=Bounds(low_bytes=low_bytes, calm_bytes=low_bytes + low_bytes // 2),
            idle_unload_s=chosen.idle_unload_s,
            sample_s=chosen.sample_s,
        )

    def _learned(self, tenant: Tenant, memory: Memory, overhead_bytes: int) -> None:
        if tenant.digest in self.notebooks:
            self.notebooks[tenant.digest].memory(memory)
        asyncio.get_running_loop().run_in_executor(None, self._keep_overhead, overhead_bytes)

    def _keep_overhead(self, overhead_bytes: int) -> None:
        """In a thread: a disk may take a second, in which nobody should wait for an answer."""
        if overhead_bytes != self._store.overhead_bytes(self._config.runtime):
            with contextlib.suppress(OSError):
                self._store.keep_overhead_bytes(self._config.runtime, overhead_bytes)


class Sampler:
    """Takes samples of this machine.

    The kernel walks all pages of a process to tell what it takes: a third of the processor time of a daemon without
    requests. So that is asked only when what it holds, which the kernel counts as it goes, has changed, and when
    another has come or gone, with whom it may have shared pages.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: dict[int, tuple[int, int]] = {}
        """By process id: what it held when it was asked, and what it takes."""

    def __call__(self, pids: Sequence[int]) -> Sample:
        """What the machine says, and what processes take; it may take milliseconds. Of several threads."""
        memory, known = host.memory_bytes(), self._known
        if known.keys() != set(pids):
            known = {}
        self._known = known = {pid: found for pid in pids if (found := _look(pid, known.get(pid)))}
        sizes = {pid: size_bytes for pid, (_held_bytes, size_bytes) in known.items()}
        return Sample(memory.get("available"), host.memory_stall(), memory.get("nvmap"), sizes)


def _look(pid: int, known: tuple[int, int] | None) -> tuple[int, int] | None:
    held_bytes = host.held_bytes(pid)
    if known and held_bytes and abs(held_bytes - known[0]) < _CHANGE_BYTES:
        return known
    size_bytes = host.process_bytes(pid)
    return None if size_bytes is None else (held_bytes or 0, size_bytes)
