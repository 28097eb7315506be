"""How waits grow with load, played in virtual time: the queue itself, without the noise of a machine.

A worker takes exactly a second a request, and as many batches as the schedule hands out. `make elasticity` measures
the same three promises on a real daemon.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from appliance.bench.mdc import Queue
from appliance.core.limits import Limits
from appliance.core.schedule import DEPTH, FULL, Schedule, Ticket
from models.errors import Overloaded

pytestmark = pytest.mark.unit

Floats = npt.NDArray[np.float64]


@dataclass
class Played:
    """Latencies of the answered, in order of answers, and how many were refused with which hints."""

    latency_s: list[float] = field(default_factory=list)
    hints_s: list[float] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.latency_s, 0.99))


def play(arrivals: Floats, servers: int) -> Played:
    """Let requests arrive at a schedule with a worker of so many threads."""
    schedule: Schedule[None] = Schedule(Limits(concurrency=servers, wait_s=1e6))
    played = Played()
    in_worker: list[Ticket[None]] = []
    running: list[tuple[float, int, Ticket[None]]] = []

    def move(now: float) -> None:
        while (batch := schedule.next(now)) is not None:
            in_worker.extend(batch.tickets)
        while in_worker and len(running) < servers:
            ticket = in_worker.pop(0)
            heapq.heappush(running, (now + 1.0, ticket.id, ticket))

    def work_until(now: float) -> None:
        while running and running[0][0] <= now:
            ended_at, _id, ticket = heapq.heappop(running)
            played.latency_s.append(ended_at - ticket.admitted_at)
            schedule.finished(ticket.id, 1.0)
            move(ended_at)

    for number, now in enumerate(arrivals.tolist()):
        work_until(now)
        try:
            schedule.admit(Ticket(number, None, now))
        except Overloaded as refusal:
            played.hints_s.append(refusal.retry_after_s)
        move(now)
    work_until(float("inf"))
    assert len(played.latency_s) + len(played.hints_s) == len(arrivals)
    return played


def poisson(load: float, servers: int, count: int = 6000) -> Floats:
    """Arrivals at random."""
    return np.cumsum(np.random.default_rng(3).exponential(1 / (load * servers), count))


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_evenly_spaced_requests_wait_no_longer_at_ten_times_the_load(servers: int) -> None:
    low, high = (play(np.arange(500) / (load * servers), servers).p99_s for load in (0.02, 0.2))
    assert high == pytest.approx(low)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("load", [0.05, 0.2, 0.5])
def test_random_requests_wait_as_in_an_ideal_queue(load: float, servers: int) -> None:
    played = play(poisson(load, servers), servers)
    assert not played.hints_s
    assert played.p99_s <= 1.1 * (Queue.at(load, servers).wait(0.99) + 1.0)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_under_twice_the_capacity_the_admitted_keep_the_p99_of_ninety_percent_load(servers: int) -> None:
    full, over = play(poisson(0.9, servers, 15_000), servers), play(poisson(2.0, servers, 4000), servers)
    assert over.p99_s <= 1.15 * full.p99_s
    assert len(full.hints_s) < 0.005 * 15_000
    assert len(over.latency_s) == pytest.approx(2000, rel=0.05), "and no capacity is left unused"
    assert max(over.latency_s) <= (FULL + DEPTH) / servers + 2.0
    assert 0 < min(over.hints_s) <= max(over.hints_s) <= (FULL + DEPTH * servers) / servers
