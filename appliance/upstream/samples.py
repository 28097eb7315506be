"""Pictures that devices want read again: a queue that several may work at, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import case, func, or_, select, update

from appliance.upstream import tables as t
from appliance.upstream.database import Database
from models import schema
from models.sync import Opinion, Sample

_CLAIM_S = 120.0
"""Whoever takes a sample must answer within that; then another may."""


class Samples:
    """The samples of one database."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        """Take from and answer in `database`."""
        self._database, self._now = database, now

    def waiting(self, most: int) -> list[Sample]:
        """Up to `most` samples that nobody else reads now, the oldest first; they are the caller's for a while."""
        with self._database.writing() as tx:
            now = self._now()
            free = (t.samples.c.answered_at.is_(None), t.samples.c.claimed_until < now, t.samples.c.sample.is_not(None))
            # A picture that may be kept for some time is not read after it.
            alive = or_(t.samples.c.keep_until > now, t.samples.c.keep_until == t.samples.c.received_at)
            rows = tx.execute(
                select(t.samples.c.sample_id, t.samples.c.sample)
                .where(*free, alive)
                .order_by(t.samples.c.received_at)
                .limit(most)
                .with_for_update(skip_locked=True)
            ).all()
            if rows:
                taken = t.samples.c.sample_id.in_([row.sample_id for row in rows])
                tx.execute(update(t.samples).where(taken).values(claimed_until=now + _CLAIM_S))
            return [schema.load(Sample, row.sample) for row in rows]

    def answered(self, opinion: Opinion) -> None:
        """Keep what a larger model says; the device is told until it acknowledges. The first answer counts."""
        with self._database.writing() as tx:
            now = self._now()
            kept = t.samples.c.keep_until > now
            tx.execute(
                update(t.samples)
                .where(t.samples.c.sample_id == opinion.sample_id, t.samples.c.answered_at.is_(None))
                .values(
                    opinion=schema.dump(opinion),
                    agrees=None if opinion.reason else opinion.agrees,
                    answered_at=now,
                    sample=case((kept, t.samples.c.sample), else_=None),
                )
            )

    def agreement(self) -> list[dict[str, Any]]:
        """How often second opinions agreed with each version of each model."""
        with self._database.reading() as tx:
            rows = tx.execute(
                select(
                    t.samples.c.model,
                    t.samples.c.version,
                    func.count(t.samples.c.agrees).label("opinions"),
                    func.sum(case((t.samples.c.agrees, 1), else_=0)).label("agree"),
                    func.sum(case((t.samples.c.answered_at.is_(None), 1), else_=0)).label("waiting"),
                ).group_by(t.samples.c.model, t.samples.c.version)
            )
            return [
                {
                    "model": row.model,
                    "version": row.version,
                    "opinions": row.opinions,
                    "agreement": round(row.agree / row.opinions, 4) if row.opinions else None,
                    "waiting": int(row.waiting or 0),
                }
                for row in rows
            ]
