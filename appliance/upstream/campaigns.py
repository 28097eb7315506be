"""Campaigns as the database holds them: the rules are those of `core.campaign`, and a step is one transaction.

Whoever steps a campaign holds its row, and whoever finds it held passes on: so of two replicas one does each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, case, delete, func, literal, select, update

from appliance.core import campaign as rules
from appliance.core.campaign import Candidate, Figures, Plan, Progress, Tally
from appliance.upstream import tables as t
from appliance.upstream.database import Database
from appliance.upstream.fleet import Fleet
from models import schema
from models.errors import BadInput, Conflict, NotFound
from models.schema import SchemaError

_SHOWN_CAMPAIGNS, _SHOWN_DEVICES = 100, 1000
_ALIVE = (rules.RUNNING, rules.PAUSED)


class Campaigns:
    """Begins campaigns, steps them, and shows where they stand."""

    def __init__(self, database: Database, fleet: Fleet, now: Callable[[], float]) -> None:
        """`fleet` keeps the audit log."""
        self._database, self._fleet, self._now = database, fleet, now

    def begin(self, by: str, asked: object) -> dict[str, Any]:
        """Begin a campaign over the devices that are known now; raises BadInput, Conflict."""
        try:
            plan = rules.check(schema.load(Plan, asked))
        except SchemaError as error:
            msg = f"the campaign cannot be used: {error}"
            raise BadInput(msg) from error
        with self._database.writing() as tx:
            if self._database.is_shared:  # else two that begin at once would not see each other's
                tx.execute(select(func.pg_advisory_xact_lock(func.hashtext(plan.model))))
            going = and_(t.campaigns.c.model == plan.model, t.campaigns.c.state.in_(_ALIVE))
            other = tx.execute(select(t.campaigns.c.id).where(going)).scalars().first()
            if other:
                msg = f"campaign {other} on {plan.model!r} has not ended: abort it, or wait"
                raise Conflict(msg)
            waves = rules.assigned(plan, _candidates(tx))
            if not waves:
                raise BadInput("no wave takes any device: only devices that report by /v1/sync can be told a version")
            now = self._now()
            row = {
                "model": plan.model,
                "version": plan.version,
                "plan": schema.dump(plan),
                "state": rules.RUNNING,
                "wave": 0,
                "created_at": now,
                "created_by": by,
                "changed_at": now,
            }
            number = int(tx.execute(t.campaigns.insert().values(row).returning(t.campaigns.c.id)).scalar_one())
            tx.execute(
                t.members.insert(),
                [{"campaign": number, "device_id": device_id, "wave": wave} for device_id, wave in waves.items()],
            )
            self._fleet.note(tx, by, "campaign began", "", {"campaign": str(number), **schema.dump(plan)})
        self.step(number)
        return self.one(number)

    def turn(self, by: str, number: int, verb: str) -> dict[str, Any]:
        """Pause, resume or abort a campaign; raises NotFound, and Conflict for one that has ended."""
        state = {"pause": rules.PAUSED, "resume": rules.RUNNING, "abort": rules.ABORTED}[verb]
        with self._database.writing() as tx:
            row = _locked(tx, number)
            if row is None:
                raise _unknown(number)
            if row.state in rules.ENDED:
                msg = f"campaign {number} is {row.state}: begin another"
                raise Conflict(msg)
            reason = f"by {by}" if state == rules.ABORTED else row.reason
            self._take_up(tx, row, Progress(state, row.wave, reason))
            self._fleet.note(tx, by, f"campaign {verb}", "", {"campaign": str(number)})
        self.step(number)
        return self.one(number)

    def step_all(self) -> None:
        """Bring every campaign that has not ended as far as it may go; raises Unavailable."""
        with self._database.reading() as tx:
            numbers = tx.execute(select(t.campaigns.c.id).where(t.campaigns.c.state.in_(_ALIVE))).scalars().all()
        for number in numbers:
            self.step(number)

    def step(self, number: int) -> None:
        """Bring one campaign as far as it may go; one that another replica holds is left to it."""
        with self._database.writing() as tx:
            row = _locked(tx, number, skip=True)
            while row is not None and row.state in _ALIVE:
                plan = schema.load(Plan, row.plan)
                if row.state == rules.RUNNING:
                    self._adopt(tx, row, plan)
                before = Progress(row.state, row.wave, row.reason)
                after = rules.step(plan, before, self._tallies(tx, row, plan), _figures(tx, row))
                self._take_up(tx, row, after)
                if after.state in rules.ENDED:
                    detail = {"campaign": str(number), "reason": after.reason}
                    self._fleet.note(tx, "upstream", f"campaign {after.state}", "", detail)
                if after.wave == before.wave:
                    return
                row = _locked(tx, number)

    def all(self) -> list[dict[str, Any]]:
        """The latest campaigns, the newest first."""
        with self._database.reading() as tx:
            rows = tx.execute(select(t.campaigns).order_by(t.campaigns.c.id.desc()).limit(_SHOWN_CAMPAIGNS)).all()
            return [self._document(tx, row) for row in rows]

    def one(self, number: int) -> dict[str, Any]:
        """A campaign with its devices; raises NotFound."""
        with self._database.reading() as tx:
            row = tx.execute(select(t.campaigns).where(t.campaigns.c.id == number)).one_or_none()
            if row is None:
                raise _unknown(number)
            those = select(t.members).where(t.members.c.campaign == number)
            members = tx.execute(those.order_by(t.members.c.wave, t.members.c.device_id).limit(_SHOWN_DEVICES))
            keys = ("device_id", "wave", "asked_at", "outcome", "outcome_at", "reason")
            devices = [{key: getattr(member, key) for key in keys} for member in members]
            return {**self._document(tx, row), "devices": devices}

    def _take_up(self, tx: Connection, row: Row[Any], after: Progress) -> None:
        """Write down where a campaign stands, and have its devices told what follows from it."""
        if after == Progress(row.state, row.wave, row.reason):
            return
        now = self._now()
        tx.execute(
            update(t.campaigns)
            .where(t.campaigns.c.id == row.id)
            .values(state=after.state, wave=after.wave, reason=after.reason, changed_at=now)
        )
        if after.wave > row.wave:
            self._ask(tx, row, t.members.c.wave == after.wave, now)
        if after.state in {rules.STOPPED, rules.ABORTED}:
            _give_back(tx, row)

    def _ask(self, tx: Connection, row: Row[Any], those: Any, now: float) -> None:  # noqa: ANN401 - a condition
        """Pin the version of a campaign on those of its devices that it has not asked yet."""
        ours = and_(t.members.c.campaign == row.id, those, t.members.c.asked_at.is_(None))
        pin = and_(t.pins.c.device_id == t.members.c.device_id, t.pins.c.model == row.model)
        before = select(t.pins.c.version).where(pin).scalar_subquery()
        pinned = select(t.members.c.device_id, literal(row.model), literal(row.version), literal(row.id)).where(ours)
        columns = ["device_id", "model", "version", "campaign"]
        insert = self._database.insert(t.pins).from_select(columns, pinned)
        changed = {"version": insert.excluded.version, "campaign": insert.excluded.campaign}
        tx.execute(update(t.members).where(ours).values(before=before))
        tx.execute(insert.on_conflict_do_update(index_elements=["device_id", "model"], set_=changed))
        tx.execute(update(t.members).where(ours).values(asked_at=now))

    def _adopt(self, tx: Connection, row: Row[Any], plan: Plan) -> None:
        """Take up devices that have registered since; one whose wave was asked already is asked at once."""
        ours = select(t.members.c.device_id).where(t.members.c.campaign == row.id)
        fresh = _candidates(tx, t.devices.c.registered_at > row.created_at, t.devices.c.device_id.not_in(ours))
        fleet = tx.execute(
            select(func.count()).select_from(t.members).where(t.members.c.campaign == row.id)
        ).scalar_one()
        rows = [
            {"campaign": row.id, "device_id": device.device_id, "wave": wave}
            for device in fresh
            if (wave := rules.wave_of(plan, device, fleet, fleet + 1))
        ]
        if rows:
            tx.execute(t.members.insert(), rows)
            self._ask(tx, row, t.members.c.wave <= row.wave, self._now())

    def _tallies(self, tx: Connection, row: Row[Any], plan: Plan) -> list[Tally]:
        silent = case((t.members.c.asked_at < self._now() - plan.patience_s, 1), else_=0)
        counted = tx.execute(
            select(t.members.c.wave, t.members.c.outcome, func.count().label("many"), func.sum(silent).label("silent"))
            .where(t.members.c.campaign == row.id)
            .group_by(t.members.c.wave, t.members.c.outcome)
        ).all()

        def tally(number: int) -> Tally:
            of = {one.outcome: one for one in counted if one.wave == number}
            many = {outcome: one.many for outcome, one in of.items()}
            return Tally(
                wanted=sum(many.values()),
                committed=many.get(rules.COMMITTED, 0),
                rolled_back=many.get(rules.ROLLED_BACK, 0),
                stuck=int(of[""].silent or 0) if "" in of else 0,
            )

        return [tally(number) for number in range(1, len(plan.waves) + 1)]

    def _document(self, tx: Connection, row: Row[Any]) -> dict[str, Any]:
        plan = schema.load(Plan, row.plan)
        return {
            "id": str(row.id),
            "name": plan.name,
            "model": plan.model,
            "version": plan.version,
            "state": row.state,
            "wave": row.wave,
            "reason": row.reason,
            "waves": schema.dump(plan.waves),
            "counts": [
                {key: getattr(tally, key) for key in ("wanted", "committed", "rolled_back", "stuck", "waiting")}
                for tally in self._tallies(tx, row, plan)
            ],
            "figures": schema.dump(_figures(tx, row)),
            "needed_share": plan.needed_share,
            "patience_s": plan.patience_s,
            "stop": {key: getattr(plan.stop, key) for key in ("rollback_share", "latency_ratio", "agreement_drop")},
            "created_at": row.created_at,
            "created_by": row.created_by,
            "changed_at": row.changed_at,
        }


def _locked(tx: Connection, number: int, *, skip: bool = False) -> Row[Any] | None:
    those = select(t.campaigns).where(t.campaigns.c.id == number)
    return tx.execute(those.with_for_update(skip_locked=skip)).one_or_none()


def _give_back(tx: Connection, row: Row[Any]) -> None:
    """Let the devices of a campaign have the pins again that they had; what an operator has set since stays."""
    asked = and_(t.members.c.campaign == row.id, t.members.c.asked_at.is_not(None))
    ours = and_(t.pins.c.campaign == row.id, t.pins.c.model == row.model)
    bare = select(t.members.c.device_id).where(asked, t.members.c.before.is_(None))
    tx.execute(delete(t.pins).where(ours, t.pins.c.device_id.in_(bare)))
    before = select(t.members.c.before).where(asked, t.members.c.device_id == t.pins.c.device_id).scalar_subquery()
    pinned = select(t.members.c.device_id).where(asked)
    tx.execute(update(t.pins).where(ours, t.pins.c.device_id.in_(pinned)).values(version=before, campaign=None))


def _figures(tx: Connection, row: Row[Any]) -> Figures:
    """What was measured of the version of a campaign."""
    measured = and_(t.members.c.campaign == row.id, t.members.c.outcome == rules.COMMITTED)
    ratios = tx.execute(select(t.members.c.latency_ratio).where(measured, t.members.c.latency_ratio.is_not(None)))
    found = list(ratios.scalars())
    new = t.samples.c.version == row.version
    counted = tx.execute(
        select(
            new.label("new"),
            func.count().label("many"),
            func.sum(case((t.samples.c.agrees, 1), else_=0)).label("agree"),
        )
        .where(t.samples.c.model == row.model, t.samples.c.agrees.is_not(None))
        .group_by(new)
    ).all()
    shares = {bool(one.new): one.agree / one.many for one in counted if one.many >= rules.LEAST_OPINIONS}
    return Figures(statistics.median(found) if found else None, shares.get(True), shares.get(False))


def _candidates(tx: Connection, *conditions: Any) -> Sequence[Candidate]:  # noqa: ANN401 - conditions
    """Devices that can be told a version, with what waves choose them by."""
    here = and_(t.devices.c.retired_at.is_(None), t.devices.c.incarnation != "", *conditions)
    ids = tx.execute(select(t.devices.c.device_id).where(here)).scalars().all()
    if not ids:
        return []
    groups: dict[str, set[str]] = {}
    labels: dict[str, dict[str, str]] = {}
    of = select(t.devices.c.device_id).where(here)
    for row in tx.execute(select(t.groups).where(t.groups.c.device_id.in_(of))):
        groups.setdefault(row.device_id, set()).add(row.name)
    for row in tx.execute(select(t.labels).where(t.labels.c.device_id.in_(of))):
        labels.setdefault(row.device_id, {})[row.key] = row.value
    return [Candidate(one, frozenset(groups.get(one, ())), labels.get(one, {})) for one in ids]


def _unknown(number: int) -> NotFound:
    return NotFound(f"there is no campaign {number}: GET /v1/fleet/campaigns lists them")
