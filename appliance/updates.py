"""Updates as the daemon sees them: what they brought serves on, and new ones are looked for where that is set up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from appliance.adapters import host
from appliance.adapters.store import JOURNAL, METADATA, SLOTS
from appliance.engines import Engines
from appliance.service import Bundle, Service
from appliance.settings import Settings, Update
from models.errors import BundleError, ConfigError
from models.folder import BundleFolder

if TYPE_CHECKING:
    from appliance.adapters.journal import Journal, Known
    from appliance.adapters.repository import Repository
    from appliance.updater import Updater

# A start without updates needs none of what stands behind them, so that is imported where it is needed.

log = structlog.get_logger()


class Updates:
    """Journal, slots and updater of one daemon."""

    def __init__(self, config: Settings, clock: Callable[[], float]) -> None:
        """Read the journal; raises ConfigError when it, or the trusted root, cannot be used."""
        self._config, self._clock, self._slots = config, clock, config.state_dir / SLOTS
        self._updater: Updater | None = None
        self._journal: Journal | None = None
        self._known: Known | None = None
        self._root = b""
        self._pins: Mapping[str, str] = {}
        """That upstream wishes for."""
        self._held = False
        path = config.state_dir / JOURNAL
        if config.update.root and config.update.url:
            try:
                self._root = config.update.root.read_bytes()
            except OSError as error:
                msg = f"update.root names {config.update.root}, which cannot be read ({error.strerror}): give root.json"
                raise ConfigError(msg) from error
        if self._root or path.exists():
            from appliance.ledger import resumed  # noqa: PLC0415 - see the top

            self._known = resumed(self._opened_journal(), clock())

    def trusts(self, folder: Path, digest: str) -> bool:
        """Whether `folder` holds the signed bundle that was put there; raises BundleError where it holds another."""
        if folder.parent != self._slots:
            return False
        if folder.name != digest:
            msg = f"{folder} holds the bundle {digest[:12]}, which was not put there: it is not served"
            raise BundleError(msg)
        return True

    def present(self, folder: Path, open_bundle: Callable[[Path], Bundle]) -> Bundle:
        """What serves in the place of `folder`: the version that an update brought, else what it holds itself."""
        if self._known is None or self._journal is None:
            return open_bundle(folder)
        from appliance.core.deployment import to_serve  # noqa: PLC0415 - see the top

        facts = self._known.facts
        try:
            name = BundleFolder(folder).manifest.name
        except BundleError as error:  # what an update brought does not need it
            if str(folder) not in facts.given:
                raise
            name = facts.given[str(folder)]
            log.warning("bundle_not_read", model=name, reason=str(error))
        if facts.given.get(str(folder)) != name:
            self._known = replace(self._known, facts=replace(facts, given={**facts.given, str(folder): name}))
            with contextlib.suppress(OSError):  # a full disk: the name is noted at another start
                self._journal.write([], [], self._known.facts)
        slots = list(self._known.slots)
        while slot := to_serve(slots, name, self._known.facts.revoked):
            try:
                return open_bundle(self._slots / slot.digest)
            except BundleError as error:  # noqa: PERF203 - rare, and few
                log.warning("slot_not_opened", model=name, version=slot.version, reason=str(error))
                slots.remove(slot)
        return open_bundle(folder)

    def start(self, service: Service, open_bundle: Callable[[Path], Bundle], engines: Engines) -> None:
        """Look for updates from now on, where that is set up; called on the event loop."""
        from appliance.inbox import Inbox  # noqa: PLC0415 - see the top

        if not self._journal or not self._known or not self._root:
            service.inbox = Inbox(self._opened_journal, dict, float)
            return
        from appliance.ledger import Ledger  # noqa: PLC0415
        from appliance.updater import Given, Time, Updater  # noqa: PLC0415

        given = {}
        for folder in self._config.bundles:
            name, digest = self._known.facts.given[str(folder)], ""
            with contextlib.suppress(BundleError):
                digest = BundleFolder(folder).manifest.digest
            given[name] = Given(folder, digest)
        ledger = Ledger(self._journal, self._known, service.tell)
        service.inbox = Inbox(self._opened_journal, lambda: ledger.facts.commanders, lambda: ledger.facts.time_floor)
        assumed = self._config.clock.assume_synced
        self._updater = Updater(
            service,
            self._wished,
            ledger,
            self._slots,
            followed=given,
            repository=self._repository,
            open_bundle=open_bundle,
            now=lambda: Time(self._clock(), synced=assumed or bool(host.clock_synced())),
            engines=engines,
        )
        self._updater.hold(self._held)
        self._updater.start()

    def status(self) -> dict[str, Any] | None:
        """For operators; None where no updates are looked for."""
        return self._updater.status() if self._updater else None

    async def stop(self) -> None:
        """Leave off; the journal knows where to go on."""
        if self._updater:
            await self._updater.stop()

    def close(self) -> None:
        """Finish what is being written."""
        if self._journal:
            self._journal.close()

    def configure(self, config: Settings) -> None:
        """Go on by other settings."""
        self._config = config
        if self._updater:
            self._updater.configure(self._wished)

    def desire(self, pins: Mapping[str, str], *, paused: bool) -> None:
        """Follow what upstream wishes for; pins of the device's own settings win, and signatures decide."""
        self._pins, self._held = pins, paused
        if self._updater:
            self._updater.hold(paused)
            self._updater.configure(self._wished)

    def overruled(self) -> list[str]:
        """Bundles that the device's own settings pin to another version than upstream wishes for."""
        own = self._config.update.pins
        return sorted(name for name, version in self._pins.items() if own.get(name, version) != version)

    @property
    def _wished(self) -> Update:
        update = self._config.update
        return update.model_copy(update={"pins": {**self._pins, **update.pins}})

    def _opened_journal(self) -> Journal:
        from appliance.adapters.journal import Journal  # noqa: PLC0415 - see the top

        self._journal = self._journal or Journal(self._config.state_dir / JOURNAL)
        return self._journal

    def _repository(self) -> Repository:
        from appliance.adapters import repository as tuf  # noqa: PLC0415 - it takes a fifth of a second

        update = self._config.update
        link = tuf.Link(update.limit_bytes_per_s, update.reserve_bytes)
        return tuf.Repository(update.url, self._root, self._config.state_dir / METADATA, link)
