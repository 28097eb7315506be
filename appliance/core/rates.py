"""How many requests a client, and all clients together, may make. Pure: times are monotonic seconds handed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.errors import TooMany

_MOST_CLIENTS = 1024
"""Idle clients beyond these are forgotten; they have used nothing up."""

_BURST_S = 1.0
"""What a client left unused in so long may come at once."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A bound; 0 requests a second is no bound."""

    per_s: float
    concurrent: int


@dataclass(slots=True)
class _Use:
    """`free_at` is when everything that was taken would have come at the allowed pace (GCRA, ITU-T I.371)."""

    running: int = 0
    free_at: float = -math.inf


class Rates:
    """Counts requests in hand and in time."""

    def __init__(self, *, client: Rate, everyone: Rate) -> None:
        """Bound each client by `client`, and all together by `everyone`."""
        self._client, self._everyone = client, everyone
        self._all = _Use()
        self._clients: dict[str, _Use] = {}

    def enter(self, client: str, now: float) -> None:
        """Take one request in hand, to be given back by `leave`; raises TooMany, and then nothing was counted."""
        use = self._clients.get(client) or _Use()
        _check(use, self._client, now, "this client")
        _check(self._all, self._everyone, now, "all clients together")
        self._clients[client] = use
        for each, rate in ((use, self._client), (self._all, self._everyone)):
            each.running += 1
            if rate.per_s:
                each.free_at = max(each.free_at, now) + 1 / rate.per_s
        if len(self._clients) > _MOST_CLIENTS:
            self._clients = {name: one for name, one in self._clients.items() if one.running or one.free_at > now}

    def leave(self, client: str) -> None:
        """A request of `client` is answered, or its client has gone."""
        self._all.running -= 1
        self._clients[client].running -= 1


def _check(use: _Use, rate: Rate, now: float, who: str) -> None:
    if use.running >= rate.concurrent:
        msg = f"{who} may have {rate.concurrent} requests in hand: wait for an answer first"
        raise TooMany(msg)
    if rate.per_s:
        wait_s = use.free_at - now - max(_BURST_S - 1 / rate.per_s, 0.0)
        if wait_s > 0:
            msg = f"{who} may make {rate.per_s:g} requests a second: send fewer"
            raise TooMany(msg, wait_s)
