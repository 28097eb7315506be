"""Prometheus metrics: the state of models, read from the service at a scrape, and what became of requests.

Names that begin with `nv_` are those of Triton, so that its dashboards work. Labels take the names of
served models only, whose number nobody outside decides.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
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

from appliance.service import Service
from models.errors import BundleError, DeadlineExceeded, ModelError, NotReady, Overloaded, WorkerLost

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REASONS: Mapping[str, tuple[type[BaseException], ...]] = {
    "REJECTED": (Overloaded, NotReady, DeadlineExceeded),
    "CANCELED": (asyncio.CancelledError,),
    "BACKEND": (WorkerLost, ModelError, BundleError),
    "OTHER": (BaseException,),
}
"""Triton's reasons of a failure -> what counts as such; the first that fits."""
_LABELS = ("model", "version")


def registry_of(service: Service) -> CollectorRegistry:
    """A registry that shows `service` and counts its requests from now on."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_StateCollector(service))
    requests = _RequestCollector(_Tally.of_each(service))
    service.observers.append(requests.observe)
    registry.register(requests)
    return registry


def text_of(registry: CollectorRegistry) -> bytes:
    """The text of a scrape."""
    # The library writes the type of every counter under a name that ends in `_total`, as Triton's do not.
    return re.sub(rb"(?m)^(# (?:HELP|TYPE) nv_\w+)_total ", rb"\1 ", generate_latest(registry))


class _Tally:
    """What became of the requests for one model."""

    def __init__(self) -> None:
        self.answered = 0
        self.seconds = 0.0
        self.failures = dict.fromkeys(_REASONS, 0)
        self.buckets = [0] * (len(_BUCKETS_S) + 1)

    @staticmethod
    def of_each(service: Service) -> dict[tuple[str, str], _Tally]:
        """A tally for every served model, so that each shows a zero before its first request."""
        return {(info.name, info.version): _Tally() for info in service.models()}

    def add(self, seconds: float, error: BaseException | None) -> None:
        if error is None:
            self.answered += 1
            self.seconds += seconds
            self.buckets[bisect_left(_BUCKETS_S, seconds)] += 1
        else:
            self.failures[next(reason for reason, kinds in _REASONS.items() if isinstance(error, kinds))] += 1


class _RequestCollector(Collector):
    def __init__(self, tallies: dict[tuple[str, str], _Tally]) -> None:
        self._tallies = tallies

    def observe(self, model: str, version: str, seconds: float, error: BaseException | None) -> None:
        """Count one request."""
        self._tallies.setdefault((model, version), _Tally()).add(seconds, error)

    def collect(self) -> Iterator[Metric]:
        success = Metric("nv_inference_request_success", "Requests that were answered.", "counter")
        failure = Metric("nv_inference_request_failure", "Requests that were not answered, by reason.", "counter")
        duration = Metric(
            "nv_inference_request_duration_us", "Microseconds spent on answered requests, waiting included.", "counter"
        )
        seconds = HistogramMetricFamily(
            "appliance_request_seconds", "Time to an answer, waiting included.", labels=_LABELS
        )
        for names, tally in self._tallies.items():
            labels = dict(zip(_LABELS, names, strict=True))
            success.add_sample(success.name, labels, tally.answered)
            duration.add_sample(duration.name, labels, round(tally.seconds * 1e6))
            for reason, count in tally.failures.items():
                failure.add_sample(failure.name, {**labels, "reason": reason}, count)
            seconds.add_metric(names, _cumulative(tally.buckets), tally.seconds)
        yield from (success, failure, duration, seconds)


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
        reboot = GaugeMetricFamily("appliance_reboot_wanted", "1 when this device should be started anew.")
        reboot.add_metric([], float(status["reboot_wanted"] is not None))
        yield from (ready, pending, runtime, degraded, reboot, *self._of_workers(status["workers"]))

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


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*map(str, _BUCKETS_S), "+Inf"]
    return [(bound, float(count)) for bound, count in zip(bounds, accumulate(counts), strict=True)]
