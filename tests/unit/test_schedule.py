"""What travels to a worker together."""

from __future__ import annotations

import itertools

import pytest

from appliance.core.limits import Limits
from appliance.core.schedule import Schedule, Ticket

pytestmark = pytest.mark.unit


def run_all(schedule: Schedule[int], cost_s: dict[int, float], rounds: int) -> list[int]:
    """Sizes of the batches when eight requests of a bucket always wait and a run of a size takes `cost_s`."""
    numbers = itertools.count(1)
    sizes = []
    for _ in range(rounds):
        while len(schedule) < 8:
            schedule.admit(Ticket(next(numbers), 0, 0.0, bucket="x", shares=True))
        batch = schedule.next(0.0)
        assert batch is not None
        sizes.append(len(batch.tickets))
        for ticket in batch.tickets:
            schedule.finished(ticket.id, cost_s[len(batch.tickets)])
    return sizes


def test_requests_share_a_run_where_that_was_measured_to_be_cheaper() -> None:
    schedule: Schedule[int] = Schedule(Limits(concurrency=1))
    sizes = run_all(schedule, dict.fromkeys((1, 2, 4, 8), 0.02), 30)
    assert sizes == [*[1] * 3, *[2] * 3, *[4] * 3, *[8] * 21]


def test_requests_run_alone_where_sharing_was_measured_not_to_pay() -> None:
    schedule: Schedule[int] = Schedule(Limits(concurrency=1))
    sizes = run_all(schedule, {size: 0.02 * size for size in (1, 2, 4, 8)}, 30)
    assert sizes == [*[1] * 3, *[2] * 3, *[1] * 24]


def test_idle_threads_get_their_own_work_before_requests_travel_together() -> None:
    schedule: Schedule[int] = Schedule(Limits(concurrency=2))
    schedule.admit(Ticket(1, 0, 0.0))
    assert schedule.next(0.0) is not None
    schedule.finished(1, 0.0003)
    for i in range(2, 8):
        schedule.admit(Ticket(i, 0, 0.0))
    sizes = []
    while (batch := schedule.next(0.0)) is not None:
        sizes.append(len(batch.tickets))
    assert sizes == [3, 3]


def test_work_that_one_thread_does_in_no_time_is_not_shared_out() -> None:
    schedule: Schedule[int] = Schedule(Limits(concurrency=2))
    schedule.admit(Ticket(1, 0, 0.0))
    assert schedule.next(0.0) is not None
    schedule.finished(1, 0.0001)
    sizes = []
    for arrived in ((2, 3, 4, 5, 6, 7), (8,), (9,)):
        for i in arrived:
            schedule.admit(Ticket(i, 0, 0.0))
        batch = schedule.next(0.0)
        sizes.append(len(batch.tickets) if batch else 0)
    assert sizes == [6, 1, 0]  # a third message would only wait in the worker
    for i in range(2, 8):
        schedule.finished(i, 0.0001)
    assert schedule.next(0.0) is not None
