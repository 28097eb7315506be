"""The server role put together: the fleet's doors before those of the same daemon, and what works beside them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.adapters.access import Gate
from appliance.adapters.bodies import Bodies
from appliance.adapters.mqtt import Broker
from appliance.settings import Settings
from appliance.upstream import http
from appliance.upstream.broker import Listener
from appliance.upstream.callers import FleetGate, Tokens
from appliance.upstream.campaigns import Campaigns
from appliance.upstream.database import Database
from appliance.upstream.fleet import Bound, Fleet, Keeping
from appliance.upstream.ingest import Ingest
from appliance.upstream.opinions import Opinions
from appliance.upstream.samples import Samples
from models import sync
from models.errors import ApplianceError

log = structlog.get_logger()

_STEP_S = 1.0
_COUNT_S = 5.0
_FORGET_S = 600.0
_DAY_S = 86400.0
_FLEET = "/v1/fleet"


@dataclass(slots=True)
class Pace:
    """How long devices are to wait between batches: as told, or longer when there are many."""

    least_s: float
    per_s: float
    wait_s: float

    def count(self, syncing: int) -> None:
        """So many devices share what may be taken in a second."""
        self.wait_s = max(self.least_s, syncing / self.per_s)


@contextlib.asynccontextmanager
async def home(
    app: Gate,
    config: Settings,
    *,
    broker: Broker | None,
    name: str,
    registry: CollectorRegistry,
    now: Callable[[], float],
    ended: Callable[[], bool],
) -> AsyncIterator[ASGIApp]:
    """The application with the fleet's paths before those of `app`, until the context is left.

    `name` is this replica's own; `broker` is where devices report, if they do; `ended` says that the server stops.
    Raises ConfigError when the database cannot be used.
    """
    told = config.fleet
    url = told.database.get_secret_value() or f"sqlite:///{config.state_dir / 'upstream.db'}"
    database = await asyncio.to_thread(Database, url)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(database.close)
        fleet = Fleet(database, now, told.online_s)
        campaigns, tokens, samples = (
            Campaigns(database, fleet, now),
            Tokens(database, fleet, now),
            Samples(database, now),
        )
        pace = Pace(told.exchange_s, told.exchanges_per_s, told.exchange_s)
        ingest = Ingest(database, now, lambda: pace.wait_s)
        bodies = Bodies(
            each_bytes=config.http.body_limit_bytes,
            all_bytes=config.http.bodies_limit_bytes,
            encodings=frozenset({b"zstd"}),
        )
        sync_door = http.SyncDoor(ingest, tokens, bodies, app.rates, registry)
        stack.callback(sync_door.close)
        changes = http.Changes(fleet, ended)
        ours = http.build(sync_door, http.FleetDoor(fleet, campaigns, tokens, samples, changes, bodies))
        gate = FleetGate(ours, app.rules, app.file, app.rates, tokens)
        keep = Keeping(
            telemetry=Bound(told.telemetry_days * _DAY_S, told.telemetry_rows, told.device_rows),
            history=Bound(told.history_days * _DAY_S, told.history_rows, told.device_rows),
            samples=Bound(told.sample_days * _DAY_S, told.sample_rows, told.device_rows),
            lives=Bound(of_device=told.device_lives),
            doings=Bound(told.audit_days * _DAY_S, told.audit_rows, told.device_entries),
            actions=Bound(told.audit_days * _DAY_S),
        )
        gauge = Gauge("appliance_upstream_devices", "Devices that are registered.", ["state"], registry=registry)

        def count() -> None:
            counts = fleet.counts()
            pace.count(counts["syncing"])
            for state, many in counts.items():
                gauge.labels(state).set(many)

        for every_s, work in (
            (_STEP_S, campaigns.step_all),
            (_COUNT_S, count),
            (_FORGET_S, partial(fleet.forget, keep)),
        ):
            await stack.enter_async_context(_repeating(work, every_s))
        if config.opinions.url:
            await stack.enter_async_context(_repeating(Opinions(samples, config.opinions).work, _STEP_S))
        if broker:
            listener = Listener(broker, ingest, name, shared=database.is_shared)
            listener.start()
            stack.push_async_callback(asyncio.to_thread, listener.stop)
        log.info("upstream", database="postgresql" if database.is_shared else "sqlite", mqtt=bool(broker))
        yield _before(gate, ours, app)


def _before(gate: ASGIApp, ours: ASGIApp, theirs: ASGIApp) -> ASGIApp:
    """Who answers a request: devices are known by `/v1/sync` itself, people by the gate."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == sync.PATH:
            await ours(scope, receive, send)
        elif path in http.PAGE or path.startswith(f"{_FLEET}/"):
            await gate(scope, receive, send)
        else:
            await theirs(scope, receive, send)

    return answer


@contextlib.asynccontextmanager
async def _repeating(work: Callable[[], Any], every_s: float) -> AsyncIterator[None]:
    """Do `work` in a thread, again and again, as long as the context is not left; it is not cut off in the middle."""
    left = asyncio.Event()

    async def repeat() -> None:
        while not left.is_set():
            try:
                await asyncio.to_thread(work)
            except ApplianceError as error:  # the database is away: the next time may do better
                log.warning("upstream_waits", reason=str(error))
            except Exception:
                log.exception("upstream_fault")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(left.wait(), every_s)

    task = asyncio.get_running_loop().create_task(repeat())
    try:
        yield
    finally:
        left.set()
        await task
