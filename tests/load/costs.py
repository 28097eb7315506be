"""What scheduling costs and what batching gains on this machine: `python tests/load/costs.py --bundle DIR`.

Processor time, so that neighbours on the machine count little; for runs of a graph the median and the fastest, taken
in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from appliance import wire
from appliance.adapters.live import Live
from appliance.adapters.metrics import Metrics
from appliance.core.limits import Limits
from appliance.core.schedule import Schedule, Ticket
from appliance.recorder import Recorder
from appliance.runtime import choose
from appliance.service import InferRequest, Outcome
from models.folder import BundleFolder
from models.spec import Tensor

SIZES = (1, 2, 4, 8)
RUNS = 12
REQUESTS = 20_000


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="time its graph rec at several batch sizes")
    parser.add_argument("--width", type=int, default=320, help="pixels of a line (default 320)")
    options = parser.parse_args()
    for waiting in (1, 64, 10_000):
        print(f"admit, hand out and finish a request while {waiting:5} wait {schedule_us(waiting):7.1f} us")
    tensors = [Tensor.from_array("x", np.zeros((1, 16), np.float32))]
    run = wire.Run(1, "model", wire.heads(tensors))
    packet = wire.encode(run, [tensors[0].data])
    print(
        f"write a small request for the worker                {cpu_us(lambda: wire.encode(run, [b'0' * 64])):7.1f} us"
    )
    print(f"read it there                                       {cpu_us(lambda: wire.decode(packet)):7.1f} us")
    print(f"count, record and show a request                    {asyncio.run(watching_us()):7.1f} us")
    if options.bundle:
        for precision, times in batching(options.bundle, options.width).items():
            for size, (median_ms, fastest_ms) in times.items():
                print(
                    f"rec {precision}, {options.width} wide, {size} in a run: {median_ms:6.1f} ms a line, "
                    f"fastest {fastest_ms:6.1f} ms"
                )
    return 0


class Watched:
    """As much of a service as those who watch its requests ask for."""

    def __init__(self) -> None:
        self.observers: list[Callable[[Outcome], None]] = []
        self.listeners: list[Callable[[], None]] = []

    def models(self) -> list[object]:
        """None."""
        return []


async def watching_us() -> float:
    """Microseconds that metrics, page, log and flight recorder take of one request."""
    service: Any = Watched()
    Metrics(service)
    Live(service)
    recorder = Recorder(service, Path("nowhere"), per_s=20)
    asked = InferRequest("model", [Tensor.from_array("x", np.zeros((1, 16), np.float32))])
    outcome = Outcome("model", "1", 0.01, None, {"queue": 0.1, "inference": 0.2}, 1, asked)

    def tell() -> None:
        for observer in service.observers:
            observer(outcome)

    with structlog.testing.capture_logs():
        spent_us = cpu_us(tell)
        await recorder.finish()
    return spent_us


def schedule_us(waiting: int) -> float:
    """Microseconds of one request's whole way through a schedule in which so many wait."""
    schedule: Schedule[None] = Schedule(Limits(queue=10**6, predicted_wait_s=1e9))
    number = 0

    def admit() -> None:
        nonlocal number
        number += 1
        schedule.admit(Ticket(number, None, number * 1e-6))

    def hand_out() -> None:
        batch = schedule.next(number * 1e-6)
        for ticket in batch.tickets if batch else ():
            schedule.finished(ticket.id, 0.005)

    def request() -> None:
        admit()
        schedule.next_expiry()
        hand_out()

    request()  # from now on it is known what one takes
    for _ in range(waiting):
        admit()
    return cpu_us(request)


def cpu_us(call: Callable[[], object]) -> float:
    """Microseconds of processor time a call."""
    started = time.process_time()
    for _ in range(REQUESTS):
        call()
    return (time.process_time() - started) / REQUESTS * 1e6


def batching(bundle: Path, width: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Milliseconds a line, median and fastest, by precision and batch size, on one thread."""
    folder = BundleFolder(bundle)
    found = {}
    x_NCHW = np.random.default_rng(0).normal(size=(max(SIZES), 3, 48, width)).astype(np.float32)
    for precision, variant in folder.manifest.graphs["rec"].variants.items():
        session = choose("onnxruntime-cpu").open(folder.read(variant.graph), threads=1)
        spent_ms: dict[int, list[float]] = {size: [] for size in SIZES}
        for turn in range(RUNS + 1):
            for size, spent in spent_ms.items():
                started = time.perf_counter()
                session.run({"x": x_NCHW[:size]})
                if turn:  # the first run of a shape plans its memory
                    spent.append((time.perf_counter() - started) / size * 1e3)
        found[precision] = {size: (statistics.median(spent), min(spent)) for size, spent in spent_ms.items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
