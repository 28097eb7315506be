"""The real HTTP door over the double of the service, asked in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

from appliance.adapters import http, metrics
from doubles.service import MemoryService

INPUT = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
ECHO, READER, PREDICT = "/v2/models/echo/infer", "/v2/models/reader/infer", "/v1/models/reader/predict"
LIMIT_BYTES = 200_000


def door(service: MemoryService) -> FastAPI:
    """The application over `service`."""
    return http.build(service, metrics.registry_of(service), body_limit_bytes=LIMIT_BYTES)  # type: ignore[arg-type]


def ask(method: str, path: str, service: MemoryService | None = None, **request: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own arguments
    """One request to a fresh application over `service`."""
    app = door(service or MemoryService())

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


def error_of(response: httpx.Response) -> str:
    """The sentence of an error, whose form is checked."""
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    sentence = response.json()["error"]
    assert isinstance(sentence, str)
    assert sentence
    return sentence
