"""The HTTP door: Open Inference Protocol v2, pictures, status, metrics. Sees only `service`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, TypeVar

import orjson
import structlog
from fastapi import FastAPI, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance import __version__
from appliance.adapters import about, access, inference, oip, openapi
from appliance.adapters.answers import Json, Parts, add_errors, answer_to, request_id
from appliance.adapters.bodies import Bodies
from appliance.adapters.live import Live, add_page
from appliance.adapters.metrics import Metrics
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.faults import Injection
from appliance.service import InferRequest, ModelInfo, Service
from models import schema
from models.errors import BadInput, NotReady
from models.spec import Tensor, pack_bytes

T = TypeVar("T")

log = structlog.get_logger()


class Door:
    """The routes over one service."""

    def __init__(self, service: Service, metrics: Metrics, bodies: Bodies, now: Callable[[], float]) -> None:
        """Answer for `service`; `metrics` are those shown; `bodies` reads what requests carry; `now` is wall time."""
        self._service, self._metrics, self._bodies, self._now = service, metrics, bodies, now

    async def server_metadata(self) -> Response:
        """What this server is and speaks."""
        return Json({"name": "edge-appliance", "version": __version__, "extensions": list(about.EXTENSIONS)})

    async def live(self) -> Response:
        """200 while the event loop turns."""
        return Json({"live": True})

    async def ready(self) -> Response:
        """200 when every model has answered a golden vector rightly."""
        unready = [f"{info.name}: {info.reason}" for info in self._service.models() if info.wanted and not info.ready]
        if unready:
            raise NotReady("; ".join(unready))
        return Json({"ready": True})

    async def repository_index(self, request: Request) -> Response:
        """Every model with its state; the body may ask for `{"ready": true}` only."""
        async with self._bodies.of(request) as body:
            only_ready = about.only_ready(body)
        return Json(
            [
                {"name": one.name, "version": one.version, "state": one.state.value, "reason": one.reason}
                for one in self._service.repository()
                if one.state.value == "READY" or not only_ready
            ]
        )

    async def load(
        self,
        request: Request,
        model: str,
        dry_run: Annotated[bool, Query(description="only tell whether it would fit")] = False,
    ) -> Response:
        """Load a model that is known here; 507 with the figures when the memory budget would not hold it."""
        async with self._bodies.of(request) as body:
            about.check_repository_order(body)
        admission = await self._service.load(model, dry_run=dry_run)
        _log_order(request, "load", model, dry_run=dry_run, fits=admission.fits)
        return Json(about.admission(admission))

    async def unload(self, request: Request, model: str) -> Response:
        """Unload a model when it has answered what it holds."""
        async with self._bodies.of(request) as body:
            about.check_repository_order(body)
        await self._service.unload(model)
        _log_order(request, "unload", model)
        return Json({})

    async def metadata(self, model: str, version: str | None = None) -> Response:
        """Inputs and outputs of a model."""
        return Json(about.metadata(_loaded(self._service.model(model, version))))

    async def config(self, model: str, version: str | None = None) -> Response:
        """The model in the form of Triton's configuration."""
        return Json(about.config(_loaded(self._service.model(model, version))))

    async def statistics(self, model: str, version: str | None = None) -> Response:
        """What became of a model's requests and where the time went, in the form of Triton's statistics."""
        info = self._service.model(model, version)
        return Json({"model_stats": [self._metrics.statistics(info.name, info.version)]})

    async def all_statistics(self) -> Response:
        """The statistics of every model."""
        return Json(
            {"model_stats": [self._metrics.statistics(info.name, info.version) for info in self._service.models()]}
        )

    async def model_ready(self, model: str, version: str | None = None) -> Response:
        """200 when this model has proven itself."""
        info = self._service.model(model, version)
        if not info.ready:
            msg = f"{info.name}: {info.reason}"
            raise NotReady(msg)
        return Json({"name": info.name, "ready": True})

    async def infer(self, request: Request, model: str, version: str | None = None) -> Response:
        """Tensors in, tensors out; JSON or the binary extension."""
        spec = self._service.spec(model, version)
        known = request.scope["known"]
        header_length = inference.header_length_in(known)
        if header_length == "0":  # a raw body: only the model's own tensors say what it is
            _loaded(self._service.model(model, version))
        async with self._bodies.of(request) as body:
            parsed = await _off_loop(oip.json_bytes(body, header_length), oip.parse, body, header_length, spec)
            wanted = inference.wanted_by(parsed, known, model, version)
            response = await _unless_gone(request, self._service.infer(wanted))
        answer: Parts = await _off_loop(
            inference.json_bytes_of(parsed, response), inference.answer_of, parsed, known, wanted, response
        )
        return answer

    async def predict(
        self,
        request: Request,
        model: str,
        deadline_ms: Annotated[float | None, Query(gt=0, description="answer by then or refuse")] = None,
        priority: Annotated[int, Query(ge=1, le=10, description="1 is most urgent")] = DEFAULT_PRIORITY,
        source: Annotated[str, Query(max_length=100, description="camera id: its latest frame wins")] = "",
        escalate: Annotated[Literal["wait"] | None, Query(description="wait for a second opinion on doubts")] = None,
    ) -> Response:
        """A JPEG or PNG in (raw body or multipart form), what was read out."""
        self._service.model(model)
        async with self._bodies.picture_of(request) as picture:
            wanted = InferRequest(
                model=model,
                tensors=[Tensor("image", "BYTES", (1,), pack_bytes([picture]))],
                deadline_ms=deadline_ms,
                priority=priority,
                source=source,
                id=request_id(request.scope["known"]),
                trace=inference.trace_in(request.scope["known"]),
                escalate=escalate is not None,
            )
            answer = Json(await _unless_gone(request, self._service.predict(wanted)))
            answer.raw_headers += inference.echoed(wanted, request.scope["known"])
            return answer

    async def inject(self, request: Request) -> Response:
        """Break something on purpose, where the operator allows it: `{"fault", "model", "amount", "for_s"}`."""
        async with self._bodies.of(request) as body:
            try:
                injection = schema.load(Injection, orjson.loads(body))
            except ValueError as error:
                msg = f"the body is no fault to inject: {error}"
                raise BadInput(msg) from error
        self._service.inject(injection)
        log.info("fault_ordered", fault=injection.fault, model=injection.model, by=request.scope["caller"].name)
        return Json({"fault": injection.fault, "model": injection.model, "for_s": injection.for_s})

    async def order(self, request: Request) -> Response:
        """Give the device an order, as by MQTT; an administrator's token stands in for the signature."""
        async with self._bodies.of(request) as body:
            result = await self._service.order(bytes(body), now=self._now(), authorized=True)
        log.info("order", id=result.id, status=result.status, reason=result.reason or None)
        return Json(schema.dump(result))

    async def order_result(self, order_id: str) -> Response:
        """The answer that an order got."""
        return Json(schema.dump(await self._service.result(order_id)))

    async def deployments(self) -> Response:
        """Attempts to move to another version, the newest first, with the figures of every verdict."""
        return Json({"deployments": self._service.deployments()})

    async def recorder(self) -> Response:
        """The last requests, the newest first: shapes, times, names and hashes, never what they carried."""
        return Json({"requests": self._service.flights()})

    async def status(self) -> Response:
        """Everything an operator wants to know at a glance."""
        return Json(self._service.status())

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)


def build(
    service: Service, metrics: Metrics, live: Live, bodies: Bodies, now: Callable[[], float] = time.time
) -> ASGIApp:
    """The application over `service`, to stand behind an `access.Gate`; `now` tells by when orders expire."""
    app = openapi.App(
        title="Edge appliance",
        version=__version__,
        docs_url=None,  # its page loads scripts from outside, which an appliance may not
        redoc_url=None,
    )
    add_errors(app)
    door = Door(service, metrics, bodies, now)
    get, post = app.get, app.post
    get("/v2", **openapi.answers())(door.server_metadata)
    get("/v2/", include_in_schema=False)(door.server_metadata)  # as the protocol's own description spells it
    get("/v2/health/live", **openapi.answers())(door.live)
    get("/v2/health/ready", **openapi.answers(503))(door.ready)
    post("/v2/repository/index", **openapi.answers(413, 415), openapi_extra=openapi.json_body(openapi.INDEX_SCHEMA))(
        door.repository_index
    )
    for verb, order in (("load", door.load), ("unload", door.unload)):
        post(
            f"/v2/repository/models/{{model}}/{verb}",
            **openapi.answers(404, 413, 415, 503, 507),
            openapi_extra=openapi.json_body(openapi.ORDER_SCHEMA),
        )(order)
    get("/v2/models/stats", **openapi.answers())(door.all_statistics)
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        get(model, **openapi.answers(404, 503))(door.metadata)
        get(f"{model}/ready", **openapi.answers(404, 503))(door.model_ready)
        get(f"{model}/config", **openapi.answers(404, 503))(door.config)
        get(f"{model}/stats", **openapi.answers(404))(door.statistics)
        post(
            f"{model}/infer",
            **openapi.answers(404, 413, 415, 500, 503, 504, 507, content={**openapi.JSON, **openapi.BINARY}),
            openapi_extra=openapi.json_body(openapi.INFER_SCHEMA, required=True, **openapi.BINARY),
        )(door.infer)
    post(
        "/v1/models/{model}/predict",
        **openapi.answers(404, 413, 415, 500, 503, 504, 507),
        openapi_extra=openapi.PICTURE_BODY,
    )(door.predict)
    add_page(app, live)
    get("/v1/status", **openapi.answers())(door.status)
    get("/v1/recorder", **openapi.answers())(door.recorder)
    post(
        "/v1/faults",
        **openapi.answers(404, 413, 415, 503),
        openapi_extra=openapi.json_body(openapi.FAULT_SCHEMA, required=True),
    )(door.inject)
    post(
        "/v1/commands",
        **openapi.answers(413, 415),
        openapi_extra=openapi.json_body(openapi.COMMAND_SCHEMA, required=True),
    )(door.order)
    get("/v1/commands/{order_id}", **openapi.answers(404, 503))(door.order_result)
    get("/v1/deployments", **openapi.answers())(door.deployments)
    get("/metrics", **openapi.answers(content=openapi.TEXT))(door.metrics)
    _refuse_undecided(app)

    async def straight_or_routed(scope: Scope, receive: Receive, send: Send) -> None:
        """Inference goes straight to the door: what a framework does around it costs more than a small model."""
        found = inference.INFER.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            await app(scope, receive, send)
            return
        request = Request(scope, receive)
        fault: BaseException | None = None
        try:
            response = await door.infer(request, *found.groups())
        except Exception as error:  # whatever it is, it has an answer
            response, fault = answer_to(request, error)
        await response(scope, receive, send)
        if fault:
            raise fault  # for the server's log

    return straight_or_routed


def _refuse_undecided(app: FastAPI) -> None:
    """A route that changes something and has no role decided in `access` would be open to all: not even the start."""
    for route in app.routes:
        if not isinstance(route, Route) or not (route.methods or set()) - access.READING:
            continue
        if access.decided(route.path) is None:
            msg = f"decide in adapters/access.py which role {route.path} needs"
            raise AssertionError(msg)


def _log_order(request: Request, order: str, model: str, **more: object) -> None:
    """Who changed what is kept; never the token that showed it."""
    log.info("repository_order", order=order, model=model[:100], by=request.scope["caller"].name, **more)


def _loaded(info: ModelInfo) -> ModelInfo:
    if not info.spec.inputs and not info.spec.outputs:
        _state, failed, why = info.reason.partition(": ")
        if failed:
            msg = f"model {info.name!r} cannot be loaded: {why}"
            raise NotReady(msg)
        msg = f"model {info.name!r} has not been loaded yet, so its tensors are not known: retry shortly"
        raise NotReady(msg)
    return info


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is given up, and leaves the queue, when the server says that its client has gone."""
    connection = request.scope.get("connection")
    if connection is None:
        return await work
    task, gone = asyncio.current_task(), False

    def give_up() -> None:
        nonlocal gone
        if task:
            gone = task.cancel()

    connection.when_gone(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            raise ClientDisconnect from None
        raise
    finally:
        connection.when_gone(None)


async def _off_loop(size_bytes: int, call: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - what `call` returns
    return await asyncio.to_thread(call, *given) if size_bytes > inference.OFF_LOOP_BYTES else call(*given)
