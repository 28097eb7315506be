"""One exchange over real HTTP: compressed, authorised, over a connection that is kept, and never left in doubt."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from doubles.upstream import MemoryUpstream
from support.upstream import ServedUpstream

from appliance.adapters.exchange import Exchanges
from appliance.adapters.tls import Calling
from models import schema, sync
from models.sync import Batch, Item

pytestmark = pytest.mark.unit

BATCH = Batch("b-1", "dock-7", "i-1", 1.8e9, items=(Item(1, "telemetry", 1.8e9, {"figures": "x" * 10_000}),))
DOCUMENT = orjson.dumps(schema.dump(BATCH))


@pytest.fixture
def served() -> Iterator[ServedUpstream]:
    with ServedUpstream(MemoryUpstream()) as upstream:
        yield upstream


def exchanges(url: str, token_file: Path | None = None, tls: Calling = Calling()) -> closing[Exchanges]:  # noqa: B008 - frozen
    return closing(Exchanges(url, tls, token_file))


@pytest.mark.parametrize("packs", [True, False])
def test_a_batch_goes_out_compressed_and_its_answer_comes_back(served: ServedUpstream, packs: bool) -> None:
    served.packs = packs
    with exchanges(f"{served.url}/") as exchange:
        first, second = exchange(DOCUMENT), exchange(DOCUMENT)
    assert sync.answer(orjson.loads(first.content)).received == ((1, 1),)
    assert (first.status, second.status, served.connections) == (200, 200, 1)
    assert first.moved_bytes < 2000
    assert served.memory.batches == [BATCH, BATCH]


def test_the_token_is_read_again_at_each_exchange(served: ServedUpstream, tmp_path: Path) -> None:
    served.token = "new"  # noqa: S105 - of nobody
    file = tmp_path / "token"
    file.write_text("old\n")
    with exchanges(served.url, file) as exchange:
        refused = exchange(DOCUMENT)
        file.write_text("new\n")
        taken = exchange(DOCUMENT)
    assert (refused.status, orjson.loads(refused.content)) == (401, {"error": "no token of ours"})
    assert taken.status == 200


def test_what_the_server_asks_for_is_passed_on(served: ServedUpstream) -> None:
    served.retry_after, served.memory.most_bytes = "17", 100
    with exchanges(served.url) as exchange:
        refused = exchange(DOCUMENT)
        served.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
        dated = exchange(DOCUMENT)
    assert (refused.status, refused.retry_after_s) == (413, 17.0)
    assert dated.retry_after_s is None


def test_a_server_that_is_not_there_has_not_taken_the_batch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with exchanges(f"http://127.0.0.1:{port}") as exchange:
        reply = exchange(DOCUMENT)
    assert (reply.status, reply.unsure, reply.moved_bytes) == (0, False, 0)
    assert reply.reason == "Failed to establish a new connection: [Errno 111] Connection refused"


def test_a_server_that_hangs_up_before_its_answer_may_have_taken_the_batch() -> None:
    def hang_up(server: socket.socket) -> None:
        connection, _address = server.accept()
        with connection:
            connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, args=(server,), daemon=True).start()
        with exchanges(f"http://127.0.0.1:{server.getsockname()[1]}") as exchange:
            reply = exchange(DOCUMENT)
    assert (reply.status, reply.unsure) == (0, True)
    assert reply.moved_bytes > 0


@pytest.mark.parametrize("missing", ["token", "certificate"])
def test_a_file_that_is_missing_is_said_and_nothing_was_sent(
    served: ServedUpstream, tmp_path: Path, missing: str
) -> None:
    path = tmp_path / missing
    tls = Calling(certificate=path) if missing == "certificate" else Calling()
    with exchanges(served.url, path if missing == "token" else None, tls) as exchange:
        reply = exchange(DOCUMENT)
    assert (reply.status, reply.unsure) == (0, False)
    assert str(path) in reply.reason
    assert served.headers == []


@pytest.mark.parametrize("content", [b"secret\nsecond", b"secr\xc3\xa9t", b""])
def test_a_token_file_that_holds_no_token_is_said_and_its_content_is_not(
    served: ServedUpstream, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with exchanges(served.url, file) as exchange:
        reply = exchange(DOCUMENT)
    assert (reply.status, reply.unsure, served.headers) == (0, False, [])
    assert reply.reason == f"{file} holds no token of one line: write it anew"


def test_an_answer_that_is_too_long_to_be_one_is_not_kept(served: ServedUpstream) -> None:
    served.memory.wait_s = 1.0

    def bomb(*_given: object) -> tuple[int, sync.Refusal]:
        return 400, sync.Refusal("x" * (17 * 2**20))

    served.memory.sync = bomb  # type: ignore[method-assign, assignment] # worse than any
    with exchanges(served.url) as exchange:
        reply = exchange(DOCUMENT)
    assert (reply.status, reply.unsure) == (0, True)
    assert "the answer has more than" in reply.reason
