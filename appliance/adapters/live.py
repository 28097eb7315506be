"""The status page, and what it lives on: the status, the last hour and the last faults, as server-sent events.

A request costs one number in a list here; everything else is done once a second, and once for all who watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from appliance.core.gates import at_fault
from appliance.core.history import STEP_S, Happened, History, LastFaults
from appliance.service import Outcome, Service
from models.errors import Overloaded, Unavailable

_EVERY_S = 1.0
_LEAST_S = 0.2
"""Between two looks, however much changes."""
_WATCHERS = 32
"""At the same time; each is a connection and some kilobytes a second."""


_WEB = Path(__file__).parent.parent / "web"
_PAGE = {"/": "index.html", "/page.css": "page.css", "/parts.js": "parts.js", "/page.js": "page.js"}
PAGE_HEADERS = {
    "cache-control": "no-cache",  # the files of another version of the appliance would be shown for months
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


class Live:
    """Follows one service."""

    def __init__(self, service: Service, on_fault: Callable[[Happened], None] = lambda _fault: None) -> None:
        """Count requests and faults of `service` from now on, and tell `on_fault` of each; `run` does the rest."""
        self._service, self._on_fault = service, on_fault
        self._history, self._faults = History(time.monotonic()), LastFaults()
        self._changed, self._ended, self._watchers = asyncio.Event(), False, 0
        self._news = asyncio.Event()
        """Set, and replaced, when there is something to tell."""
        self._status = self._point = b""
        self._points = 0
        """How many there were since the start."""
        service.observers.append(self._observe)
        service.listeners.append(self._change)

    def recent_faults(self) -> list[dict[str, Any]]:
        """The last faults of all workers, the newest first."""
        return self._faults.document(time.monotonic())

    async def run(self) -> None:
        """Look again and again."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _EVERY_S)
            self._changed.clear()
            point = self._history.look(time.monotonic(), self._service.waiting)
            if point:
                self._points += 1
                self._point = _event("point", point)
            if self._watchers:
                self._status = _event("status", self._service.status())
            self._tell()
            await asyncio.sleep(_LEAST_S)

    def end(self) -> None:
        """Let go whoever watches: a server that stops waits for all its answers to end."""
        self._ended = True
        self._tell()

    @property
    def ended(self) -> bool:
        """Whether those who watch are let go."""
        return self._ended

    def watch(self) -> AsyncIterator[bytes]:
        """Events for one who watches, until they or the daemon leave: `history`, then `status` and each new `point`.

        Raises Overloaded when too many watch.
        """
        if self._watchers >= _WATCHERS:
            msg = f"{_WATCHERS} watch already, which are as many as may: close a page, or ask /v1/status instead"
            raise Overloaded(msg)
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        self._watchers += 1
        try:
            seen = self._points
            yield _event("history", {"step_s": STEP_S, "points": list(self._history.points)})
            yield _event("status", self._service.status())
            while not self._ended:
                await self._news.wait()
                if self._ended:
                    return
                if self._points != seen:
                    seen = self._points
                    yield self._point
                yield self._status
        finally:
            self._watchers -= 1

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _observe(self, outcome: Outcome) -> None:
        history = self._history
        if outcome.error is None:
            history.answered += 1
            history.answered_s.append(outcome.seconds)
        elif at_fault(outcome.error):
            history.failed += 1
        elif isinstance(outcome.error, Unavailable):
            history.dropped += 1

    def _change(self) -> None:
        for fault in self._faults.see(self._service.workers(), time.monotonic()):
            self._on_fault(fault)
        self._changed.set()


@contextlib.contextmanager
def following(service: Service, on_fault: Callable[[Happened], None] = lambda _fault: None) -> Iterator[Live]:
    """Follow `service` on the running event loop."""
    live = Live(service, on_fault)
    task = asyncio.get_running_loop().create_task(live.run())
    try:
        yield live
    finally:
        task.cancel()


def add_page(app: FastAPI, live: Live) -> None:
    """The status page, and what it lives on."""

    async def page(request: Request) -> Response:
        return FileResponse(_WEB / _PAGE[request.scope["path"]], headers=PAGE_HEADERS)

    async def events() -> Response:
        return StreamingResponse(live.watch(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    for path in _PAGE:
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(page)
    app.get("/v1/events", include_in_schema=False)(events)  # OpenAPI has no words for a stream of events


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
