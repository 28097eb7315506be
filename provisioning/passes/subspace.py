"""Chooses which heads share keys and values, and the shared heads, for the smallest error on samples.

Scores depend on Wq_h and Wk_h only through their product. To second order, a change of the scores of a time step costs
the variance of that change under the attention paid there (the divergence between both attentions). On average that is
the square of M_h = Sq [Wq_h; bq_h] Wk_h^T Sk, with Sq^2 = E[(x,1)^T (x,1)] and Sk^2 the covariance of x under the
attention, averaged over heads and time steps. By Eckart and Young its best approximation of rank D, for all heads of
the group at once, projects on V, the first D right singular vectors of the M_h below each other:

    Wk_G = Sk^-1 V,  bk_G = -mean(x) Wk_G,  [Wq'_h; bq'_h] = Sq^-1 M_h V = [Wq_h; bq_h] Wk_h^T Sk V

Likewise for values with N_h = Sv Wv_h Wo_h, Sv^2 = mean_h Cov(P_h x) of what head h averages, and U, the first D left
singular vectors of the N_h side by side:

    Wv_G = Sv^-1 U,  bv_G = -mean(x) Wv_G,  Wo'_h = U^T N_h,  bo' = bo + sum_h (mean(x) Wv_h + bv_h) Wo_h

The squares of the other singular values are the cost of a group; all groupings into equal groups are compared.

That minimises the error of each head by itself. The error of their sum is what counts, so values and the last layer are
then fitted in turn, by ridge regression towards what they were, to what the block computed before:

    min |Y - sum_h Z_h [Wv_G; bv_G] Wo_h - bo|,  Z_h = P'_h (x, 1)

Axes in names: B batch, T time steps, N time steps of all samples, C channels, H heads, G groups, R heads of a group,
D size of a head, E = C + 1, M channels of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np

from models.spec import Array
from provisioning.passes import constant
from provisioning.passes.attention import Block, Linear

_FLAT = 1e-5
"""Directions of x with less than this share of the largest variance count as having this much."""
_RIDGE = 1e-4
"""Weight of a ridge, as a share of the mean eigenvalue of what it is added to."""
_TURNS = 5
"""How often values and last layer are fitted in turn; the error falls little after that."""
_STEPS = 25
"""Steps of conjugate gradients for the values, of which there are too many to solve for directly."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """The layers of a block whose query heads stand in the order of their groups."""

    order: tuple[int, ...]
    """Head of the block as published that each query head is."""
    q: Linear
    k: Linear
    """[C, G D], and v as well."""
    v: Linear
    out: Linear


class Samples:
    """What all samples bring to a block, in double precision; N is their time steps together."""

    def __init__(self, block: Block, collected: Iterable[Mapping[str, Array]]) -> None:
        """Take what was `collected` of x and the mask."""
        xs: list[Array] = []
        self._masks: list[Array] = []
        for tensors in collected:
            xs.append(tensors[str(block.x.name)])
            mask = np.zeros(1)
            if block.mask is not None:
                held = constant(block.mask)
                mask = tensors[str(block.mask.name)] if held is None else held
            self._masks.append(mask.astype(np.float64))
        self._shapes = [x.shape[:2] for x in xs]
        self.x = np.concatenate([x.reshape(-1, x.shape[2]) for x in xs]).astype(np.float64)
        """[N, C]"""

    def each(self, flat: Array, heads: int) -> Iterator[Array]:
        """What belongs to each sample in `flat` [N, heads * size], as [B, heads, T, size]."""
        start = 0
        for batch, steps in self._shapes:
            part = flat[start : start + batch * steps]
            yield part.reshape(batch, steps, heads, -1).transpose(0, 2, 1, 3)
            start += batch * steps

    def attention(self, q: Linear, k: Linear, heads: int, kv_heads: int, scale: float) -> Iterator[Array]:
        """What the query heads, group after group, pay to the keys of each sample: P [B, G, R, T, T]."""
        queries, keys = self.each(_apply(q, self.x), heads), self.each(_apply(k, self.x), kv_heads)
        for q_BHTD, k_BGTD, mask in zip(queries, keys, self._masks, strict=True):
            scores = scale * _grouped(q_BHTD, kv_heads) @ k_BGTD[:, :, None].swapaxes(-1, -2)
            scores = (scores.reshape(*q_BHTD.shape[:3], -1) + mask).reshape(scores.shape)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            yield np.asarray(scores / scores.sum(axis=-1, keepdims=True))

    def averages(self, attention: Iterable[Array], heads: int) -> Array:
        """What the heads average, (x, 1): Z [H, N, E]."""
        ones = np.concatenate([self.x, np.ones((len(self.x), 1))], axis=1)
        parts = []
        for p_BGRTT, x_B1TE in zip(attention, self.each(ones, 1), strict=True):
            batch, steps = p_BGRTT.shape[0], p_BGRTT.shape[-1]
            seen = p_BGRTT.reshape(batch, heads, steps, steps) @ x_B1TE
            parts.append(seen.transpose(1, 0, 2, 3).reshape(heads, batch * steps, -1))
        return np.concatenate(parts, axis=1)

    def contexts(self, attention: Iterable[Array], flat: Array, kv_heads: int) -> Array:
        """P v of all samples [N, H D] for v = `flat` [N, G D]."""
        parts = []
        for p_BGRTT, v_BGTD in zip(attention, self.each(flat, kv_heads), strict=True):
            context = p_BGRTT @ v_BGTD[:, :, None]
            batch, groups, rows, steps, size = context.shape
            context = context.reshape(batch, groups * rows, steps, size).transpose(0, 2, 1, 3)
            parts.append(context.reshape(batch * steps, -1))
        return np.concatenate(parts)


def _apply(layer: Linear, x: Array) -> Array:
    return np.asarray(x @ layer.w.astype(np.float64) + layer.b)


def _grouped(q_BHTD: Array, kv_heads: int) -> Array:
    batch, heads, steps, size = q_BHTD.shape
    return q_BHTD.reshape(batch, kv_heads, heads // kv_heads, steps, size)


def share(block: Block, kv_heads: int, samples: Samples) -> Grouped:
    """Layers with `kv_heads` key and value heads that do what `block` does on `samples`, as nearly as they can."""
    heads, size, width = block.heads, block.size, block.x_width
    x, count = samples.x, len(samples.x)
    mean = x.mean(axis=0)
    attention = list(samples.attention(block.q, block.k, heads, heads, block.scale))
    averaged, attended = np.zeros((width, width)), np.zeros((width, width))
    for p_BHRTT, x_B1TC in zip(attention, samples.each(x - mean, 1), strict=True):
        p_BHTT = p_BHRTT[:, :, 0]
        seen = (p_BHTT @ x_B1TC).reshape(-1, width)
        averaged += seen.T @ seen / (heads * count)
        paid_BT1 = p_BHTT.sum(axis=(1, 2))[:, :, None]  # attention that each time step gets from all others
        attended += ((paid_BT1 * x_B1TC[:, 0]).reshape(-1, width).T @ x_B1TC.reshape(-1, width)) / (heads * count)
    root_k, inverse_k = _roots(attended - averaged)
    root_v, inverse_v = _roots(averaged)
    extended = np.concatenate([x, np.ones((count, 1))], axis=1)
    moments_q = extended.T @ extended / count
    q = np.concatenate([block.q.w, block.q.b[None]]).astype(np.float64).reshape(width + 1, heads, size)
    k, v = (layer.w.astype(np.float64).reshape(width, heads, size) for layer in (block.k, block.v))
    out = block.out.w.astype(np.float64).reshape(heads, size, -1)
    # M_h^T M_h = F_h F_h^T with F_h [C, D], so the singular values and vectors of a group are those of its F_h.
    of_keys = [root_k @ k[:, h] @ _factor(q[:, h].T @ moments_q @ q[:, h]) for h in range(heads)]
    of_values = [root_v @ v[:, h] @ _factor(out[h] @ out[h].T) for h in range(heads)]
    groups = _grouping(_costs(of_keys, size), _costs(of_values, size), heads, kv_heads)
    new_q, new_k, new_v, new_out = [], [], [], []
    for group in groups:
        right, left = _first(of_keys, group, size), _first(of_values, group, size)
        new_k.append(inverse_k @ right)
        new_v.append(inverse_v @ left)
        new_q += [q[:, h] @ (k[:, h].T @ root_k @ right) for h in group]
        new_out += [left.T @ root_v @ v[:, h] @ out[h] for h in group]
    wq, wk, wv = (np.concatenate(one, axis=1) for one in (new_q, new_k, new_v))
    bias = block.out.b + _apply(block.v, mean) @ block.out.w
    grouped = Grouped(
        tuple(h for group in groups for h in group),
        Linear(wq[:-1], wq[-1]),
        Linear(wk, -mean @ wk),
        Linear(wv, -mean @ wv),
        Linear(np.concatenate(new_out), bias),
    )
    before = _apply(block.out, samples.contexts(attention, _apply(block.v, x), heads))
    return _fitted(block, grouped, kv_heads, samples, before)


def _roots(moments: Array) -> tuple[Array, Array]:
    """Square root of a symmetric matrix, and its inverse."""
    values, vectors = np.linalg.eigh(moments)
    values = np.maximum(values, values[-1] * _FLAT)
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def _factor(gram: Array) -> Array:
    """F with F F^T = gram, which need not be of full rank."""
    values, vectors = np.linalg.eigh(gram)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0)))


def _first(factors: Sequence[Array], group: Sequence[int], size: int) -> Array:
    """The first `size` left singular vectors of the group's factors side by side."""
    return np.asarray(
        np.linalg.svd(np.concatenate([factors[h] for h in group], axis=1), full_matrices=False)[0][:, :size]
    )


def _costs(factors: Sequence[Array], size: int) -> Callable[[tuple[int, ...]], float]:
    """Cost of a group, as a share of what all heads weigh together."""
    side_by_side = np.concatenate(factors, axis=1)
    gram = side_by_side.T @ side_by_side
    total = float(np.trace(gram))

    def cost(group: tuple[int, ...]) -> float:
        columns = np.concatenate([np.arange(h * size, (h + 1) * size) for h in group])
        return float(np.linalg.eigvalsh(gram[np.ix_(columns, columns)])[:-size].sum()) / total

    return cost


def _grouping(
    of_keys: Callable[[tuple[int, ...]], float],
    of_values: Callable[[tuple[int, ...]], float],
    heads: int,
    kv_heads: int,
) -> list[tuple[int, ...]]:
    """The cheapest of all groupings of the heads into `kv_heads` groups of one size."""
    members = heads // kv_heads
    cost = {group: of_keys(group) + of_values(group) for group in combinations(range(heads), members)}

    @cache
    def best(left: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """The cheapest grouping of the heads that are left; the first of them is in some group."""
        if not left:
            return 0.0, ()
        options = []
        for others in combinations(left[1:], members - 1):
            group = (left[0], *others)
            rest_cost, rest = best(tuple(h for h in left if h not in group))
            options.append((cost[group] + rest_cost, (group, *rest)))
        return min(options)

    return list(best(tuple(range(heads)))[1])


def _fitted(block: Block, grouped: Grouped, kv_heads: int, samples: Samples, before: Array) -> Grouped:
    """`grouped` with values and last layer fitted to what the block computed before, `before` [N, M]."""
    heads, size = block.heads, block.size
    seen_HNE = samples.averages(samples.attention(grouped.q, grouped.k, heads, kv_heads, block.scale), heads)
    width = seen_HNE.shape[2]
    flat = seen_HNE.transpose(1, 0, 2).reshape(len(before), -1)
    fit = _Fit(
        moments=(flat.T @ flat).reshape(heads, width, heads * width),
        wanted=(flat.T @ before).reshape(heads, width, -1),
        group_of=np.arange(heads) // (heads // kv_heads),
    )
    stacked = np.concatenate([grouped.v.w, grouped.v.b[None]])
    v_GED = stacked.reshape(width, kv_heads, size).transpose(1, 0, 2)
    out = np.concatenate([grouped.out.w, grouped.out.b[None]])
    out = fit.out(v_GED, out)
    for _ in range(_TURNS):
        v_GED = fit.values(v_GED, out)
        out = fit.out(v_GED, out)
    stacked = v_GED.transpose(1, 0, 2).reshape(width, -1)
    return replace(grouped, v=Linear(stacked[:-1], stacked[-1]), out=Linear(out[:-1], out[-1]))


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least squares in turn. The last channel of Z_h is 1, so its moments with anything are sums."""

    moments: Array
    """Z_h^T Z_h' [H, E, H E]"""
    wanted: Array
    """Z_h^T Y [H, E, M]"""
    group_of: Array
    """Group of each head [H]."""

    def out(self, v_GED: Array, before: Array) -> Array:
        """Last layer with its bias below it [H D + 1, M], given the values; `before` is what it was."""
        v_HED = v_GED[self.group_of]
        heads, width, size = v_HED.shape
        half = self.moments.reshape(heads, width, heads, width).transpose(0, 2, 1, 3) @ v_HED  # [H, H', E, D']
        inner = v_HED.transpose(0, 2, 1)[:, None] @ half  # [H, H', D, D']
        sums = half[0, :, -1].reshape(-1)  # sum over N of what each head computes
        gram = np.empty((heads * size + 1,) * 2)
        gram[:-1, :-1] = inner.transpose(0, 2, 1, 3).reshape(heads * size, heads * size)
        gram[-1, :-1] = gram[:-1, -1] = sums
        gram[-1, -1] = self.moments[0, -1, width - 1]
        right = (v_HED.transpose(0, 2, 1) @ self.wanted).reshape(heads * size, -1)
        right = np.concatenate([right, self.wanted[0, -1:]])
        ridge = _RIDGE * np.trace(gram) / len(gram)
        return np.asarray(np.linalg.solve(gram + ridge * np.eye(len(gram)), right + ridge * before))

    def values(self, before: Array, out: Array) -> Array:
        """Values [G, E, D], given the last layer [H D + 1, M], by conjugate gradients from what they were."""
        heads, width, size = len(self.group_of), before.shape[1], before.shape[2]
        o_HDM = out[:-1].reshape(heads, size, -1)
        inner = np.einsum("gdm,hem->hgde", o_HDM, o_HDM)  # Wo_h' Wo_h^T at [h, h']
        sums = self.moments[:, :, width - 1]  # sum over N of Z_h [H, E]
        scale = np.trace(self.moments.reshape(heads, width, heads, width).trace(axis1=0, axis2=2)) / (heads * width)
        ridge = _RIDGE * scale * np.einsum("hhdd->", inner) / (heads * size)

        def normal(v_GED: Array) -> Array:
            turned = v_GED[self.group_of][None] @ inner  # [H, H', E, D]
            return np.asarray(self._by_group(self.moments @ turned.reshape(heads, heads * width, size)) + ridge * v_GED)

        right = (self.wanted - sums[:, :, None] * out[-1]) @ o_HDM.transpose(0, 2, 1)
        return _conjugate_gradients(normal, self._by_group(right) + ridge * before, before)

    def _by_group(self, each_HED: Array) -> Array:
        rows = int((self.group_of == 0).sum())
        return np.asarray(each_HED.reshape(-1, rows, *each_HED.shape[1:]).sum(axis=1))


def _conjugate_gradients(normal: Callable[[Array], Array], right: Array, start: Array) -> Array:
    """A better solution of normal(x) = right than `start`, `normal` symmetric and positive (Hestenes, Stiefel 1952)."""
    x, residual = start, right - normal(start)
    direction, square = residual, (residual**2).sum()
    for _ in range(_STEPS):
        image = normal(direction)
        step = square / (direction * image).sum()
        x, residual = x + step * direction, residual - step * image
        square, old = (residual**2).sum(), square
        direction = residual + square / old * direction
    return x
