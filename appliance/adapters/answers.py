"""Answers of the HTTP door that are the same on every path: JSON, and errors in one form.

Every error of every path is `{"error": "one sentence"}`; the classes of `models.errors` decide the status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from models.errors import (
    ApplianceError,
    BadInput,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InsufficientMemory,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from models.spec import Payload

STATUS: Mapping[type[ApplianceError], int] = {
    BadInput: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    Conflict: 409,
    TooLarge: 413,
    Overloaded: 429,
    DeadlineExceeded: 504,
    InsufficientMemory: 507,
    Unavailable: 503,
}
"""Most derived class first; every other error is the appliance's own: 500."""

REQUEST_ID, LONGEST_ID = b"x-request-id", 100
"""The header by which a caller knows its answers again, and how many bytes of it are given back."""
JOINED_BYTES = 64 * 1024
"""What is no larger is cheaper to copy than to hand on by itself."""
_LONGEST_ERROR = 1000
_LONGEST_QUOTE = 100
"""Characters."""

_QUERY = {
    "deadline_ms": "a number of milliseconds above 0",
    "priority": "a whole number from 1 (most urgent) to 10",
    "source": "a name of 100 characters or fewer",
    "dry_run": "true or false",
    "escalate": "a `wait`, or left out",
}
"""What the query of a request may say."""

_CHALLENGES = ('Bearer realm="appliance"', 'Basic realm="appliance", charset="UTF-8"')
"""A browser answers to the second: whoever opens the status page is asked for a token. Chromium reads no further than
the first challenge of a header, so each has one of its own."""


class Json(JSONResponse):
    """JSON by orjson."""

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - the base class's signature
        """Bytes of `content`."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def refusal(error: Exception) -> Json:
    """The answer to one of our errors."""
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, Unavailable):
        headers["retry-after"] = f"{max(1, math.ceil(error.retry_after_s))}"
    figures = {}
    if isinstance(error, InsufficientMemory):
        figures = {
            "need_bytes": error.need_bytes,
            "have_bytes": error.have_bytes,
            "would_evict": list(error.would_evict),
        }
    sentence = str(error)
    # It may quote names that a caller sent, which may be as long as a body.
    shortened = sentence if len(sentence) <= _LONGEST_ERROR else f"{sentence[:_LONGEST_ERROR]} ..."
    answer = Json({"error": shortened, **figures}, status, headers)
    if isinstance(error, Unauthenticated):
        for challenge in _CHALLENGES:
            answer.headers.append("www-authenticate", challenge)
    return answer


class Parts(Response):
    """A body in parts: large tensors are not copied behind the JSON before them, small ones are sent with it."""

    def __init__(self, parts: Sequence[Payload], headers: list[tuple[bytes, bytes]]) -> None:
        """Answer 200 with `parts`, borrowed until they are sent, and `headers` besides their length."""
        self.status_code, self.background = 200, None
        size_bytes = sum(map(len, parts))
        self.parts = parts if size_bytes > JOINED_BYTES else [b"".join(parts)]
        self.raw_headers = [*headers, (b"content-length", b"%d" % size_bytes)]

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self.parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": self.parts[-1]})


def request_id(known: Mapping[bytes, bytes]) -> str:
    """What the caller calls this request, by its headers; empty where it does not, or uses too many words."""
    said = known.get(REQUEST_ID, b"")
    return said.decode("latin-1") if len(said) <= LONGEST_ID else ""


def answer_to(request: Request, error: BaseException) -> tuple[Response, BaseException | None]:
    """The answer to any exception, and the exception again where it is a fault of ours, to be logged."""
    response, fault = _answer_to(request, error)
    if said := request_id(request.scope.get("known", {})):
        response.raw_headers.append((REQUEST_ID, said.encode("latin-1")))
    return response, fault


def _answer_to(request: Request, error: BaseException) -> tuple[Response, BaseException | None]:
    if isinstance(error, ApplianceError):
        return refusal(error), None
    if isinstance(error, ClientDisconnect):
        return Json({"error": "the client left before it was answered"}, 400), None
    if isinstance(error, HTTPException):
        return _routing(request, error), None
    if isinstance(error, RequestValidationError):
        return _validation(error), None
    return Json({"error": f"a fault of the appliance, see its log: {type(error).__name__}"}, 500), error


def add_errors(app: FastAPI) -> None:
    """Have `app` answer every exception in our form."""

    async def answer(request: Request, error: Exception) -> Response:
        return answer_to(request, error)[0]

    # The framework hands a fault of ours to the server's log by itself.
    for kind in (Exception, ApplianceError, ClientDisconnect, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def _routing(request: Request, error: HTTPException) -> Response:
    sentence = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        sentence = "there is nothing at this path: /openapi.json lists every path"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another verb")
        sentence = f"this path does not take {request.method[:20]}: use {allowed}"
    return Json({"error": sentence}, error.status_code, error.headers)


def _validation(error: RequestValidationError) -> Response:
    first = error.errors()[0]
    name = str(first["loc"][-1])
    rule = f"it must be {_QUERY[name]}" if name in _QUERY else first["msg"]
    return Json({"error": f"`{name}` is {str(first['input'])[:_LONGEST_QUOTE]!r}: {rule}"}, 400)
