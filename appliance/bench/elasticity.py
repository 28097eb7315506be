"""How latency grows with load, beside what queueing theory allows.

(a) evenly spaced requests, from 2 % to 20 % of capacity: P99 grows at most 15 %.
(b) Poisson arrivals, from 5 % to 50 %: P99 at most 1.15 times that of an M/D/c queue with the measured service time:
    the P99 wait, in services as capacity shows them, and then the time of a request that meets nobody.
(c) twice the capacity: those that are admitted keep the P99 of 90 % load, the others are refused in under 5 ms.

Loads are taken in turn, several times over, and medians of the rounds are judged, because machines are noisy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

import numpy as np

from appliance.bench import openloop
from appliance.bench.mdc import Queue, waits_of
from appliance.bench.question import Question
from models.errors import ApplianceError

PHASED = (0.02, 0.2)
POISSON = (0.05, 0.1, 0.2, 0.35, 0.5)
FULL, OVER = 0.9, 2.0
LONGER = 5
"""How many times more requests near and beyond capacity: a queue that is nearly full changes slowly."""
GROWTH = 1.15
REFUSED_WITHIN_S = 0.005
OK = 200
REFUSALS = (429, 503)
_CLOSED = (64, 512)
"""Requests of the two closed loops that find capacity; the first only warms up."""
_ALONE = 100
_FEWEST = 10
"""Requests below which nothing is said of a P99."""
_DRAWS = 50


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line: what was measured, what it may be, and whether it is."""

    what: str
    have: float | None
    """None when it was not measured; `note` says why."""
    limit: float | None
    """None when it is only told."""
    unit: str = ""
    at_least: bool = False
    """Whether `limit` is the least that passes, rather than the most."""
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether it is within its limit, NaN being not; None when there is nothing to judge."""
        if self.have is None or self.limit is None:
            return None
        return self.have >= self.limit if self.at_least else self.have <= self.limit

    def __str__(self) -> str:
        mark = {True: "pass", False: "FAIL", None: "-"}[self.passed]
        have = "left out" if self.have is None else f"{self.have:.3f} {self.unit}"
        return f"{mark:4}  {self.what:68} {have:>14}  limit {self.limit} {self.unit}  {self.note}"


@dataclass(frozen=True, slots=True)
class Point:
    """One load, for a plot: its share of capacity, and P99 as measured and as the law has it."""

    load: float
    p99_ms: float
    law_ms: float | None = None


class Loads:
    """Loads on one daemon, as shares of its capacity."""

    def __init__(
        self,
        url: str,
        question: Question,
        servers: int,
        samples: int,
        longest_s: float = math.inf,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Ask `question`, with further `headers`, of the daemon at `url`, which runs so many `servers` at a time.

        Each load is of `samples` requests, fewer where these would take longer than `longest_s`.
        """
        where = urlsplit(url)
        self.servers = servers
        self._address = where.hostname or "", where.port or 80
        self._request = question.wire(where.netloc, headers)
        self._samples, self._longest_s = samples, longest_s
        self._chance = np.random.default_rng(2)
        self.capacity = self.alone_s = 0.0

    def measure_capacity(self) -> None:
        """Answers a second when somebody always waits, but nobody is refused; and the time when nobody else asks."""
        self._alone(2)
        first_s = self._alone(2)
        for count in _CLOSED:
            fit = max(self._longest_s * self.servers / first_s, 4 * self.servers)
            answers = self.send(np.zeros(int(min(count, fit))), at_once=4 * self.servers)
            if not (answers.status == OK).all():
                msg = f"asked one after the other the daemon answered {sorted(set(answers.status.tolist()))}, not 200"
                raise ApplianceError(msg)
            self.capacity = len(answers.status) / float(answers.latency_s.max())
        self.alone_s = self._alone(int(max(min(_ALONE, self._longest_s / first_s), 3)))

    def _alone(self, count: int) -> float:
        answers = self.send(np.zeros(count + 1), at_once=1)
        return float(np.median(np.diff(answers.latency_s)))  # due at once, so one follows the other

    @property
    def service_s(self) -> float:
        """What a request takes of one server."""
        return self.servers / self.capacity

    def count(self, load: float, times: float = 1.0) -> int:
        """Requests of a load; 0 when too few fit into the time for a P99 to mean anything."""
        fit = self._longest_s * load * self.capacity
        return 0 if fit < _FEWEST else int(min(self._samples * times, fit))

    def evenly(self, load: float) -> openloop.Answers:
        """Sources in phase: one request due in each slot."""
        return self.send(np.arange(self.count(load, 0.5)) / (load * self.capacity))

    def poisson(self, load: float, times: float = 1.0) -> tuple[openloop.Answers, float]:
        """Arrivals at random, and the P99 wait, in services, of those very arrivals in an ideal queue.

        Few arrivals are seldom typical. Below capacity they are drawn many times over before anything is sent, and
        those are taken whose own P99, played in an ideal queue, is nearest to the law's. Near capacity that matters
        most: of 900 arrivals at 90 % in an ideal queue for two, half have a P99 under 7 services; the law has 10.8.
        """
        count, steady = self.count(load, times), load < 1
        draws = self._chance.exponential(1 / (load * self.capacity), (_DRAWS if steady else 1, count)).cumsum(1)
        ideal = [float(np.quantile(waits_of((due_s / self.service_s).tolist(), self.servers), 0.99)) for due_s in draws]
        law = Queue.at(load, self.servers).wait(0.99) if steady else 0.0
        best = int(np.argmin([abs(wait - law) for wait in ideal]))
        return self.send(draws[best]), ideal[best]

    def send(
        self, due_s: openloop.Floats, at_once: int = openloop.MOST_CONNECTIONS, start_at: float = 0.0
    ) -> openloop.Answers:
        """Send at these moments, see `openloop.run`."""
        time.sleep(0.2)  # what the load before has left in the queue
        return openloop.run(self._address, self._request, due_s, at_once=at_once, start_at=start_at)


def p99_ms(answers: openloop.Answers) -> float:
    """P99 of the answered, in milliseconds; infinite when nobody was."""
    answered = answers.latency_s[answers.status == OK]
    return float(np.quantile(answered, 0.99)) * 1e3 if len(answered) else math.inf


def phased(loads: Loads, rounds: int, tell: Callable[[str], None]) -> list[Verdict]:
    """Part (a)."""
    what = f"evenly spaced, P99 at {PHASED[1]:.0%} load over P99 at {PHASED[0]:.0%}"
    if not all(map(loads.count, PHASED)):
        return [Verdict(what, None, GROWTH, "x", note=_too_slow(loads, PHASED[0]))]
    ratios = []
    for _ in range(rounds):
        low, high = (p99_ms(loads.evenly(load)) for load in PHASED)
        tell(f"{PHASED[0]:.0%} load: P99 {low:.2f} ms, {PHASED[1]:.0%}: {high:.2f} ms")
        ratios.append(high / low)
    return [
        Verdict(
            what, float(np.median(ratios)), GROWTH, "x", note=f"{loads.count(PHASED[0], 0.5)} requests at the least"
        )
    ]


def random_arrivals(
    loads: Loads, rounds: int, tell: Callable[[str], None], shares: Sequence[float] = POISSON
) -> tuple[list[Verdict], list[Point]]:
    """Part (b)."""
    service_ms, alone_ms = loads.service_s * 1e3, loads.alone_s * 1e3
    verdicts, points = [], []
    for load in shares:
        what = f"Poisson at {load:.0%} load, P99 over M/D/{loads.servers}"
        if not loads.count(load):
            verdicts.append(Verdict(what, None, GROWTH, "x", note=_too_slow(loads, load)))
            continue
        measured = [loads.poisson(load) for _ in range(rounds)]
        have = float(np.median([p99_ms(answers) for answers, _ideal in measured]))
        same = float(np.median([ideal for _answers, ideal in measured])) * service_ms + alone_ms
        law = Queue.at(load, loads.servers).wait(0.99) * service_ms + alone_ms
        note = f"P99 {have:.2f} ms, law {law:.2f} ms, {loads.count(load)} requests"
        tell(f"{load:.0%} load: {note} (these very arrivals {same:.2f} ms)")
        verdicts.append(Verdict(what, have / law, GROWTH, "x", note=note))
        points.append(Point(load, have, law))
    return verdicts, points


def overload(loads: Loads, rounds: int, tell: Callable[[str], None]) -> list[Verdict]:
    """Part (c). A refusal's time counts from the moment at which its request was sent."""
    times = f"P99 of the admitted at {OVER:.0%} load over P99 at {FULL:.0%}"
    if not loads.count(FULL):
        return [Verdict(times, None, GROWTH, "x", note=_too_slow(loads, FULL))]
    growth, refusal_s, accepted, hinted, lost = [], [], [], True, 0
    for _ in range(rounds):
        full, _ideal = loads.poisson(FULL, LONGER)
        over, _ideal = loads.poisson(OVER, LONGER)
        refused = np.isin(over.status, REFUSALS)
        answered = over.status == OK
        lost += int((~refused & ~answered).sum())
        hinted = hinted and bool(over.hinted[refused].all())
        growth.append(p99_ms(over) / p99_ms(full))
        shed_s = (over.latency_s - over.late_s)[refused]
        refusal_s.append(float(np.quantile(shed_s, 0.99)) if len(shed_s) else 0.0)
        accepted.append(float(answered.mean()) * OVER)
        tell(
            f"{FULL:.0%} load: P99 {p99_ms(full):.2f} ms, {np.isin(full.status, REFUSALS).mean():.1%} refused; "
            f"{OVER:.0%}: P99 {p99_ms(over):.2f} ms, {refused.mean():.1%} refused in {refusal_s[-1] * 1e3:.2f} ms "
            f"(P99); client late by {over.late_s.max() * 1e3:.2f} ms"
        )
    shed_ms = float(np.median(refusal_s)) * 1e3
    return [
        Verdict(times, float(np.median(growth)), GROWTH, "x", note=f"{loads.count(OVER, LONGER)} requests"),
        Verdict(f"P99 of a refusal at {OVER:.0%} load", shed_ms, REFUSED_WITHIN_S * 1e3, "ms"),
        Verdict(f"capacity left unused at {OVER:.0%} load", max(0.0, 1 - float(np.median(accepted))), 0.1),
        Verdict("refusals without a Retry-After, and answers that are neither", float(lost + (not hinted)), 0.0),
    ]


def _too_slow(loads: Loads, load: float) -> str:
    rate = load * loads.capacity
    return f"{_FEWEST} requests at {rate:.2g} a second take {_FEWEST / rate:.0f} s, longer than this run allows"
