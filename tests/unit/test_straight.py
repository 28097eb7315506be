"""The straight way of small requests: what it answers is what the ordinary way answers, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from doubles.asgi import ALL_BYTES, ECHO, INPUT, LIMIT_BYTES, ON_LOOPBACK, READER, UNBOUND
from doubles.service import MemoryService
from uvicorn.server import ServerState

from appliance.adapters import http, oip
from appliance.adapters.access import Gate, Rules
from appliance.adapters.bodies import Bodies
from appliance.adapters.http1 import Http1
from appliance.adapters.live import Live
from appliance.adapters.metrics import Metrics
from appliance.adapters.straight import Straight
from appliance.adapters.tokens import Role, TokenFile
from appliance.core.rates import Rate, Rates
from appliance.service import InferRequest, InferResponse, Origin, Told
from models.errors import ModelError, Overloaded
from models.spec import Tensor

pytestmark = pytest.mark.unit

BINARY = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
VALUES = bytes(range(16))
ONE_AT_A_TIME = Rate(0, 1)
"""A request that was not given back would keep out the next."""
LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""Its answer is the last on a connection."""


def request(document: object, tail: bytes = b"", *headers: str, path: str = ECHO) -> bytes:
    """A POST of a document and of binary tensors behind it."""
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    said = [f"inference-header-content-length: {len(content)}"] if tail else []
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(content + tail)}", *said, *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content + tail


PLAIN = request({"inputs": [INPUT]})
WANTS_BINARY = {"inputs": [BINARY], "parameters": {"binary_data_output": True}}
CORPUS = {
    "JSON": PLAIN,
    "binary in": request({"inputs": [BINARY]}, VALUES),
    "binary in and out": request(WANTS_BINARY, VALUES),
    "an id of its own": request({"inputs": [INPUT], "id": "42"}),
    "outputs chosen": request({"inputs": [INPUT], "outputs": [{"name": "sum"}]}),
    "a request id": request({"inputs": [INPUT]}, b"", "X-Request-Id: mine"),
    "a request id of too many words": request({"inputs": [INPUT]}, b"", "X-Request-Id: " + "x" * 200),
    "a version": request({"inputs": [INPUT]}, path="/v2/models/echo/versions/1.0/infer"),
    "another version": request({"inputs": [INPUT]}, path="/v2/models/echo/versions/7/infer"),
    "a model that is not here": request({"inputs": [INPUT]}, path="/v2/models/none/infer"),
    "a bundle as a whole": request({"inputs": [INPUT]}, path=READER),
    "a path that is spelled otherwise": request({"inputs": [INPUT]}, path="/v2/models/%65cho/infer"),
    "a query": request({"inputs": [INPUT]}, path=f"{ECHO}?a=b"),
    "no JSON": request(b"nonsense"),
    "no body": request(b""),
    "a raw body": request(VALUES, b"", "Inference-Header-Content-Length: 0"),
    "a length that is none": request(VALUES, b"", "Inference-Header-Content-Length: x"),
    "a tensor cut short": request({"inputs": [BINARY]}, VALUES[:8]),
    "a wrong shape": request({"inputs": [{**INPUT, "shape": [3, 2]}]}),
    "an output that is not there": request({"inputs": [INPUT], "outputs": [{"name": "none"}]}),
    "a priority": request({"inputs": [INPUT], "parameters": {"priority": 99}}),
    "compressed": request({"inputs": [INPUT]}, b"", "Content-Encoding: gzip"),
    "a host that is not ours": PLAIN.replace(b"localhost", b"elsewhere"),
    "a page of another site": request({"inputs": [INPUT]}, b"", "Origin: http://elsewhere"),
    "a token that is not known": request({"inputs": [INPUT]}, b"", "Authorization: Bearer none"),
    "the last one": request({"inputs": [INPUT]}, b"", "Connection: close"),
    "HTTP/1.0": PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "one that waits for a 100": request({"inputs": [INPUT]}, b"", "Expect: 100-continue"),
    "chunks": b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % ECHO.encode()
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN.partition(b"\r\n\r\n")[2]), PLAIN.partition(b"\r\n\r\n")[2]),
    "two lengths": request({"inputs": [INPUT]}, b"", "Content-Length: 1"),
    "no HTTP": b"nonsense\r\n\r\n",
    "another path": b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a body over the limit": request(b" " * (LIMIT_BYTES + 1)),
}


class Doors:
    """The door on a free port, with the straight way or without it."""

    def __init__(
        self,
        service: MemoryService | None = None,
        *,
        straight: bool = True,
        rules: Rules = ON_LOOPBACK,
        tokens: TokenFile | None = None,
        client: Rate = ONE_AT_A_TIME,
        all_bytes: int = ALL_BYTES,
        silence_s: float = 20,
        rest_s: int = 20,
    ) -> None:
        service = service or MemoryService()
        bodies = Bodies(each_bytes=LIMIT_BYTES, all_bytes=all_bytes)
        app = http.build(service, Metrics(service), Live(service), bodies)  # type: ignore[arg-type] # its double
        tokens = tokens or TokenFile(Path(tempfile.gettempdir()) / "no such folder")
        gate = Gate(app, rules, tokens, Rates(client=client, everyone=UNBOUND))
        self.way = Counted(gate, service, bodies) if straight else None  # type: ignore[arg-type] # its double
        config = uvicorn.Config(gate, log_config=None, access_log=False, timeout_keep_alive=rest_s)
        config.load()
        self.state = ServerState()
        self._make = partial(Http1, config, self.state, {}, silence_s=silence_s, straight=self.way)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Doors]:
        """Serve on a free port."""
        server = await asyncio.get_running_loop().create_server(self._make, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def said(self, *pieces: bytes, ends: bytes = LAST) -> bytes:
        """All that is answered to `pieces`, sent a moment apart, and to a last request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        with contextlib.suppress(ConnectionError):  # the server may have hung up before the last piece
            for piece in (*pieces, ends):
                writer.write(piece)
                await asyncio.sleep(0.005)
            while part := await asyncio.wait_for(reader.read(65536), 20):
                answer += part
        writer.close()
        return answer


class Counted(Straight):
    """Counts what it has taken in hand."""

    taken = 0

    def take(self, *given: Any) -> bool:  # noqa: ANN401 - handed on
        taken = super().take(*given)
        self.taken += taken
        return taken


async def both(*pieces: bytes, fault: Exception | None = None, **how: Any) -> tuple[bytes, int]:  # noqa: ANN401 - handed on
    """What both ways answer, which is the same; and how many requests went straight."""
    ours = Doors(MemoryService(fault=fault), **how)
    ordinary = Doors(MemoryService(fault=fault), straight=False, **how)
    async with ours.open(), ordinary.open():
        answer = await ours.said(*pieces)
        assert answer == await ordinary.said(*pieces)
    assert ours.way
    return answer, ours.way.taken


@pytest.mark.parametrize("content", CORPUS.values(), ids=CORPUS)
def test_both_ways_answer_the_same_to_the_byte(content: bytes) -> None:
    asyncio.run(both(content, content))


def test_small_requests_of_the_usual_kinds_go_straight() -> None:
    kinds = ["JSON", "binary in", "binary in and out", "a request id", "a version", "a raw body"]
    answer, taken = asyncio.run(both(*[CORPUS[kind] for kind in kinds]))
    assert taken == len(kinds)
    assert answer.count(b"HTTP/1.1 200 OK") == len(kinds) + 1


@pytest.mark.parametrize(
    "fault", [Overloaded("full", 3.0), ModelError("nonsense"), ZeroDivisionError("a fault of ours")], ids=repr
)
def test_both_ways_tell_what_a_service_raises_in_the_same_words(fault: Exception) -> None:
    _answer, taken = asyncio.run(both(CORPUS["a request id"], fault=fault))
    assert taken == 1


@pytest.mark.parametrize("cut", [1, 30, 75, len(PLAIN) - 5])
def test_a_request_in_two_pieces_is_answered_the_same(cut: int) -> None:
    answer, _taken = asyncio.run(both(PLAIN[:cut], PLAIN[cut:], PLAIN))
    assert answer.count(b"HTTP/1.1 200 OK") == 3


def test_requests_behind_each_other_on_one_connection_are_answered_in_their_order() -> None:
    many = b"".join(request({"inputs": [INPUT], "id": str(number)}) for number in range(20))
    answer, _taken = asyncio.run(both(PLAIN, many, PLAIN, many[:700], many[700:]))
    assert [int(part.partition(b'"')[0]) for part in answer.split(b'"id":"')[1:]] == [*range(20), *range(20)]


def test_a_body_that_does_not_come_is_waited_for_no_longer_than_the_silence_allows() -> None:
    async def scenario() -> bytes:
        async with Doors(silence_s=0.2).open() as ours:
            return await ours.said(PLAIN[:-5], ends=b"")

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 408")


def test_a_connection_that_rests_is_closed() -> None:
    async def scenario() -> bytes:
        async with Doors(rest_s=1).open() as ours:
            return await ours.said(PLAIN, ends=b"")  # which ends when the server has closed

    assert asyncio.run(scenario()).count(b"200 OK") == 1


def test_rates_and_roles_hold_on_both_ways(tmp_path: Path) -> None:
    answer, taken = asyncio.run(both(PLAIN, PLAIN, PLAIN, client=Rate(0.001, 1)))
    assert (taken, answer.count(b"HTTP/1.1 429")) == (1, 3)
    tokens = TokenFile(tmp_path)
    token = tokens.create("camera", Role.INFER)
    named = request({"inputs": [INPUT]}, b"", f"Authorization: Bearer {token}")
    answer, taken = asyncio.run(both(named, named, PLAIN, rules=Rules(anonymous=False), tokens=tokens))
    assert answer.count(b"200 OK") == 2
    assert taken == 1  # the first reads the file of tokens, which may wait for a disk
    assert answer.count(b"HTTP/1.1 401") == 2


def test_nothing_is_parsed_for_a_client_over_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = oip.parse
    monkeypatch.setattr(oip, "parse", lambda body, *how: parsed.append(body) or parse(body, *how))  # type: ignore[func-returns-value] # so short

    async def scenario() -> bytes:
        async with Doors(client=Rate(0.001, 1)).open() as ours:
            return await ours.said(PLAIN, PLAIN)

    assert asyncio.run(scenario()).count(b"HTTP/1.1 429") == 2
    assert len(parsed) == 1


class Slow(MemoryService):
    """Answers when it is told to."""

    asked, given_up = 0, False

    def ask(self, request: InferRequest, told: Told) -> Callable[[], None]:
        def give_up() -> None:
            self.given_up = True
            told(asyncio.CancelledError())

        self.asked += 1
        self.answer = partial(super().ask, request, told)
        return give_up


async def until(holds: Callable[[], bool]) -> None:
    end_at = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_at
        await asyncio.sleep(0.005)


def test_who_leaves_has_its_request_given_up_and_takes_no_room() -> None:
    async def scenario() -> None:
        slow = Slow()
        async with Doors(slow, all_bytes=len(PLAIN)).open() as ours:
            for number in range(3):
                _reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
                writer.write(PLAIN)
                await until(lambda number=number: slow.asked == number + 1)  # type: ignore[misc] # of this round
                slow.given_up = False
                writer.close()
                await until(lambda: slow.given_up)

    asyncio.run(scenario())


def test_a_server_that_stops_waits_for_the_rest_of_a_request() -> None:
    async def scenario() -> bytes:
        async with Doors().open() as ours:
            reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
            writer.write(PLAIN)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            writer.write(PLAIN[:-5])
            (connection,) = ours.state.connections
            await until(lambda: bool(connection._early))  # type: ignore[union-attr] # noqa: SLF001 - nothing else shows that it came
            connection.shutdown()
            writer.write(PLAIN[-5:])
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer

    answer = asyncio.run(scenario())
    assert b"HTTP/1.1 200 OK" in answer
    assert b"connection: close" in answer


def test_a_server_that_stops_answers_what_is_in_hand_and_says_that_it_was_the_last() -> None:
    async def scenario() -> bytes:
        slow = Slow()
        async with Doors(slow).open() as ours:
            reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
            writer.write(PLAIN)
            await until(lambda: slow.asked == 1)
            for connection in list(ours.state.connections):
                connection.shutdown()
            slow.answer()
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer


def test_a_request_that_begins_before_its_connection_has_rested_too_long_is_answered() -> None:
    async def scenario() -> bytes:
        async with Doors(rest_s=1).open() as ours:
            reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b"}"), 20)
            (connection,) = ours.state.connections
            writer.write(PLAIN[:-5])
            await until(lambda: bool(connection._early))  # type: ignore[union-attr] # noqa: SLF001 - nothing else shows that it came
            await asyncio.sleep(1.1)
            with contextlib.suppress(ConnectionError):
                writer.write(PLAIN[-5:] + LAST)
                answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200 OK")


def test_a_body_in_many_pieces_is_read_the_ordinary_way() -> None:
    answer, taken = asyncio.run(both(PLAIN[:-9], PLAIN[-9:-5], PLAIN[-5:], PLAIN[:-5], PLAIN[-5:]))
    assert (taken, answer.count(b"HTTP/1.1 200 OK")) == (1, 3)


class Answering(MemoryService):
    """Answers the same to whatever it is asked."""

    def __init__(self, *, degraded: str | None = None, size_bytes: int = 8) -> None:
        super().__init__()
        self._origin = Origin("echo", "1.0", "memory", "fp32", "signed", degraded)
        self._tensor = Tensor("y", "UINT8", (size_bytes,), bytes(size_bytes))

    def _answer(self, request: InferRequest) -> InferResponse:
        del request
        return InferResponse(self._origin, [self._tensor], {})


@pytest.mark.parametrize("straight", [True, False])
def test_a_reason_of_many_lines_or_letters_fits_in_a_header(straight: bool) -> None:
    async def scenario() -> bytes:
        service = Answering(degraded="it died:\r\nset-cookie: a=b\x00 \u2192 CPU")
        async with Doors(service, straight=straight).open() as ours:
            return await ours.said(PLAIN)

    answer = asyncio.run(scenario())
    assert b"appliance-degraded: it died: set-cookie: a=b ? CPU\r\n" in answer


def test_a_client_that_reads_no_answer_is_cut_off_and_keeps_no_place() -> None:
    async def scenario() -> bytes:
        async with Doors(Answering(size_bytes=16 * 1024 * 1024), silence_s=1).open() as ours:
            _reader, writer = await asyncio.open_connection("127.0.0.1", ours.port, limit=1024)
            writer.write(request(WANTS_BINARY, VALUES) * 2)  # the second goes the ordinary way, and waits there
            await until(lambda: any(one.flow.write_paused for one in ours.state.connections))  # type: ignore[union-attr] # one of ours
            await until(lambda: not ours.state.connections)
            writer.close()
            return await ours.said(request(WANTS_BINARY, VALUES))

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200 OK")


def test_an_answer_that_cannot_be_written_closes_the_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.adapters.http1._head_of", lambda *_given: 1 / 0)

    async def scenario() -> bytes:
        slow = Slow()
        async with Doors(slow).open() as ours:
            reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
            writer.write(PLAIN)
            await until(lambda: slow.asked == 1)
            slow.answer()
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer

    assert asyncio.run(scenario()) == b""
    assert "ZeroDivisionError" in caplog.text
