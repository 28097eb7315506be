"""The queueing law that stands beside what the elasticity benchmark measures."""

from __future__ import annotations

import numpy as np
import pytest

from appliance.bench.mdc import Queue, waits_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("load", [0.05, 0.5, 0.9])
def test_one_server_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    queue = Queue.at(load, 1)
    assert queue.mean_wait() == pytest.approx(load / (2 * (1 - load)), rel=1e-6)
    assert queue.waits_at_most(0.0) == pytest.approx(1 - load, rel=1e-6)


@pytest.mark.parametrize(("load", "servers"), [(0.3, 1), (0.5, 2), (0.8, 2), (0.8, 4)])
def test_the_law_agrees_with_a_queue_that_is_played(load: float, servers: int) -> None:
    gaps = np.random.default_rng(1).exponential(1 / (load * servers), 200_000)
    waits = np.array(waits_of(np.cumsum(gaps).tolist(), servers))
    queue = Queue.at(load, servers)
    assert waits.mean() == pytest.approx(queue.mean_wait(), rel=0.05)
    for wait in (0.0, 0.4, 1.0, 2.5):
        assert np.mean(waits <= wait + 1e-9) == pytest.approx(queue.waits_at_most(wait), abs=0.01)
    assert np.quantile(waits, 0.99) == pytest.approx(queue.wait(0.99), rel=0.06)
