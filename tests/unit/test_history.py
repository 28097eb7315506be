"""The last hour and the last faults, in memory; and the stream of events that shows them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from doubles.service import MemoryService

from appliance.adapters.live import Live, following
from appliance.core.history import STEP_S, History, LastFaults
from appliance.service import InferRequest
from models.errors import ModelError, NotReady, Overloaded
from models.spec import Tensor, pack_bytes

pytestmark = pytest.mark.unit


def worker(cause: str | None = None, **faults: int) -> dict[str, Any]:
    return {
        "bundle": "reader",
        "version": "1.0",
        "faults": faults,
        "cause": cause,
        "reason": "it died" if cause else None,
        "rung": "restart" if cause else None,
    }


# The hour


def test_a_step_tells_the_rate_the_percentiles_the_longest_queue_and_what_was_not_answered() -> None:
    history = History(0.0)
    for i in range(1, 101):
        history.answered += 1
        history.answered_s.append(i / 1000)
    history.dropped, history.failed = 3, 1
    assert history.look(STEP_S / 2, 7) is None
    point = history.look(2 * STEP_S, 2)
    assert point
    assert (point.per_s, point.waiting, point.dropped, point.failed) == (100 / (2 * STEP_S), 7, 3, 1)
    assert (point.p50_ms, point.p95_ms, point.p99_ms) == (50.0, 95.0, 99.0)
    assert list(history.points) == [point]


def test_a_step_without_requests_has_no_latency_and_counts_nothing_of_the_step_before() -> None:
    history = History(0.0)
    history.answered, history.dropped = 5, 2
    history.look(STEP_S, 4)
    point = history.look(2 * STEP_S, 0)
    assert point
    assert (point.per_s, point.p50_ms, point.dropped, point.waiting) == (0.0, None, 0, 4)


def test_an_hour_is_kept_and_no_more() -> None:
    history = History(0.0)
    for i in range(1, 1000):
        history.look(i * STEP_S, 0)
    assert len(history.points) * STEP_S == 3600


# Faults


def test_a_fault_is_told_with_its_recovery_once_the_worker_is_well_again() -> None:
    faults = LastFaults()
    assert faults.see([worker()], 0.0) == []
    (fresh,) = faults.see([worker("crash", crash=1)], 10.0)
    assert (fresh.cause, fresh.reason, fresh.rung) == ("crash", "it died", "restart")
    assert faults.document(11.0)[0]["recovery_s"] is None
    assert faults.see([worker(crash=1)], 12.5) == []
    (told,) = faults.document(20.0)
    assert (told["model"], told["cause"], told["ago_s"], told["recovery_s"]) == ("reader", "crash", 10.0, 2.5)


def test_the_newest_fault_comes_first_and_old_ones_are_forgotten() -> None:
    faults = LastFaults()
    for i in range(1, 101):
        faults.see([worker("hang", hang=i)], float(i))
    told = faults.document(100.0)
    assert [one["ago_s"] for one in told][:3] == [0.0, 1.0, 2.0]
    assert len(told) < 50


def test_a_version_that_takes_over_with_counts_of_its_own_is_no_fault() -> None:
    faults = LastFaults()
    faults.see([worker("crash", crash=3)], 0.0)
    assert faults.see([worker()], 1.0) == []
    assert faults.see([worker("crash", crash=1)], 2.0)[0].cause == "crash"


# Events


def of(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def first(events: AsyncIterator[bytes], name: str) -> Any:  # noqa: ANN401 - JSON
    async for event in events:
        found, data = of(event)
        if found == name:
            return data
    pytest.fail(f"the stream ended before {name}")


async def ask(service: MemoryService) -> None:
    tensor = Tensor("image", "BYTES", (1,), pack_bytes([b"picture"]))
    await service.infer(InferRequest(model="reader", tensors=[tensor]))


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the history ends with each look."""
    monkeypatch.setattr("appliance.core.history.STEP_S", 0.1)


@pytest.mark.usefixtures("short_steps")
def test_whoever_watches_gets_the_hour_then_the_status_then_each_new_point() -> None:
    async def watch() -> None:
        service = MemoryService()
        with following(service) as live:  # type: ignore[arg-type] # its double
            events = live.watch()
            name, history = of(await anext(events))
            assert (name, history) == ("history", {"step_s": STEP_S, "points": []})
            name, status = of(await anext(events))
            assert (name, status["device_id"]) == ("status", "memory")
            await ask(service)
            point = await asyncio.wait_for(first(events, "point"), 20)
            assert point["p50_ms"] == 20.0
            assert point["per_s"] > 0
            _name, again = of(await anext(live.watch()))
            assert point in again["points"]

    asyncio.run(watch())


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize(
    ("fault", "counted"),
    [(Overloaded("full"), (1, 0)), (ModelError("nonsense"), (0, 1)), (NotReady("it restarts"), (0, 1))],
)
def test_requests_that_were_not_answered_are_counted_by_whose_fault_it_was(
    fault: Exception, counted: tuple[int, int]
) -> None:
    async def watch() -> None:
        service = MemoryService(fault=fault)
        with following(service) as live:  # type: ignore[arg-type] # its double
            with pytest.raises(type(fault)):
                await ask(service)
            point = await asyncio.wait_for(first(live.watch(), "point"), 20)
            assert (point["dropped"], point["failed"]) == counted

    asyncio.run(watch())


def test_a_change_is_told_and_the_end_lets_everybody_go() -> None:
    async def watch() -> None:
        service = MemoryService()
        with following(service) as live:  # type: ignore[arg-type] # its double
            events = live.watch()
            for _ in range(2):
                await anext(events)
            service.tell()
            assert (await asyncio.wait_for(first(events, "status"), 20))["ready"]
            live.end()
            assert [event async for event in events] == []

    asyncio.run(watch())


def test_no_more_than_a_number_may_watch() -> None:
    async def watch() -> None:
        live = Live(MemoryService())  # type: ignore[arg-type] # its double
        watchers = [live.watch() for _ in range(32)]
        for watcher in watchers:
            await anext(watcher)
        with pytest.raises(Overloaded, match="close a page"):
            live.watch()
        await watchers[0].aclose()  # type: ignore[attr-defined] # a generator
        await anext(live.watch())

    asyncio.run(watch())
