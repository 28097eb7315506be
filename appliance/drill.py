"""The drill behind `appliance doctor --drill`: breaks a running daemon in every way, and times how it recovers.

A client like any other: it injects each fault over HTTP, asks the model again and again, and compares every answer
with the one given before. What counts is what a caller saw: the time from the fault to the first right answer after
the last that was not.
"""

from __future__ import annotations

import difflib
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from appliance.bench.question import guesses
from appliance.core.health import Rung
from models.answers import said
from models.errors import ApplianceError

PICTURE = Path(__file__).parent / "web" / "drill.png"
"""One line of text, for models that take pictures."""

_WRONG = "a wrong answer"
_OVER_LEASE = "over its lease"
"""No fault of a worker: it is replaced before it becomes one."""
_PAUSE_S = 0.02
_LONGEST_S = 300.0
"""No recovery may take longer: five minutes are what the product promises at most."""
_SETTLES_S = 1.0
_TRIED_SIZES = (1, 32, 224, 320, 8, 640)
_TOLERANCE = 0.05
"""Relative, of numbers: the next worker may compute in another precision."""
_ALIKE = 0.8
"""Of text from a fallback, which says so: another precision may read a letter differently."""


@dataclass(frozen=True, slots=True)
class Act:
    """One fault, and what it is expected to do."""

    fault: str
    means: str
    """For people."""
    cause: str = ""
    """The fault class that the daemon must find; empty when its models should not feel it."""
    lasts_s: float = 3.0
    """It is mended after this; a fault that the daemon must find by itself is not."""
    pause_s: float = _PAUSE_S
    """Between two questions."""


ACTS = (
    Act("crash", "the worker process dies", "crash"),
    Act("hang", "the model never answers", "hang"),
    Act("nan", "the model computes NaN", "model-error"),
    Act("corrupt-plan", "a byte of the model is wrong at its next load", "plan-refused"),
    Act("cuda-error", "the GPU's context answers nothing any more", "poisoned-context"),
    Act("leak", "each run keeps more memory", _OVER_LEASE, lasts_s=8.0, pause_s=0.1),
    Act("slow", "each run takes longer than callers allow"),
    Act("clock-step", "the wall clock jumps by a year"),
    Act("disk-full", "nothing can be kept on disk"),
    Act("broker-loss", "the MQTT broker cannot be reached"),
)
FAULTS = tuple(act.fault for act in ACTS)


@dataclass(frozen=True, slots=True)
class Result:
    """What one fault did."""

    fault: str
    means: str
    detected_by: str
    answers: str
    """What callers got while it was broken."""
    recovery_s: float | None
    """From the fault to the first right answer after the last that was not; None when there is none to tell."""
    verdict: str
    """recovered, not felt, not caught, failed or skipped."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Lines of text, or the numbers of every output; and why they are not by the model as it was meant to be."""

    values: Sequence[Any]
    degraded: str | None = None


class Drill:
    """One drill on one daemon and one of its models."""

    def __init__(self, client: httpx.Client, model: str = "") -> None:
        """`client` speaks to the daemon; an empty `model` takes the first. Raises ApplianceError when it cannot be."""
        self._client = client
        status = self._status()
        if not status.get("faults_enabled"):
            raise ApplianceError(
                "fault injection is off in this daemon: start it with APPLIANCE_FAULTS__ENABLED=true, or say "
                "`enabled = true` under [faults] in its configuration"
            )
        served = {one["name"]: one for one in status["models"]}
        if not served or (model and model not in served):
            msg = f"there is no model {model!r} to drill on; served are {', '.join(served) or 'none'}"
            raise ApplianceError(msg)
        self.model = model or next(iter(served))
        self._has_broker = status["mqtt"] is not None
        self._questions = (
            [{"content": PICTURE.read_bytes()}]
            if served[self.model]["takes_pictures"]
            else [{"json": {"inputs": inputs}} for inputs in self._guesses()]
        )
        while self._questions and self._ask()[0] != "200":
            self._questions.pop(0)
        if not self._questions:
            msg = f"model {self.model!r} answers no question of ours before any fault: see `appliance status`"
            raise ApplianceError(msg)
        started = time.monotonic()
        self._right = self._ask()[1]
        usual_s = time.monotonic() - started
        self._allowed_s, self._late_s = max(1.0, 3 * usual_s), 0.25 + 3 * usual_s

    def run(self, faults: Collection[str] = FAULTS) -> Iterator[Result]:
        """Inject one of `faults` after the other; each is mended before its result is given."""
        for act in ACTS:
            if act.fault not in faults:
                continue
            if act.fault == "broker-loss" and not self._has_broker:
                yield Result(act.fault, act.means, "-", "-", None, "skipped", "no broker is configured")
                continue
            try:
                result = self._play(act)
            finally:
                self._mend()
            yield result

    def _play(self, act: Act) -> Result:
        before, worker = self._worker(), self._worker()
        bad: Counter[str] = Counter()
        latest_s = 0.0
        found_by_daemon = act.cause and act.fault != "leak"
        limit_s = _LONGEST_S if found_by_daemon else act.lasts_s + 2 * self._allowed_s + _LONGEST_S / 10
        back_s, broken, ended_s = 0.0, False, 0.0
        started = time.monotonic()
        self._inject(act, _LONGEST_S if found_by_daemon else act.lasts_s)
        while ended_s < limit_s:
            asked_s = time.monotonic() - started
            what, answer = self._ask(self._allowed_s if act.fault == "slow" else None)
            ended_s = time.monotonic() - started
            if what != "200":
                bad[what] += 1
            elif not self._is_right(answer):
                bad[_WRONG] += 1
            else:
                late = act.cause != "" and ended_s - asked_s > self._late_s  # it waited for the recovery
                latest_s = max(latest_s, ended_s - asked_s if late else 0.0)
                back_s, broken = (ended_s if broken or late else back_s), False
                worker = self._worker()
                found = act.cause in _new(before, worker, "faults") and worker["state"] == "ready"
                if found or (not found_by_daemon and ended_s > act.lasts_s + _SETTLES_S and self._broker_is_back()):
                    break
                time.sleep(act.pause_s)
                continue
            broken = True
            time.sleep(act.pause_s)
        if act.fault == "broker-loss":
            back_s = ended_s
        answers = [f"{count} x {what}" for what, count in bad.items()]
        if latest_s:
            answers.append(f"right after {latest_s:.2f} s")
        known = sorted(_new(before, worker, "rungs"), key=[rung.value for rung in Rung].index)
        return _judged(act, answers, None if broken else back_s, _new(before, worker, "faults"), known)

    def _mend(self) -> None:
        """Restore everything, and see it restored."""
        self._post("/v1/faults", json={"fault": "none"})
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until:
            what, answer = self._ask()
            (model,) = (one for one in self._status()["models"] if one["name"] == self.model)
            if what == "200" and self._is_right(answer) and model["ready"]:
                return
            time.sleep(_PAUSE_S)
        msg = f"model {self.model!r} does not come back: see `appliance status` and the daemon's log"
        raise ApplianceError(msg)

    def _inject(self, act: Act, for_s: float) -> None:
        amount = {"amount": 2 * self._allowed_s} if act.fault == "slow" else {}
        self._post("/v1/faults", json={"fault": act.fault, "model": self.model, "for_s": for_s, **amount})

    def _post(self, path: str, **request: Any) -> None:  # noqa: ANN401 - httpx's own
        answer = self._client.post(path, **request)
        if answer.is_error:
            msg = f"{answer.json().get('error', answer.text[:200])} (HTTP {answer.status_code})"
            raise ApplianceError(msg)

    def _ask(self, allowed_s: float | None = None) -> tuple[str, _Answer]:
        """The status and what was answered."""
        question: dict[str, Any] = dict(self._questions[0])
        try:
            if "content" in question:
                query = {} if allowed_s is None else {"deadline_ms": 1e3 * allowed_s}
                answer = self._client.post(f"/v1/models/{self.model}/predict", params=query, **question)
                document = answer.json()
                found = _Answer([text for text, _ in said(document)], document.get("degraded"))
            else:
                limit = {} if allowed_s is None else {"parameters": {"timeout": int(1e6 * allowed_s)}}
                answer = self._client.post(f"/v2/models/{self.model}/infer", json={**question["json"], **limit})
                values = [value for output in answer.json().get("outputs", []) for value in output["data"]]
                found = _Answer(values, answer.headers.get("appliance-degraded"))
        except (httpx.HTTPError, ValueError) as error:
            return type(error).__name__, _Answer([])
        return str(answer.status_code), found

    def _is_right(self, answer: _Answer) -> bool:
        have, want = answer.values, self._right.values
        if answer.degraded and all(isinstance(value, str) for value in want):
            return difflib.SequenceMatcher(None, "".join(have), "".join(want)).ratio() >= _ALIKE
        return len(have) == len(want) and all(
            math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            if isinstance(other, float)
            else one == other
            for one, other in zip(have, want, strict=True)
        )

    def _guesses(self) -> Iterator[list[dict[str, Any]]]:
        """Inputs that the model may take, as JSON has them: ones, in a few sizes."""
        inputs = self._client.get(f"/v2/models/{self.model}").json()["inputs"]
        for arrays in guesses(inputs, _TRIED_SIZES):
            yield [
                {
                    "name": one["name"],
                    "datatype": one["datatype"],
                    "shape": (array := arrays[one["name"]]).shape,
                    "data": ["1"] * array.size if one["datatype"] == "BYTES" else array.reshape(-1).tolist(),
                }
                for one in inputs
            ]

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._client.get("/v1/status").raise_for_status().json()
        return status

    def _worker(self) -> dict[str, Any]:
        status = self._status()
        bundles = {worker["bundle"]: worker for worker in status["workers"]}
        # A graph of a bundle is `bundle.graph`, and runs in the worker of its bundle.
        name = self.model if self.model in bundles else self.model.rpartition(".")[0]
        worker = bundles[name]
        return {**worker, "faults": {**worker["faults"], _OVER_LEASE: status["memory"]["recycles"]}}

    def _broker_is_back(self) -> bool:
        return not self._has_broker or bool(self._status()["mqtt"]["connected"])


def _judged(act: Act, bad: Sequence[str], back_s: float | None, faults: Sequence[str], rungs: Sequence[str]) -> Result:
    """The result of an act from what callers saw and what the daemon says that it found and did."""
    answers = ", ".join(bad) or "all right"
    detected = " -> ".join([", ".join(faults), *rungs]) if faults else "-"
    if back_s is None:
        return Result(act.fault, act.means, detected, answers, None, "failed", "no right answer came any more")
    back_s = round(back_s, 3)
    if _WRONG in answers:
        return Result(act.fault, act.means, detected, answers, back_s, "failed", "callers got a wrong answer")
    if act.cause and act.cause not in faults:
        return Result(act.fault, act.means, detected, answers, None, "not caught", f"expected was {act.cause}")
    if act.fault == "slow":
        detected = "the caller's deadline"
    elif act.fault == "broker-loss":
        detected = "the MQTT connection"
    verdict = "recovered" if bad or act.cause or act.fault == "broker-loss" else "not felt"
    return Result(act.fault, act.means, detected, answers, back_s, verdict)


def _new(before: Mapping[str, Any], after: Mapping[str, Any], counts: str) -> list[str]:
    return [name for name, count in after[counts].items() if count > before[counts].get(name, 0)]
