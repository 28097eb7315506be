"""What Prometheus is told about requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from doubles.service import MemoryService

from appliance.adapters import metrics
from appliance.service import Outcome
from models.errors import (
    ApplianceError,
    BadInput,
    BundleError,
    DeadlineExceeded,
    ModelError,
    NotReady,
    Overloaded,
    TooLarge,
    WorkerLost,
)

pytestmark = pytest.mark.unit

ECHO = 'model="echo",version="1.0"'


class Scraped:
    """A service and the lines that a scrape of it gives."""

    def __init__(self) -> None:
        self._service = MemoryService()
        self.metrics = metrics.Metrics(self._service)  # type: ignore[arg-type] # its double

    def happened(
        self, seconds: float, error: BaseException | None = None, together: int = 1, **timing_ms: float
    ) -> None:
        for observer in self._service.observers:
            observer(Outcome("echo", "1.0", seconds, error, timing_ms, together))

    @property
    def lines(self) -> list[str]:
        return self.metrics.text().decode().splitlines()

    def value(self, series: str) -> float:
        (line,) = (line for line in self.lines if line.startswith(f"{series} "))
        return float(line.removeprefix(f"{series} "))


def test_every_served_model_shows_zeros_before_its_first_request() -> None:
    scraped = Scraped()
    for model in ("echo", "reader"):
        assert scraped.value(f'nv_inference_request_success{{model="{model}",version="1.0"}}') == 0
        assert scraped.value(f'appliance_request_seconds_count{{model="{model}",version="1.0"}}') == 0


def test_counters_have_the_names_and_types_that_dashboards_for_triton_expect() -> None:
    lines = Scraped().lines
    for name in ("success", "failure", "duration_us"):
        assert f"# TYPE nv_inference_request_{name} counter" in lines
    assert "# TYPE appliance_worker_restarts_total counter" in lines
    assert "# TYPE appliance_request_seconds histogram" in lines


def test_answered_requests_are_counted_with_their_time() -> None:
    scraped = Scraped()
    for seconds in (0.004, 0.02, 0.02, 100):
        scraped.happened(seconds)
    assert scraped.value(f"nv_inference_request_success{{{ECHO}}}") == 4
    assert scraped.value(f"nv_inference_request_duration_us{{{ECHO}}}") == 100_044_000
    assert scraped.value(f"appliance_request_seconds_sum{{{ECHO}}}") == pytest.approx(100.044)
    buckets = dict.fromkeys(("0.0025", "0.005", "0.025", "30.0", "+Inf"), 0.0)
    for bound in buckets:
        buckets[bound] = scraped.value(f'appliance_request_seconds_bucket{{le="{bound}",{ECHO}}}')
    assert buckets == {"0.0025": 0, "0.005": 1, "0.025": 3, "30.0": 3, "+Inf": 4}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full"), "REJECTED"),
        (NotReady("loading"), "REJECTED"),
        (DeadlineExceeded("late"), "REJECTED"),
        (asyncio.CancelledError(), "CANCELED"),
        (WorkerLost("died"), "BACKEND"),
        (ModelError("failed"), "BACKEND"),
        (BundleError("damaged"), "BACKEND"),
        (BadInput("no tensor"), "OTHER"),
        (TooLarge("many"), "OTHER"),
        (ApplianceError("else"), "OTHER"),
        (RuntimeError("a fault"), "OTHER"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_is_counted_under_its_reason_and_takes_no_time(error: BaseException, reason: str) -> None:
    scraped = Scraped()
    scraped.happened(5.0, error)
    counted = {
        name: scraped.value(f'nv_inference_request_failure{{model="echo",reason="{name}",version="1.0"}}')
        for name in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert counted == {name: float(name == reason) for name in counted}
    assert scraped.value(f"nv_inference_request_success{{{ECHO}}}") == 0
    assert scraped.value(f"appliance_request_seconds_count{{{ECHO}}}") == 0


def test_where_the_time_went_is_counted_under_the_names_of_triton() -> None:
    scraped = Scraped()
    for _ in range(2):
        scraped.happened(0.018, queue=5.0, decode=2.0, inference=10.0, processing=1.0, total=18.0)
    scraped.happened(1.0, ModelError("failed"))
    assert scraped.value(f"nv_inference_queue_duration_us{{{ECHO}}}") == 10_000
    assert scraped.value(f"nv_inference_compute_input_duration_us{{{ECHO}}}") == 4_000
    assert scraped.value(f"nv_inference_compute_infer_duration_us{{{ECHO}}}") == 20_000
    assert scraped.value(f"nv_inference_compute_output_duration_us{{{ECHO}}}") == 2_000
    statistics = scraped.metrics.statistics("echo", "1.0")
    assert (statistics["inference_count"], statistics["execution_count"]) == (2, 2)
    assert statistics["last_inference"] > 1e12  # milliseconds of this century
    assert statistics["inference_stats"] == {
        "success": {"count": 2, "ns": 36_000_000},
        "fail": {"count": 1, "ns": 1_000_000_000},
        "queue": {"count": 2, "ns": 10_000_000},
        "compute_input": {"count": 2, "ns": 4_000_000},
        "compute_infer": {"count": 2, "ns": 20_000_000},
        "compute_output": {"count": 2, "ns": 2_000_000},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }


def test_requests_that_shared_a_run_count_as_one_execution_with_its_size() -> None:
    scraped = Scraped()
    for together in (4, 4, 4, 4, 1):
        scraped.happened(0.1, together=together, inference=8.0)
    statistics = scraped.metrics.statistics("echo", "1.0")
    assert (statistics["inference_count"], statistics["execution_count"]) == (5, 2)
    idle = {"count": 1, "ns": 0}
    run = {"compute_input": idle, "compute_infer": {"count": 1, "ns": 8_000_000}, "compute_output": idle}
    assert statistics["batch_stats"] == [{"batch_size": 1, **run}, {"batch_size": 4, **run}]


def test_statistics_of_a_model_that_was_never_asked_are_zeros() -> None:
    assert Scraped().metrics.statistics("new", "2")["inference_stats"]["success"] == {"count": 0, "ns": 0}


def test_faults_restarts_rungs_and_times_to_recover_are_told_by_cause() -> None:
    scraped = Scraped()
    reader = 'model="reader",version="1.0"'
    assert scraped.value(f'appliance_worker_restarts_total{{cause="crash",{reader}}}') == 2
    assert scraped.value(f'appliance_worker_faults_total{{cause="hang",{reader}}}') == 1
    assert scraped.value('appliance_recovery_rungs_total{model="reader",rung="restart",version="1.0"}') == 3
    assert scraped.value(f'appliance_recovery_seconds_count{{cause="crash",{reader}}}') == 2
    assert scraped.value(f'appliance_recovery_seconds_sum{{cause="crash",{reader}}}') == 1.5
    assert scraped.value(f'appliance_recovery_last_seconds{{cause="crash",{reader}}}') == 0.5
    assert scraped.value(f"appliance_model_degraded{{{reader}}}") == 0
    assert scraped.value("appliance_reboot_wanted") == 0


class Operated(MemoryService):
    """A device with a clock, a broker and updates, whose one worker holds the GPU."""

    def status(self) -> dict[str, Any]:
        status = super().status()
        status["models"] = [{**status["models"][1], "runtime": "tensorrt"}]
        status["workers"][0]["pid"] = 4711
        return status | {
            "clock": {"synced": False},
            "compiling": {"bundle": "reader", "says": None},
            "update": {"slots": [{"state": "good"}, {"state": "bad"}, {"state": "bad"}]},
        }


def test_clock_deployments_slots_and_contexts_are_told_where_there_are_any() -> None:
    service = Operated()
    service.deployments = lambda: [{"step": "good"}, {"step": "trial"}, {"step": "good"}]
    lines = metrics.Metrics(service).text().decode().splitlines()  # type: ignore[arg-type] # its double
    assert {
        "appliance_clock_synced 0.0",
        'appliance_deployments{step="good"} 2.0',
        'appliance_deployments{step="trial"} 1.0',
        'appliance_slots{state="bad"} 2.0',
        "appliance_cuda_contexts 1.0",
        "appliance_compiling 1.0",
    } <= set(lines)
    assert not [line for line in Scraped().lines if "clock_synced" in line or "compiling" in line]
