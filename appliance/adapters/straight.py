"""Small inference requests on their way without a task: read, let in, parsed and handed to the service in one call.

Most of the time that a small model's request takes is not the model's. Nothing of what others decide is decided here:
the gate lets in, `oip` parses, the service answers, and the door writes what is answered. Whoever is not let
in, and whatever is out of the ordinary, goes the ordinary way from its first byte, and is answered there.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import httptools
from fastapi import Request, Response

from appliance.adapters import access, inference, oip
from appliance.adapters.access import Caller, Gate
from appliance.adapters.answers import JOINED_BYTES, answer_to
from appliance.adapters.bodies import Bodies
from appliance.service import InferRequest, InferResponse, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from appliance.adapters.http1 import Http1

_HEAD_BYTES, _END = 2048, b"\r\n\r\n"
_REMEMBERED_HEADS = 256
"""A client sends the same head time after time: it is read only once."""
_NOT_HERE = frozenset({b"expect", b"transfer-encoding", b"upgrade", b"content-encoding"})
"""Headers that make a request one for the ordinary way."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The head of a small request for inference, on a connection that stays open."""

    path: str
    model: str
    version: str | None
    known: Mapping[bytes, bytes]
    size_bytes: int
    """Of the head and the body together."""
    body_at: int
    header_length: str | None


class Straight:
    """The way from a connection to the service and back."""

    def __init__(self, gate: Gate, service: Service, bodies: Bodies) -> None:
        """Let in whom `gate` does, ask `service`, and count in `bodies` what is in hand."""
        self._gate, self._service, self._bodies = gate, service, bodies

    @staticmethod
    def head(data: bytes) -> Head | None:
        """The head with which `data` begins; None where this is not the way for it, or it has not come whole."""
        end = data.find(_END, 0, _HEAD_BYTES)
        return None if end < 0 else _head(data[: end + len(_END)])

    def take(self, connection: Http1, head: Head, body: bytes) -> bool:
        """Take a whole request in hand, and answer it; False where that is not for here, and nothing was done."""
        known, bodies, rates = head.known, self._bodies, self._gate.rates
        try:
            caller = self._gate.at_once(head.path, known, connection.address)
            spec = self._service.asked_at_once(head.model, head.version)
            if caller is None or spec is None:
                return False
            if not spec.inputs or len(body) > bodies.each_bytes:
                return False
            rates.enter(caller.name, time.monotonic())
        except Exception:  # whatever it is, it is met and told on the ordinary way
            return False
        try:
            bodies.take(len(body))
            parsed = oip.parse(body, head.header_length, spec)
        except Exception as error:  # whatever it is, it has an answer
            self._left(caller, body)
            connection.answer(*_refused(head, error))
            return True
        wanted = inference.wanted_by(parsed, known, head.model, head.version)

        def told(result: InferResponse | BaseException) -> None:
            self._left(caller, body)
            if connection.in_hand:  # else the client has gone
                _answer(connection, head, parsed, wanted, result)

        give_up = self._service.ask(wanted, told)
        if connection.in_hand:
            connection.when_gone(give_up)
        return True

    def _left(self, caller: Caller, body: bytes) -> None:
        self._gate.rates.leave(caller.name)
        self._bodies.give_back(len(body))


def _answer(
    connection: Http1, head: Head, parsed: oip.Request, wanted: InferRequest, result: InferResponse | BaseException
) -> None:
    def write(rendered: Callable[[], tuple[Response, BaseException | None]]) -> None:
        try:
            connection.answer(*rendered())
        except Exception as error:  # whatever it is, the client does not wait in vain
            connection.fail(error)

    large = isinstance(result, InferResponse) and inference.json_bytes_of(parsed, result) > inference.OFF_LOOP_BYTES
    if large:
        writing = asyncio.get_running_loop().run_in_executor(None, _rendered, head, parsed, wanted, result)
        writing.add_done_callback(lambda done: write(done.result))
    else:
        write(partial(_rendered, head, parsed, wanted, result))


def _rendered(
    head: Head, parsed: oip.Request, wanted: InferRequest, result: InferResponse | BaseException
) -> tuple[Response, BaseException | None]:
    """The answer, and the fault of ours that it tells, to be logged."""
    if isinstance(result, InferResponse):
        try:
            return inference.answer_of(parsed, head.known, wanted, result), None
        except Exception as error:  # whatever it is, it has an answer
            result = error
    return _refused(head, result)


def _refused(head: Head, error: BaseException) -> tuple[Response, BaseException | None]:
    scope = {"type": "http", "method": "POST", "path": head.path, "known": head.known}
    return answer_to(Request(scope), error)


class _Reader:
    """Told by the parser what is in a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_ended = self.has_body = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_ended = True

    def on_body(self, _body: bytes) -> None:
        self.has_body = True


@lru_cache(maxsize=_REMEMBERED_HEADS)
def _head(content: bytes) -> Head | None:
    """The head that `content` is, as uvicorn's parser reads it, too."""
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(content)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    names = {name for name, _value in reader.headers}
    path = reader.url.decode("latin-1")
    found = inference.INFER.fullmatch(path)
    length = dict(reader.headers).get(b"content-length", b"")
    if (
        found is None
        or not path.isascii()
        or any(char in path for char in "%?#")
        or parser.get_method() != b"POST"
        or parser.get_http_version() != "1.1"
        or not reader.has_ended
        or reader.has_body
        or not parser.should_keep_alive()
        or names & _NOT_HERE
        or not length.isdigit()
        or not 0 < int(length) <= JOINED_BYTES
    ):
        return None
    model, version = found.groups()
    known = access.looked_at(reader.headers)
    header_length = inference.header_length_in(known)
    return Head(path, model, version, known, len(content) + int(length), len(content), header_length)
