"""Requests that a worker gets together: each has its own answer, and none suffers for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny

from appliance import wire
from appliance.core.health import State
from appliance.core.limits import Limits
from appliance.core.schedule import DEPTH, FULL
from appliance.supervisor import Answer, Supervisor
from models.errors import BadInput, DeadlineExceeded, ModelError, Overloaded
from models.folder import BundleFolder
from models.spec import Tensor

pytestmark = pytest.mark.contract

Ask = Callable[..., Coroutine[Any, Any, Answer]]


@asynccontextmanager
async def served(order: wire.Open, **limits: float) -> AsyncIterator[Supervisor]:
    """A supervisor whose worker is ready."""
    supervisor = Supervisor([order], Limits(**limits), on_ready=lambda _ready: None)  # type: ignore[arg-type]
    supervisor.start(on_change=lambda: None)
    until = time.monotonic() + 30
    while supervisor.health.state is not State.READY:
        assert time.monotonic() < until, supervisor.health
        await asyncio.sleep(0.005)
    try:
        yield supervisor
    finally:
        await supervisor.stop(5)


def null(folder: Path, delay_s: float = 0.0) -> wire.Open:
    """The identity on FP32 [N, C], each run of which takes `delay_s` however many rows it has."""
    return wire.Open(name="null", runtime="null", onnx=str(tiny.null_model(folder / "null.json", delay_s)))


def frame(number: int) -> Tensor:
    """A row that is like no other."""
    return Tensor.from_array("x", np.full((1, 3), number, np.float32))


async def ask(supervisor: Supervisor, number: int, **wishes: Any) -> Answer:  # noqa: ANN401 - those of `submit`
    """The answer to one frame, which must be that very frame."""
    answer = await supervisor.submit(wire.BARE_GRAPH, [frame(number)], **wishes)
    (tensor,) = answer.tensors
    assert tensor.to_array().tolist() == [[number] * 3]
    return answer


def test_requests_share_runs_once_that_was_measured_to_be_cheaper_and_each_gets_its_own_rows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(null(tmp_path, 0.02), concurrency=1) as supervisor:
            for start in range(0, 160, 16):
                answers = await asyncio.gather(*(ask(supervisor, start + i) for i in range(16)))
            runs = {answer.timing_ms["inference"] for answer in answers}
            assert len(runs) == 2, "sixteen requests in runs of eight"
            assert {answer.together for answer in answers} == {8}

    asyncio.run(scenario())


def test_requests_run_alone_when_that_is_all_that_is_allowed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(null(tmp_path, 0.002), concurrency=1, batch=1) as supervisor:
            for start in range(0, 64, 16):
                answers = await asyncio.gather(*(ask(supervisor, start + i) for i in range(16)))
            assert len({answer.timing_ms["inference"] for answer in answers}) == 16
            assert {answer.together for answer in answers} == {1}

    asyncio.run(scenario())


def test_a_bad_request_fails_alone_in_a_run_that_it_would_have_shared(tmp_path: Path) -> None:
    folder = BundleFolder(tiny.pick_bundle(tmp_path / "pick"))
    order = wire.Open("pick", "onnxruntime-cpu", bundle=str(folder.path), digest=folder.manifest.digest)

    async def pick(supervisor: Supervisor, index: int) -> Answer:
        return await supervisor.submit("pick", [Tensor.from_array("x", np.array([index], np.int64))])

    async def scenario() -> None:
        async with served(order, concurrency=1) as supervisor:
            for _ in range(3):  # after this two are tried in one run
                await pick(supervisor, 0)
            good, bad = await asyncio.gather(pick(supervisor, 1), pick(supervisor, 99), return_exceptions=True)
            assert isinstance(good, Answer)
            assert good.tensors[0].to_array().tolist() == [10.0]
            assert isinstance(bad, (BadInput, ModelError))

    asyncio.run(scenario())


def test_work_whose_client_has_left_is_not_done_even_when_the_worker_holds_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(null(tmp_path, 0.5), concurrency=1, batch=1) as supervisor:
            started = time.monotonic()
            first, left = (asyncio.ensure_future(ask(supervisor, number)) for number in (1, 2))
            await asyncio.sleep(0.1)
            assert (supervisor.running, supervisor.waiting) == (2, 0)
            left.cancel()
            await asyncio.gather(first, ask(supervisor, 3))
            assert 1.0 <= time.monotonic() - started < 1.5

    asyncio.run(scenario())


def test_what_the_worker_holds_beyond_its_deadline_is_not_computed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(null(tmp_path, 0.5), concurrency=1, batch=1) as supervisor:
            started = time.monotonic()
            first, late = (
                asyncio.ensure_future(ask(supervisor, number, deadline_at=at))
                for number, at in ((1, float("inf")), (2, started + 0.3))
            )
            await asyncio.sleep(0.1)
            _first, third = await asyncio.gather(first, ask(supervisor, 3))
            assert 1.0 <= time.monotonic() - started < 1.5
            assert third.timing_ms["inference"] >= 500
            with pytest.raises(DeadlineExceeded):
                await late

    asyncio.run(scenario())


def test_a_crowd_is_admitted_up_to_the_longest_wait_and_the_rest_is_told_when_to_come_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(null(tmp_path, 0.02), concurrency=1, batch=1) as supervisor:
            for number in range(3):
                await ask(supervisor, number)
            outcomes = await asyncio.gather(*(ask(supervisor, number) for number in range(60)), return_exceptions=True)
            assert supervisor.service_s is not None
            assert 0.02 <= supervisor.service_s < 0.2
            refused = [one for one in outcomes if isinstance(one, Overloaded)]
            answered = [one for one in outcomes if isinstance(one, Answer)]
            assert len(refused) + len(answered) == 60
            assert FULL <= len(answered) <= FULL + DEPTH + 1
            assert all(0.2 < one.retry_after_s < 5 for one in refused)

    asyncio.run(scenario())


def test_one_picture_is_decoded_while_another_is_computed(tmp_path: Path) -> None:
    folder = BundleFolder(tiny.guess_bundle(tmp_path / "guess", 0.25, 0.75))
    order = wire.Open("guess", "onnxruntime-cpu", bundle=str(folder.path), digest=folder.manifest.digest, concurrency=2)
    picture = Tensor.from_array("image", np.array([tiny.picture(2000, 1500)], np.object_))

    async def scenario() -> None:
        async with served(order, concurrency=2) as supervisor:
            await supervisor.submit("", [picture])
            supervisor.sabotage("slow", 0.15)
            started = time.monotonic()
            answers = await asyncio.gather(*(supervisor.submit("", [picture]) for _ in range(6)))
            spent_s = time.monotonic() - started
            stages_s = sum(one.timing_ms["decode"] + one.timing_ms["inference"] for one in answers) / 1e3
            assert spent_s < 0.8 * stages_s, "else one stage waited for the other"

    asyncio.run(scenario())
