"""The registry of devices, what each should be like, orders to them, who did what, and what may be forgotten.

Everything here is a question or a wish of people; what devices say comes in by `ingest`, and campaigns have their own.
Each wish is written into the audit log in the transaction that fulfils it.

Past 400 lines because each question is one statement, and what people may wish for is checked beside it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    delete,
    exists,
    func,
    or_,
    select,
    true,
    update,
)

from appliance.upstream import tables as t
from appliance.upstream.database import Database
from models.errors import BadInput, Conflict, NotFound
from models.orders import PAYLOAD_TYPE

MOST_DEVICES = 1000
"""On one page."""
_HISTORY = ("deployment", "alarm", "command_result")
_MOST_EVENTS = 200
_MOST_NAMES = 64
"""Groups, labels or pins of one device."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,127}")
_MOST_ENVELOPES = 10_000
_AT_ONCE = 5000
"""Rows that are deleted in one transaction, and those of the same moment as the last."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What is kept of one kind, the latest rows; None is no bound."""

    age_s: float | None = None
    rows: int | None = None
    """In all."""
    of_device: int | None = None


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long and how much of it is kept."""

    telemetry: Bound
    history: Bound
    """Of deployments, of alarms, and of answers to orders."""
    samples: Bound
    lives: Bound
    """Of devices, besides the present one."""
    doings: Bound
    """Entries of the audit log that devices have made."""
    actions: Bound
    """Those of people and of campaigns: nothing that devices do may push them out."""


class Fleet:
    """Everything that people may ask of the fleet, and wish, except campaigns and tokens."""

    def __init__(self, database: Database, now: Callable[[], float], online_s: float) -> None:
        """A device that was heard within `online_s` counts as online."""
        self._database, self._now, self._online_s = database, now, online_s

    # Devices

    def devices(self, group: str = "", label: str = "", after: str = "", limit: int = 100) -> dict[str, Any]:
        """One page of devices in the order of their names, those of a group or with a label `key=value` alone."""
        chosen = _chosen(group, label).where(t.devices.c.device_id > after).order_by(t.devices.c.device_id)
        with self._database.reading() as tx:
            rows = tx.execute(chosen.limit(max(1, min(limit, MOST_DEVICES)) + 1)).all()
            more, rows = len(rows) > limit, rows[:limit]
            return {"devices": self._documents(tx, rows), "next": rows[-1].device_id if more else None}

    def device(self, device_id: str) -> dict[str, Any]:
        """One device, with what happened on it and to it, the newest first; raises NotFound."""
        with self._database.reading() as tx:
            (document,) = self._documents(tx, [_device(tx, device_id)])
            told = tx.execute(
                select(t.items)
                .where(t.items.c.device_id == device_id, t.items.c.kind.in_(_HISTORY))
                .order_by(t.items.c.received_at.desc())
                .limit(_MOST_EVENTS)
            )
            done = tx.execute(
                select(t.audit)
                .where(t.audit.c.device_id == device_id)
                .order_by(t.audit.c.at.desc(), t.audit.c.id.desc())
                .limit(_MOST_EVENTS)
            )
            events = [
                {"at": row.received_at, "kind": row.kind, "text": _told(row.kind, row.payload), "payload": row.payload}
                for row in told
            ]
            events += [
                {"at": row.at, "kind": row.action, "text": _done(row), "payload": row.detail or None} for row in done
            ]
        timeline = sorted(events, key=lambda event: event["at"], reverse=True)[:_MOST_EVENTS]
        return {**document, "timeline": timeline}

    def change(self, by: str, device_id: str, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Set groups, labels, pins, `paused` or `retired` of a device; raises BadInput, NotFound."""
        unknown = sorted(set(wish) - {"groups", "labels", "pins", "paused", "retired"})
        if unknown or not wish:
            what = f"a device has no {unknown[0][:60]!r} to set" if unknown else "nothing is to be set"
            msg = f"{what}: groups, labels, pins, paused and retired can be"
            raise BadInput(msg)
        with self._database.writing() as tx:
            _device(tx, device_id, retired=True)
            if "groups" in wish:
                names = _names(wish["groups"], "groups")
                tx.execute(delete(t.groups).where(t.groups.c.device_id == device_id))
                _insert(tx, t.groups, [{"name": name, "device_id": device_id} for name in names])
            if "labels" in wish:
                pairs = _pairs(wish["labels"], "labels")
                mine = t.labels.c.device_id == device_id
                tx.execute(delete(t.labels).where(mine, or_(t.labels.c.own, t.labels.c.key.in_(pairs))))
                rows = [{"device_id": device_id, "key": k, "value": v, "own": True} for k, v in pairs.items()]
                _insert(tx, t.labels, rows)
            if "pins" in wish:
                self._pin(tx, device_id, _pairs(wish["pins"], "pins", or_none=True))
            for name in ("paused", "retired"):
                if name in wish and not isinstance(wish[name], bool):
                    msg = f"{name} is true or false, not {str(wish[name])[:60]!r}"
                    raise BadInput(msg)
            changes: dict[str, Any] = {name: wish[name] for name in ("paused",) if name in wish}
            if "retired" in wish:
                changes["retired_at"] = self._now() if wish["retired"] else None
            if changes:
                tx.execute(update(t.devices).where(t.devices.c.device_id == device_id).values(changes))
            if wish.get("retired"):
                _strip(tx, device_id)
            self.note(tx, by, "changed", device_id, wish)
        return self.device(device_id) if not wish.get("retired") else {"device_id": device_id, "retired": True}

    def _pin(self, tx: Connection, device_id: str, pins: Mapping[str, str | None]) -> None:
        for model, version in pins.items():
            if version is None:
                tx.execute(delete(t.pins).where(t.pins.c.device_id == device_id, t.pins.c.model == model))
            else:
                row = {"device_id": device_id, "model": model, "version": version}
                tx.execute(
                    self._database.insert(t.pins)
                    .values(row)
                    .on_conflict_do_update(
                        index_elements=["device_id", "model"], set_={"version": version, "campaign": None}
                    )
                )

    def _documents(self, tx: Connection, rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
        ids = [row.device_id for row in rows]
        groups: defaultdict[str, list[str]] = defaultdict(list)
        labels: defaultdict[str, dict[str, str]] = defaultdict(dict)
        pins: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for row in tx.execute(select(t.groups).where(t.groups.c.device_id.in_(ids)).order_by(t.groups.c.name)):
            groups[row.device_id].append(row.name)
        for row in tx.execute(select(t.labels).where(t.labels.c.device_id.in_(ids)).order_by(t.labels.c.key)):
            labels[row.device_id][row.key] = row.value
        for row in tx.execute(select(t.pins).where(t.pins.c.device_id.in_(ids)).order_by(t.pins.c.model)):
            pins[row.device_id][row.model] = row.version
        heard = self._now() - self._online_s
        return [
            {
                "device_id": row.device_id,
                "groups": groups[row.device_id],
                "labels": labels[row.device_id],
                "last_seen": row.last_seen,
                "online": row.availability == "online" or row.last_seen >= heard,
                "incarnation": row.incarnation,
                "versions": row.versions or {},
                "health": row.health,
                "degraded": row.degraded,
                "profile": row.profile,
                "paused": row.paused,
                "desired": pins[row.device_id],
            }
            for row in rows
        ]

    # Orders

    def command(self, by: str, target: Mapping[str, Any], envelopes: Sequence[Any]) -> dict[str, Any]:
        """Hand signed orders on to the devices they name, which must be among those of `target`.

        They are not verified here but by the devices, which do not believe this server. Raises BadInput, Conflict.
        """
        if len(target) != 1 or not set(target) <= {"device", "group", "label"}:
            raise BadInput('a target is one of {"device": ...}, {"group": ...} and {"label": "key=value"}')
        if not 0 < len(envelopes) <= _MOST_ENVELOPES:
            msg = f"give 1 to {_MOST_ENVELOPES} envelopes, one for each device"
            raise BadInput(msg)
        orders = [_order(envelope) for envelope in envelopes]
        with self._database.writing() as tx:
            ids = set(tx.execute(_those(target)).scalars())
            strays = sorted({order["device_id"] for order in orders} - ids)
            if strays:
                msg = f"an order is for {strays[0][:100]!r}, which is no device of {dict(target)}: mend the target"
                raise BadInput(msg)
            known = t.deliveries.c.order_id.in_([order["order_id"] for order in orders])
            taken = tx.execute(select(t.deliveries.c.order_id).where(known)).scalars().first()
            if taken or len({order["order_id"] for order in orders}) < len(orders):
                msg = f"the order {taken or 'id'!r} was handed in before: sign it anew, with an id of its own"
                raise Conflict(msg)
            row = {"target": dict(target), "created_at": self._now(), "created_by": by}
            number = tx.execute(t.commands.insert().values(row).returning(t.commands.c.id)).scalar_one()
            _insert(tx, t.deliveries, [{**order, "command": number} for order in orders])
            for order in orders:
                detail = {"command": str(number), "order_id": order["order_id"]}
                self.note(tx, by, "ordered", order["device_id"], detail)
        return {"id": str(number), "devices": sorted(order["device_id"] for order in orders)}

    def command_results(self, number: int) -> dict[str, Any]:
        """What became of a command on each device; raises NotFound."""
        with self._database.reading() as tx:
            found = tx.execute(select(t.commands).where(t.commands.c.id == number)).one_or_none()
            if found is None:
                msg = f"there is no command {number}"
                raise NotFound(msg)
            those = select(t.deliveries).where(t.deliveries.c.command == number).order_by(t.deliveries.c.device_id)
            rows, now = tx.execute(those).all(), self._now()
        return {
            "id": str(found.id),
            "target": found.target,
            "created_at": found.created_at,
            "created_by": found.created_by,
            "devices": [_delivered(row, now) for row in rows],
        }

    # Who did what

    def note(self, tx: Connection, by: str, action: str, device_id: str, detail: Mapping[str, Any]) -> None:
        """Write into the audit log what is being done."""
        row = {"at": self._now(), "by": by, "action": action, "device_id": device_id, "detail": dict(detail)}
        tx.execute(t.audit.insert().values(row))

    def audited(self, before: int = 0, limit: int = 100) -> dict[str, Any]:
        """The audit log, the newest first; `before` is the id of the last entry of the page before."""
        chosen = select(t.audit).order_by(t.audit.c.id.desc()).limit(max(1, min(limit, MOST_DEVICES)))
        with self._database.reading() as tx:
            rows = tx.execute(chosen.where(t.audit.c.id < before) if before else chosen).all()
        keys = ("id", "at", "by", "action", "device_id", "detail")
        entries = [{key: getattr(row, key) for key in keys} for row in rows]
        return {"audit": entries, "next": rows[-1].id if len(rows) == limit else None}

    # What is told of the whole

    def pulse(self) -> dict[str, Any]:
        """Values that differ when something has changed; by what it is."""
        with self._database.reading() as tx:
            return {
                "devices": tuple(
                    tx.execute(select(func.max(t.devices.c.last_seen), func.count(t.devices.c.device_id))).one()
                ),
                "campaigns": (
                    tx.execute(select(func.max(t.campaigns.c.changed_at))).scalar(),
                    tx.execute(select(func.max(t.members.c.outcome_at))).scalar(),
                ),
                "commands": tx.execute(select(func.max(t.deliveries.c.result_at))).scalar(),
                "audit": tx.execute(select(func.max(t.audit.c.id))).scalar(),
            }

    def counts(self) -> dict[str, int]:
        """How many devices there are, and how many are online."""
        heard = self._now() - self._online_s
        online = or_(t.devices.c.availability == "online", t.devices.c.last_seen >= heard)
        with self._database.reading() as tx:
            here = select(func.count()).select_from(t.devices).where(t.devices.c.retired_at.is_(None))
            return {
                "known": tx.execute(here).scalar_one(),
                "online": tx.execute(here.where(online)).scalar_one(),
                "syncing": tx.execute(here.where(t.devices.c.last_seen >= heard)).scalar_one(),
            }

    # What may be forgotten

    def forget(self, keep: Keeping) -> dict[str, int]:
        """Delete what is older or more than is kept; how many rows, by kind. Pictures go when their time has come."""
        told, heard = t.items.c.kind, t.streams.c.heard_at
        alive = exists().where(
            t.devices.c.device_id == t.streams.c.device_id, t.devices.c.incarnation == t.streams.c.incarnation
        )
        doing = t.audit.c.action.in_(t.DOINGS)
        gone = {
            "telemetry": self._thin_out(told == "telemetry", t.items.c.received_at, keep.telemetry),
            **{kind: self._thin_out(told == kind, t.items.c.received_at, keep.history) for kind in _HISTORY},
            "sample": self._thin_out(true(), t.samples.c.received_at, keep.samples),
            "life": self._thin_out(~alive, heard, keep.lives),
            "doing": self._thin_out(doing, t.audit.c.at, keep.doings),
            "action": self._thin_out(~doing, t.audit.c.at, keep.actions),
        }
        now = self._now()
        with self._database.writing() as tx:
            seen = and_(t.samples.c.sample.is_not(None), t.samples.c.keep_until < now)
            over = or_(t.samples.c.answered_at.is_not(None), t.samples.c.keep_until > t.samples.c.received_at)
            tx.execute(update(t.samples).where(seen, over).values(sample=None))
        return gone

    def _thin_out(self, those: ColumnElement[bool], at: Column[float], keep: Bound) -> int:
        """Delete of `those` rows what is more than is kept, by the time in their column `at`; how many rows.

        Device by device first: what one device told too much must not push out what others did.
        """
        device, gone = at.table.c.device_id, 0
        if keep.age_s is not None:
            gone += self._delete(and_(those, at < self._now() - keep.age_s), at)
        if keep.of_device:
            crowded = select(device).where(those).group_by(device).having(func.count() > keep.of_device)
            with self._database.reading() as tx:
                names = tx.execute(crowded).scalars().all()
            gone += sum(self._keep_latest(and_(those, device == name), at, keep.of_device) for name in names)
        return gone + (self._keep_latest(those, at, keep.rows) if keep.rows else 0)

    def _keep_latest(self, those: ColumnElement[bool], at: Column[float], most: int) -> int:
        latest = select(at).where(those).order_by(at.desc())
        with self._database.reading() as tx:
            oldest = tx.execute(latest.offset(most - 1).limit(1)).scalar_one_or_none()
        return 0 if oldest is None else self._delete(and_(those, at < oldest), at)

    def _delete(self, those: ColumnElement[bool], at: Column[float]) -> int:
        """Delete rows, the oldest first and not too many in one transaction: while it writes, devices wait."""
        gone = 0
        while True:
            with self._database.reading() as tx:
                until = tx.execute(select(at).where(those).order_by(at).offset(_AT_ONCE).limit(1)).scalar_one_or_none()
            with self._database.writing() as tx:
                part = those if until is None else and_(those, at <= until)
                gone += tx.execute(delete(at.table).where(part)).rowcount
            if until is None:
                return gone


def _chosen(group: str, label: str) -> Select[Any]:
    chosen = select(t.devices).where(t.devices.c.retired_at.is_(None))
    if group:
        chosen = chosen.where(t.devices.c.device_id.in_(select(t.groups.c.device_id).where(t.groups.c.name == group)))
    if label:
        key, equals, value = label.partition("=")
        if not equals:
            msg = f"the label {label[:100]!r} is none: write it as key=value"
            raise BadInput(msg)
        those = select(t.labels.c.device_id).where(t.labels.c.key == key, t.labels.c.value == value)
        chosen = chosen.where(t.devices.c.device_id.in_(those))
    return chosen


def _those(target: Mapping[str, Any]) -> Select[Any]:
    """Names of the devices of a target."""
    group, label = str(target.get("group") or ""), str(target.get("label") or "")
    chosen = _chosen(group, label).with_only_columns(t.devices.c.device_id)
    return chosen.where(t.devices.c.device_id == str(target["device"])) if "device" in target else chosen


def _device(tx: Connection, device_id: str, *, retired: bool = False) -> Row[Any]:
    row = tx.execute(select(t.devices).where(t.devices.c.device_id == device_id)).one_or_none()
    if row is None or (row.retired_at is not None and not retired):
        msg = f"there is no device {device_id[:100]!r}: one is known from its first report on"
        raise NotFound(msg)
    return row


def _strip(tx: Connection, device_id: str) -> None:
    """Take from a device that is retired what would have it come back, or be waited for."""
    for table in (t.pins, t.groups, t.tokens, t.members):
        tx.execute(delete(table).where(table.c.device_id == device_id))


def _insert(tx: Connection, table: Any, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401 - a table
    if rows:
        tx.execute(table.insert(), rows)


def _names(given: object, what: str) -> list[str]:
    if not isinstance(given, list) or len(given) > _MOST_NAMES or not all(map(_usable, given)):
        msg = f"{what} is a list of up to {_MOST_NAMES} names of A-Z a-z 0-9 . _ - and spaces"
        raise BadInput(msg)
    return sorted(set(given))


def _pairs(given: object, what: str, *, or_none: bool = False) -> dict[str, Any]:
    if (
        not isinstance(given, dict)
        or len(given) > _MOST_NAMES
        or not all(_usable(key) and (_usable(value) or (or_none and value is None)) for key, value in given.items())
    ):
        msg = f"{what} is an object of up to {_MOST_NAMES} pairs of names of A-Z a-z 0-9 . _ - and spaces"
        raise BadInput(msg)
    return given


def _usable(name: object) -> bool:
    return isinstance(name, str) and bool(_NAME.fullmatch(name))


def _order(envelope: object) -> dict[str, Any]:
    """What must be known of a signed order to bring it to its device; raises BadInput."""
    try:
        if not isinstance(envelope, dict) or envelope["payloadType"] != PAYLOAD_TYPE or not envelope["signatures"]:
            raise BadInput("this is no signed order: make it with `provision command sign`")
        order = json.loads(base64.b64decode(envelope["payload"], validate=True))
        found = {
            "device_id": str(order["device_id"]),
            "order_id": str(order["id"]),
            "expires_at": float(order["expires_at"]),
            "envelope": envelope,
        }
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        msg = f"the order cannot be read ({error}): make it with `provision command sign`, for one device each"
        raise BadInput(msg) from error
    return found


def _delivered(row: Row[Any], now: float) -> dict[str, Any]:
    result = row.result or {}
    waiting = "expired" if row.expires_at <= now and row.acknowledged_at is None else "waiting"
    return {
        "device_id": row.device_id,
        "order_id": row.order_id,
        "status": result.get("status") or waiting,
        "reason": result.get("reason") or "",
        "result": result.get("result") or {},
    }


def _told(kind: str, payload: Mapping[str, Any]) -> str:
    """What a device told, in a few words."""
    said: Iterable[Any]
    if kind == "deployment":
        said = (payload.get("name"), payload.get("version"), payload.get("step"), payload.get("reason"))
    elif kind == "command_result":
        said = (payload.get("status"), payload.get("reason"))
    else:
        over = "is over" if payload.get("over") else ""
        said = (payload.get("alarm"), payload.get("model"), over, payload.get("text"))
    return " ".join(str(word) for word in said if word)


def _done(row: Row[Any]) -> str:
    detail = ", ".join(f"{key} {value}" for key, value in row.detail.items())
    by = f" by {row.by}" if row.by != row.device_id else ""
    return f"{row.action}{by}{f': {detail}' if detail else ''}"[:300]
