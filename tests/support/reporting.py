"""Devices as their upstream sees them: each tells a thing until it is received, and does an order once."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from models import sync
from models.orders import PAYLOAD_TYPE
from models.sync import Acks, Answer, Batch, Item, Ordered


class Reporter:
    """The client's side of the exchange, in memory."""

    def __init__(self, device_id: str, send: Callable[[Batch], Answer], incarnation: str = "life-1") -> None:
        """Report by `send`, which raises OSError where an answer is lost."""
        self.device_id, self.send, self.incarnation = device_id, send, incarnation
        self.state: dict[str, Any] = running("1")
        self.pins: Mapping[str, str] = {}
        self.effects: Counter[str] = Counter()
        """How often each order had an effect."""
        self.waiting: dict[int, Item] = {}
        self._number = self._batches = self._exchange = 0
        self._etag, self._known_state = "", None
        self._acks = Acks()

    def tell(self, kind: str, **payload: object) -> None:
        """Have something to tell."""
        self._number += 1
        self.waiting[self._number] = Item(self._number, kind, 1.0, payload)

    def batch(self) -> Batch:
        """What it would send now."""
        self._batches += 1
        return Batch(
            batch_id=f"{self.incarnation}-{self._batches}",
            device_id=self.device_id,
            incarnation=self.incarnation,
            sent_at=1.0,
            etag=self._etag,
            state=None if self.state == self._known_state else self.state,
            items=tuple(self.waiting.values()),
            acks=self._acks,
            exchange=self._exchange,
        )

    def report(self) -> Answer:
        """One exchange."""
        batch, state = self.batch(), self.state
        answer = self.send(batch)
        self._known_state = None if answer.send_state else state
        self._exchange = answer.exchange
        for number in list(self.waiting):
            if sync.within(answer.received, number):
                del self.waiting[number]
        if answer.desired:
            self._etag, self.pins = answer.desired.etag, answer.desired.pins
        self._acks = Acks(
            tuple(ordered.id for ordered in answer.commands), tuple(opinion.sample_id for opinion in answer.opinions)
        )
        for ordered in answer.commands:
            self._do(ordered)
        return answer

    def obey(self, *, good: bool = True, reason: str = "it reads worse", **figures: float) -> None:
        """Move to the version that it is pinned to, or try it and go back; and have that to tell."""
        version = self.pins.get("m")
        if version is None or self.state == running(version):
            return
        if good:
            self.state = running(version)
        self.tell("deployment", **deployment(version, good=good, reason=reason, figures=figures))

    def _do(self, ordered: Ordered) -> None:
        if not self.effects[ordered.id]:
            self.effects[ordered.id] += 1
            self.tell("command_result", id=ordered.id, status="done", reason="", result={})


def running(version: str) -> dict[str, Any]:
    """The state of a device that serves a version of the one model `m`."""
    return {"ready": True, "models": [{"name": "m", "version": version, "digest": f"d{version}"}], "update": None}


def deployment(
    version: str, *, good: bool, reason: str = "", figures: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The report of a deployment that has ended."""
    return {
        "id": 1,
        "name": "m",
        "version": version,
        "step": "good" if good else "undone",
        "committed": good,
        "ended": True,
        "reason": None if good else reason,
        "failed_step": None if good else "trial",
        "verdicts": [{"step": "trial", "event": "passed", "at": 1.0, "reason": None, "figures": dict(figures or {})}],
    }


def order(device_id: str, order_id: str, expires_at: float = 4e9) -> dict[str, Any]:
    """An order in an envelope, as far as a server that does not verify it can tell."""
    content = {"id": order_id, "device_id": device_id, "command": "snapshot", "expires_at": expires_at, "sequence": 1}
    payload = base64.b64encode(json.dumps(content).encode()).decode()
    return {"payloadType": PAYLOAD_TYPE, "payload": payload, "signatures": [{"keyid": "k", "sig": "s"}]}
