"""Orders about models and the device itself; those about updates are the updater's.

`load`, `unload` and `configure` state an end that is wanted, so giving them twice does no harm. The others are carried
out at most once, for which the inbox answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from appliance import settings
from appliance.adapters import about, host
from appliance.adapters.store import Store
from appliance.core.command import Command, CommandResult
from appliance.core.health import State
from appliance.service import Order, Service
from appliance.settings import Settings
from models.errors import BadInput, NotReady

log = structlog.get_logger()

_GOES_DOWN_S = 10.0
"""From an order to reboot to the signal that ends this daemon."""
_SHOWN_DEPLOYMENTS = 5


class Part(Protocol):
    """What takes up other settings while it runs."""

    def configure(self, config: Settings) -> None:
        """Go on by `config`."""


class Orders:
    """What one device does by order."""

    def __init__(
        self,
        service: Service,
        config: Settings,
        store: Store,
        *,
        now: Callable[[], float],
        parts: Sequence[Part],
    ) -> None:
        """`config` is what files and variables say; `parts` are told of what holds from now on."""
        self._service, self._given, self._store = service, config, store
        self._now, self._parts = now, parts

    def by_name(self) -> dict[str, Order]:
        """For the service."""
        return {
            "load": self._load,
            "unload": self._unload,
            "restart-model": self._restart_model,
            "configure": self._configure,
            "snapshot": self._snapshot,
            "reboot": self._reboot,
        }

    async def _load(self, order: Command) -> dict[str, Any]:
        """Have a model serve, in the version that its folder holds; answered when it does."""
        return about.admission(await self._service.load(_name(order)))

    async def _unload(self, order: Command) -> dict[str, Any]:
        """Let a model answer what it holds and free its memory."""
        await self._service.unload(_name(order))
        return {"name": _name(order)}

    def _restart_model(self, order: Command) -> dict[str, Any]:
        """Start the worker of a model anew, all faults forgiven; requests in hand are answered first."""
        bundle = self._service.serving(_name(order))
        if bundle.supervisor.health.state is State.STOPPED:
            msg = f"{bundle.name} is not loaded: order load"
            raise NotReady(msg)
        bundle.supervisor.renew()
        return {"name": bundle.name, "version": bundle.version}

    async def _configure(self, order: Command) -> dict[str, Any]:
        """Change settings over what files say; null takes a change back. Kept over restarts."""
        wanted = order.args.get("settings")
        if not isinstance(wanted, Mapping) or not wanted:
            raise BadInput('configure takes args like {"settings": {"update.window": "22:00-04:30"}}')
        kept = {**self._store.configured(), **wanted}
        changes = {key: value for key, value in kept.items() if value is not None}
        fresh = settings.configured(self._given, changes)
        await asyncio.to_thread(self._store.keep_configured, changes)
        for part in self._parts:
            part.configure(fresh)
        return {"configured": changes}

    def _snapshot(self, _order: Command) -> dict[str, Any]:
        """What the device is like at this moment."""
        latest = self._service.deployments()[:_SHOWN_DEPLOYMENTS]
        return {"at": round(self._now(), 3), "status": self._service.status(), "deployments": latest}

    async def _reboot(self, order: Command) -> CommandResult:
        """Start the machine anew; the answer is found in the inbox, after that."""
        await asyncio.to_thread(host.reboot, self._given.reboot_command)
        await asyncio.sleep(_GOES_DOWN_S)
        return CommandResult(
            order.id, "unknown", f"the device still runs {_GOES_DOWN_S:.0f} s after it was told: ask later"
        )


def changed_by_order(config: Settings, store: Store) -> Settings:
    """What holds at a start: what files and variables say, with what was changed by order since."""
    try:
        return settings.configured(config, store.configured())
    except BadInput as error:  # kept by another version: no reason not to start
        log.warning("configured_not_taken", reason=str(error))
        return config


def _name(order: Command) -> str:
    name = order.args.get("name")
    if not isinstance(name, str) or not name:
        msg = f'order {order.command!r} needs the name of a model: give args like {{"name": "ppocr-v4"}}'
        raise BadInput(msg)
    return name
