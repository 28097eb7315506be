"""Memory for work that is no model, taken from the budget of the models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from support import tiny

from appliance import wire
from appliance.core.limits import Limits
from appliance.core.pressure import Bounds
from appliance.memory import Keeper, ModelState, Rules
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
