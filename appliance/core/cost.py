"""What the requests of one bucket cost, learned from what they took: seconds each, and how many to compute together.

Pure. A bucket holds requests of one shape, so they cost the same and may share a run.
"""

from __future__ import annotations

_WEIGHT = 0.1
"""Of the newest sample in the running mean: it forgets a disturbance within some twenty runs."""
_TRIES = 3
"""Runs of one size before it is judged, by the fastest of them: the one that neighbours disturbed least."""
_GAIN = 0.9
"""A larger run must take at most this share of the smaller one's time a request: waiting for it costs as well."""


def smoothed(known: float | None, sample: float) -> float:
    """The running mean `known`, if there is one, moved towards a new sample."""
    return sample if known is None else known + _WEIGHT * (sample - known)


class Cost:
    """Learned for one bucket."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.service_s: float | None = None
        """Mean seconds a request; None before the first."""
        self._fastest_s: dict[int, float] = {}
        self._tries: dict[int, int] = {}

    def learn(self, size: int, took_s: float) -> None:
        """A run of `size` requests took `took_s`."""
        each_s = took_s / size
        self.service_s = smoothed(self.service_s, each_s)
        if self._tries.get(size, 0) < _TRIES:
            self._tries[size] = self._tries.get(size, 0) + 1
            self._fastest_s[size] = min(each_s, self._fastest_s.get(size, each_s))

    def together(self, waiting: int, most: int) -> int:
        """How many of `waiting` requests to compute in one run, at most `most`: a power of two.

        Twice as many are tried as long as that made each request cheaper. Powers of two, because a runtime
        plans its memory anew for every shape it meets.
        """
        best, size = 1, 1
        while size <= min(waiting, most):
            if self._tries.get(size, 0) < _TRIES:
                return size
            if size > 1 and self._fastest_s[size] > _GAIN * self._fastest_s[size // 2]:
                break
            best, size = size, 2 * size
        return best
