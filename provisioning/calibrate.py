"""Watches what flows into convolutions and products of matrices while samples run through a graph.

Samples may differ in size, as text lines do in width: statistics are kept, never tensors. A histogram reaches from 0
to a power of two, so histograms of different reach add up without a second pass: the shorter one is folded, two
bins into one, until both reach as far. Sums run in the order of the samples, so the same samples give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appliance.runtime import Runtime
from models.spec import Array

_BINS = 4096


@dataclass(frozen=True, slots=True)
class Watched:
    """Statistics of |x| of one tensor."""

    low: npt.NDArray[np.float32]
    """Smallest x of each channel."""
    high: npt.NDArray[np.float32]
    """Largest x of each channel."""
    channel_sum: npt.NDArray[np.float64]
    """Sum of x of each channel."""
    counts: npt.NDArray[np.int64]
    """Histogram of |x| over [0, 2**exponent)."""
    exponent: int

    @classmethod
    def of(cls, tensor: Array, axis: int) -> Watched:
        """Look at one tensor whose channels lie along `axis`."""
        others = tuple(i for i in range(tensor.ndim) if i != axis % tensor.ndim)
        low, high = tensor.min(axis=others), tensor.max(axis=others)
        exponent = math.frexp(_largest(low, high))[1]
        bins = (np.abs(tensor).reshape(-1) * np.float32(_BINS * 2.0**-exponent)).astype(np.int32)
        counts = np.bincount(bins, minlength=_BINS)
        return cls(low, high, tensor.sum(axis=others, dtype=np.float64), counts, exponent)

    def __add__(self, other: Watched) -> Watched:
        """Both together."""
        exponent = max(self.exponent, other.exponent)
        return Watched(
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.channel_sum + other.channel_sum,
            self._reaching(exponent) + other._reaching(exponent),
            exponent,
        )

    def _reaching(self, exponent: int) -> npt.NDArray[np.int64]:
        fold = 1 << min(exponent - self.exponent, _BINS.bit_length() - 1)
        folded = self.counts.reshape(-1, fold).sum(axis=1)
        return np.pad(folded, (0, _BINS - len(folded)))

    @property
    def mean(self) -> Array:
        """E[x] of each channel."""
        return np.asarray(self.channel_sum * (len(self.channel_sum) / self.counts.sum()))

    def threshold(self, percentile: float) -> float:
        """Smallest size that `percentile` percent of all elements do not pass; never past the largest seen.

        Zeros are counted too. They say nothing about the scale, but leaving them out would make it depend on padding.
        """
        wanted = math.ceil(self.counts.sum() * percentile / 100)
        full = int(np.searchsorted(np.cumsum(self.counts), wanted)) + 1
        return min(full * 2.0**self.exponent / _BINS, _largest(self.low, self.high))


def _largest(low: Array, high: Array) -> float:
    return float(max(-low.min(), high.max(), 0))


def watch(
    graph: bytes, axes: Mapping[str, int], samples: Sequence[Mapping[str, Array]], runtime: Runtime, threads: int
) -> dict[str, Watched]:
    """Statistics of the inputs and outputs `axes` (name -> axis of its channels) of `graph` over `samples`."""
    session = runtime.open(graph, threads=1)
    inputs = {tensor.name for tensor in session.spec.inputs}

    def look(sample: Mapping[str, Array]) -> dict[str, Watched]:
        tensors = {**sample, **session.run(sample, [name for name in axes if name not in inputs])}
        return {name: Watched.of(tensors[name], axis) for name, axis in axes.items()}

    with ThreadPoolExecutor(threads) as pool:
        return _total(pool.map(look, samples))


def _total(seen: Iterable[dict[str, Watched]]) -> dict[str, Watched]:
    total: dict[str, Watched] = {}
    for one in seen:
        total = {name: total[name] + watched if total else watched for name, watched in one.items()}
    return total
