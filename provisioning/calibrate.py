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

METHODS = ("percentile", "entropy", "mse")
"""Ways to choose a threshold: clip a share of the elements; lose least information; make the least squared error."""
_BINS = 4096
_LEVELS = 128
"""Magnitudes that a signed byte tells apart."""
_STRIDE = 16
"""Bins between two thresholds that are tried: an eighth of a level when all bins are used."""
_TINY = 1e-10


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

    def threshold(self, method: str, percentile: float) -> float:
        """The |x| that the scale is to represent, chosen by a method of `METHODS`; never past the largest seen."""
        largest = _largest(self.low, self.high)
        if not self.counts.any() or largest == 0:
            return 0.0
        width = 2.0**self.exponent / _BINS
        if method == "percentile":
            return min(self._percentile(percentile) * width, largest)
        last = int(np.flatnonzero(self.counts)[-1]) + 1
        candidates = range(_LEVELS, last + _STRIDE, _STRIDE)
        cost = self._entropy if method == "entropy" else self._squared_error
        best = min(candidates, key=cost, default=last)
        return min(best * width, largest)

    def _percentile(self, percentile: float) -> int:
        """Bins that `percentile` percent of all elements lie in.

        Zeros are counted too. They say nothing about the scale, but leaving them out would make it depend on padding.
        """
        wanted = math.ceil(self.counts.sum() * percentile / 100)
        return int(np.searchsorted(np.cumsum(self.counts), wanted)) + 1

    def _squared_error(self, bins: int) -> float:
        """Expected square of what a scale over `bins` bins does to x, in widths of bins.

        Inside, rounding is uniform over a step: step**2 / 12 (not for the first bin, which zeros share);
        outside, clipping costs the square of the distance (Banner et al. 2019, "Post training 4-bit
        quantization of convolutional networks for rapid-deployment", section 3).
        """
        outside = np.arange(_BINS - bins) + 0.5
        return float(self.counts[1:bins].sum() * (bins / _LEVELS) ** 2 / 12 + (self.counts[bins:] * outside**2).sum())

    def _entropy(self, bins: int) -> float:
        """KL divergence of the histogram over `bins` bins from itself in 128 levels.

        What lies outside is added to the last bin of the one and missing in the other (Migacz 2017, "8-bit Inference
        with TensorRT", GTC).
        """
        inside = self.counts[:bins].astype(np.float64)
        level = np.arange(bins) * _LEVELS // bins
        used = inside > 0
        total = np.bincount(level, inside, _LEVELS)
        share = np.bincount(level, used, _LEVELS)
        coarse = np.where(used, (total / np.maximum(share, 1))[level], 0)
        inside[-1] += self.counts[bins:].sum()
        p, q = inside / inside.sum(), np.maximum(coarse / max(coarse.sum(), 1), _TINY)
        seen = p > 0
        return float((p[seen] * np.log(p[seen] / q[seen])).sum())


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
