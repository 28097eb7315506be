"""The HTTP door: Open Inference Protocol v2, pictures, status, metrics. Sees only `service`.

Every error of every path is `{"error": "one sentence"}`; the classes of `models.errors` decide the status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from appliance import __version__
from appliance.adapters import metrics, oip
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.faults import Injection
from appliance.service import InferRequest, ModelInfo, Origin, Service
from models import schema
from models.errors import (
    ApplianceError,
    BadInput,
    DeadlineExceeded,
    NotFound,
    NotReady,
    Overloaded,
    TooLarge,
    Unavailable,
)
from models.spec import Tensor, pack_bytes

T = TypeVar("T")

STATUS: Mapping[type[ApplianceError], int] = {
    BadInput: 400,
    NotFound: 404,
    TooLarge: 413,
    Overloaded: 429,
    DeadlineExceeded: 504,
    Unavailable: 503,
}
"""Most derived class first; every other error is the appliance's own: 500."""

_PAGE = Path(__file__).parent.parent / "web" / "index.html"

_LONGEST_ERROR = 1000
_LONGEST_QUOTE = 100
"""Characters."""

_OFF_LOOP_BYTES = 64 * 1024
"""JSON and tensors larger than this are read and written in a thread, not on the event loop."""

_QUERY = {
    "deadline_ms": "a number of milliseconds above 0",
    "priority": "a whole number from 1 (most urgent) to 10",
    "source": "a name of 100 characters or fewer",
}
"""What the query of a predict request may say."""

_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_PICTURE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/jpeg": {"schema": {"type": "string", "format": "binary"}},
            "image/png": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"image": {"type": "string", "format": "binary"}}}
            },
        },
    }
}
_JSON_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
_INFER_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}, **_BINARY}}
}


class Door:
    """The routes over one service."""

    def __init__(self, service: Service, registry: CollectorRegistry, *, body_limit_bytes: int) -> None:
        """Answer for `service`; `registry` holds the metrics shown; larger bodies are refused."""
        self._service, self._registry, self._body_limit_bytes = service, registry, body_limit_bytes

    async def server_metadata(self) -> Response:
        """What this server is and speaks."""
        return Json({"name": "edge-appliance", "version": __version__, "extensions": list(oip.EXTENSIONS)})

    async def live(self) -> Response:
        """200 while the event loop turns."""
        return Json({"live": True})

    async def ready(self) -> Response:
        """200 when every model has answered a golden vector rightly."""
        unready = [f"{info.name}: {info.reason}" for info in self._service.models() if not info.ready]
        if unready:
            raise NotReady("; ".join(unready))
        return Json({"ready": True})

    async def repository_index(self, request: Request) -> Response:
        """Every model with its state; the body may ask for `{"ready": true}` only."""
        only_ready = oip.only_ready(await _body(request, self._body_limit_bytes))
        return Json(
            [
                {
                    "name": info.name,
                    "version": info.version,
                    "state": "READY" if info.ready else "UNAVAILABLE",
                    "reason": info.reason,
                }
                for info in self._service.models()
                if info.ready or not only_ready
            ]
        )

    async def metadata(self, model: str, version: str | None = None) -> Response:
        """Inputs and outputs of a model."""
        return Json(oip.metadata(_loaded(self._service.model(model, version))))

    async def model_ready(self, model: str, version: str | None = None) -> Response:
        """200 when this model has proven itself."""
        info = self._service.model(model, version)
        if not info.ready:
            msg = f"{info.name}: {info.reason}"
            raise NotReady(msg)
        return Json({"name": info.name, "ready": True})

    async def infer(self, request: Request, model: str, version: str | None = None) -> Response:
        """Tensors in, tensors out; JSON or the binary extension."""
        info = self._service.model(model, version)
        header_length = request.headers.get(oip.HEADER)
        if header_length == "0":  # a raw body: only the model's own tensors say what it is
            _loaded(info)
        body = await _body(request, self._body_limit_bytes)
        parsed = await _off_loop(len(body), lambda: oip.parse(body, header_length, info.spec))
        wanted = InferRequest(
            model=model,
            version=version,
            tensors=parsed.tensors,
            outputs=parsed.outputs,
            deadline_ms=parsed.timeout_us / 1e3 if parsed.timeout_us else None,
            priority=parsed.priority or DEFAULT_PRIORITY,
        )
        response = await _unless_gone(request, self._service.infer(wanted))
        origin = response.origin
        head = {
            "model_name": origin.model,
            "model_version": origin.version,
            "parameters": {
                "runtime": origin.runtime,
                "precision": origin.precision,
                "trust": origin.trust,
                "degraded": origin.degraded or "",
            },
        }
        size = sum(memoryview(tensor.data).nbytes for tensor in response.tensors)
        content, json_length = await _off_loop(size, lambda: oip.render(parsed, head, response.tensors))
        headers = _origin_headers(origin)
        if json_length is None:
            return Response(content, headers=headers, media_type="application/json")
        headers[oip.HEADER] = str(json_length)
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def predict(
        self,
        request: Request,
        model: str,
        deadline_ms: Annotated[float | None, Query(gt=0, description="answer by then or refuse")] = None,
        priority: Annotated[int, Query(ge=1, le=10, description="1 is most urgent")] = DEFAULT_PRIORITY,
        source: Annotated[str, Query(max_length=100, description="camera id: its latest frame wins")] = "",
    ) -> Response:
        """A JPEG or PNG in (raw body or multipart form), what was read out."""
        self._service.model(model)
        picture = await _picture(request, self._body_limit_bytes)
        wanted = InferRequest(
            model=model,
            tensors=[Tensor("image", "BYTES", (1,), pack_bytes([picture]))],
            deadline_ms=deadline_ms,
            priority=priority,
            source=source,
        )
        return Json(await _unless_gone(request, self._service.predict(wanted)))

    async def inject(self, request: Request) -> Response:
        """Break something on purpose, where the operator allows it: `{"fault", "model", "amount", "for_s"}`."""
        body = await _body(request, self._body_limit_bytes)
        try:
            injection = schema.load(Injection, orjson.loads(body))
        except ValueError as error:
            msg = f"the body is no fault to inject: {error}"
            raise BadInput(msg) from error
        self._service.inject(injection)
        return Json({"fault": injection.fault, "model": injection.model, "for_s": injection.for_s})

    async def page(self) -> Response:
        """The status page."""
        return FileResponse(_PAGE)

    async def status(self) -> Response:
        """Everything an operator wants to know at a glance."""
        return Json(self._service.status())

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(metrics.text_of(self._registry), media_type=CONTENT_TYPE_LATEST)


def build(service: Service, registry: CollectorRegistry, *, body_limit_bytes: int) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(
        title="Edge appliance",
        version=__version__,
        docs_url=None,  # its page loads scripts from outside, which an appliance may not
        redoc_url=None,
    )
    _add_errors(app)
    door = Door(service, registry, body_limit_bytes=body_limit_bytes)
    get, post = app.get, app.post
    get("/v2")(door.server_metadata)
    get("/v2/health/live")(door.live)
    get("/v2/health/ready")(door.ready)
    post("/v2/repository/index")(door.repository_index)
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        get(model)(door.metadata)
        get(f"{model}/ready")(door.model_ready)
        post(f"{model}/infer", openapi_extra=_INFER_BODY)(door.infer)
    post("/v1/models/{model}/predict", openapi_extra=_PICTURE_BODY)(door.predict)
    app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)(door.page)
    get("/v1/status")(door.status)
    post("/v1/faults", openapi_extra=_JSON_BODY)(door.inject)
    get("/metrics")(door.metrics)
    return app


class Json(Response):
    """JSON by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - the base class's signature
        """Bytes of `content`."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _shortened(sentence: str) -> str:
    """A sentence may quote names that a caller sent, which may be as long as a body."""
    return sentence if len(sentence) <= _LONGEST_ERROR else f"{sentence[:_LONGEST_ERROR]} ..."


def _loaded(info: ModelInfo) -> ModelInfo:
    if not info.spec.inputs and not info.spec.outputs:
        _state, failed, why = info.reason.partition(": ")
        if failed:
            msg = f"model {info.name!r} cannot be loaded: {why}"
            raise NotReady(msg)
        msg = f"model {info.name!r} has not been loaded yet, so its tensors are not known: retry shortly"
        raise NotReady(msg)
    return info


def _add_errors(app: FastAPI) -> None:
    async def ours(_request: Request, error: Exception) -> Response:
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
        headers = {"retry-after": f"{max(1, round(error.retry_after_s))}"} if isinstance(error, Unavailable) else {}
        return Json({"error": _shortened(str(error))}, status, headers)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for that class
        sentence = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND:
            sentence = "there is nothing at this path: /openapi.json lists every path"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "another verb")
            sentence = f"this path does not take {request.method[:20]}: use {allowed}"
        return Json({"error": sentence}, error.status_code, error.headers)

    async def validation(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for that class
        first = error.errors()[0]
        name = str(first["loc"][-1])
        rule = f"it must be {_QUERY[name]}" if name in _QUERY else first["msg"]
        return Json({"error": f"`{name}` is {str(first['input'])[:_LONGEST_QUOTE]!r}: {rule}"}, 400)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Json({"error": "the client left before it was answered"}, 400)

    async def fault(_request: Request, error: Exception) -> Response:
        return Json({"error": f"a fault of the appliance, see its log: {type(error).__name__}"}, 500)

    app.add_exception_handler(Exception, fault)  # the server logs it with its stack
    app.add_exception_handler(ApplianceError, ours)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(RequestValidationError, validation)


async def _body(request: Request, limit_bytes: int) -> bytes:
    """The whole body, never more than `limit_bytes`, whether or not its length was announced."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "compressed bodies are not accepted: send the body as it is")
    too_large = TooLarge(f"the body is over the limit of {_mebibytes(limit_bytes)}: send a smaller one")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise too_large
    chunks: list[bytes] = []
    received_bytes = 0
    async for chunk in request.stream():
        received_bytes += len(chunk)
        if received_bytes > limit_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _mebibytes(size_bytes: int) -> str:
    return f"{round(size_bytes / 2**20, 2):g} MiB"


async def _picture(request: Request, limit_bytes: int) -> bytes:
    body = await _body(request, limit_bytes)
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):

        async def once() -> AsyncGenerator[bytes, None]:
            yield body

        try:
            form = await MultiPartParser(request.headers, once(), max_files=1, max_fields=8).parse()
        except (MultiPartException, KeyError, ValueError) as error:
            msg = f"the form cannot be read: {error}"
            raise BadInput(msg) from error
        files = [value for value in form.values() if not isinstance(value, str)]
        body = await files[0].read() if files else b""
        await form.close()
    if not body:
        raise BadInput("the request carries no picture: send a JPEG or PNG as the body or as a form file")
    return body


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is given up, and leaves the queue, when its client hangs up first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        # Behind a whole body only one message comes: that the client has gone.
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _off_loop(size_bytes: int, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what `call` returns
    return await asyncio.to_thread(call) if size_bytes > _OFF_LOOP_BYTES else call()


def _origin_headers(origin: Origin) -> dict[str, str]:
    headers = {
        "appliance-runtime": origin.runtime,
        "appliance-precision": origin.precision,
        "appliance-version": origin.version,
        "appliance-trust": origin.trust,
    }
    return headers | ({"appliance-degraded": origin.degraded} if origin.degraded else {})
