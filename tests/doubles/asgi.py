"""The real HTTP door behind its gate over the double of the service, asked in memory."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from appliance import settings
from appliance.adapters import http
from appliance.adapters.access import Gate, Rules
from appliance.adapters.bodies import Bodies
from appliance.adapters.live import Live
from appliance.adapters.metrics import Metrics
from appliance.adapters.tokens import TokenFile
from appliance.core.rates import Rate, Rates
from doubles.service import MemoryService

INPUT = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
ECHO, READER, PREDICT = "/v2/models/echo/infer", "/v2/models/reader/infer", "/v1/models/reader/predict"
LIMIT_BYTES = 200_000
ALL_BYTES = 500_000
ON_LOOPBACK = Rules(anonymous=True, hosts=settings.LOOPBACK)
UNBOUND = Rate(0, 10**6)


def door(
    service: MemoryService,
    rules: Rules = ON_LOOPBACK,
    tokens: TokenFile | None = None,
    *,
    client: Rate = UNBOUND,
    everyone: Rate = UNBOUND,
) -> ASGIApp:
    """The application over `service` as the daemon puts it together."""
    bodies = Bodies(each_bytes=LIMIT_BYTES, all_bytes=ALL_BYTES)
    app = http.build(service, Metrics(service), Live(service), bodies)  # type: ignore[arg-type] # its double
    tokens = tokens or TokenFile(Path(tempfile.gettempdir()) / "no such folder")
    return Gate(app, rules, tokens, Rates(client=client, everyone=everyone))


def asked(app: ASGIApp, method: str, path: str, **request: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own
    """One request to `app` from this machine."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


def ask(method: str, path: str, service: MemoryService | None = None, **request: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own arguments
    """One request to a fresh application over `service`."""
    return asked(door(service or MemoryService()), method, path, **request)


def error_of(response: httpx.Response) -> str:
    """The sentence of an error, whose form is checked."""
    assert response.headers["content-type"] == "application/json"
    document: Mapping[str, Any] = response.json()
    assert document.keys() == {"error"}
    sentence = document["error"]
    assert isinstance(sentence, str)
    assert sentence
    return sentence
