"""What a device knows of its deployments, slots and signed metadata: in memory, and written down before it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from appliance.adapters.journal import Facts, Journal, Known
from appliance.core import deployment as rules
from appliance.core.deployment import Deployment, Slot, Step

log = structlog.get_logger()

_RETRY_S = 5.0
"""While the journal cannot be written."""


class Ledger:
    """The journal of one device, and what is in it."""

    def __init__(self, journal: Journal, known: Known, on_change: Callable[[], None] = lambda: None) -> None:
        """Go on from `known`, which the journal held and which `resumed` has looked through.

        `on_change` is called when a deployment came to another step, when updates are paused or go on, and when there
        is another problem.
        """
        self._on_change = on_change
        self._journal = journal
        self._deployments = {one.id: one for one in known.deployments}
        self._slots = {slot.digest: slot for slot in known.slots}
        self.facts = known.facts
        self.problem = ""
        """Why something is not done at present, for operators; empty when nothing keeps it."""

    @property
    def active(self) -> Deployment | None:
        """The deployment that has not ended; there is one at a time."""
        return next((one for one in self._deployments.values() if not one.ended), None)

    @property
    def deployments(self) -> list[Deployment]:
        """All that are remembered, the newest first."""
        return sorted(self._deployments.values(), key=lambda one: -one.id)

    @property
    def slots(self) -> list[Slot]:
        """All that are known, the latest changed last."""
        return sorted(self._slots.values(), key=lambda slot: slot.deployment)

    @property
    def next_id(self) -> int:
        """For the next deployment."""
        return max(self._deployments, default=0) + 1

    def of(self, number: int) -> Deployment:
        """The deployment with that id, as it stands."""
        return self._deployments[number]

    def brought(self, digest: str | None) -> Deployment | None:
        """The deployment that brought what serves now, where one did: it is on trial, or has passed it."""
        latest = next((one for one in self.deployments if one.digest == digest), None)
        return latest if latest and latest.at in {Step.TRIAL, Step.GOOD} else None

    def say(self, problem: str) -> None:
        """Tell operators why something is not done, or with nothing that all is well."""
        if problem and problem != self.problem:
            log.warning("update_problem", reason=problem)
        changed, self.problem = problem != self.problem, problem
        if changed:
            self._on_change()

    async def note(self, deployment: Deployment) -> None:
        """Write down where a deployment stands, with its slot; only then it stands there."""
        slot = rules.slot_of(deployment, self._slots.get(deployment.digest))

        def keep() -> None:
            self._deployments[deployment.id] = deployment
            if slot:
                self._slots[slot.digest] = slot

        before = self._deployments.get(deployment.id)
        await self._until_written(keep, [deployment], [slot] if slot else [], None)
        if before is None or before.step != deployment.step:
            last = deployment.verdicts[-1] if deployment.verdicts else None
            log.info(
                "deployment",
                id=deployment.id,
                model=deployment.name,
                version=deployment.version,
                step=deployment.step,
                reason=deployment.reason or None,
                figures=dict(last.figures) if last else {},
            )
            self._on_change()

    async def learn(self, facts: Facts) -> None:
        """Write down what signed metadata says."""
        if facts != self.facts:
            await self._until_written(lambda: setattr(self, "facts", facts), [], [], facts)
            self._on_change()

    async def spoil(self, slot: Slot) -> None:
        """Write down that the files of a slot are going to be removed."""
        await self._until_written(lambda: self._slots.update({slot.digest: slot}), [], [slot], None)

    async def _until_written(
        self, keep: Callable[[], Any], deployments: list[Deployment], slots: list[Slot], facts: Facts | None
    ) -> None:
        """Write, however long the disk is full: nothing is done that is not written down. Serving goes on."""
        while not await self._written(deployments, slots, facts):  # noqa: ASYNC110 - a disk gives no sign
            await asyncio.sleep(_RETRY_S)
        keep()

    async def _written(self, deployments: list[Deployment], slots: list[Slot], facts: Facts | None) -> bool:
        try:
            await self._journal.record(deployments=deployments, slots=slots, facts=facts)
        except OSError as error:
            self.say(str(error))
            return False
        return True


def resumed(journal: Journal, now: float) -> Known:
    """What `journal` holds, as a daemon that has just started goes on with it; written down at once."""
    known = journal.read()
    again = {one.id: one for one in rules.resume(known.deployments, now)}
    slots = {slot.digest: slot for slot in known.slots}
    changed = [slot for one in again.values() if (slot := rules.slot_of(one, slots.get(one.digest)))]
    if again:
        try:
            journal.write(list(again.values()), changed, None)
        except OSError as error:  # it stands there as it was, and serving must not wait for room
            log.warning("journal_not_written", reason=str(error))
    slots.update({slot.digest: slot for slot in changed})
    return Known(tuple(again.get(one.id, one) for one in known.deployments), tuple(slots.values()), known.facts)
