"""Prometheus metrics, read from the service when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.service import Service


def registry_of(service: Service) -> CollectorRegistry:
    """A registry that shows `service`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_ServiceCollector(service))
    return registry


class _ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        status = self._service.status()
        labels = ["model", "version"]
        ready = GaugeMetricFamily("appliance_model_ready", "1 when the model has proven itself.", labels=labels)
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Requests that wait for the model.", labels=labels
        )
        runtime = InfoMetricFamily("appliance_model", "What really computes answers.", labels=labels)
        for model in status["models"]:
            names = [model["name"], model["version"]]
            ready.add_metric(names, float(model["ready"]))
            pending.add_metric(names, float(model["waiting"]))
            runtime.add_metric(names, {"runtime": model["runtime"] or "none", "trust": model["trust"]})
        restarts = GaugeMetricFamily("appliance_worker_restarts", "Restarts since start.", labels=["bundle"])
        for worker in status["workers"]:
            restarts.add_metric([worker["bundle"]], float(worker["restarts"]))
        yield from (ready, pending, runtime, restarts)
