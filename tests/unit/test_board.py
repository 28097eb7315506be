"""A machine that slows itself down: who is told, and what is refused meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from doubles.service import MemoryService

from appliance.adapters.metrics import Metrics
from appliance.board import Board
from appliance.core.throttle import Throttle
from models.errors import Overloaded

pytestmark = pytest.mark.unit

HOT = {"slowed_by": ["gpu-throttle-alert"], "temperatures_celsius": {"gpu-thermal": 99.5}}
COOL: dict[str, Any] = {"slowed_by": [], "temperatures_celsius": {"gpu-thermal": 61.0}}
LOW, USUAL = 6, 5


def test_throttling_begins_at_once_and_is_over_only_after_a_while_without_any() -> None:
    began = Throttle().after(100.0, slowed_by=["cpufreq-cpu0"], events={})
    assert (began.reasons, began.since, began.times) == (("cpufreq-cpu0",), 100.0, 1)
    again = began.after(105.0, events={}).after(110.0, slowed_by=["cpufreq-cpu0"], events={})
    assert (again.reasons, again.since, again.times) == (("cpufreq-cpu0",), 100.0, 1)
    assert again.after(124.0, events={}).reasons
    over = again.after(124.0, events={}).after(125.0, events={})
    assert over.reasons == ()
    assert over.after(130.0, slowed_by=["cpufreq-cpu0"], events={}).times == 2


def test_a_power_event_counts_when_it_happens_and_not_for_ever_after() -> None:
    old = Throttle().after(0.0, events={"instant_over_current": 7})
    assert old.reasons == ()
    fresh = old.after(5.0, events={"instant_over_current": 8})
    assert fresh.reasons == ("instant_over_current",)
    assert fresh.after(20.0, events={"instant_over_current": 8}).reasons == ()


def test_a_throttled_machine_refuses_low_priority_says_why_and_tells_once() -> None:
    board, told = Board(), list[str]()
    for now, facts in ((0.0, COOL), (5.0, HOT), (10.0, HOT), (15.0, COOL)):
        board.judge(facts, now, lambda: told.append("changed"))
    with pytest.raises(Overloaded, match="gpu-throttle-alert"):
        board.check(LOW)
    board.check(USUAL)
    assert board.status()["throttled"]["reasons"] == ["gpu-throttle-alert"]
    assert board.status()["temperatures_celsius"] == {"gpu-thermal": 61.0}
    assert told == ["changed"]
    board.judge(COOL, 25.0, lambda: told.append("changed"))
    board.check(LOW)
    assert told == ["changed"] * 2


def test_a_look_that_fails_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.chain([OSError("the bus is stuck")], itertools.repeat(HOT))

    def read() -> dict[str, Any]:
        look = next(looks)
        if isinstance(look, Exception):
            raise look
        return look

    async def watched() -> Board:
        monkeypatch.setattr("appliance.board.SAMPLE_S", 0.0)
        board, changed = Board(read), asyncio.Event()
        watching = asyncio.ensure_future(board.watch(changed.set))
        await asyncio.wait_for(changed.wait(), 20)
        watching.cancel()
        return board

    assert asyncio.run(watched()).status()["throttled"]["times"] == 1


class OnABoard(MemoryService):
    """Says of itself what a board would."""

    def status(self) -> dict[str, Any]:
        board = Board()
        board.judge(
            {
                **HOT,
                "gpu_load": 0.5,
                "rails": {"VDD_IN": {"volts": 5.0, "amperes": 2.0, "watts": 10.0}},
                "slots": {"bootable": {"A": True, "B": False}},
            },
            0.0,
            lambda: None,
        )
        return {**super().status(), "device": board.status()}


def test_a_scrape_has_what_the_board_says_and_no_line_for_what_it_does_not_say() -> None:
    lines = Metrics(OnABoard()).text().decode().splitlines()  # type: ignore[arg-type] # its double
    for line in (
        "appliance_throttled 1.0",
        "appliance_throttlings_total 1.0",
        'appliance_temperature_celsius{zone="gpu-thermal"} 99.5',
        "appliance_gpu_load 0.5",
        'appliance_power_watts{rail="VDD_IN"} 10.0',
        'appliance_slot_bootable{slot="B"} 0.0',
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith(("appliance_clock_hertz", "appliance_largest_free"))]
