"""What a device tells of itself from time to time, and of single answers where an operator wants them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

import orjson

from appliance.core.gates import Tally, p95
from appliance.service import Outcome, Service
from models.errors import NotFound


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
