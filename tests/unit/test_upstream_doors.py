"""The upstream's paths: who may do what there, and what is answered to batches that cannot be taken."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from doubles.asgi import ON_LOOPBACK, UNBOUND
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import PlainTextResponse
from support.reporting import Reporter, order

from appliance.adapters.access import Gate, Rules
from appliance.adapters.tokens import Role, TokenFile
from appliance.core.rates import Rates
from appliance.settings import Settings
from appliance.upstream import database as databases
from appliance.upstream import http
from appliance.upstream.home import Pace, home
from models import schema, sync
from models.sync import Answer, Batch

pytestmark = pytest.mark.unit

OFF_LOOPBACK = Rules(anonymous=False)
FLEET = "/v1/fleet"
WIDE, DEEP = {str(n): n for n in range(20_000)}, "[" * 1000 + "]" * 1000


class Server:
    """The upstream's application in memory, asked from outside its event loop."""

    def __init__(self, folder: Path, rules: Rules = ON_LOOPBACK) -> None:
        self.loop, self._made = asyncio.new_event_loop(), 0
        self.file, self.registry = TokenFile(folder), CollectorRegistry()
        self.admin = self.file.create("root", Role.ADMIN)
        gate = Gate(PlainTextResponse("the daemon"), rules, self.file, Rates(client=UNBOUND, everyone=UNBOUND))
        config = Settings(state_dir=folder)
        self._context = home(
            gate, config, broker=None, name="r", registry=self.registry, now=lambda: 1.8e9, ended=lambda: False
        )
        self._app = self.loop.run_until_complete(self._context.__aenter__())

    def ask(self, method: str, path: str, token: str = "", certificate: str = "", **request: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own
        return self.loop.run_until_complete(self.asked(method, path, token, certificate, **request))

    async def asked(
        self,
        method: str,
        path: str,
        token: str = "",
        certificate: str = "",
        **request: Any,  # noqa: ANN401 - httpx's own
    ) -> httpx.Response:
        async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
            await self._app({**scope, **({"client_certificate": certificate} if certificate else {})}, receive, send)

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = request.pop("headers", {}) | ({"authorization": f"Bearer {token}"} if token else {})
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers, **request)

    def token(self, role: str, device_id: str = "") -> str:
        self._made += 1
        asked = {"name": f"{role}-{self._made}", "role": role, "device_id": device_id}
        made = self.ask("POST", f"{FLEET}/tokens", self.admin, json=asked)
        assert made.status_code == 201, made.text
        return str(made.json()["token"])

    def device(self, device_id: str) -> Reporter:
        token = self.token("device", device_id)

        def send(batch: Batch) -> Answer:
            answer = self.sync(schema.dump(batch), token)
            assert answer.status_code == 200, answer.text
            return sync.answer(answer.json())

        return Reporter(device_id, send)

    def sync(self, batch: object, token: str = "", **request: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own
        body = batch if isinstance(batch, bytes) else zstandard.compress(json.dumps(batch).encode())
        return self.ask("POST", sync.PATH, token, content=body, headers={"content-encoding": "zstd"}, **request)

    def close(self) -> None:
        self.loop.run_until_complete(self._context.__aexit__(None, None, None))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.close()


@pytest.fixture
def locked_server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path, OFF_LOOPBACK)
    yield started
    started.close()


def error_of(response: httpx.Response) -> str:
    document: Mapping[str, Any] = response.json()
    return str(document["error"])


def batch(device_id: str = "d", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a batch
    return {"batch_id": "b", "device_id": device_id, "incarnation": "i", "sent_at": 1.0, **more}


# Who may do what


def test_what_is_not_the_fleets_is_answered_by_the_daemon_behind(server: Server) -> None:
    for path in ("/v2/health/live", "/metrics", "/v1/status"):
        assert server.ask("GET", path).text == "the daemon"


def test_each_role_may_do_what_it_says(locked_server: Server) -> None:
    tokens = {role: locked_server.token(role) for role in ("viewer", "operator", "admin")}
    for role, method, path, status in (
        ("viewer", "GET", "/devices", 200),
        ("viewer", "GET", "/campaigns", 200),
        ("viewer", "GET", "/agreement", 200),
        ("viewer", "GET", "/audit", 403),
        ("viewer", "POST", "/campaigns", 403),
        ("viewer", "PATCH", "/devices/d", 403),
        ("operator", "GET", "/audit", 200),
        ("operator", "PATCH", "/devices/d", 404),
        ("operator", "POST", "/campaigns/1/pause", 404),
        ("operator", "GET", "/commands/1", 404),
        ("operator", "GET", "/tokens", 403),
        ("operator", "DELETE", "/tokens/x", 403),
        ("admin", "GET", "/tokens", 200),
        ("admin", "DELETE", "/devices/d", 404),
        ("admin", "DELETE", "/tokens/x", 404),
    ):
        request = {"json": {"paused": True}} if method in {"POST", "PATCH"} else {}
        answer = locked_server.ask(method, f"{FLEET}{path}", tokens[role], **request)
        assert answer.status_code == status, f"{role} {method} {path}: {answer.text}"
        assert status < 400 or answer.json().keys() == {"error"}


def test_on_loopback_anybody_may_read_and_nobody_may_change_without_a_token(server: Server) -> None:
    assert server.ask("GET", f"{FLEET}/devices").json() == {"devices": [], "next": None}
    assert server.ask("PATCH", f"{FLEET}/devices/d", json={"paused": True}).status_code == 401
    assert server.ask("GET", f"{FLEET}/tokens").status_code == 401


def test_elsewhere_a_stranger_gets_nothing(locked_server: Server) -> None:
    for path in ("/", f"{FLEET}/devices", f"{FLEET}/events"):
        assert locked_server.ask("GET", path).status_code == 401
    assert locked_server.ask("GET", f"{FLEET}/devices", "root.wrong").status_code == 401


def test_devices_and_people_cannot_stand_in_for_each_other(server: Server) -> None:
    device, person = server.token("device", "d"), server.token("admin")
    assert "a device's token" in error_of(server.ask("GET", f"{FLEET}/devices", device))
    assert "one of people" in error_of(server.sync(batch(), person))
    assert server.sync(batch(), server.admin).status_code == 401
    assert server.sync(batch()).status_code == 401
    assert "the batch is that of 'other'" in error_of(server.sync(batch("other"), device))


def test_a_page_of_another_site_may_change_nothing(server: Server) -> None:
    password = base64.b64encode(f"anybody:{server.admin}".encode()).decode()
    headers = {"authorization": f"Basic {password}", "origin": "http://elsewhere.example"}
    answer = server.ask("PATCH", f"{FLEET}/devices/d", json={"paused": True}, headers=headers)
    assert (answer.status_code, "another site" in error_of(answer)) == (403, True)


def test_a_device_is_known_by_its_certificate(locked_server: Server) -> None:
    assert locked_server.sync(batch("press-7"), certificate="press-7").status_code == 200
    assert locked_server.sync(batch("press-7"), certificate="press-8").status_code == 403
    viewer = locked_server.token("viewer")
    assert locked_server.ask("GET", f"{FLEET}/devices/press-7", viewer).json()["device_id"] == "press-7"


# What a batch may be


def test_a_batch_is_taken_compressed_and_as_it_is(server: Server) -> None:
    device = server.device("d")
    device.tell("alarm", text="hot")
    assert device.report().received == ((1, 1),)
    plain = server.ask("POST", sync.PATH, server.token("device", "e"), json=batch("e"))
    assert plain.json()["wait_s"] == 30.0


def test_what_is_no_batch_is_refused_and_why_is_said(server: Server) -> None:
    token, nothing = server.token("device", "d"), {"number": 0, "kind": "alarm", "at": 1.0, "payload": {}}
    for body, status, why in (
        (b"no frame", 400, "the batch cannot be read"),
        (zstandard.compress(b"[1"), 400, "the batch cannot be read"),
        (zstandard.compress(b"{}"), 400, "batch_id is missing"),
        (batch(items=[nothing]), 400, "items[0].number must be"),
        (zstandard.compress(b" " * (sync.MOST_BYTES + 1)), 413, "over 4194304 bytes"),
        (batch(items=[nothing | {"number": i} for i in range(1, 258)]), 400, "at most 256"),
        (batch(items=[nothing | {"number": 1, "payload": WIDE}]), 400, "payload must be at most 65536 bytes"),
        (batch(state=WIDE), 400, "state must be at most 65536 bytes"),
        (zstandard.compress(json.dumps(batch(state={"deep": 0})).replace("0}", DEEP + "}").encode()), 400, "nested"),
    ):
        answer = server.sync(body, token)
        assert answer.status_code == status
        assert why in error_of(answer)
        assert status != 413 or answer.json()["most_bytes"] == sync.MOST_BYTES
    assert server.ask("POST", sync.PATH, token, content=b" " * (sync.MOST_BYTES + 1)).status_code == 413


def test_more_batches_than_can_be_in_hand_are_told_to_come_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = server.token("device", "d")
    monkeypatch.setattr(http, "_MOST_IN_HAND", 0)
    answer = server.sync(batch(), token)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 5
    assert b'exchanges_total{outcome="Overloaded"} 1.0' in generate_latest(server.registry)


def test_a_device_that_lets_its_batches_trickle_in_keeps_no_other_device_waiting(server: Server) -> None:
    slow, other = server.token("device", "slow"), server.token("device", "d")

    async def scenario() -> None:
        enough = asyncio.Event()

        async def trickle() -> AsyncIterator[bytes]:
            yield b"{"
            await enough.wait()

        stalled = [asyncio.create_task(server.asked("POST", sync.PATH, slow, content=trickle())) for _ in range(70)]
        ended, waiting = await asyncio.wait(stalled, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        while len(waiting) > 2:
            ended, waiting = await asyncio.wait(stalled, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        assert {task.result().status_code for task in ended} == {429}
        assert (await server.asked("POST", sync.PATH, other, json=batch("d"))).status_code == 200
        enough.set()
        await asyncio.wait(waiting)
        assert (await server.asked("POST", sync.PATH, slow, json=batch("slow"))).status_code == 200

    server.loop.run_until_complete(scenario())


def test_while_the_database_does_not_answer_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "_WAIT_S", 1.0)
    server = Server(tmp_path)
    device, token = server.device("d"), server.token("device", "d")
    device.tell("alarm", text="hot")
    other = sqlite3.connect(tmp_path / "upstream.db")
    try:
        other.execute("BEGIN IMMEDIATE")
        assert server.ask("GET", f"{FLEET}/ready").json()["ready"]  # it can still be read
        answer = server.sync(schema.dump(device.batch()), token)
        assert answer.status_code == 503
        assert "the database does not answer" in error_of(answer)
        other.rollback()
    finally:
        other.close()
    assert device.report().received == ((1, 1),)
    server.close()


def test_devices_are_told_to_come_less_often_when_there_are_many() -> None:
    pace = Pace(30.0, 100.0, 30.0)
    pace.count(1000)
    assert pace.wait_s == 30.0
    pace.count(1_000_000)
    assert pace.wait_s == 10_000.0


# All of it by HTTP


def test_a_campaign_and_an_order_by_http(server: Server) -> None:
    device, operator = server.device("d"), server.token("operator")
    device.report()
    name = operator.partition(".")[0]
    labels = {"groups": ["line"], "labels": {"hall": "2"}}
    assert server.ask("PATCH", f"{FLEET}/devices/d", operator, json=labels).json()["labels"] == {"hall": "2"}
    wish = {"name": "n", "model": "m", "version": "2", "waves": [{"label": "hall=2", "canary": True}]}
    begun = server.ask("POST", f"{FLEET}/campaigns", operator, json=wish)
    assert (begun.status_code, begun.json()["wave"]) == (201, 1)
    assert server.ask("POST", f"{FLEET}/campaigns", operator, json=wish).status_code == 409
    path = f"{FLEET}/campaigns/{begun.json()['id']}"
    assert server.ask("POST", f"{path}/pause", operator).json()["state"] == "paused"
    assert server.ask("POST", f"{path}/resume", operator).json()["state"] == "running"
    asked = {"target": {"group": "line"}, "envelopes": [order("d", "o-1")]}
    made = server.ask("POST", f"{FLEET}/commands", operator, json=asked)
    assert (made.status_code, made.json()["devices"]) == (202, ["d"])
    device.report()
    device.obey()
    device.report()
    (result,) = server.ask("GET", f"{FLEET}/commands/{made.json()['id']}").json()["devices"]
    assert result["status"] == "done"
    assert server.ask("GET", path).json()["counts"][0]["committed"] == 1
    assert server.ask("GET", f"{FLEET}/campaigns").json()["campaigns"][0]["id"] == begun.json()["id"]
    entries = server.ask("GET", f"{FLEET}/audit", operator).json()["audit"]
    assert {entry["by"] for entry in entries if entry["action"].startswith("campaign")} <= {name, "upstream"}
    revoked = server.ask("DELETE", f"{FLEET}/tokens/{name}", server.admin)
    assert revoked.status_code == 200
    assert server.ask("GET", f"{FLEET}/devices", operator).status_code == 401


def test_a_body_that_is_no_object_is_refused(server: Server) -> None:
    for path in ("/campaigns", "/commands", "/tokens"):
        for body in (b"", b"[", b"[]", b"1"):
            answer = server.ask("POST", f"{FLEET}{path}", server.admin, content=body)
            assert answer.status_code == 400
            assert "body" in error_of(answer)


@pytest.mark.parametrize("path", ["/campaigns/{}", "/commands/{}", "/audit?before={}"])
def test_a_number_larger_than_the_database_holds_is_refused_as_the_callers(server: Server, path: str) -> None:
    answer = server.ask("GET", FLEET + path.format(2**63), server.admin)
    assert answer.status_code == 400, answer.text
