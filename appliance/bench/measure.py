"""The four dimensions of a served model, measured on a running daemon: speed, cost, elasticity, stability.

And what stands beside them: whether answers repeat, how long a recovery takes, and the availability that follows.
Loads are bounded in time, so a slow model is told of with fewer requests than a quick one; each line says how many.
What is promised of 1,000 requests gets more time, and is not measured where that was not enough.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import chain
from typing import Any, TypeVar

import httpx
import numpy as np

from appliance.bench import elasticity, question
from appliance.bench.damage import mutated
from appliance.bench.elasticity import OK, Loads, Point, Verdict
from appliance.bench.question import Question
from appliance.drill import Drill
from appliance.runtime.machine import cpu_name
from models.errors import ApplianceError
from models.spec import Array

LATEST_S = 0.1
"""P99 at the highest rate stays below it."""
RATE = 200.0
COST = 0.023
"""For 1,000 requests, in the unit of the price."""
BAD_INPUTS = REPEATS = 1000
RECOVERED_S = 300.0
AVAILABLE = 99.95
"""Percent."""
LAG_MS = 5.0
FAULTS = ("crash", "hang", "nan", "corrupt-plan")
"""Drilled, those from which a model has to recover."""
_DAY_S = 86_400
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SAMPLES = 400
_PARTS = 8
"""No single load takes more than such a share of the time."""
_STEPS = 6
_BACK_OFF = (1.0, 0.9, 0.8, 0.65)
_CLIENTS = 4
_BATCH = 8
_NOTE = 100
_HEAD_BYTES = 1000
"""Damage to the payload of a large tensor makes another input, not a bad one."""
_BARE_TOLERANCE = 1e-5
"""Of a bare ONNX file, whose maker has named none."""

Tell = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a measurement may take, and what its figures are reckoned with."""

    lasts_s: float = 120.0
    """About so long, the series of 1,000 and a drill apart."""
    series_s: float = 600.0
    """After that a series of 1,000 requests is given up."""
    price_per_hour: float = 1.0
    """Of the machine."""
    faults_per_day: float = 1.0
    """Of each kind that is drilled."""
    drill: bool = True
    """Whether the daemon is broken, where it lets itself be; that takes as long as the recoveries take."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One heading and its lines."""

    name: str
    verdicts: list[Verdict]


@dataclass(slots=True)
class Findings:
    """All that was measured."""

    facts: dict[str, str]
    dimensions: list[Dimension] = field(default_factory=list)
    rates: list[Point] = field(default_factory=list)
    """Loads of the search for the highest rate."""
    poisson: list[Point] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed; what was left out has not."""
        return all(one.passed is not False for dimension in self.dimensions for one in dimension.verdicts)


class Bench:
    """One measurement of one model of one daemon."""

    def __init__(self, client: httpx.Client, model: str, plan: Plan, tell: Tell) -> None:
        """`client` speaks to the daemon; an empty `model` takes the first that is ready. Raises ApplianceError."""
        self._client, self._plan, self._tell = client, plan, tell
        if client.base_url.scheme != "http":
            raise ApplianceError(
                "the benchmark speaks plain HTTP, so that it measures no encryption of its own: run it on the device, "
                "or through a tunnel, against an address that begins with http://"
            )
        status = self._status()
        ready = [one["name"] for one in status["models"] if one["ready"]]
        if not model and not ready:
            raise ApplianceError("no model is ready: see `appliance status`")
        self.model = model or ready[0]
        self._question = question.find(client, self.model)
        self._right = self._question.ask(client)
        bundles = {one["name"]: one for one in status["models"]}
        # A graph of a bundle is `bundle.graph`.
        served = bundles.get(self.model) or bundles[self.model.rpartition(".")[0]]
        self._bundle: str = served["name"]
        self._tolerance = max(served["tolerance"].values(), default=_BARE_TOLERANCE)
        carried = {"Authorization": client.headers["authorization"]} if "authorization" in client.headers else {}
        longest_s = plan.lasts_s / _PARTS
        self._loads = Loads(
            str(client.base_url), self._question, served["concurrency"], _SAMPLES, longest_s, headers=carried
        )
        host = client.base_url.host
        precision = ", ".join(f"{graph} {how}" for graph, how in sorted(served["precision"].items()))
        self._findings = Findings(
            {
                "model": f"{self.model} {served['version']}, {served['runtime']} ({precision})",
                "request": str(self._question),
                "device": f"{status['device_id']}, appliance {status['appliance']}",
                "machine": f"{cpu_name()}, {os.cpu_count()} cores" if host in _LOOPBACK else f"that at {host}",
                "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
            }
        )

    def run(self) -> Findings:
        """Measure everything; raises ApplianceError when the daemon is not there any more."""
        found = self._findings
        self._tell("capacity")
        self._loads.measure_capacity()
        found.facts["capacity"] = (
            f"{self._loads.capacity:.1f} requests/s, {self._loads.servers} at a time; "
            f"{self._loads.alone_s * 1e3:.2f} ms when alone"
        )
        rate = self._highest_rate()
        what = f"requests/s of {self.model} with P99 under {LATEST_S * 1e3:.0f} ms"
        note = "" if rate else f"one alone takes {self._loads.alone_s * 1e3:.0f} ms"
        speed = Verdict(what, rate, RATE, "/s", at_least=True, note=note)
        found.dimensions.append(Dimension("Speed", [speed]))
        found.dimensions.append(Dimension("Cost", [self._cost(rate)]))
        found.dimensions.append(Dimension("Elasticity", list(self._elasticity())))
        found.dimensions.append(Dimension("Stability", list(self._bad_inputs())))
        found.dimensions.append(Dimension("Repeatability", list(self._repeats())))
        found.dimensions.append(Dimension("Recovery", list(self._recovery())))
        return found

    def _highest_rate(self) -> float:
        """By bisection below capacity, and confirmed by a longer run; 0 when there is none."""
        if self._loads.alone_s >= LATEST_S:
            return 0.0
        low, high = 0.0, 1.1 * self._loads.capacity
        trial_s = self._plan.lasts_s / 60
        for step in range(_STEPS):
            middle = (low + high) / 2 if step else 0.8 * self._loads.capacity
            low, high = (middle, high) if self._keeps_up(middle, trial_s) else (low, middle)
        return next((share * low for share in _BACK_OFF if low and self._keeps_up(share * low, 3 * trial_s)), 0.0)

    def _keeps_up(self, rate: float, for_s: float) -> bool:
        """Whether 99 in 100 of Poisson arrivals are answered in time; a refusal is never in time."""
        chance = np.random.default_rng(int(rate * 1e3))
        answers = self._loads.send(chance.exponential(1 / rate, max(int(rate * for_s), _STEPS)).cumsum())
        latency_s = np.where(answers.status == OK, answers.latency_s, math.inf)
        p99_s = float(np.quantile(latency_s, 0.99, method="higher"))
        self._tell(f"{rate:.1f} requests/s: P99 {p99_s * 1e3:.1f} ms")
        self._findings.rates.append(Point(rate, p99_s * 1e3))
        return p99_s < LATEST_S

    def _cost(self, rate: float) -> Verdict:
        what = f"1,000 requests at that rate and {self._plan.price_per_hour:g} an hour"
        if not rate:
            return Verdict(what, None, COST, note="there is no such rate")
        return Verdict(what, 1000 / rate / 3600 * self._plan.price_per_hour, COST)

    def _elasticity(self) -> Iterator[Verdict]:
        yield from elasticity.phased(self._loads, 1, self._tell)
        quick = self._plan.lasts_s < Plan().lasts_s
        shares = elasticity.POISSON[::4] if quick else elasticity.POISSON[::2]
        verdicts, self._findings.poisson = elasticity.random_arrivals(self._loads, 1, self._tell, shares)
        yield from verdicts
        yield from elasticity.overload(self._loads, 1, self._tell)
        lag_ms = self._status()["event_loop"]["lag_p99_ms"]
        yield Verdict("event loop lag under these loads, P99 of the last minute", lag_ms, LAG_MS, "ms")

    def _bad_inputs(self) -> Iterator[Verdict]:
        before = self._status()
        declared = self._declared()
        chance = random.Random(3)  # noqa: S311 - to be repeatable
        head, tail = self._question.content[:_HEAD_BYTES], self._question.content[_HEAD_BYTES:]
        bodies = [mutated(head, chance) + tail for _ in range(BAD_INPUTS)]
        self._tell(f"{BAD_INPUTS:,} bad inputs")

        def send(content: bytes) -> int:
            try:
                return self._client.post(
                    self._question.path, content=content, headers=dict(self._question.headers)
                ).status_code
            except httpx.HTTPError:
                return 0

        statuses = np.array(self._together(send, bodies))
        after = self._status()
        restarts = [sum(one["restarts"] for one in status["workers"]) for status in (before, after)]
        restarted = restarts[1] - restarts[0] + (after["uptime_s"] < before["uptime_s"])
        counts = ", ".join(f"{(statuses == one).sum()} x {one or 'no answer'}" for one in np.unique(statuses))
        undeclared = int(((statuses >= 500) & ~np.isin(statuses, declared) | (statuses == 0)).sum())  # noqa: PLR2004
        restarts_line = Verdict(f"restarts in {BAD_INPUTS:,} bad inputs", float(restarted), 0.0, note=counts)
        yield counted(restarts_line, len(statuses), BAD_INPUTS)
        errors_line = Verdict("server errors that are not declared, or no answer", float(undeclared), 0.0)
        yield counted(errors_line, len(statuses), BAD_INPUTS)
        right = question.difference(self._question.ask(self._client), self._right)
        yield Verdict("difference of the right answer before and after", right, self._tolerance)

    def _declared(self) -> list[int]:
        """Statuses of an inference by the daemon's own description."""
        document = self._client.get("/openapi.json").raise_for_status().json()
        (operation,) = (one["post"] for path, one in document["paths"].items() if path == "/v2/models/{model}/infer")
        return [int(code) for code in operation["responses"]]

    def _repeats(self) -> Iterator[Verdict]:
        self._tell(f"{REPEATS:,} times the same")

        def off(_number: int) -> float:
            return question.difference(self._question.ask(self._client), self._right)

        apart = self._together(off, range(REPEATS))
        verdict = Verdict(f"largest difference in {REPEATS:,} runs", max(apart), self._tolerance)
        yield counted(verdict, len(apart), REPEATS)
        yield self._batched()

    def _batched(self) -> Verdict:
        """Several rows in one request beside each row alone."""
        what = f"largest difference between {_BATCH} in one request and each alone"
        inputs = self._question.inputs
        if any(array.ndim == 0 or len(array) != 1 for array in inputs.values()):
            return Verdict(what, None, self._tolerance, note="its input is no batch")
        several = {name: self._varied(array) for name, array in inputs.items()}
        try:
            together = Question.of(self.model, several).ask(self._client)
        except ApplianceError as error:
            return Verdict(what, None, self._tolerance, note=str(error)[:_NOTE])
        if any(array.shape[:1] != (_BATCH,) for array in together.values()):
            return Verdict(what, None, self._tolerance, note="its answer is no batch")
        each = [Question.of(self.model, question.rows(several, i)).ask(self._client) for i in range(_BATCH)]
        apart = [question.difference(question.rows(together, i), alone) for i, alone in enumerate(each)]
        return Verdict(what, max(apart), self._tolerance)

    def _varied(self, array: Array) -> Array:
        """`_BATCH` rows of the kind of `array`, which has one."""
        if array.dtype == np.object_:
            return question.picture_array(*(question.page(f"Copy {i}") for i in range(_BATCH)))
        if np.issubdtype(array.dtype, np.floating):
            drawn = np.random.default_rng(4).normal(size=(_BATCH, *array.shape[1:]))
            return drawn.astype(array.dtype)
        return np.repeat(array, _BATCH, axis=0)

    def _together(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Results of the calls that began before the time of a series was over."""
        ends_at = time.monotonic() + self._plan.series_s
        with ThreadPoolExecutor(_CLIENTS) as pool:
            done = list(pool.map(lambda item: [call(item)] if time.monotonic() < ends_at else [], items))
        return list(chain.from_iterable(done))

    def _recovery(self) -> Iterator[Verdict]:
        """By the drill, where the daemon lets itself be broken; availability follows by arithmetic."""
        what, follows = "slowest recovery", "availability, computed and not observed"
        results = []
        if not self._plan.drill:
            yield Verdict(what, None, RECOVERED_S, "s", note="left out of a quick run")
            return
        try:
            for result in Drill(self._client, self._bundle).run(FAULTS):
                self._tell(f"{result.fault}: {result.verdict}")
                results.append(result)
        except ApplianceError as error:
            yield Verdict(what, None, RECOVERED_S, "s", note=str(error))
            yield Verdict(follows, None, AVAILABLE, "%", at_least=True, note="it needs the recovery times")
            return
        caught = [one for one in results if one.verdict != "not caught"]  # nobody felt it, so nobody waited
        times_s = [math.inf if one.recovery_s is None else one.recovery_s for one in caught]
        note = ", ".join(f"{one.fault} {took_s:.2f} s" for one, took_s in zip(caught, times_s, strict=True))
        wrong = [one.fault for one in results if one.verdict == "failed"]
        yield Verdict(what, max(times_s), RECOVERED_S, "s", note=note)
        bad = "faults after which an answer was wrong, or none came"
        yield Verdict(bad, float(len(wrong)), 0.0, note=", ".join(wrong))
        share = 1 - sum(times_s) * self._plan.faults_per_day / _DAY_S
        note = f"{self._plan.faults_per_day:g} of each fault a day"
        yield Verdict(follows, 100 * max(share, 0.0), AVAILABLE, "%", at_least=True, note=note)

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._client.get("/v1/status").raise_for_status().json()
        return status


def counted(verdict: Verdict, done: int, wanted: int) -> Verdict:
    """`verdict` on a series of `wanted` requests, of which `done` were made: a short one may fail, but not pass."""
    if done >= wanted or not verdict.passed:
        return verdict
    note = f"not measured: time was over after {done:,} of {wanted:,}"
    return replace(verdict, have=None, note=f"{note}; {verdict.note}" if verdict.note else note)
