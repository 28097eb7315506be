"""How late the event loop is."""

from __future__ import annotations

import asyncio
import time

import pytest

from appliance.lag import Lag, watched_loop

pytestmark = pytest.mark.unit


def measured(blocked_s: float) -> Lag:
    """The lag of a loop that something blocks for so long."""

    async def live() -> Lag:
        with watched_loop() as lag:
            await asyncio.sleep(0.1)
            time.sleep(blocked_s)  # noqa: ASYNC251 - that is the fault
            await asyncio.sleep(0.1)
        return lag

    return asyncio.run(live())


def test_what_blocks_the_event_loop_shows_as_its_lag_with_the_time_that_all_waited() -> None:
    status = measured(0.3).status()
    assert 200 < status["lag_max_ms"] < 2000
    assert status["lag_p99_ms"] > 100
    assert status["lag_p50_ms"] <= status["lag_p99_ms"] <= status["lag_max_ms"]


def test_a_loop_that_was_not_measured_yet_has_no_lag() -> None:
    assert set(Lag().status().values()) == {0.0}
