"""The upstream's HTTP door: `/v1/sync` for devices, `/v1/fleet` and the fleet page for people."""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import zstandard
from fastapi import Path as InPath
from fastapi import Query, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.responses import FileResponse, StreamingResponse

from appliance import __version__
from appliance.adapters import openapi
from appliance.adapters.answers import Json, add_errors, refusal
from appliance.adapters.bodies import Bodies
from appliance.adapters.live import PAGE_HEADERS
from appliance.core.rates import Rates
from appliance.upstream.callers import Tokens
from appliance.upstream.campaigns import Campaigns
from appliance.upstream.fleet import MOST_DEVICES, Fleet
from appliance.upstream.ingest import Ingest
from appliance.upstream.samples import Samples
from models import schema, sync
from models.errors import ApplianceError, BadInput, Overloaded, TooLarge

T = TypeVar("T")

PAGE = {"/": "fleet.html", "/page.css": "page.css", "/parts.js": "parts.js", "/fleet.js": "fleet.js"}
MOST_NUMBER = 2**63 - 1
"""Of a campaign or a command, as the database keeps them."""
Number = Annotated[int, InPath(ge=0, le=MOST_NUMBER)]
_WEB = Path(__file__).parent.parent / "web"
_WRITERS = 6
"""Batches that are taken in at the same time."""
_MOST_IN_HAND = 64
"""Batches that are taken in or wait for it; others are told to come later."""
_MOST_OF_DEVICE = 2
"""Of one device: a batch, and the one before, whose connection it gave up."""
_LATER_S = 5.0
_LOOK_S = 1.0
"""Between two looks for changes, however many watch."""
_WATCHERS = 32
_WINDOW_BYTES = 2**23
"""Of zstd: what a frame may have us allocate."""


class SyncDoor:
    """Takes in batches, as many at a time as the database does well with."""

    def __init__(
        self, ingest: Ingest, tokens: Tokens, bodies: Bodies, rates: Rates, registry: CollectorRegistry
    ) -> None:
        """Hand batches to `ingest`; `bodies` and `rates` bound what is in hand, and `registry` shows the counts."""
        self._ingest, self._tokens, self._bodies, self._rates = ingest, tokens, bodies, rates
        self._pool = ThreadPoolExecutor(_WRITERS, "ingest")
        self._in_hand, self._of_device = 0, collections.Counter[str]()
        self._exchanges = Counter(
            "appliance_upstream_exchanges", "Batches by what became of them.", ["outcome"], registry=registry
        )
        self._seconds = Histogram(
            "appliance_upstream_exchange_seconds",
            "From a batch's last byte to its answer.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
            registry=registry,
        )

    async def exchange(self, request: Request) -> Response:
        """One exchange with a device (models/sync.py)."""
        try:
            answer = await self._exchange(request)
        except ApplianceError as error:
            self._exchanges.labels(type(error).__name__).inc()
            if isinstance(error, TooLarge):
                return Json(schema.dump(sync.Refusal(str(error), sync.MOST_BYTES)), 413)
            return refusal(error)
        self._exchanges.labels("taken").inc()
        return Json(schema.dump(answer))

    def close(self) -> None:
        """Finish what is in hand."""
        self._pool.shutdown()

    async def _exchange(self, request: Request) -> sync.Answer:
        if self._in_hand >= _MOST_IN_HAND:
            msg = f"{_MOST_IN_HAND} batches are in hand already: send this one later"
            raise Overloaded(msg, _LATER_S * (1 + random.random()))  # noqa: S311 - so that not all come back at once
        self._in_hand += 1
        try:
            known = request.scope["known"] = dict(request.scope["headers"])  # as the gate does for the other paths
            authorization = request.headers.get("authorization")
            device_id = await self._in_pool(lambda: self._tokens.device(request.scope, authorization))
            self._rates.enter(device_id, time.monotonic())
            self._of_device[device_id] += 1
            try:
                if self._of_device[device_id] > _MOST_OF_DEVICE:
                    raise Overloaded("batches of this device are in hand already: wait for an answer", _LATER_S)
                async with self._bodies.of(request) as body:
                    packed = known.get(b"content-encoding") == b"zstd"
                    with self._seconds.time():
                        return await self._in_pool(lambda: self._taken(device_id, body, packed=packed))
            finally:
                self._rates.leave(device_id)
                self._of_device[device_id] -= 1
                if not self._of_device[device_id]:
                    del self._of_device[device_id]
        finally:
            self._in_hand -= 1

    def _taken(self, device_id: str, body: bytes, *, packed: bool) -> sync.Answer:
        try:
            try:
                batch = sync.batch(orjson.loads(_unpacked(body) if packed else _bounded(body)))
            except ValueError as error:
                msg = f"the batch cannot be read: {error}"
                raise BadInput(msg) from error
            return self._ingest.exchange(device_id, batch, sync.MOST_BYTES)
        except RecursionError:
            raise BadInput("the batch is nested too deeply: flatten it") from None

    async def _in_pool(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class Changes:
    """Tells whoever watches that something has changed; what, they ask themselves."""

    def __init__(self, fleet: Fleet, ended: Callable[[], bool]) -> None:
        """Follow `fleet` until `ended`, where a server that stops waits for all its answers."""
        self._fleet, self._ended = fleet, ended
        self._watchers, self._looked_at = 0, float("-inf")
        self._pulse: dict[str, Any] = {}
        self._looking = asyncio.Lock()

    def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events; raises Overloaded when too many watch."""
        if self._watchers >= _WATCHERS:
            msg = f"{_WATCHERS} watch already, which are as many as may: close a page"
            raise Overloaded(msg)
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        self._watchers += 1
        try:
            yield b": changes\n\n"
            known = await self._look()
            while not self._ended():
                await asyncio.sleep(_LOOK_S)
                pulse = await self._look()
                changed = [what for what, value in pulse.items() if value != known[what]]
                if changed:
                    yield b"data: %b\n\n" % orjson.dumps({"changed": changed})
                known = pulse
        finally:
            self._watchers -= 1

    async def _look(self) -> dict[str, Any]:
        async with self._looking:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._pulse = await asyncio.to_thread(self._fleet.pulse)
                self._looked_at = time.monotonic()
            return self._pulse


class FleetDoor:
    """The fleet's own API; its methods are plain functions, which the framework runs in threads."""

    def __init__(
        self, fleet: Fleet, campaigns: Campaigns, tokens: Tokens, samples: Samples, changes: Changes, bodies: Bodies
    ) -> None:
        """Answer from these; `bodies` reads what requests carry."""
        self._fleet, self._campaigns, self._tokens = fleet, campaigns, tokens
        self._samples, self._changes, self._bodies = samples, changes, bodies

    def ready(self) -> Response:
        """200 while the database answers: what a balancer of replicas should ask."""
        return Json({"ready": True, **self._fleet.counts()})

    def devices(
        self,
        group: str = "",
        label: Annotated[str, Query(description="key=value")] = "",
        after: Annotated[str, Query(description="`next` of the page before")] = "",
        limit: Annotated[int, Query(ge=1, le=MOST_DEVICES)] = 100,
    ) -> Response:
        """A page of devices: what each runs, should run, and when it was heard last."""
        return Json(self._fleet.devices(group, label, after, limit))

    def device(self, device_id: str) -> Response:
        """One device and its timeline, the newest first."""
        return Json(self._fleet.device(device_id))

    async def change(self, request: Request, device_id: str) -> Response:
        """Set groups, labels, pins, `paused` or `retired`."""
        wish = await self._object(request)
        return Json(await asyncio.to_thread(self._fleet.change, _by(request), device_id, wish))

    def retire(self, request: Request, device_id: str) -> Response:
        """Take a device out of the fleet: what it sends is refused from then on, and its tokens open nothing."""
        return Json(self._fleet.change(_by(request), device_id, {"retired": True}))

    async def begin(self, request: Request) -> Response:
        """Begin a campaign; 409 while another on the same model has not ended."""
        asked = await self._object(request)
        return Json(await asyncio.to_thread(self._campaigns.begin, _by(request), asked), 201)

    def campaigns(self) -> Response:
        """The latest campaigns."""
        return Json({"campaigns": self._campaigns.all()})

    def campaign(self, campaign: Number) -> Response:
        """One campaign with its devices."""
        return Json(self._campaigns.one(campaign))

    def pause(self, request: Request, campaign: Number) -> Response:
        """Ask no further device."""
        return Json(self._campaigns.turn(_by(request), campaign, "pause"))

    def resume(self, request: Request, campaign: Number) -> Response:
        """Go on."""
        return Json(self._campaigns.turn(_by(request), campaign, "resume"))

    def abort(self, request: Request, campaign: Number) -> Response:
        """End it; its devices get back what they had."""
        return Json(self._campaigns.turn(_by(request), campaign, "abort"))

    async def command(self, request: Request) -> Response:
        """Hand signed orders on: `{"target", "envelopes"}`, or `envelope` for a single device."""
        asked = await self._object(request)
        target, envelopes = asked.get("target"), asked.get("envelopes", [asked.get("envelope")])
        if not isinstance(target, dict) or not isinstance(envelopes, list):
            raise BadInput('a command is {"target": {...}, "envelopes": [...]}')
        return Json(await asyncio.to_thread(self._fleet.command, _by(request), target, envelopes), 202)

    def command_results(self, command: Number) -> Response:
        """What each device answered."""
        return Json(self._fleet.command_results(command))

    def audit(
        self,
        before: Annotated[int, Query(ge=0, le=MOST_NUMBER, description="`next` of the page before")] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_DEVICES)] = 100,
    ) -> Response:
        """Who did what, the newest first."""
        return Json(self._fleet.audited(before, limit))

    async def create_token(self, request: Request) -> Response:
        """Make a token, shown in this answer and never again."""
        asked = await self._object(request)
        name, role, device_id = (str(asked.get(key) or "") for key in ("name", "role", "device_id"))
        return Json(await asyncio.to_thread(self._tokens.create, _by(request), name, role, device_id), 201)

    def tokens(self) -> Response:
        """Names and roles of the tokens."""
        return Json({"tokens": self._tokens.all()})

    def revoke_token(self, request: Request, name: str) -> Response:
        """Let a token open nothing any more."""
        self._tokens.revoke(_by(request), name)
        return Json({"name": name, "revoked": True})

    def agreement(self) -> Response:
        """How often second opinions agree, by model and version."""
        return Json({"agreement": self._samples.agreement()})

    async def events(self) -> Response:
        """Server-sent events: `{"changed": [...]}`."""
        return StreamingResponse(
            self._changes.watch(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _object(self, request: Request) -> dict[str, Any]:
        """The JSON object that a request carries; raises BadInput, TooLarge."""
        async with self._bodies.of(request) as body:
            try:
                found = orjson.loads(body)
            except ValueError as error:
                msg = f"the body is no JSON: {error}"
                raise BadInput(msg) from error
        if not isinstance(found, dict):
            raise BadInput("the body must be a JSON object")
        return found


def build(sync_door: SyncDoor, door: FleetDoor) -> openapi.App:
    """The application; `/v1/sync` knows its callers itself, everything else is to stand behind a `FleetGate`."""
    app = openapi.App(
        title="Edge appliance: the fleet",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/fleet/openapi.json",
    )
    add_errors(app)
    app.post(sync.PATH, **openapi.answers(403, 413, 415, 503))(sync_door.exchange)
    device, campaign = "/v1/fleet/devices/{device_id}", "/v1/fleet/campaigns/{campaign}"
    routes: dict[str, dict[str, Callable[..., Any]]] = {
        "/v1/fleet/ready": {"GET": door.ready},
        "/v1/fleet/devices": {"GET": door.devices},
        device: {"GET": door.device, "PATCH": door.change, "DELETE": door.retire},
        "/v1/fleet/campaigns": {"GET": door.campaigns, "POST": door.begin},
        campaign: {"GET": door.campaign},
        f"{campaign}/pause": {"POST": door.pause},
        f"{campaign}/resume": {"POST": door.resume},
        f"{campaign}/abort": {"POST": door.abort},
        "/v1/fleet/commands": {"POST": door.command},
        "/v1/fleet/commands/{command}": {"GET": door.command_results},
        "/v1/fleet/audit": {"GET": door.audit},
        "/v1/fleet/tokens": {"GET": door.tokens, "POST": door.create_token},
        "/v1/fleet/tokens/{name}": {"DELETE": door.revoke_token},
        "/v1/fleet/agreement": {"GET": door.agreement},
    }
    for path, verbs in routes.items():
        for verb, answer in verbs.items():
            app.api_route(path, methods=[verb], **openapi.answers(404, 503))(answer)
    app.get("/v1/fleet/events", include_in_schema=False)(door.events)

    async def page(request: Request) -> Response:
        return FileResponse(_WEB / PAGE[request.scope["path"]], headers=PAGE_HEADERS)

    for path in PAGE:
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(page)
    return app


def _by(request: Request) -> str:
    return str(request.scope["caller"].name)


def _unpacked(body: bytes) -> bytes:
    """A body without its compression, which may not hide more than a batch may be; raises ValueError, TooLarge."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(body) as reader:
            content = reader.read(sync.MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return _bounded(content)


def _bounded(content: bytes) -> bytes:
    if len(content) > sync.MOST_BYTES:
        msg = f"the batch is over {sync.MOST_BYTES} bytes before compression: send fewer items"
        raise TooLarge(msg)
    return content
