"""Fault injection, piece by piece: sessions that are broken on purpose, and faults that end in time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from appliance.broken import BrokenSession
from appliance.faults import MEND, Faults, Injection
from appliance.runtime.null import NullSession
from models.errors import BadInput

pytestmark = pytest.mark.unit

X = {"x": np.ones((2, 3), np.float32)}


class Worker:
    """Remembers what was done to it."""

    def __init__(self) -> None:
        self.done: list[tuple[str, float]] = []
        self.mended = asyncio.Event()

    def sabotage(self, fault: str, amount: float) -> None:
        self.done.append((fault, amount))
        if fault == MEND:
            self.mended.set()


def test_a_session_that_lies_gives_nan_of_the_right_shape() -> None:
    answer = BrokenSession(NullSession(0.0), "nan", 0.0).run(X)["y"]
    assert answer.shape == (2, 3)
    assert np.isnan(answer).all()


def test_a_session_that_leaks_keeps_memory_but_not_without_bound_and_answers_rightly() -> None:
    session = BrokenSession(NullSession(0.0), "leak", 0.001)
    for _ in range(100):
        assert np.array_equal(session.run(X)["y"], X["x"])
    assert session.leaked_bytes == 32 * int(0.001 * 2**20)


def test_a_fault_is_mended_after_its_time_and_a_newer_one_starts_that_anew() -> None:
    async def scenario() -> list[tuple[str, float]]:
        faults, worker = Faults({}), Worker()
        faults.inject(Injection("slow", "m", amount=0.5, for_s=0.01), worker)
        faults.inject(Injection("hang", "m", for_s=0.05), worker)
        await asyncio.wait_for(worker.mended.wait(), 10)
        return worker.done

    assert asyncio.run(scenario()) == [("slow", 0.5), ("hang", 0.0), (MEND, 0.0)]


def test_mending_reaches_every_worker_and_every_switch_and_nothing_is_mended_twice() -> None:
    switched: list[tuple[bool, float]] = []

    async def scenario() -> tuple[Worker, Worker]:
        faults = Faults({"clock-step": lambda on, amount: switched.append((on, amount))})
        broken, well = Worker(), Worker()
        faults.inject(Injection("leak", "m", for_s=0.01), broken)
        faults.inject(Injection("clock-step", amount=5.0, for_s=0.01), None)
        faults.mend([broken, well])
        await asyncio.sleep(0.03)
        return broken, well

    broken, well = asyncio.run(scenario())
    assert (broken.done, well.done) == ([("leak", 16.0), (MEND, 0.0)], [(MEND, 0.0)])
    assert switched == [(True, 5.0), (False, 0.0)]


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
def test_an_amount_that_is_none_is_refused_before_anything_is_broken(amount: float) -> None:
    worker = Worker()
    with pytest.raises(BadInput, match="its amount is no less than 0"):
        Faults({}).inject(Injection("slow", "m", amount=amount), worker)
    assert worker.done == []
