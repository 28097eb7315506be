"""A device that reports to the double of upstream, in handed-in time: its sync is the real one, over a real spool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from doubles.upstream import MemoryUpstream

from appliance.adapters.spool import Spool
from appliance.cloudsync import CloudSync
from appliance.core.clock import RELEASED_AT
from appliance.core.outbox import Rules
from appliance.service import Service
from appliance.settings import Upstream
from models.sync import MOST_ITEMS

DEVICE = "dock-7"
SHORT = Rules(window=MOST_ITEMS, replay_per_s=1e6)


def lived(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test as a story on an event loop."""

    @wraps(story)
    def run(**given: Any) -> None:  # noqa: ANN401 - fixtures
        asyncio.run(story(**given))

    return run


class Following:
    """Notes what is wished for."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.pins: Mapping[str, str] = {}
        self.paused = False
        self.own: dict[str, str] = {}

    def desire(self, pins: Mapping[str, str], *, paused: bool) -> None:
        """Follow them."""
        self.pins, self.paused = pins, paused

    def overruled(self) -> list[str]:
        """Where `own` says otherwise."""
        return sorted(name for name, version in self.pins.items() if self.own.get(name, version) != version)


class Device:
    """One device over one start of its daemon, and its clocks."""

    def __init__(self, folder: Path, upstream: MemoryUpstream, rules: Rules = SHORT, **settings: Any) -> None:  # noqa: ANN401 - settings
        """Start it on `folder`."""
        self.now, self.wall, self.synced, self.hot = 1000.0, RELEASED_AT + 1e6, True, False
        self.obeyed: list[str] = []
        self.following = Following()
        self.service = Service([], device_id=DEVICE, facts=self.facts)
        self.service.orders["status"] = lambda order: self.obeyed.append(order.id) or {"well": True}
        config = Upstream(**{"url": "https://upstream", "interval_s": 60.0, "telemetry_s": 0.0, **settings})
        self.spool = Spool(folder / "sync.db", rules)
        self.sync = CloudSync(
            self.service,
            config,
            self.spool,
            upstream,
            self.following,
            wall=lambda: self.wall,
            synced=lambda: self.synced,
            monotonic=lambda: self.now,
        )

    def facts(self) -> dict[str, Any]:
        """What its host says."""
        return {
            "clock": {"synced": self.synced, "assumed": False, "started_at": 0, "now": round(self.wall)},
            "update": None,
            "device": {"throttled": {"reasons": ["hot"] if self.hot else []}},
        }

    async def live(self, for_s: float) -> None:
        """Let time pass."""
        until = self.now + for_s
        while True:
            wait_s = max(await self.sync.turn(), 0.01)
            for _ in range(5):  # what it has begun goes on
                await asyncio.sleep(0)
            if self.now + wait_s > until:
                self.wall, self.now = self.wall + until - self.now, until
                return
            self.wall, self.now = self.wall + wait_s, self.now + wait_s


@contextmanager
def device(folder: Path, upstream: MemoryUpstream, **settings: Any) -> Iterator[Device]:  # noqa: ANN401 - settings
    """One start of a device."""
    one = Device(folder, upstream, **settings)
    try:
        yield one
    finally:
        one.spool.close()


def told(upstream: MemoryUpstream, *kinds: str) -> list[Any]:
    """What the server has of this test's items, in the order in which they were put."""
    return [item.payload["n"] for item in upstream.of(DEVICE, *kinds)]
