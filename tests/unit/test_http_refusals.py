"""The HTTP door in memory: one form of error on every path, with the right status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from doubles.asgi import ECHO, INPUT, LIMIT_BYTES, PREDICT, ask, door, error_of
from doubles.service import MemoryService

from models.errors import (
    BundleError,
    DeadlineExceeded,
    ModelError,
    NotReady,
    Overloaded,
    TooLarge,
    WorkerLost,
)

pytestmark = pytest.mark.unit


async def streamed(size_bytes: int) -> AsyncIterator[bytes]:
    """A body whose length is not announced."""
    for _ in range(size_bytes // 1000):
        yield bytes(1000)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nowhere"),
        ("GET", "/v2/nowhere"),
        ("POST", "/v2/models"),
        ("GET", "/v2/models/missing"),
        ("GET", "/v2/models/missing/ready"),
        ("POST", "/v2/models/missing/infer"),
        ("GET", "/v2/models/echo/versions/9"),
        ("GET", "/v2/models/echo/versions/9/ready"),
        ("POST", "/v2/models/echo/versions/9/infer"),
        ("POST", "/v1/models/missing/predict"),
        ("GET", "/v2/models/a%2Fb"),
        ("GET", "/docs"),
    ],
)
def test_what_does_not_exist_is_404(method: str, path: str) -> None:
    response = ask(method, path)
    assert response.status_code == 404
    error_of(response)


def test_an_unknown_path_is_answered_with_where_the_known_ones_are() -> None:
    sentence = error_of(ask("GET", "/v2/nowhere"))
    assert sentence == "there is nothing at this path: /openapi.json lists every path"


def test_an_unknown_model_is_named() -> None:
    assert "'missing'" in error_of(ask("GET", "/v2/models/missing"))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v2", "GET"),
        ("DELETE", "/v2/health/live", "GET"),
        ("GET", ECHO, "POST"),
        ("PUT", PREDICT, "POST"),
        ("GET", "/v2/repository/index", "POST"),
        ("OPTIONS", "/v1/status", "GET"),
    ],
)
def test_a_wrong_verb_is_405_and_says_which_is_right(method: str, path: str, allowed: str) -> None:
    response = ask(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert error_of(response) == f"this path does not take {method}: use {allowed}"


@pytest.mark.parametrize(
    ("path", "request_", "sentence"),
    [
        (ECHO, {"content": b"{"}, "the request is not JSON"),
        (ECHO, {"content": b""}, "the request is not JSON"),
        (ECHO, {"content": b"[" * 100_000}, "the request is not JSON"),
        (ECHO, {"json": {"inputs": [{**INPUT, "name": "z"}]}}, "inputs are ['z'], but this model takes ['x']"),
        (ECHO, {"json": {"inputs": [{**INPUT, "data": ["a"] * 4}]}}, "values that are no float32"),
        (ECHO, {"json": {"inputs": [INPUT], "outputs": [{"name": "q"}]}}, "there is no output"),
        (ECHO, {"content": b"{}", "headers": {"inference-header-content-length": "-1"}}, "must be the number of bytes"),
        (ECHO, {"content": bytes(7), "headers": {"inference-header-content-length": "0"}}, "no multiple of the 8"),
        ("/v2/repository/index", {"content": b"ready"}, "the request is not JSON"),
        (PREDICT, {"content": b""}, "the request carries no picture"),
        (PREDICT, {"data": {"image": "abc"}, "files": {"a": b""}}, "the request carries no picture"),
        (PREDICT, {"files": [("a", b"1"), ("b", b"2")]}, "the form cannot be read: Too many files"),
        (PREDICT, {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "the form cannot be read"),
        (
            PREDICT,
            {"content": b"--A", "headers": {"content-type": "multipart/form-data; boundary=B"}},
            "the form cannot be read",
        ),
        ("/v1/models/echo/predict", {"content": b"abc"}, "raw tensors, not pictures: use POST /v2/models/echo/infer"),
    ],
)
def test_a_request_that_cannot_be_used_is_400_with_the_reason(
    path: str, request_: dict[str, Any], sentence: str
) -> None:
    response = ask("POST", path, **request_)
    assert response.status_code == 400
    assert sentence in error_of(response)


@pytest.mark.parametrize(
    "query",
    [
        "priority=high",
        "priority=0",
        "priority=11",
        "priority=1.5",
        "deadline_ms=soon",
        "deadline_ms=0",
        "deadline_ms=-5",
        "deadline_ms=nan",
        f"source={'s' * 101}",
        "escalate=now",
    ],
)
def test_a_query_value_outside_its_range_is_400_and_named(query: str) -> None:
    response = ask("POST", f"{PREDICT}?{query}", content=b"abc")
    assert response.status_code == 400
    name, _, value = query.partition("=")
    assert error_of(response).startswith(f"`{name}` is {value[:100]!r}: it must be a ")


@pytest.mark.parametrize("path", [ECHO, PREDICT, "/v2/repository/index"])
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "streamed"])
def test_a_body_over_the_limit_is_413_whether_or_not_its_length_is_announced(path: str, *, announced: bool) -> None:
    response = ask("POST", path, content=bytes(LIMIT_BYTES + 1) if announced else streamed(LIMIT_BYTES + 1000))
    assert ("content-length" in response.request.headers) is announced
    assert response.status_code == 413
    assert error_of(response) == "the body is over the limit of 0.19 MiB: send a smaller one"


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "streamed"])
def test_a_body_of_just_the_limit_is_taken(*, announced: bool) -> None:
    response = ask("POST", PREDICT, content=bytes(LIMIT_BYTES) if announced else streamed(LIMIT_BYTES))
    assert response.json()["bytes"] == LIMIT_BYTES


@pytest.mark.parametrize(
    ("headers", "read_bytes"),
    [({}, LIMIT_BYTES + 1000), ({"content-length": f"{100 * LIMIT_BYTES}"}, 0)],
    ids=["streamed", "announced"],
)
def test_no_more_is_read_of_a_large_body_than_shows_that_it_is_too_large(
    headers: dict[str, str], read_bytes: int
) -> None:
    sent: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        async for chunk in streamed(100 * LIMIT_BYTES):
            sent.append(len(chunk))
            yield chunk

    assert ask("POST", ECHO, content=body(), headers=headers).status_code == 413
    assert sum(sent) == read_bytes


@pytest.mark.parametrize("path", [ECHO, PREDICT])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_body_is_415(path: str, encoding: str) -> None:
    response = ask("POST", path, content=b"abc", headers={"content-encoding": encoding})
    assert response.status_code == 415
    assert "compressed bodies are not accepted" in error_of(response)


@pytest.mark.parametrize("path", [ECHO, PREDICT])
@pytest.mark.parametrize(
    ("fault", "status", "retry"),
    [
        (Overloaded("64 requests wait already"), 429, True),
        (NotReady("it restarts"), 503, True),
        (WorkerLost("the worker died"), 503, True),
        (DeadlineExceeded("too late"), 504, True),
        (TooLarge("too many pixels"), 413, False),
        (ModelError("the model failed"), 500, False),
        (BundleError("it is damaged"), 500, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_error_of_the_service_has_its_status_and_says_when_to_retry(
    path: str, fault: Exception, status: int, *, retry: bool
) -> None:
    content = orjson.dumps({"inputs": [INPUT]})
    response = ask("POST", path, MemoryService(fault=fault), content=content)
    assert response.status_code == status
    assert error_of(response) == str(fault)
    assert ("retry-after" in response.headers) is retry
    assert int(response.headers.get("retry-after", "1")) >= 1


def test_a_fault_nobody_thought_of_is_500_in_the_same_form_and_tells_no_internals() -> None:
    response = ask("POST", PREDICT, MemoryService(fault=RuntimeError("secret path /etc/x")), content=b"abc")
    assert response.status_code == 500
    assert error_of(response) == "a fault of the appliance, see its log: RuntimeError"


def test_a_camera_that_leaves_in_the_middle_of_its_picture_is_no_fault_of_the_appliance() -> None:
    service = MemoryService()
    app = door(service)
    messages = iter([{"type": "http.request", "body": b"\xff\xd8", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:  # noqa: ANN401 - ASGI
        return next(messages)

    async def send(message: Any) -> None:  # noqa: ANN401 - ASGI
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": PREDICT,
        "raw_path": PREDICT.encode(),
        "query_string": b"",
        "headers": [(b"content-length", b"100")],
        "client": ("127.0.0.1", 1),
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
    }
    asyncio.run(app(scope, receive, send))  # raises when the fault would be logged as the appliance's own
    assert service.requests == []
