"""The identity of a running daemon.

Its certificate is renewed before it expires, revocations are fetched, and what changed in the files, also by
`appliance enroll`, is taken up without a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import structlog

from appliance.core.identity import Renewal, Tries, renewal, spread_of
from appliance.outside import outside
from appliance.settings import Settings
from models.errors import ApplianceError

if TYPE_CHECKING:
    from appliance.adapters.identity import Facts, Identity

log = structlog.get_logger()

_LOOK_S = 30.0
"""How often files and clock are looked at: both may change under us."""


@contextlib.asynccontextmanager
async def upkept(
    config: Settings, clock: Callable[[], float], take_up: Callable[[], None] | None
) -> AsyncIterator[Upkeep]:
    """An `Upkeep` that is at work where there is, or should be, an identity."""
    upkeep = Upkeep(config, clock, take_up)
    task = asyncio.get_running_loop().create_task(upkeep.run()) if upkeep.wanted else None
    try:
        yield upkeep
    finally:
        if task:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Upkeep:
    """Looks after the folder `identity` of one daemon."""

    def __init__(self, config: Settings, clock: Callable[[], float], take_up: Callable[[], None] | None) -> None:
        """`clock` tells Unix time; `take_up`, called on the event loop, has the door use the files as they are now."""
        self._files, self._check_s = config.identity_files, config.identity.check_s
        self._clock, self._take_up = clock, take_up
        self.wanted = config.identity.http or config.identity.mqtt or self._files.certificate.exists()
        self._tries = Tries()
        self._asked_at = float("-inf")
        self._stamp: object = self._stamped()
        self._status: dict[str, Any] = {"problem": None}

    def status(self) -> dict[str, Any] | None:
        """For operators; None where there is no identity."""
        return self._status if self.wanted else None

    async def run(self) -> None:
        """Look after it until cancelled."""
        while True:
            try:
                problem = await outside(self.look)
            except ApplianceError as error:
                problem = str(error)
            except Exception as error:  # whatever it is, the next look may find it gone; serving does not need this
                problem = f"{type(error).__name__}: {error}"
            if problem and problem != self._status["problem"]:
                log.warning("identity_problem", reason=problem)
            self._status = {**self._status, "problem": problem or None}
            stamp = self._stamped()
            if stamp != self._stamp:
                self._stamp = stamp
                self._use()
            await asyncio.sleep(min(_LOOK_S, self._check_s))

    def _use(self) -> None:
        """Have the door use what the files hold now."""
        if self._take_up is None:
            return
        try:
            self._take_up()
            log.info("identity_taken_up")
        except ApplianceError as error:
            log.warning("identity_problem", reason=str(error))

    def look(self) -> str:
        """Renew and fetch what is due; why nothing can be done, if so. In a thread; raises ApplianceError."""
        from appliance.adapters.identity import Identity  # noqa: PLC0415 - only with an identity; it loads cryptography
        from appliance.doctor_tls import day  # noqa: PLC0415 - likewise

        identity = Identity(self._files)
        facts, now = identity.facts(), self._clock()
        if facts is None:
            return "this device is not enrolled: get it a certificate with `appliance enroll`"
        due = self._judge(facts, now)
        if now >= due.at and not due.hindered and facts.service:
            facts = self._renewed(identity, now)
            due = self._judge(facts, now)
        self._status = {
            "name": facts.name,
            "valid_until": day(facts.valid_until),
            "renewed_from": day(due.at),
            "problem": self._status["problem"],
        }
        if due.hindered == "clock":
            return f"the clock says {day(now)}, before the certificate begins: set it, or wait until it is synchronised"
        if due.hindered == "expired":
            return f"the certificate expired on {day(facts.valid_until)}: enrol anew with a token"
        if not facts.service:
            ends = f"the certificate ends on {day(facts.valid_until)}, and nobody is known who renews it: bring another"
            return ends if now >= due.at else ""
        if not 0 <= now - self._asked_at < self._check_s:  # the clock may have been set back
            self._asked_at = now
            identity.fetch_revoked()
        return ""

    def _renewed(self, identity: Identity, now: float) -> Facts:
        from appliance.doctor_tls import day  # noqa: PLC0415 - see above

        self._tries = Tries(self._tries.failed + 1, now)  # unless the next line comes through
        facts = identity.renew()
        self._tries = Tries()
        log.info("identity_renewed", name=facts.name, valid_until=day(facts.valid_until))
        return facts

    def _judge(self, facts: Facts, now: float) -> Renewal:
        return renewal(facts.valid_from, facts.valid_until, now, spread_of(facts.name), self._tries)

    def _stamped(self) -> object:
        """What changes whenever one of the files does."""
        found = []
        for path in (self._files.certificate, self._files.authority, self._files.revoked):
            with contextlib.suppress(OSError):
                state = path.stat()
                found.append((path.name, state.st_mtime_ns, state.st_ino))
        return found
