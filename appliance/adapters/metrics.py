"""What became of requests, as Prometheus and Triton's statistics ask for it, and the state of models at a scrape.

Names that begin with `nv_` are those of Triton, so that its dashboards work. Labels take the names of
served models only, whose number nobody outside decides.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from appliance.adapters.metrics_fleet import fleet_metrics
from appliance.core.pressure import Step
from appliance.service import Outcome, Service
from models.errors import (
    BundleError,
    DeadlineExceeded,
    InsufficientMemory,
    ModelError,
    NotReady,
    Overloaded,
    WorkerLost,
)

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REASONS: Mapping[str, tuple[type[BaseException], ...]] = {
    "REJECTED": (Overloaded, NotReady, DeadlineExceeded, InsufficientMemory),
    "CANCELED": (asyncio.CancelledError,),
    "BACKEND": (WorkerLost, ModelError, BundleError),
    "OTHER": (BaseException,),
}
"""Triton's reasons of a failure -> what counts as such; the first that fits."""
_PARTS = {"queue": "queue", "decode": "input", "inference": "infer", "processing": "output"}
"""Part of an answer's timing -> Triton's name of it."""
_COMPUTED = {part: name for part, name in _PARTS.items() if part != "queue"}
_LABELS = ("model", "version")
_CUDA = ("tensorrt", "onnxruntime-cuda")
"""Runtimes whose workers hold a context of the GPU."""


class Metrics:
    """Counts the requests of one service from now on."""

    def __init__(self, service: Service) -> None:
        """Show `service`; every served model shows zeros before its first request."""
        self._tallies = {(info.name, info.version): _Tally() for info in service.models()}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_StateCollector(service))
        self.registry.register(_RequestCollector(self._tallies))
        service.observers.append(self._observe)

    def text(self) -> bytes:
        """The text of a scrape."""
        # The library writes the type of every counter under a name that ends in `_total`, as Triton's do not.
        return re.sub(rb"(?m)^(# (?:HELP|TYPE) nv_\w+)_total ", rb"\1 ", generate_latest(self.registry))

    def statistics(self, model: str, version: str) -> dict[str, Any]:
        """Counts and nanoseconds of a model, in the form of Triton's statistics extension.

        The time of a failed request has no parts; that of a bundle counts decoding as input, and
        everything else around its graphs as output.
        """
        tally = self._tallies.get((model, version), _Tally())
        parts = {
            f"{'' if part == 'queue' else 'compute_'}{part}": _duration(tally.answered, spent_s)
            for part, spent_s in tally.parts_s.items()
        }
        return {
            "name": model,
            "version": version,
            "last_inference": round(tally.last_at * 1e3),
            "inference_count": tally.answered,
            "execution_count": sum(batch.executions for batch in tally.batches.values()),
            "inference_stats": {
                "success": _duration(tally.answered, tally.seconds),
                "fail": _duration(sum(tally.failures.values()), tally.failed_s),
                **parts,
                "cache_hit": _duration(0, 0.0),
                "cache_miss": _duration(0, 0.0),
            },
            "batch_stats": [batch.statistics for _size, batch in sorted(tally.batches.items())],
            "memory_usage": [],
            "response_stats": {},
        }

    def _observe(self, outcome: Outcome) -> None:
        names = (outcome.model, outcome.version)
        tally = self._tallies.get(names)
        if tally is None:
            tally = self._tallies[names] = _Tally()
        tally.add(outcome)


class _Batches:
    """Runs that so many requests shared; each of these requests tells the time of the whole run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._requests = 0
        self.spent_ms: defaultdict[str, float] = defaultdict(float)
        """By part, of all requests."""

    def add(self, timing_ms: Mapping[str, float]) -> None:
        self._requests += 1
        spent_ms = self.spent_ms
        for part, ms in timing_ms.items():
            spent_ms[part] += ms

    @property
    def executions(self) -> int:
        return math.ceil(self._requests / self.size)

    @property
    def statistics(self) -> dict[str, Any]:
        parts = {
            f"compute_{name}": _duration(self.executions, self.spent_ms[part] / 1e3 / self.size)
            for part, name in _COMPUTED.items()
        }
        return {"batch_size": self.size, **parts}


class _Tally:
    """What became of the requests for one model."""

    def __init__(self) -> None:
        self.answered = 0
        self.seconds = self.failed_s = 0.0
        self.batches: dict[int, _Batches] = {}
        """By the number of requests that shared a run."""
        self.failures = dict.fromkeys(_REASONS, 0)
        self.buckets = [0] * (len(_BUCKETS_S) + 1)
        self.last_at = 0.0
        """Unix seconds of the last answer."""

    def add(self, outcome: Outcome) -> None:
        seconds, error = outcome.seconds, outcome.error
        if error is None:
            self.answered += 1
            self.seconds += seconds
            self.buckets[bisect_left(_BUCKETS_S, seconds)] += 1
            batch = self.batches.get(outcome.together)
            if batch is None:
                batch = self.batches[outcome.together] = _Batches(outcome.together)
            batch.add(outcome.timing_ms)
            self.last_at = time.time()
        else:
            self.failed_s += seconds
            self.failures[next(reason for reason, kinds in _REASONS.items() if isinstance(error, kinds))] += 1

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of answered requests, by Triton's name of the part."""
        batches = self.batches.values()
        return {name: sum(batch.spent_ms[part] for batch in batches) / 1e3 for part, name in _PARTS.items()}


class _RequestCollector(Collector):
    def __init__(self, tallies: dict[tuple[str, str], _Tally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        success = Metric("nv_inference_request_success", "Requests that were answered.", "counter")
        failure = Metric("nv_inference_request_failure", "Requests that were not answered, by reason.", "counter")
        duration = Metric(
            "nv_inference_request_duration_us", "Microseconds spent on answered requests, waiting included.", "counter"
        )
        parts = {
            part: Metric(f"nv_inference_{name}_duration_us", f"Microseconds of answered requests {doing}.", "counter")
            for part, name, doing in (
                ("queue", "queue", "in the queue"),
                ("input", "compute_input", "on decoding"),
                ("infer", "compute_infer", "in graphs"),
                ("output", "compute_output", "around graphs"),
            )
        }
        seconds = HistogramMetricFamily(
            "appliance_request_seconds", "Time to an answer, waiting included.", labels=_LABELS
        )
        for names, tally in self._tallies.items():
            labels = dict(zip(_LABELS, names, strict=True))
            success.add_sample(success.name, labels, tally.answered)
            duration.add_sample(duration.name, labels, round(tally.seconds * 1e6))
            for part, metric in parts.items():
                metric.add_sample(metric.name, labels, round(tally.parts_s[part] * 1e6))
            for reason, count in tally.failures.items():
                failure.add_sample(failure.name, {**labels, "reason": reason}, count)
            seconds.add_metric(names, _cumulative(tally.buckets), tally.seconds)
        yield from (success, failure, duration, *parts.values(), seconds)


class _StateCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        status = self._service.status()
        ready = GaugeMetricFamily("appliance_model_ready", "1 when the model has proven itself.", labels=_LABELS)
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Requests that wait for the model.", labels=_LABELS
        )
        runtime = InfoMetricFamily("appliance_model", "What really computes answers.", labels=_LABELS)
        for model in status["models"]:
            names = [model["name"], model["version"]]
            ready.add_metric(names, float(model["ready"]))
            pending.add_metric(names, float(model["waiting"]))
            runtime.add_metric(names, {"runtime": model["runtime"] or "none", "trust": model["trust"]})
        degraded = GaugeMetricFamily("appliance_model_degraded", "1 when on a fallback.", labels=_LABELS)
        for model in status["models"]:
            degraded.add_metric([model["name"], model["version"]], float(model["degraded"] is not None))
        swaps = CounterMetricFamily("appliance_swaps", "Hot swaps, by outcome.", labels=("model", "outcome"))
        swapping = SummaryMetricFamily(
            "appliance_swap_seconds", "Loading, switching, and the gap where there was one.", labels=("model", "part")
        )
        longest = GaugeMetricFamily("appliance_swap_longest_switch_seconds", "Of one switch.", labels=("model",))
        for model in status["models"]:
            name, counts = model["name"], model["swaps"]
            for outcome in ("beside", "with_gap", "refused"):
                swaps.add_metric([name, outcome], float(counts[outcome]))
            for part in ("load", "switch", "gap"):
                swapping.add_metric([name, part], counts["beside"] + counts["with_gap"], counts[f"{part}_s"])
            longest.add_metric([name], counts["longest_switch_s"])
        yield from (swaps, swapping, longest)
        reboot = GaugeMetricFamily("appliance_reboot_wanted", "1 when this device should be started anew.")
        reboot.add_metric([], float(status["reboot_wanted"] is not None))
        yield from (ready, pending, runtime, degraded, reboot, *self._of_workers(status["workers"]))
        yield from self._of_memory(status["memory"])
        yield from self._of_operation(status, self._service.deployments())
        yield from fleet_metrics(status)
        if "device" in status:  # not in a service that nobody told of its machine
            yield from self._of_device(status["device"])
        lag = GaugeMetricFamily(
            "appliance_event_loop_lag_seconds", "How late the event loop was, in the last minute.", labels=("quantile",)
        )
        for quantile, key in (("0.5", "p50"), ("0.99", "p99"), ("1", "max")):
            if "event_loop" in status:  # not in a service that has no loop of its own
                lag.add_metric([quantile], status["event_loop"][f"lag_{key}_ms"] / 1e3)
        yield lag

    @staticmethod
    def _of_memory(memory: Mapping[str, Any]) -> Iterator[Metric]:
        budget = GaugeMetricFamily("appliance_memory_budget_bytes", "For all models together.")
        budget.add_metric([], float(memory["budget_bytes"]))
        lease = GaugeMetricFamily("appliance_memory_lease_bytes", "Granted, by term.", labels=("model", "term"))
        used = GaugeMetricFamily("appliance_memory_used_bytes", "What the worker takes (PSS).", labels=("model",))
        for model in memory["models"]:
            for term, size_bytes in model["lease_bytes"].items():
                lease.add_metric([model["name"], term], float(size_bytes))
            if model["used_bytes"] is not None:
                used.add_metric([model["name"]], float(model["used_bytes"]))
        pressure = GaugeMetricFamily("appliance_memory_pressure", "1 for the present step.", labels=("step",))
        for step in Step:
            pressure.add_metric([step.name.lower()], float(step.name.lower() == memory["step"]))
        yield from (budget, lease, used, pressure)
        for key, what in (
            ("evictions", "Models unloaded to make room for others."),
            ("idle_unloads", "Models unloaded because nobody used them."),
            ("recycles", "Workers replaced because they took more than their lease."),
        ):
            yield CounterMetricFamily(f"appliance_memory_{key}", what, value=float(memory[key]))
        for key, what in (
            ("available_bytes", "Memory that the machine has left."),
            ("nvmap_bytes", "Memory that the GPU of a Jetson holds."),
            ("stall_percent", "Share of the last 10 s in which something waited for memory."),
        ):
            if memory[key] is not None:
                yield GaugeMetricFamily(f"appliance_memory_{key}", what, value=float(memory[key]))

    @staticmethod
    def _of_device(device: Mapping[str, Any]) -> Iterator[Metric]:
        """What the machine does not say has no line."""
        throttled = device["throttled"]
        slowed = float(bool(throttled["reasons"]))
        yield GaugeMetricFamily("appliance_throttled", "1 while it slows itself down.", value=slowed)
        yield CounterMetricFamily("appliance_throttlings", "How often it began to.", value=float(throttled["times"]))
        for key, what in (
            ("gpu_load", "Of the GPU, between 0 and 1."),
            ("largest_free_block_bytes", "Memory that is free in one piece."),
        ):
            if key in device:
                yield GaugeMetricFamily(f"appliance_{key}", what, value=float(device[key]))
        for name, key, label, what in (
            ("temperature_celsius", "temperatures_celsius", "zone", "By thermal zone."),
            ("clock_hertz", "clocks_hz", "unit", "Of the GPU and the fastest core, now and at most."),
            ("power_events", "power_events", "cause", "Times the chip was slowed for power since it was started."),
        ):
            yield _labelled(name, what, label, device.get(key, {}))
        slots, rails = device.get("slots", {}), device.get("rails", {})
        yield _labelled("power_watts", "By rail.", "rail", {rail: figures["watts"] for rail, figures in rails.items()})
        yield _labelled("slot_bootable", "0 when its retries are spent.", "slot", slots.get("bootable", {}))

    @staticmethod
    def _of_operation(status: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        """What is not known, or not set up, has no line."""
        contexts = sum(
            worker["pid"] is not None and (model["runtime"] or "").startswith(_CUDA)
            for model, worker in zip(status["models"], status["workers"], strict=False)
        )
        yield GaugeMetricFamily("appliance_cuda_contexts", "Workers that hold one.", value=float(contexts))
        if "compiling" in status:
            busy = float(status["compiling"] is not None)
            yield GaugeMetricFamily("appliance_compiling", "1 while an engine is being made.", value=busy)
        clock, update = status.get("clock"), status.get("update")
        if clock and clock["synced"] is not None:
            synced = float(clock["synced"])
            yield GaugeMetricFamily("appliance_clock_synced", "1 when the wall clock is believed.", value=synced)
        if update:
            moved = GaugeMetricFamily(
                "appliance_deployments", "Attempts that are remembered, by where they stand.", labels=("step",)
            )
            for step, count in Counter(one["step"] for one in deployments).items():
                moved.add_metric([step], float(count))
            slots = GaugeMetricFamily("appliance_slots", "Bundles on disk, by state.", labels=("state",))
            for state, count in Counter(slot["state"] for slot in update["slots"]).items():
                slots.add_metric([state], float(count))
            yield from (moved, slots)

    @staticmethod
    def _of_workers(workers: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        by_cause = (*_LABELS, "cause")
        restarts = CounterMetricFamily("appliance_worker_restarts", "Restarts since start, by cause.", labels=by_cause)
        faults = CounterMetricFamily("appliance_worker_faults", "Faults since start, by class.", labels=by_cause)
        rungs = CounterMetricFamily(
            "appliance_recovery_rungs", "Steps taken against faults, by rung of the ladder.", labels=(*_LABELS, "rung")
        )
        recovery = SummaryMetricFamily(
            "appliance_recovery_seconds", "From a fault to a model that has proven itself again.", labels=by_cause
        )
        last = GaugeMetricFamily("appliance_recovery_last_seconds", "The latest of these.", labels=by_cause)
        for worker in workers:
            names = [worker["bundle"], worker["version"]]
            for family, counts in ((restarts, "restarts_by_cause"), (faults, "faults"), (rungs, "rungs")):
                for kind, count in worker[counts].items():
                    family.add_metric([*names, kind], float(count))
            for cause, spent in worker["recoveries"].items():
                recovery.add_metric([*names, cause], spent["count"], spent["total_s"])
                last.add_metric([*names, cause], spent["last_s"])
        yield from (restarts, faults, rungs, recovery, last)


def _labelled(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"appliance_{name}", what, labels=(label,))
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*map(str, _BUCKETS_S), "+Inf"]
    return [(bound, float(count)) for bound, count in zip(bounds, accumulate(counts), strict=True)]
