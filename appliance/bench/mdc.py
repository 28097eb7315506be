"""M/D/c: how long Poisson arrivals wait for `c` servers that all take the same time.

The distribution is that of G. J. Franx, "A simple solution for the M/D/c waiting time distribution", Operations
Research Letters 29 (2001) 221-229. Times are in units of one service; `load` is the share of the servers in use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_PRECISION = 1e-13


@dataclass(frozen=True)
class Queue:
    """An M/D/c queue in its steady state."""

    servers: int
    load: float
    in_system: npt.NDArray[np.float64]
    """P(at most n requests wait or are served), by n."""

    @classmethod
    def at(cls, load: float, servers: int) -> Queue:
        """The queue at `load`, below 1.

        Over one service time all that were served leave and all that waited move up (Crommelin 1932): the number
        in the system becomes what exceeded `servers`, plus a Poisson number of arrivals. Iterated to its fixed point.
        """
        arrivals = load * servers
        most = math.ceil(arrivals + 12 * math.sqrt(arrivals) + 20)
        poisson = np.exp([k * math.log(arrivals) - arrivals - math.lgamma(k + 1) for k in range(most)])
        share = np.zeros(math.ceil(10 * servers + 40 / (1 - load)))
        share[0] = 1.0
        while True:
            left = np.concatenate(([share[: servers + 1].sum()], share[servers + 1 :]))
            new = np.convolve(left, poisson)[: len(share)]
            new /= new.sum()
            if np.abs(new - share).max() < _PRECISION:
                return cls(servers, load, np.cumsum(new))
            share = new

    def waits_at_most(self, wait: float) -> float:
        """P(an arrival waits no longer than `wait`)."""
        slots = math.floor(wait) + 1
        due = self.load * self.servers * (slots - wait)
        total, term = 0.0, math.exp(-due)
        for j in range(slots * self.servers):
            # At most that many wait, so at most that many and the served ones are in the system.
            waiting = (slots * self.servers - j - 1) + self.servers
            total += self.in_system[min(waiting, len(self.in_system) - 1)] * term
            term *= due / (j + 1)
        return float(total)

    def wait(self, share: float) -> float:
        """The wait that `share` of arrivals do not exceed."""
        low, high = 0.0, 1.0
        while self.waits_at_most(high) < share:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.waits_at_most(middle) < share else (low, middle)
        return high if self.waits_at_most(0.0) < share else 0.0

    def mean_wait(self) -> float:
        """Mean wait, by Little's law from the mean number that waits."""
        shares = np.diff(self.in_system, prepend=0.0)
        waiting = np.maximum(np.arange(len(shares)) - self.servers, 0)
        return float((shares * waiting).sum()) / (self.load * self.servers)


def waits_of(arrivals: Iterable[float], servers: int) -> list[float]:
    """What each of these arrivals waits for `servers` that take 1 and serve in order of arrival: the same, played."""
    free_at = [0.0] * servers
    waits = []
    for at in arrivals:
        begins = max(heapq.heappop(free_at), at)
        heapq.heappush(free_at, begins + 1.0)
        waits.append(begins - at)
    return waits
