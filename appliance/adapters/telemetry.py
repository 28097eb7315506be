"""What a device tells of itself from time to time, and of single answers where an operator wants them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import orjson

from appliance.core.gates import Tally, p95
from appliance.core.history import LastFaults
from appliance.service import Outcome, Service
from models.errors import NotFound

_STATE = ("device_id", "appliance", "ready", "models", "clock", "update")
_PASSING = {
    "models": ("waiting", "running", "service_ms", "swaps"),
    "clock": ("now",),
    "update": ("looked_s_ago", "looking", "share", "fetched_bytes"),
}
"""Part of the state -> what in it is another at each look."""


def reported_state(status: Mapping[str, Any]) -> dict[str, Any]:
    """What the fleet is told of a status."""
    state = {key: status[key] for key in _STATE}
    return {**state, "memory_step": status["memory"]["step"], "throttled": status["device"]["throttled"]["reasons"]}


def lasting_state(status: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what changes all the time, for whoever is told of changes only."""
    state = reported_state(status)
    for part, passing in _PASSING.items():
        whole = state[part]
        found = [_without(one, passing) for one in whole] if isinstance(whole, list) else whole
        state[part] = _without(found, passing) if isinstance(found, Mapping) else found
    return state


def _without(part: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in keys}


class Alarms:
    """What an operator should be told of at once: faults of workers, and what begins and ends to be wrong."""

    def __init__(self) -> None:
        """Nothing is wrong yet."""
        self._faults = LastFaults()
        self._wrong: dict[tuple[str, str], str] = {}
        """(What, model or nothing) -> why."""

    def see(self, status: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
        """Look at a status at the monotonic time `now`; what is new in it."""
        fresh: list[dict[str, Any]] = [
            {
                "alarm": "worker_fault",
                "model": fault.model,
                "version": fault.version,
                "cause": fault.cause,
                "rung": fault.rung,
                "text": fault.reason or fault.cause,
            }
            for fault in self._faults.see(status["workers"], now)
        ]
        wrong = {("degraded", model["name"]): model["degraded"] for model in status["models"] if model["degraded"]}
        for what, why in (
            ("reboot_wanted", status["reboot_wanted"]),
            ("throttled", ", ".join(status["device"]["throttled"]["reasons"])),
            ("memory", status["memory"]["step"].replace("normal", "")),
        ):
            if why:
                wrong[what, ""] = why
        began = {key: why for key, why in wrong.items() if key not in self._wrong}
        ended = {key: why for key, why in self._wrong.items() if key not in wrong}
        self._wrong = wrong
        for changed, over in ((began, False), (ended, True)):
            fresh += [
                {"alarm": what, "model": model or None, "over": over, "text": why}
                for (what, model), why in changed.items()
            ]
        return fresh


class Telemetry:
    """Counts requests between two documents."""

    def __init__(self, service: Service) -> None:
        """Count the requests of `service` from now on."""
        self._service = service
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)
        service.observers.append(self._observe)

    def document(self, at: float, session: int) -> dict[str, Any]:
        """Figures of now, and of the requests since the last document; `at` is in Unix seconds."""
        status, tallies = self._service.status(), self._tallies
        self._tallies = defaultdict(Tally)
        return {
            "at": round(at, 3),
            "session": session,
            "uptime_s": status["uptime_s"],
            "ready": status["ready"],
            "models": [
                {
                    "name": model["name"],
                    "version": model["version"],
                    "ready": model["ready"],
                    "degraded": model["degraded"],
                    "waiting": model["waiting"],
                    "requests": tallies[model["name"]].requests,
                    "errors": tallies[model["name"]].errors,
                    "p95_ms": round(p95(ms), 3) if (ms := list(tallies[model["name"]].ms)) else None,
                }
                for model in status["models"]
            ],
            "restarts": sum(worker["restarts"] for worker in status["workers"]),
            "memory_bytes": status.get("memory_bytes", {}),
            "event_loop": status.get("event_loop"),
        }

    def _observe(self, outcome: Outcome) -> None:
        name = outcome.model
        with contextlib.suppress(NotFound):  # it is no bundle and no graph of one
            name = self._service.serving(name).name
        self._tallies[name].count(outcome.seconds, outcome.error)


def ended_deployments(service: Service, reported: str) -> tuple[list[dict[str, Any]], str]:
    """Deployments that have come to another end than `reported` says, the oldest first; and what to say from then on.

    A deployment may end twice: one that was good may be undone much later.
    """
    latest = reversed(service.deployments())
    ended = {f"{one['id']} {one['started_at']}": one for one in latest if one["ended"]}
    known = orjson.loads(reported) if reported else {}
    steps = {number: one["step"] for number, one in ended.items()}
    return [one for number, one in ended.items() if known.get(number) != one["step"]], orjson.dumps(steps).decode()
