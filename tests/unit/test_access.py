"""The gate before the HTTP door: who is let in to what, how often, and what web pages may not do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles.asgi import ALL_BYTES, ECHO, INPUT, LIMIT_BYTES, ON_LOOPBACK, PREDICT, ask, asked, door, error_of
from doubles.service import MemoryService
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.adapters.access import Rules
from appliance.adapters.tokens import Role, TokenFile
from appliance.core.rates import Rate

pytestmark = pytest.mark.unit

LOAD, UNLOAD = "/v2/repository/models/echo/load", "/v2/repository/models/echo/unload"
OFF_LOOPBACK = Rules(anonymous=False, certificates={"camera": Role.INFER, "workshop": Role.ADMIN})
INFER = {"json": {"inputs": [INPUT]}}


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def basic(token: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()}


def certified(app: ASGIApp, name: str) -> ASGIApp:
    """`app` as a client sees it whose certificate TLS has verified."""

    async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client_certificate": name}, receive, send)

    return with_certificate


# On loopback


@pytest.mark.parametrize("path", ["/", "/v2", "/v1/status", "/metrics", "/openapi.json", "/v2/models/echo/stats"])
def test_on_loopback_anybody_may_read(path: str) -> None:
    assert ask("GET", path).status_code == 200


def test_on_loopback_anybody_may_run_models_and_list_them() -> None:
    assert ask("POST", ECHO, **INFER).status_code == 200
    assert ask("POST", PREDICT, content=b"abc").status_code == 200
    assert ask("POST", "/v2/repository/index").status_code == 200


def test_what_others_have_asked_is_read_with_a_token_of_role_operate_even_on_loopback() -> None:
    assert "--role operate" in error_of(ask("GET", "/v1/recorder"))
    assert ask("HEAD", "/v1/recorder").status_code == 401


@pytest.mark.parametrize(("path", "role"), [(LOAD, "operate"), (UNLOAD, "operate"), ("/v1/faults", "admin")])
def test_on_loopback_changes_need_a_token_and_the_sentence_says_how_to_get_one(path: str, role: str) -> None:
    service = MemoryService()
    response = ask("POST", path, service)
    assert response.status_code == 401
    assert f"`appliance token create NAME --role {role}`" in error_of(response)
    # In two headers: of one with two challenges Chromium reads the first, and asks nobody for a token.
    challenges = response.headers.get_list("www-authenticate")
    assert [one.partition(" ")[0] for one in challenges] == ["Bearer", "Basic"]
    assert service.ready


@pytest.mark.parametrize("path", ["/v1/commands", "/v1/faults", LOAD, UNLOAD, "/v2/repository/index", ECHO])
@pytest.mark.parametrize("end", ["%0A", "%0a", "%0D%0A"])
def test_a_line_break_after_a_path_leads_nowhere_and_never_past_its_role(path: str, end: str) -> None:
    service = MemoryService()
    assert ask("POST", path + end, service, json={}).status_code == 404
    assert not service.requests


def test_anonymous_use_of_loopback_can_be_turned_off(tokens: TokenFile) -> None:
    app = door(MemoryService(), Rules(anonymous=False, hosts=ON_LOOPBACK.hosts), tokens)
    assert asked(app, "GET", "/v1/status").status_code == 401
    assert asked(app, "GET", "/v1/status", headers=bearer(tokens.create("a", Role.INFER))).status_code == 200


# Off loopback


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v2/health/live"),
        ("GET", "/metrics"),
        ("POST", ECHO),
        ("GET", "/nowhere"),
        ("PUT", "/v2"),
    ],
)
def test_off_loopback_nothing_is_said_to_whoever_shows_no_token(method: str, path: str) -> None:
    response = asked(door(MemoryService(), OFF_LOOPBACK), method, path)
    assert response.status_code == 401
    assert "`appliance token create NAME --role infer`" in error_of(response)


@pytest.mark.parametrize("form", [bearer, basic])
@pytest.mark.parametrize(
    ("role", "statuses"),
    [(Role.INFER, (200, 200, 403, 403)), (Role.OPERATE, (200, 200, 200, 403)), (Role.ADMIN, (200, 200, 200, 200))],
)
def test_each_role_may_do_its_part_and_that_of_the_roles_below(
    tokens: TokenFile, form: Callable[[str], dict[str, str]], role: Role, statuses: tuple[int, ...]
) -> None:
    app = door(MemoryService(), OFF_LOOPBACK, tokens)
    headers = form(tokens.create("someone", role))
    asks: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/status", {}),
        ("POST", ECHO, INFER),
        ("POST", UNLOAD, {}),
        ("POST", "/v1/commands", {}),  # no order, which only an admin is told
    ]
    found = [asked(app, method, path, headers=headers, **more).status_code for method, path, more in asks]
    assert tuple(found) == statuses


def test_a_refusal_names_the_token_and_both_roles_and_never_its_secret(tokens: TokenFile) -> None:
    token = tokens.create("gate", Role.INFER)
    sentence = error_of(asked(door(MemoryService(), OFF_LOOPBACK, tokens), "POST", LOAD, headers=bearer(token)))
    assert sentence == "'gate' has role infer, and this needs operate"


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer x", "Bearer gate.wrong", "Digest a=b", "", "Basic eDp5", "bearer gate", "gate.{secret}"],
)
def test_a_wrong_token_opens_nothing_even_where_none_is_needed(tokens: TokenFile, header: str) -> None:
    secret = tokens.create("gate", Role.ADMIN).partition(".")[2]
    app = door(MemoryService(), tokens=tokens)
    response = asked(app, "GET", "/v2", headers={"authorization": header.format(secret=secret)})
    assert response.status_code == 401
    assert secret not in error_of(response)


@pytest.mark.parametrize("value", ["Basic !", "Basic eDp", "Basic \xff"])
def test_a_basic_authorization_that_is_none_is_a_wrong_request(value: str) -> None:
    assert ask("GET", "/v2", headers={b"authorization": value.encode("latin-1")}).status_code == 400


def test_a_token_opens_at_once_and_a_revoked_one_nothing_after_a_second(
    tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("appliance.adapters.access.time.monotonic", lambda: now[0])
    app = door(MemoryService(), OFF_LOOPBACK, tokens)
    token = tokens.create("gate", Role.INFER)
    assert asked(app, "GET", "/v2", headers=bearer(token)).status_code == 200
    tokens.revoke("gate")
    now[0] += 1.01
    assert asked(app, "GET", "/v2", headers=bearer(token)).status_code == 401


def test_a_damaged_file_of_tokens_lets_nobody_in(tokens: TokenFile, tmp_path: Path) -> None:
    token = tokens.create("gate", Role.ADMIN)
    (tmp_path / "tokens.json").write_text("{")
    assert asked(door(MemoryService(), OFF_LOOPBACK, tokens), "GET", "/v2", headers=bearer(token)).status_code == 401


def test_a_client_certificate_may_what_its_common_name_was_given() -> None:
    app = door(MemoryService(), OFF_LOOPBACK)
    assert asked(certified(app, "camera"), "POST", ECHO, **INFER).status_code == 200
    assert asked(certified(app, "camera"), "POST", UNLOAD).status_code == 403
    assert asked(certified(app, "workshop"), "POST", UNLOAD).status_code == 200
    stranger = asked(certified(app, "stranger"), "GET", "/v2")
    assert (stranger.status_code, "add the name to http.client_roles" in error_of(stranger)) == (403, True)


# Web pages


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1", "localhost."])
def test_every_spelling_of_loopback_is_a_name_of_the_appliance(host: str) -> None:
    assert ask("GET", "/v2", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", "10.0.0.1"],
)
def test_a_page_whose_name_was_rebound_to_loopback_is_refused(host: str) -> None:
    response = ask("GET", "/v1/status", headers={"host": host})
    assert response.status_code == 403
    assert "is no name of this appliance" in error_of(response)


def test_the_operator_may_add_names() -> None:
    rules = Rules(anonymous=True, hosts=ON_LOOPBACK.hosts | {"gate.local"})
    assert asked(door(MemoryService(), rules), "GET", "/v2", headers={"host": "gate.local:80"}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:9999", "http://localhost.evil"])
@pytest.mark.parametrize(("path", "body"), [(PREDICT, b"abc"), ("/v2/repository/index", b"")])
def test_a_page_of_another_site_may_run_nothing(path: str, body: bytes, origin: str) -> None:
    headers = {"origin": origin, "host": "127.0.0.1:8080", "content-type": "text/plain"}
    response = ask("POST", path, headers=headers, content=body)
    assert response.status_code == 403
    assert "another site" in error_of(response)


def test_the_appliances_own_page_may_run_models() -> None:
    headers = {"origin": "http://127.0.0.1:8080", "host": "127.0.0.1:8080"}
    assert ask("POST", PREDICT, headers=headers, content=b"abc").status_code == 200


def test_pages_of_a_proxy_that_the_operator_named_may_run_models() -> None:
    app = door(MemoryService(), Rules(anonymous=True, hosts=ON_LOOPBACK.hosts, sites=frozenset({"gate.example"})))
    assert asked(app, "POST", PREDICT, headers={"origin": "https://gate.example"}, content=b"abc").status_code == 200


# How much


def test_a_client_over_its_rate_is_told_when_to_come_again() -> None:
    app = door(MemoryService(), client=Rate(2.0, 8))
    statuses = [asked(app, "GET", "/v2").status_code for _ in range(4)]
    assert statuses[:2] == [200, 200]
    response = asked(app, "GET", "/v2")
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert "2 requests a second" in error_of(response)


def test_rates_are_counted_by_token_not_by_address(tokens: TokenFile) -> None:
    app = door(MemoryService(), tokens=tokens, client=Rate(1.0, 8))
    first, second = (bearer(tokens.create(name, Role.INFER)) for name in ("a", "b"))
    assert asked(app, "GET", "/v2", headers=first).status_code == 200
    assert asked(app, "GET", "/v2", headers=first).status_code == 429
    assert asked(app, "GET", "/v2", headers=second).status_code == 200


def test_more_requests_at_once_than_allowed_are_429_and_later_ones_are_taken() -> None:
    app = door(MemoryService(), everyone=Rate(0, 2))

    async def slow() -> AsyncIterator[bytes]:
        yield b"abc"
        await asyncio.sleep(0)  # the others' turn
        yield b"def"

    async def together() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answers = await asyncio.gather(*(client.post(PREDICT, content=slow()) for _ in range(5)))
        return sorted(answer.status_code for answer in answers)

    assert asyncio.run(together()) == [200, 200, 429, 429, 429]
    assert asked(app, "POST", PREDICT, content=b"abc").status_code == 200


def test_bodies_that_are_received_together_stay_within_one_limit() -> None:
    app = door(MemoryService())

    def sending(held: asyncio.Event, started: asyncio.Event) -> tuple[Scope, Receive]:
        messages: list[Message] = [{"type": "http.request", "body": bytes(LIMIT_BYTES), "more_body": True}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            started.set()
            await held.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": PREDICT, "query_string": b"", "headers": []}
        return {**scope, "client": ("127.0.0.1", 1)}, receive

    async def scene() -> tuple[httpx.Response, httpx.Response]:
        held, sent = asyncio.Event(), []

        async def send(message: Message) -> None:
            sent.append(message)

        tasks = []
        for _ in range(ALL_BYTES // LIMIT_BYTES):
            started = asyncio.Event()
            scope, receive = sending(held, started)
            tasks.append(asyncio.create_task(app(scope, receive, send)))
            await started.wait()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            refused = await client.post(PREDICT, content=bytes(LIMIT_BYTES))
            held.set()
            await asyncio.gather(*tasks)
            return refused, await client.post(PREDICT, content=bytes(LIMIT_BYTES))

    refused, taken = asyncio.run(scene())
    assert refused.status_code == 429
    assert "bodies of other requests fill the 0.48 MiB there are" in error_of(refused)
    assert taken.status_code == 200
