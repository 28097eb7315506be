"""What devices tell, taken in exactly once, and what they are told in return. By `/v1/sync`, and from MQTT.

A transaction a batch: all of it counts or nothing does, and only what counts is acknowledged. The numbers that were
taken are remembered as ranges for each life of a device, so an item that comes again is known for one also when its
row is long deleted. The row of that life is locked meanwhile, so the same batch at two replicas is taken once.

Past 400 lines because both ways in keep the same things in the same tables, and are read together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import orjson
import structlog
from sqlalchemy import BindParameter, Connection, Row, bindparam, delete, literal, select, union_all, update
from sqlalchemy.exc import DataError

from appliance.core import campaign as rules
from appliance.upstream import tables as t
from appliance.upstream.database import Database
from models import schema, sync
from models.errors import BadInput, Forbidden
from models.schema import SchemaError
from models.sync import Answer, Batch, Desired, Item, Opinion, Ordered, Sample

log = structlog.get_logger()

MQTT = "mqtt"
"""In the place of an incarnation, for what came by MQTT; numbers are digests there, as a report has none."""
_MOST_COMMANDS, _MOST_OPINIONS = 32, 64
"""In one answer."""
_MOST_RANGES = 10_000
"""Of one life. Beyond, the oldest gap counts as taken: what was in it has been given up by the device."""
_LONGEST_LABEL, _MOST_LABELS = 128, 64

# Statements of each exchange, put together once: to do so takes longer than to run them.
_OURS: BindParameter[str] = bindparam("ours")
_LIFE: BindParameter[str] = bindparam("life")
_NOW: BindParameter[float] = bindparam("now")
_DEVICE = select(t.devices).where(t.devices.c.device_id == _OURS)
_STREAM = select(t.streams).where(t.streams.c.device_id == _OURS, t.streams.c.incarnation == _LIFE).with_for_update()
_SEEN = update(t.devices).where(t.devices.c.device_id == _OURS).values(last_seen=_NOW)
_ANSWERED = (
    update(t.streams)
    .where(t.streams.c.device_id == _OURS, t.streams.c.incarnation == _LIFE)
    .values({name: bindparam(f"new_{name}") for name in ("heard_at", "exchange", "batch_id", "sent_at", "received")})
)
_ASKED = (
    select(t.members, t.campaigns.c.model, t.campaigns.c.version)
    .join(t.campaigns, t.campaigns.c.id == t.members.c.campaign)
    .where(
        t.members.c.device_id == _OURS,
        t.members.c.asked_at.is_not(None),
        t.campaigns.c.state.in_((rules.RUNNING, rules.PAUSED)),
    )
)
_WISHES = union_all(
    select(literal("pin").label("what"), t.pins.c.model.label("key"), t.pins.c.version.label("value")).where(
        t.pins.c.device_id == _OURS
    ),
    select(literal("label"), t.labels.c.key, t.labels.c.value).where(t.labels.c.device_id == _OURS, t.labels.c.own),
    select(literal("group"), t.groups.c.name, literal("")).where(t.groups.c.device_id == _OURS),
)
_ORDERS = (
    select(t.deliveries.c.order_id, t.deliveries.c.envelope)
    .where(
        t.deliveries.c.device_id == _OURS,
        t.deliveries.c.acknowledged_at.is_(None),
        t.deliveries.c.result.is_(None),
        t.deliveries.c.expires_at > _NOW,
    )
    .order_by(t.deliveries.c.command)
    .limit(_MOST_COMMANDS)
)
_OPINIONS = (
    select(t.samples.c.opinion)
    .where(
        t.samples.c.device_id == _OURS,
        t.samples.c.acknowledged_at.is_(None),
        t.samples.c.answered_at.is_not(None),
    )
    .limit(_MOST_OPINIONS)
)


class Ingest:
    """Takes in what devices report."""

    def __init__(self, database: Database, now: Callable[[], float], pace: Callable[[], float]) -> None:
        """Write to `database`; `pace` says how many seconds a device is to wait before its next batch."""
        self._database, self._now, self._pace = database, now, pace

    # By /v1/sync

    def exchange(self, device_id: str, batch: Batch, most_bytes: int) -> Answer:
        """Take in a batch of the device that has shown to be `device_id`; what it is told, after the commit.

        Raises Forbidden for another's batch and for a device that was retired, and Unavailable.
        """
        if batch.device_id != device_id:
            msg = f"the batch is that of {batch.device_id[:100]!r} and who sends it is {device_id!r}: set device_id"
            raise Forbidden(msg)
        with self._database.writing() as tx:
            now = self._now()
            device, stream = self._life(tx, batch, now)
            restored = batch.exchange > stream.exchange
            present = batch.incarnation == device.incarnation
            late = _late(batch, stream) or not present
            if restored:
                _note(tx, now, "restored", device_id, {"exchange": batch.exchange, "known": stream.exchange})
            tx.execute(_SEEN, {"ours": device_id, "now": max(now, device.last_seen)})
            if batch.state is not None and not late:
                self._state(tx, device_id, batch.state)
            fresh = self._items(tx, batch, stream.received, now)
            self._acknowledged(tx, device_id, batch.acks, now)
            self._judge(tx, device_id, [item for item in fresh if item.kind == "deployment"], now)
            again = batch.batch_id == stream.batch_id
            exchange = max(stream.exchange, batch.exchange) + (not again)
            told = {
                "new_heard_at": now,
                "new_exchange": exchange,
                "new_batch_id": batch.batch_id,
                "new_sent_at": max(stream.sent_at, batch.sent_at),
                "new_received": _merged(stream.received, [item.number for item in fresh]),
            }
            tx.execute(_ANSWERED, {"ours": device_id, "life": batch.incarnation, **told})
            answer = Answer(
                received=sync.ranges(item.number for item in batch.items),
                wait_s=self._pace(),
                most_bytes=most_bytes,
                exchange=exchange,
            )
            if not present:  # another board has the name by now: what is for that one must not be done twice
                return replace(answer, exchange=batch.exchange)  # one that has just started may yet come back
            desired = _desired(tx, device)
            return replace(
                answer,
                # A copy of long ago knows less than the device does: first it is heard.
                desired=None if desired.etag == batch.etag or restored else desired,
                commands=_open_orders(tx, device_id, now),
                opinions=_open_opinions(tx, device_id),
                send_state=(restored or late or device.state is None) and (batch.state is None or late),
            )

    def _life(self, tx: Connection, batch: Batch, now: float) -> tuple[Row[Any], Row[Any]]:
        """The rows of a device and of its present life, which is locked; both are made where they are not there."""
        device_id, incarnation = batch.device_id, batch.incarnation
        device = self._registered(tx, device_id, now)
        ours = {"ours": device_id, "life": incarnation}
        stream = tx.execute(_STREAM, ours).one_or_none()
        if stream is not None and not _comes_back(tx, batch, device):
            return device, stream
        life = {"device_id": device_id, "incarnation": incarnation, "heard_at": now, "received": []}
        if stream is not None or self._database.add(tx, t.streams, life):
            tx.execute(
                update(t.devices).where(t.devices.c.device_id == device_id).values(incarnation=incarnation, state=None)
            )
            tx.execute(update(t.members).where(t.members.c.device_id == device_id).values(number=0))
            if device.incarnation:
                action = "flashed anew" if stream is None else "came back"
                _note(tx, now, action, device_id, {"before": device.incarnation, "now": incarnation})
        return self._registered(tx, device_id, now), tx.execute(_STREAM, ours).one()

    def _registered(self, tx: Connection, device_id: str, now: float) -> Row[Any]:
        """The row of a device, made where it is a new one; raises Forbidden for one that was retired."""
        known = tx.execute(_DEVICE, {"ours": device_id}).one_or_none()
        if known is None:
            row = {"device_id": device_id, "registered_at": now, "last_seen": now}
            if self._database.add(tx, t.devices, row):
                _note(tx, now, "registered", device_id, {})
            known = tx.execute(_DEVICE, {"ours": device_id}).one()
        if known.retired_at is not None:
            msg = f"the device {device_id!r} was retired: an operator may take that back"
            raise Forbidden(msg)
        return known

    def _items(self, tx: Connection, batch: Batch, taken: sync.Ranges, now: float) -> list[Item]:
        """Keep what is new; which items that is, in the order of their numbers."""
        fresh = {item.number: item for item in batch.items if not sync.within(taken, item.number)}
        found = [fresh[number] for number in sorted(fresh)]
        self._keep(tx, batch.device_id, batch.incarnation, found, now)
        return found

    def _keep(self, tx: Connection, device_id: str, incarnation: str, items: Sequence[Item], now: float) -> None:
        for item in items:
            if item.kind == "sample":
                self._sample(tx, device_id, item.payload, now)
            elif item.kind == "command_result":
                _result(tx, device_id, item.payload, now)
        rows = [
            {
                "device_id": device_id,
                "incarnation": incarnation,
                "number": item.number,
                "kind": item.kind,
                "at": item.at,
                "received_at": now,
                "payload": dict(item.payload),
            }
            for item in items
            if item.kind != "sample"
        ]
        if rows:
            tx.execute(self._database.insert(t.items).on_conflict_do_nothing(), rows)

    def _sample(self, tx: Connection, device_id: str, payload: Mapping[str, Any], now: float) -> None:
        try:
            sample = schema.load(Sample, payload)
        except SchemaError as error:
            msg = f"a sample cannot be used: {error}"
            raise BadInput(msg) from error
        row = {
            "sample_id": sample.sample_id,
            "device_id": device_id,
            "model": sample.model,
            "version": sample.version,
            "received_at": now,
            "keep_until": now + sample.keep_s,
            "sample": dict(payload),
        }
        self._database.add(tx, t.samples, row)

    def _state(self, tx: Connection, device_id: str, state: Mapping[str, Any], *, session: int = 0) -> None:
        models = rules.tables(state.get("models"))
        degraded = next((str(one["degraded"]) for one in models if one.get("degraded")), "")
        tx.execute(
            update(t.devices)
            .where(t.devices.c.device_id == device_id)
            .values(
                state=dict(state),
                versions={str(one.get("name")): {key: one.get(key) for key in ("version", "digest")} for one in models},
                health="ready" if state.get("ready") else "not ready",
                degraded=degraded,
                profile=str(state.get("profile") or "")[:64],
                session=session,
            )
        )
        if "labels" in state:
            self._reported_labels(tx, device_id, rules.table(state["labels"]))

    def _reported_labels(self, tx: Connection, device_id: str, reported: Mapping[str, Any]) -> None:
        """Keep the labels that a device gives itself; those that were set here win."""
        tx.execute(delete(t.labels).where(t.labels.c.device_id == device_id, ~t.labels.c.own))
        rows = [
            {"device_id": device_id, "key": key[:_LONGEST_LABEL], "value": str(value)[:_LONGEST_LABEL], "own": False}
            for key, value in islice(reported.items(), _MOST_LABELS)
        ]
        if rows:
            tx.execute(self._database.insert(t.labels).on_conflict_do_nothing(), rows)

    @staticmethod
    def _acknowledged(tx: Connection, device_id: str, acks: sync.Acks, now: float) -> None:
        for table, key, ids in (
            (t.deliveries, t.deliveries.c.order_id, acks.commands),
            (t.samples, t.samples.c.sample_id, acks.opinions),
        ):
            if ids:
                acknowledged = update(table).where(table.c.device_id == device_id, key.in_(ids))
                tx.execute(acknowledged.where(table.c.acknowledged_at.is_(None)).values(acknowledged_at=now))

    @staticmethod
    def _judge(tx: Connection, device_id: str, reports: Sequence[Item], now: float) -> None:
        """Note what became of the versions that campaigns have asked a device for."""
        asked = tx.execute(_ASKED, {"ours": device_id}).all()
        if not asked:
            return
        state = tx.execute(select(t.devices.c.state).where(t.devices.c.device_id == device_id)).scalar_one()
        for member in asked:
            found = _outcome(member, reports, state or {})
            if found:
                ours = (t.members.c.campaign == member.campaign, t.members.c.device_id == device_id)
                tx.execute(update(t.members).where(*ours).values(outcome_at=now, **found))

    # By MQTT

    def told(self, reports: Iterable[tuple[str, str, bytes, int, bool]]) -> None:
        """Take in messages: device, what follows it in the topic, payload, session, whether the broker had retained it.

        Raises Unavailable. Those of a device are taken in their order, and the devices in that of their names: two
        replicas that each hold a device's row must not wait for each other.
        What was retained is no news of a device. Of one that brings its reports by /v1/sync only state and
        availability are taken, so nothing counts twice.
        """
        with self._database.writing() as tx:
            for report in sorted(reports, key=lambda report: report[0]):
                self._told_or_lost(tx, *report)

    def _told_or_lost(self, tx: Connection, device_id: str, topic: str, *message: Any) -> None:  # noqa: ANN401 - `_told`'s
        """Take one in, or give it up if it cannot be kept: it would come again for ever, and hold up the others."""
        try:
            with tx.begin_nested():
                self._told(tx, device_id, topic, *message)
        except (DataError, BadInput, Forbidden, SchemaError, RecursionError) as error:
            log.warning("fleet_report_lost", device=device_id[:100], topic=topic[:100], reason=str(error)[:200])

    def _told(self, tx: Connection, device_id: str, topic: str, payload: bytes, session: int, retained: bool) -> None:
        now = self._now()
        device = self._registered(tx, device_id, now)
        ours = t.devices.c.device_id == device_id
        if topic == "availability":
            word = "online" if payload == b"online" else "offline"
            if word == "online" or session >= device.session:  # else a will that came late
                tx.execute(update(t.devices).where(ours).values(availability=word))
            return
        try:
            document = orjson.loads(payload)
        except ValueError:
            return
        if not isinstance(document, dict):
            return
        document = sync.row(topic, document)
        if not retained:
            tx.execute(update(t.devices).where(ours).values(last_seen=now))
        if topic == "state":
            older = retained and device.incarnation  # what /v1/sync has brought is as new, or newer
            if session >= device.session and not older:
                self._state(tx, device_id, document, session=session)
                self._judge(tx, device_id, [], now)
            return
        kind = {"telemetry": "telemetry", "deployments": "deployment", "cmd/result": "command_result"}.get(topic)
        if kind is None or device.incarnation:
            return
        digest = hashlib.sha256(f"{topic}\0".encode() + payload).digest()
        at = document.get("at", document.get("started_at"))
        made_at = float(at) if isinstance(at, float | int) else now
        item = Item(int.from_bytes(digest[:8], "big") >> 1, kind, made_at, document)
        self._keep(tx, device_id, MQTT, [item], now)


def _comes_back(tx: Connection, batch: Batch, device: Row[Any]) -> bool:
    """Whether a device goes on in a life before the newest, as after a start without its disk, or from a backup.

    By its clock: only what has just started, and was sent after all that was heard of the newest life.
    """
    if batch.incarnation == device.incarnation or batch.exchange or not batch.clock_synced:
        return False
    newest = (t.streams.c.device_id == device.device_id, t.streams.c.incarnation == device.incarnation)
    return batch.sent_at > (tx.execute(select(t.streams.c.sent_at).where(*newest)).scalar() or 0.0)


def _late(batch: Batch, stream: Row[Any]) -> bool:
    """Whether a batch was held back on its way while later ones were answered, so that its state may be an old one.

    A device that has just started knows of no answer: then its clock decides. One that is wrongly taken for late is
    asked for its state again.
    """
    if batch.exchange == 0:
        return bool(stream.exchange > 1 and batch.sent_at <= stream.sent_at)
    return bool(batch.exchange < stream.exchange - 1)


def _desired(tx: Connection, device: Row[Any]) -> Desired:
    """What a device should be like."""
    wishes = sorted((row.what, row.key, row.value) for row in tx.execute(_WISHES, {"ours": device.device_id}))
    wanted = Desired(
        "",
        {key: value for what, key, value in wishes if what == "pin"},
        paused=device.paused,
        labels={key: value for what, key, value in wishes if what == "label"},
        groups=tuple(key for what, key, _value in wishes if what == "group"),
    )
    etag = hashlib.sha256(orjson.dumps(schema.dump(wanted), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    return replace(wanted, etag=etag)


def _note(tx: Connection, now: float, action: str, device_id: str, detail: Mapping[str, Any]) -> None:
    """Write into the audit log what a device did, one of `tables.DOINGS`."""
    row = {"at": now, "by": device_id, "action": action, "device_id": device_id, "detail": dict(detail)}
    tx.execute(t.audit.insert().values(row))


def _result(tx: Connection, device_id: str, payload: Mapping[str, Any], now: float) -> None:
    """Keep the answer to an order that went through here; the first counts, as one order has one answer."""
    tx.execute(
        update(t.deliveries)
        .where(
            t.deliveries.c.device_id == device_id,
            t.deliveries.c.order_id == str(payload.get("id", "")),
            t.deliveries.c.result.is_(None),
        )
        .values(result=dict(payload), result_at=now)
    )


def _outcome(member: Row[Any], reports: Sequence[Item], state: Mapping[str, Any]) -> dict[str, Any]:
    """What has changed for a member of a campaign: by the latest report, else by the state; empty for nothing."""
    found: dict[str, Any] = {}
    for item in reports:
        said = item.payload
        if (said.get("name"), said.get("version")) == (member.model, member.version) and item.number > member.number:
            word = rules.outcome(said)
            if word:
                reason = str(said.get("reason") or "")
                found = {"outcome": word, "number": item.number, "reason": reason}
                found["latency_ratio"] = rules.latency_ratio(said)
    if not found and not member.outcome and rules.settled(state).get(member.model) == member.version:
        found = {"outcome": rules.COMMITTED}
    return found


def _open_orders(tx: Connection, device_id: str, now: float) -> tuple[Ordered, ...]:
    rows = tx.execute(_ORDERS, {"ours": device_id, "now": now})
    return tuple(Ordered(row.order_id, row.envelope) for row in rows)


def _open_opinions(tx: Connection, device_id: str) -> tuple[Opinion, ...]:
    rows = tx.execute(_OPINIONS, {"ours": device_id}).scalars()
    return tuple(schema.load(Opinion, opinion) for opinion in rows)


def _merged(spans: Sequence[Sequence[int]], numbers: Iterable[int]) -> list[list[int]]:
    """Ranges that hold what is in `spans` and `numbers`."""
    merged: list[list[int]] = []
    for first, last in sorted([*((first, last) for first, last in spans), *((number, number) for number in numbers)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    surplus = len(merged) - _MOST_RANGES
    if surplus > 0:
        merged[: surplus + 1] = [[merged[0][0], merged[surplus][1]]]
    return merged
