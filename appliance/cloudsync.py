"""Reports to upstream, and follows it: one round trip carries items out, and wishes, orders and opinions back.

What there is to tell waits in `sync.db` until the server has committed it: at least once on the wire, and once in the
server's database, where (device, incarnation, number) makes it one. A batch of which nobody knows whether it arrived is
sent again as it was, if the day has the bytes; all others are made anew of what waits by then. Waiting goes by
monotonic time: whatever the wall clock does, the server is neither flooded nor forgotten. Only the hours of the window
are wall time, by their nature.

The loop runs on the event loop and decides; making a batch into bytes, and the exchange, happen in a thread.

Past 400 lines because what an exchange carries, and what becomes of each part of it, are read together.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import structlog

from appliance.adapters.telemetry import Alarms, Telemetry, ended_deployments, lasting_state
from appliance.core import clock
from appliance.core.command import CommandResult
from appliance.core.outbox import SPARE, Kind, Reconnect
from appliance.core.sync import Allowance, Fit
from appliance.outside import outside
from appliance.service import Service
from models import schema, sync
from models.sync import Acks, Answer, Batch, Desired, Opinion, Ordered, Refusal, Sample

if TYPE_CHECKING:
    from appliance.adapters.exchange import Reply
    from appliance.adapters.spool import Spool
    from appliance.settings import Upstream

log = structlog.get_logger()

_KINDS = dict(zip(sync.KINDS, Kind, strict=True))
"""Both are in the order of their priority."""
_LOOK_S = 0.5
"""From a change to the look at it: changes come in swarms."""
_EAGER_S = 1.0
"""Between two exchanges while somebody waits for an opinion."""
_LONGEST_S = 3600.0
_LEAST_BYTES = 4096
"""An exchange is begun only when the day has so many left."""
_KEPT_FOR_URGENT = 4
"""The last quarter of a day's bytes is not for telemetry and samples."""
_NOTED_PARTS = 16
"""What was spent of a day is written down that often: a start costs no more than such a part."""
_OK, _BAD_REQUEST, _CONFLICT, _TOO_LARGE = 200, 400, 409, 413
_INCARNATION, _DESIRED, _REPORTED, _SPENT = "incarnation", "desired", "reported", "spent"


class Follower(Protocol):
    """Who moves models to the versions that upstream wishes for."""

    def desire(self, pins: Mapping[str, str], *, paused: bool) -> None:
        """Follow these pins from now on, where the device's own settings have none."""

    def overruled(self) -> Sequence[str]:
        """Models that the device's own settings pin to another version than is wished for."""


@dataclass(slots=True)
class _Sent:
    """A batch on its way."""

    document: dict[str, Any]
    numbers: list[int]
    state: bytes | None
    acks: Acks
    content: bytes = b""
    """Its JSON, once it was made."""


@dataclass(slots=True)
class _Figures:
    """Since the start."""

    exchanges: int = 0
    failures: int = 0
    moved_bytes: int = 0
    at: float | None = None
    """Monotonic seconds of the last exchange that came off."""
    reason: str = "nothing was exchanged yet"
    """Why the last did not come off; empty where it did."""
    held: str = ""
    """Why telemetry and samples wait; empty where they need not."""
    too_large: int = 0
    """Items that no row of the server would have held, though they were shortened."""


@dataclass(slots=True)
class _Given:
    """Orders or opinions of upstream, by their ids, until it knows that they need not come again."""

    taken: set[str] = field(default_factory=set)
    safe: set[str] = field(default_factory=set)
    """What came of them will not be lost: they may be acknowledged."""

    def take(self, name: str) -> bool:
        """Whether it is a new one."""
        new = name not in self.taken
        self.taken.add(name)
        return new

    def acknowledged(self, names: Collection[str]) -> None:
        """The server knows."""
        self.taken.difference_update(names)
        self.safe.difference_update(names)


class CloudSync:
    """The loop of one device."""

    def __init__(
        self,
        service: Service,
        config: Upstream,
        spool: Spool,
        exchange: Callable[[bytes], Reply],
        follower: Follower,
        *,
        wall: Callable[[], float],
        synced: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Speak for `service` by `exchange`, which blocks; `wall` tells Unix seconds, `synced` whether they are right.

        What upstream wished for last holds from now on, before it is heard again.
        """
        self._service, self._config, self._spool, self._exchange = service, config, spool, exchange
        self._follower, self._wall, self._synced, self._monotonic = follower, wall, synced, monotonic
        self._incarnation = spool.note(_INCARNATION) or uuid.uuid4().hex
        spool.take_note(_INCARNATION, self._incarnation)
        if not spool.write():  # the same numbers would come again after the next start, for other items
            self._incarnation = uuid.uuid4().hex
        self._answered = 0
        self._desired = schema.load(Desired, orjson.loads(spool.note(_DESIRED) or b'{"etag": ""}'))
        follower.desire(self._desired.pins, paused=self._desired.paused)
        now = monotonic()
        self._allowance = Allowance(config.day_bytes, now, int(spool.note(_SPENT) or 0))
        self._noted_bytes = self._allowance.spent_bytes(now)
        self._fit, self._tries, self._figures = Fit(), Reconnect(), _Figures()
        self._telemetry, self._alarms = Telemetry(service), Alarms()
        self._telemetry_at = now + config.telemetry_s
        self._due_at = self._not_before = now
        self._urgent = False
        self._unsure: _Sent | None = None
        """Nobody knows whether it arrived."""
        self._told: bytes | None = None
        """The state that the server has."""
        self._orders, self._opinions = _Given(), _Given()
        self.on_opinion: Callable[[Opinion, Callable[[], None]], None] = lambda _opinion, safe: safe()
        """Told of each opinion; calls the second, in any thread, when that need not come again."""
        self.waiting = 0
        """How many requests wait for an opinion."""
        self._wanted = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; called on the event loop."""
        self._service.listeners.append(self._change)
        self._keep(self._run())

    async def stop(self) -> None:
        """Leave off: what waits is on the disk."""
        self._service.listeners.remove(self._change)
        for task in self._tasks:
            task.cancel()
        if self._looking:
            self._looking.cancel()

    def status(self) -> dict[str, Any]:
        """For operators: whether it works, what waits, and why."""
        now, figures = self._monotonic(), self._figures
        return {
            "url": self._config.url,
            "works": not figures.reason,
            "reason": figures.reason or None,
            "held": figures.held or None,
            "too_large": figures.too_large,
            "last_s_ago": None if figures.at is None else round(now - figures.at, 1),
            "next_in_s": round(max(0.0, max(self._not_before, self._due_at) - now), 1),
            "exchanges": figures.exchanges,
            "failures": figures.failures,
            "moved_bytes": figures.moved_bytes,
            "day_bytes": self._allowance.day_bytes or None,
            "day_spent_bytes": self._allowance.spent_bytes(now),
            "incarnation": self._incarnation,
            "desired": {**schema.dump(self._desired), "overruled": list(self._follower.overruled())},
            "spool": self._spool.status(),
        }

    # What there is to tell

    def put(self, kind: str, payload: Mapping[str, Any], *, safe: Callable[[], None] = lambda: None) -> None:
        """Let an item wait for upstream; `safe` is called, in any thread, when it will not be lost.

        What a row of the server has no room for is shortened, or else given up.
        """
        short = payload if kind == "sample" else sync.shortened(payload)
        if short is None or "shortened" in short:
            log.warning("sync_item_too_large", kind=kind, left_out=short and short["shortened"])
        if short is None:
            self._figures.too_large += 1
            safe()
            return
        payload = short
        self._spool.put(_KINDS[kind], kind, orjson.dumps(payload), at=self._wall(), when_safe=safe)
        if _KINDS[kind] not in SPARE or (self.waiting and kind == "sample"):
            self._urgent = True
            self._wanted.set()

    def ask(self, sample: Sample) -> None:
        """Let a sample wait for upstream."""
        self.put("sample", schema.dump(sample))

    def why_held(self) -> str:
        """Why telemetry and samples have to wait now; empty where they need not."""
        window, now = self._config.window, self._monotonic()
        if window and not self._synced():
            return f"the clock is not synchronised, so nobody knows whether the window {window} is open"
        shut_s = clock.until_window(window, self._wall())
        if shut_s:
            return f"the window {window} opens in {shut_s / 3600:.1f} h"
        if self._allowance.left_bytes(now) < self._allowance.day_bytes / _KEPT_FOR_URGENT:
            return "the last bytes of this day are kept for what is urgent"
        return ""

    def _change(self) -> None:
        """Something that `status` says has changed."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self.look)

    def look(self) -> None:
        """Tell of deployments that have ended, and of alarms."""
        self._looking = None
        reports, reported = ended_deployments(self._service, self._spool.note(_REPORTED))
        for report in reports:
            self.put("deployment", report)
        if reports:
            self._spool.take_note(_REPORTED, reported)
        for alarm in self._alarms.see(self._service.status(), self._monotonic()):
            self.put("alarm", alarm)

    # The loop

    async def _run(self) -> None:
        self._change()
        while True:
            try:
                wait_s = await self.turn()
            except Exception:  # whatever it is, the device must stay reachable
                log.exception("sync_fault")
                self._failed("a fault of the sync itself: see the log", self._monotonic())
                wait_s = _EAGER_S
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), max(wait_s, 0.01))
            self._wanted.clear()

    async def turn(self) -> float:
        """Do what is due; seconds until there is something again, unless something urgent comes."""
        now, self._loop = self._monotonic(), asyncio.get_running_loop()
        self._spool.age(self._wall())
        if self._config.telemetry_s and now >= self._telemetry_at:
            self._telemetry_at = now + self._config.telemetry_s
            self.put("telemetry", self._telemetry.document(self._wall(), self._spool.start_number))
        held, self._figures.held = self._figures.held, self.why_held()
        if held and not self._figures.held:
            self._due_at = now
        sent = self._due(now)
        if sent is None:
            due_at = max(self._not_before, now if self._urgent else self._due_at)
            moments = [due_at, *([self._telemetry_at] if self._config.telemetry_s else [])]
            return min(_LONGEST_S, *(moment - now for moment in moments))
        reply = await outside(self._send, sent)
        self._judge(sent, reply, self._monotonic())
        return 0.0

    def _due(self, now: float) -> _Sent | None:
        """The batch to send now, if one is."""
        if now < self._not_before or (now < self._due_at and not self._urgent):
            return None
        day_bytes = self._allowance.day_bytes
        least_bytes = min(_LEAST_BYTES, day_bytes // _KEPT_FOR_URGENT)
        if self._unsure and self._allowance.wait_s(now, len(self._unsure.content)):
            self._spool.disconnected()  # by their numbers its items count once in any batch
            self._unsure = None
        short_s = self._allowance.wait_s(now, least_bytes)
        if short_s:
            self._not_before = now + min(short_s, _LONGEST_S)
            self._figures.reason = f"the {day_bytes} bytes of this day are spent (upstream.day_bytes)"
            return None
        self._urgent = False
        return self._unsure or self._batch(now)

    def _batch(self, now: float) -> _Sent:
        most_bytes = min(self._fit.most_bytes, self._allowance.left_bytes(now))
        acks = Acks(tuple(sorted(self._orders.safe)), tuple(sorted(self._opinions.safe)))
        status = self._service.status()
        profile = status.get("profile", {}).get("name", "")
        told = sync.shortened({**lasting_state(status), "profile": profile, "labels": dict(self._config.labels)})
        state = orjson.dumps(told) if told else self._told
        batch = Batch(
            batch_id=uuid.uuid4().hex,
            device_id=self._service.device_id,
            incarnation=self._incarnation,
            sent_at=round(self._wall(), 3),
            clock_synced=self._synced(),
            etag=self._desired.etag,
            acks=acks,
            exchange=self._answered,
        )
        document = schema.dump(batch)
        if state and state != self._told:
            document["state"] = orjson.Fragment(state)
        room_bytes = most_bytes - len(orjson.dumps(document))
        kinds = [kind for kind in Kind if kind not in SPARE or not self._figures.held]
        taken = self._spool.take(now, self._fit.most_items, kinds, room_bytes)
        document["items"] = [
            {"number": one.number, "kind": one.topic, "at": one.at, "payload": orjson.Fragment(one.payload)}
            for one in taken
        ]
        return _Sent(document, [one.number for one in taken], state if "state" in document else None, acks)

    def _send(self, sent: _Sent) -> Reply:
        """In a thread."""
        sent.content = sent.content or orjson.dumps(sent.document)
        return self._exchange(sent.content)

    def _judge(self, sent: _Sent, reply: Reply, now: float) -> None:
        self._figures.moved_bytes += reply.moved_bytes
        self._spend(reply.moved_bytes, now)
        self._unsure = None
        try:
            answer = sync.answer(orjson.loads(reply.content)) if reply.status == _OK else None
        except ValueError as error:
            self._unsure = sent
            self._failed(f"the answer cannot be read ({error}): is {self._config.url} an upstream?", now)
            return
        if answer:
            self._taken(sent, answer, now)
            return
        if reply.unsure:
            self._unsure = sent
        else:
            self._spool.disconnected()
        refusal = _refusal(reply)
        if reply.status == _BAD_REQUEST:
            self._fit.not_understood(sent.numbers)
        elif reply.status == _TOO_LARGE:
            self._fit.too_large(refusal.most_bytes)
        narrows = reply.status in {_BAD_REQUEST, _TOO_LARGE} and bool(sent.numbers)
        self._failed(refusal.error, now, reply.retry_after_s, narrows=narrows)

    def _failed(self, reason: str, now: float, wait_s: float | None = None, *, narrows: bool = False) -> None:
        """Say why, and try again later; a fleet that lost its server must not return all at once.

        It `narrows` when the next batch is a smaller one, for which nobody needs to wait.
        """
        if not self._figures.failures or self._figures.reason != reason:
            log.warning("sync_failed", url=self._config.url, reason=reason)
        self._figures.failures, self._figures.reason = self._figures.failures + 1, reason
        longest_s, chance = self._config.longest_retry_s, random.random()  # noqa: S311 - not for secrets
        self._tries = self._tries if narrows else self._tries.after(0.0, longest_s)
        own_s = _EAGER_S if narrows else self._tries.wait_s(chance, longest_s)
        asked_s = 0.0 if wait_s is None else min(wait_s, _LONGEST_S) * (1 + chance / 4)
        self._not_before = now + max(asked_s, own_s)

    def _taken(self, sent: _Sent, answer: Answer, now: float) -> None:
        """The server has committed what it names."""
        for number in sent.numbers:
            if sync.within(answer.received, number):
                self._spool.settled(number)
        self._spool.disconnected()  # the others wait again
        narrowing = self._fit.suspect is not None
        guilty = self._fit.passed(answer.most_bytes)
        if guilty is not None:
            log.warning("sync_item_refused", number=guilty, reason="the server does not understand it")
            self._spool.settled(guilty, refused=True)
        if self._figures.reason:
            log.info("sync_works", url=self._config.url)
        self._figures.exchanges, self._figures.reason, self._figures.at = self._figures.exchanges + 1, "", now
        self._tries, self._answered = Reconnect(), answer.exchange
        self._told = None if answer.send_state else (sent.state or self._told)
        self._orders.acknowledged(sent.acks.commands)
        self._opinions.acknowledged(sent.acks.opinions)
        self._hear(answer)
        more = (narrowing or bool(sent.numbers)) and self._sendable()
        self._set_pace(answer, now, more=more or answer.send_state)

    def _hear(self, answer: Answer) -> None:
        """Take what the server says besides."""
        if answer.desired:
            self._follow(answer.desired)
        for ordered in answer.commands:
            if self._orders.take(ordered.id):
                self._keep(self._obey(ordered))
        for opinion in answer.opinions:
            if self._opinions.take(opinion.sample_id):
                self.on_opinion(opinion, partial(self._later, self._opinions.safe.add, opinion.sample_id))

    def _set_pace(self, answer: Answer, now: float, *, more: bool) -> None:
        """When the next exchange is due: as the server says, and no sooner than needed."""
        asked_s = min(answer.wait_s, _LONGEST_S)
        self._not_before = now + asked_s * sync.URGENT_SHARE
        if self.waiting:
            self._due_at = now + _EAGER_S
        elif more:
            self._due_at = now + asked_s
        else:
            jitter = random.uniform(0.9, 1.1)  # noqa: S311 - not for secrets; a fleet must not come all at once
            self._due_at = now + max(asked_s, self._config.interval_s * jitter)

    def _sendable(self) -> bool:
        """Whether something waits that need not be held back."""
        waiting = self._spool.status()["waiting"]
        return any(waiting[kind.value] for kind in Kind if kind not in SPARE or not self._figures.held)

    def _follow(self, desired: Desired) -> None:
        log.info("desired_state", etag=desired.etag, pins=dict(desired.pins), paused=desired.paused)
        self._desired = desired
        self._spool.take_note(_DESIRED, orjson.dumps(schema.dump(desired)).decode())
        self._follower.desire(desired.pins, paused=desired.paused)

    async def _obey(self, ordered: Ordered) -> None:
        """Carry out an order; what comes of it is told before the order is acknowledged."""
        try:
            result = await self._service.order(orjson.dumps(ordered.envelope), now=self._wall())
        except Exception as error:  # not acknowledged, it would come again for ever
            log.exception("order_fault")
            result = CommandResult("", "failed", f"a fault of the appliance itself ({error}): see its log")
        log.info("order", id=ordered.id, status=result.status, reason=result.reason or None)
        safe = partial(self._later, self._orders.safe.add, ordered.id)
        self.put("command_result", {**schema.dump(result), "id": ordered.id}, safe=safe)

    def _later(self, call: Callable[[str], None], what: str) -> None:
        """On the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # it has ended: at the next start the server says it again
            self._loop.call_soon_threadsafe(call, what)

    def _spend(self, size_bytes: int, now: float) -> None:
        self._allowance.spend(now, size_bytes)
        spent_bytes, day_bytes = self._allowance.spent_bytes(now), self._allowance.day_bytes
        if abs(spent_bytes - self._noted_bytes) > day_bytes / _NOTED_PARTS and day_bytes:
            self._noted_bytes = spent_bytes
            self._spool.take_note(_SPENT, str(spent_bytes))

    def _keep(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refusal(reply: Reply) -> Refusal:
    """Why a batch was not taken, in a sentence."""
    if not reply.status:
        return Refusal(f"upstream does not answer ({reply.reason}): it is tried again")
    try:
        said = schema.load(Refusal, orjson.loads(reply.content))
    except ValueError:
        said = Refusal("")
    why = {
        401: "upstream does not know this device: give it a token (upstream.token_file) or a certificate",
        403: "upstream does not let this device in: look at its token or certificate",
        _CONFLICT: "this device id is known with another key: remove the old device upstream, or give this one a name",
    }.get(reply.status, "upstream did not take a batch")
    return Refusal(f"{why} (HTTP {reply.status}{': ' if said.error else ''}{said.error[:200]})", said.most_bytes)
