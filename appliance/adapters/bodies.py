"""Request bodies: each within a limit, and all that are in hand within another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from models.errors import BadInput, Overloaded, TooLarge


class Bodies:
    """Counts the bytes of every body from its first byte to the answer."""

    def __init__(self, *, each_bytes: int, all_bytes: int) -> None:
        """Take no body over `each_bytes`, and none for which those in hand leave no room within `all_bytes`."""
        self._each_bytes, self._all_bytes = each_bytes, all_bytes
        self._held_bytes = 0

    @contextlib.asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body of `request`, whether or not its length was announced.

        Raises TooLarge, or Overloaded when bodies that others send take up the room.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "compressed bodies are not accepted: send the body as it is")
        too_large = TooLarge(f"the body is over the limit of {_mebibytes(self._each_bytes)}: send a smaller one")
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._each_bytes:
            raise too_large
        chunks: list[bytes] = []
        received_bytes = 0
        try:
            async for chunk in request.stream():
                received_bytes += len(chunk)
                self._held_bytes += len(chunk)
                if received_bytes > self._each_bytes:
                    raise too_large
                if self._held_bytes > self._all_bytes:
                    msg = f"bodies of other requests fill the {_mebibytes(self._all_bytes)} there are: retry shortly"
                    raise Overloaded(msg)
                chunks.append(chunk)
            yield b"".join(chunks)
        finally:
            self._held_bytes -= received_bytes

    @contextlib.asynccontextmanager
    async def picture_of(self, request: Request) -> AsyncIterator[bytes]:
        """The one encoded picture that `request` carries, as its body or as a file of a form. Raises BadInput, too."""
        async with self.of(request) as body:
            is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
            picture = await _file_of_form(request, body) if is_form else body
            if not picture:
                raise BadInput("the request carries no picture: send a JPEG or PNG as the body or as a form file")
            yield picture


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
