"""Request bodies: each within a limit, and all that are in hand within another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from models.errors import BadInput, Overloaded, TooLarge


class Bodies:
    """Counts the bytes of every body from its first byte to the answer."""

    def __init__(self, *, each_bytes: int, all_bytes: int, encodings: frozenset[bytes] = frozenset()) -> None:
        """Take no body over `each_bytes`, and none for which those in hand leave no room within `all_bytes`.

        Of compressed bodies those in `encodings` are read, as they are.
        """
        self.each_bytes, self._all_bytes = each_bytes, all_bytes
        self.encodings = encodings | {b"identity"}
        self._held_bytes = 0

    def of(self, request: Request) -> _Body:
        """A context that reads the whole body of `request`, whether or not its length was announced.

        Raises TooLarge, or Overloaded when bodies that others send take up the room.
        """
        return _Body(self, request)

    def take(self, size_bytes: int) -> None:
        """Count bytes that came in; raises Overloaded, and they are counted all the same."""
        self._held_bytes += size_bytes
        if self._held_bytes > self._all_bytes:
            msg = f"bodies of other requests fill the {_mebibytes(self._all_bytes)} there are: retry shortly"
            raise Overloaded(msg)

    def give_back(self, size_bytes: int) -> None:
        """Bytes that were taken are no longer held."""
        self._held_bytes -= size_bytes

    @contextlib.asynccontextmanager
    async def picture_of(self, request: Request) -> AsyncIterator[bytes]:
        """The one encoded picture that `request` carries, as its body or as a file of a form. Raises BadInput, too."""
        async with self.of(request) as body:
            is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
            picture = await _file_of_form(request, body) if is_form else body
            if not picture:
                raise BadInput("the request carries no picture: send a JPEG or PNG as the body or as a form file")
            yield picture


class _Body:
    """One body, counted until the context is left."""

    __slots__ = ("_bodies", "_received_bytes", "_request")

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies, self._request, self._received_bytes = bodies, request, 0

    async def __aenter__(self) -> bytes:
        known: Mapping[bytes, bytes] = self._request.scope["known"]
        if known.get(b"content-encoding", b"identity") not in self._bodies.encodings:
            raise HTTPException(415, "compressed bodies are not accepted: send the body as it is")
        limit_bytes = self._bodies.each_bytes
        announced = known.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit_bytes:
            raise _too_large(limit_bytes)
        try:
            return await self._read(limit_bytes)
        except BaseException:
            self._give_back()
            raise

    async def __aexit__(self, *_error: object) -> None:
        self._give_back()

    async def _read(self, limit_bytes: int) -> bytes:
        chunks: list[bytes] = []
        more = True
        while more:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            self._received_bytes += len(chunk)
            self._bodies.take(len(chunk))
            if self._received_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _give_back(self) -> None:
        self._bodies.give_back(self._received_bytes)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body is over the limit of {_mebibytes(limit_bytes)}: send a smaller one")


async def _file_of_form(request: Request, body: bytes) -> bytes:
    async def once() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, once(), max_files=1, max_fields=8).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        msg = f"the form cannot be read: {error}"
        raise BadInput(msg) from error
    files = [value for value in form.values() if not isinstance(value, str)]
    content = await files[0].read() if files else b""
    await form.close()
    return content


def _mebibytes(size_bytes: int) -> str:
    return f"{round(size_bytes / 2**20, 2):g} MiB"
