"""Memory for work that is no model, taken from the budget of the models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs
from support import tiny

from appliance import wire
from appliance.core.limits import Limits
from appliance.core.pressure import Bounds
from appliance.memory import Keeper, ModelState, Rules, Sample
from appliance.service import Bundle, InferRequest, Service
from models.errors import InsufficientMemory
from models.spec import Tensor

pytestmark = pytest.mark.contract

MIB = 2**20
BUDGET_BYTES = 300 * MIB
REQUEST = InferRequest("null", [Tensor.from_array("x", np.ones((1, 3), np.float32))])


def test_compiling_takes_the_place_of_an_idle_model_never_of_a_busy_one_and_gives_it_back(tmp_path: Path) -> None:
    order = wire.Open("null", "null", onnx=str(tiny.null_model(tmp_path / "null.json", delay_s=0.3)))
    bundle = Bundle([order], Limits(body_bytes=1024), manifest=None, on_ready=lambda _ready: None)
    keeper = Keeper([bundle], Rules(BUDGET_BYTES, Bounds(0, 0), spare=False))
    service = Service([bundle], device_id="d", facts=dict, keeper=keeper)

    async def compile_() -> ModelState:
        async with keeper.lease("engine of null", {"compile": 250 * MIB}):
            assert keeper.budget.by_term("engine of null") == {"compile": 250 * MIB}
            return keeper.state("null")[0]

    async def scenario() -> None:
        service.start()
        await service.load("null")
        asked = asyncio.ensure_future(service.infer(REQUEST))
        await asyncio.sleep(0.1)
        assert bundle.supervisor.running == 1
        with pytest.raises(InsufficientMemory, match="engine of null needs 250 MiB") as refused:
            await compile_()
        assert refused.value.would_evict == ("null",)
        await asked
        assert await compile_() is ModelState.UNAVAILABLE
        assert keeper.budget.leased_bytes == 0
        await service.infer(REQUEST)  # its next request brings it back
        assert keeper.state("null")[0] is ModelState.READY
        await service.stop(5)

    asyncio.run(scenario())


async def samples(seen: list[int], count: int) -> None:
    """Wait until the machine was looked at so many times more."""
    wanted, until = len(seen) + count, time.monotonic() + 20
    while len(seen) < wanted:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("models", [1, 2])
def test_what_the_gpu_of_a_jetson_holds_more_counts_as_its_only_workers_which_is_replaced_over_its_lease(
    tmp_path: Path, models: int
) -> None:
    held_bytes, seen = 500 * MIB, list[int]()
    order = wire.Open("null", "null", onnx=str(tiny.null_model(tmp_path / "null.json")))
    bundles = [
        Bundle([replace(order, name=name)], Limits(body_bytes=1024), manifest=None, on_ready=lambda _ready: None)
        for name in ("null", "other")[:models]
    ]

    def sample(pids: Sequence[int]) -> Sample:
        seen.append(held_bytes)
        return Sample(nvmap_bytes=held_bytes, process_bytes=dict.fromkeys(pids, 30 * MIB))

    async def scenario() -> None:
        nonlocal held_bytes
        keeper = Keeper(bundles, Rules(models * BUDGET_BYTES, Bounds(0, 0), sample_s=0.02, spare=False), sample=sample)
        service = Service(bundles, device_id="d", facts=dict, keeper=keeper)
        service.start()
        for bundle in bundles:
            await service.load(bundle.name)
        await samples(seen, 5)
        pid = bundles[0].supervisor.pid
        assert keeper.recycles == 0
        held_bytes += 700 * MIB
        await samples(seen, 5)
        if models > 1:
            assert keeper.recycles == 0, "it may be the other's"
        else:
            until = time.monotonic() + 20
            while bundles[0].supervisor.pid in {pid, None} or service.status()["workers_aside"]:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            await service.infer(REQUEST)
            await samples(seen, 5)
            assert keeper.recycles == 1, "what stays held is not the next worker's"
        await service.stop(5)

    asyncio.run(scenario())


@pytest.mark.parametrize("other", ["engine of another", ""])
def test_what_an_engine_being_built_or_a_camera_takes_of_the_gpu_replaces_no_worker_beside_it(
    tmp_path: Path, other: str
) -> None:
    held_bytes, seen = 50 * MIB, list[int]()
    order = wire.Open("null", "null", onnx=str(tiny.null_model(tmp_path / "null.json")))
    bundle = Bundle([order], Limits(body_bytes=1024), manifest=None, on_ready=lambda _ready: None)

    def sample(pids: Sequence[int]) -> Sample:
        seen.append(held_bytes)
        return Sample(nvmap_bytes=held_bytes, process_bytes=dict.fromkeys(pids, 30 * MIB))

    async def scenario() -> None:
        nonlocal held_bytes
        keeper = Keeper([bundle], Rules(BUDGET_BYTES, Bounds(0, 0), sample_s=0.02, spare=False), sample=sample)
        service = Service([bundle], device_id="d", facts=dict, keeper=keeper)
        service.start()
        await service.load("null")
        ready = bundle.supervisor.ready
        assert ready
        if not other:  # a camera, beside a model that has nothing on the GPU
            bundle.supervisor.ready = replace(ready, runtime="onnxruntime-cpu")
        await samples(seen, 5)
        async with keeper.lease(other, {"compile": 10 * MIB}) if other else contextlib.nullcontext():
            held_bytes += 850 * MIB
            await samples(seen, 5)
        assert keeper.recycles == 0
        await samples(seen, 5)
        assert keeper.recycles == 0
        await service.stop(5)

    asyncio.run(scenario())


def test_at_the_start_the_biggest_of_equally_important_models_comes_first_and_who_leaves_tells_what_that_freed(
    tmp_path: Path,
) -> None:
    order = wire.Open("null", "null", onnx=str(tiny.null_model(tmp_path / "null.json")))
    bundles = [
        Bundle(
            [replace(order, name=name)],
            Limits(body_bytes=1024),
            manifest=None,
            on_ready=lambda _ready: None,
            file_bytes=size * MIB,
            priority=priority,
        )
        for name, size, priority in (("small", 1, 5), ("big", 90, 5), ("important", 1, 1))
    ]
    available_bytes = iter(range(1000 * MIB, 10**12, 50 * MIB))
    keeper = Keeper(
        bundles,
        Rules(2000 * MIB, Bounds(0, 0), spare=False),
        sample=lambda _pids: Sample(available_bytes=next(available_bytes)),
    )
    service = Service(bundles, device_id="d", facts=dict, keeper=keeper)

    async def scenario() -> None:
        taken: list[str] = []
        take = keeper.budget.take
        keeper.budget.take = lambda name, terms: (taken.append(name), take(name, terms))[1]  # type: ignore[method-assign]
        service.start()
        await service.load("small")
        assert taken == ["important", "big", "small"]
        with capture_logs() as lines:
            await service.unload("small")
        (line,) = (line for line in lines if line["event"] == "worker_left")
        assert (line["model"], line["available_rose_mib"] >= 50) == ("small", True)
        await service.stop(5)

    asyncio.run(scenario())
