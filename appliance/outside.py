"""Waiting for a network from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def outside(call: Callable[..., T], *given: object) -> T:
    """Run what waits for a network, in a thread that does not hold up the end of the daemon."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = call(*given)
        except BaseException as error:
            tell(future.set_exception, error)
        else:
            tell(future.set_result, result)

    def tell(how: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if future.done() else how(what))

    threading.Thread(target=run, name="outside", daemon=True).start()
    return await future
