"""Lets groups of query heads share one key and value head (grouped-query attention), without training.

Requires: attention blocks that `passes.attention` finds, with a number of heads that the wanted number divides;
samples of what flows into them.
Ensures: every such block computes keys and values for the wanted number of heads only. It is written as products of
four axes: the queries of a group stand below each other as rows [B, G, R T, D] and meet the keys [B, G, D, T] of their
group once, so no key and no value is repeated. Opset 17, standard operators.

Method "average" takes the mean of the keys' and of the values' weights of neighbouring heads (Ainslie et al. 2023,
"GQA"). Method "subspace" chooses the groups and their shared heads for the smallest error on the samples:

Scores depend on Wq_h and Wk_h only through their product, and softmax drops what is the same for all keys, so the
summed error of the scores of a group is that of M_h = Sq [Wq_h; bq_h] Wk_h^T Sk, with Sq^2 = E[(x,1)^T (x,1)] and
Sk^2 = Cov(x). By Eckart and Young its best approximation of rank D, for all heads of the group at once, projects on V,
the first D right singular vectors of the M_h below each other:

    Wk_G = Sk^-1 V,  bk_G = -mean(x) Wk_G,  [Wq'_h; bq'_h] = Sq^-1 M_h V = [Wq_h; bq_h] Wk_h^T Sk V

Likewise for values with N_h = Sv Wv_h Wo_h, Sv^2 = mean_h Cov(P_h x) of what head h averages, and U, the first D left
singular vectors of the N_h side by side:

    Wv_G = Sv^-1 U,  bv_G = -mean(x) Wv_G,  Wo'_h = U^T N_h,  bo' = bo + sum_h (mean(x) Wv_h + bv_h) Wo_h

The squares of the other singular values are the cost of a group; all groupings into equal groups are searched. At last
Wo' and bo' are fitted anew to what the block computed before, by ridge regression towards the values above.
Blocks are converted in order, and samples are taken again after each.

Axes in names: B batch, T time steps, C channels, H heads, G groups, R heads of a group, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from models.errors import ConfigError
from models.spec import Array
from provisioning.passes import initializer, sizes
from provisioning.passes.attention import Block, Found, Linear

METHODS = ("subspace", "average")
Collect: TypeAlias = Callable[[ir.Model, Sequence[str]], Iterable[Mapping[str, Array]]]
"""Runs the samples through a model and hands out the named tensors, a mapping for each sample."""

_FLAT = 1e-5
"""Directions of x with less than this share of the largest variance count as having this much."""
_RIDGE = 1e-4
"""Weight of the ridge, as a share of the mean square of what the block's heads compute."""


@dataclass(frozen=True, slots=True)
class _Grouped:
    """The layers of a converted block. Query heads stand in the order of their groups."""

    order: tuple[int, ...]
    """Head of the block as published that each query head is."""
    q: Linear
    k: Linear
    """[C, G D], and v as well."""
    v: Linear
    out: Linear


def check(found: Found, kv_heads: int, what: str) -> None:
    """Raise ConfigError, naming `what`, unless all blocks can be converted to `kv_heads`."""
    if not found.blocks:
        reasons = "".join(f"; {one.node} looks like attention, but {one.reason}" for one in found.not_understood)
        msg = f"{what} has no attention that could be converted{reasons}: build it without --kv-heads"
        raise ConfigError(msg)
    for block in found.blocks:
        if not 1 <= kv_heads <= block.heads or block.heads % kv_heads:
            possible = [str(n) for n in divisors(block.heads)]
            msg = (
                f"{what} has {block.heads} heads at {block.name}, which cannot share {kv_heads} key and value heads "
                f"evenly: give --kv-heads {', '.join(possible[:-1])} or {possible[-1]}"
            )
            raise ConfigError(msg)


def divisors(heads: int) -> list[int]:
    """Numbers of key and value heads that `heads` can share."""
    return [n for n in range(1, heads + 1) if heads % n == 0]


def convert(model: ir.Model, found: Found, kv_heads: int, method: str, collect: Collect) -> ir.Model:
    """Convert the blocks that were `found` in `model`, which passed `check`, in place."""
    for number, block in enumerate(found.blocks):
        if kv_heads == block.heads:
            continue
        if method == "average":
            grouped = _average(block, kv_heads)
        else:
            names = [str(value.name) for value in (block.x, block.mask) if value is not None]
            grouped = _subspace(block, kv_heads, _Samples(block, collect(model, names)))
        _replace(model, block, grouped, kv_heads, f"attention{number}")
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    return model


def _average(block: Block, kv_heads: int) -> _Grouped:
    def mean(layer: Linear) -> Linear:
        w, b = (
            array.reshape(-1, kv_heads, block.heads // kv_heads, block.size)
            .mean(axis=2)
            .reshape(-1, kv_heads * block.size)
            for array in (layer.w, layer.b)
        )
        return Linear(w, b[0])

    return _Grouped(tuple(range(block.heads)), block.q, mean(block.k), mean(block.v), block.out)


class _Samples:
    """What all samples bring to a block, in double precision; N is their time steps together."""

    def __init__(self, block: Block, collected: Iterable[Mapping[str, Array]]) -> None:
        """Take what was `collected` of x and the mask."""
        xs: list[Array] = []
        self._masks: list[Array] = []
        for tensors in collected:
            xs.append(tensors[str(block.x.name)])
            mask = tensors[str(block.mask.name)] if block.mask is not None else np.zeros(1)
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


def _subspace(block: Block, kv_heads: int, samples: _Samples) -> _Grouped:
    heads, size, width = block.heads, block.size, block.x_width
    x, count = samples.x, len(samples.x)
    mean = x.mean(axis=0)
    attention = list(samples.attention(block.q, block.k, heads, heads, block.scale))
    averaged = np.zeros((width, width))
    for p_BHRTT, x_B1TC in zip(attention, samples.each(x - mean, 1), strict=True):
        seen = (p_BHRTT[:, :, 0] @ x_B1TC).reshape(-1, width)
        averaged += seen.T @ seen / (heads * count)
    root_k, inverse_k = _roots(np.cov(x, rowvar=False, bias=True))
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
    grouped = _Grouped(
        tuple(h for group in groups for h in group),
        Linear(wq[:-1], wq[-1]),
        Linear(wk, -mean @ wk),
        Linear(wv, -mean @ wv),
        Linear(np.concatenate(new_out), bias),
    )
    before = _apply(block.out, samples.contexts(attention, _apply(block.v, x), heads))
    return _refitted(block, grouped, kv_heads, samples, before)


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


def _refitted(block: Block, grouped: _Grouped, kv_heads: int, samples: _Samples, before: Array) -> _Grouped:
    """`grouped` with its last layer fitted to what the block computed before [N, M]."""
    attention = samples.attention(grouped.q, grouped.k, block.heads, kv_heads, block.scale)
    context = samples.contexts(attention, _apply(grouped.v, samples.x), kv_heads)
    context = np.concatenate([context, np.ones((len(context), 1))], axis=1)
    gram = context.T @ context
    ridge = _RIDGE * np.trace(gram) / len(gram)
    layer = np.concatenate([grouped.out.w, grouped.out.b[None]])
    fitted = np.linalg.solve(gram + ridge * np.eye(len(gram)), context.T @ before + ridge * layer)
    return replace(grouped, out=Linear(fitted[:-1], fitted[-1]))


def _replace(model: ir.Model, block: Block, grouped: _Grouped, kv_heads: int, name: str) -> None:
    """Write the converted block in place of `block`; its nodes and constants are called `name`_..."""
    made: list[ir.Node] = []
    heads, size = block.heads, block.size
    dtype = block.q.w.dtype

    def constant(what: str, array: Array) -> ir.Value:
        return initializer(model, f"{name}_{what}", array)

    def node(
        operator: str, what: str, *inputs: ir.Value, outputs: int = 1, **attributes: int | Sequence[int]
    ) -> ir.Value:
        one = ir.node(operator, list(inputs), attributes, num_outputs=outputs, name=f"{name}_{what}")
        for index, value in enumerate(one.outputs):
            value.name = f"{one.name}_{index}" if outputs > 1 else one.name
            value.dtype = block.x.dtype
        made.append(one)
        return one.outputs[0]

    def shaped(what: str, value: ir.Value, *shape: int) -> ir.Value:
        return node("Reshape", what, value, constant(f"{what}_shape", np.array(shape, np.int64)))

    def linear(what: str, value: ir.Value, layer: Linear) -> ir.Value:
        product = node("MatMul", f"{what}_product", value, constant(f"{what}_weights", layer.w.astype(dtype)))
        return node("Add", what, product, constant(f"{what}_bias", layer.b.astype(dtype)))

    layers = {"q": grouped.q, "k": grouped.k, "v": grouped.v}
    if block.packed:
        packed = Linear(
            *(np.concatenate([getattr(one, part) for one in layers.values()], axis=-1) for part in ("w", "b"))
        )
        lengths = constant("lengths", np.array([one.w.shape[1] for one in layers.values()], np.int64))
        first = node("Split", "parts", linear("qkv", block.x, packed), lengths, outputs=3, axis=-1)
        q, k, v = first.producer().outputs  # type: ignore[union-attr] # made just above
    else:
        q, k, v = (linear(what, block.x, layer) for what, layer in layers.items())
    q = node("Transpose", "q_heads", shaped("q_cut", q, 0, -1, heads, size), perm=[0, 2, 1, 3])
    if block.scale != 1:
        q = node("Mul", "q_scaled", q, constant("scale", np.array(block.scale, dtype)))
    q = shaped("q_rows", q, 0, kv_heads, -1, size)
    k = node("Transpose", "k_heads", shaped("k_cut", k, 0, -1, kv_heads, size), perm=[0, 2, 3, 1])
    v = node("Transpose", "v_heads", shaped("v_cut", v, 0, -1, kv_heads, size), perm=[0, 2, 1, 3])
    scores = node("MatMul", "scores", q, k)
    if block.mask is not None:
        mask = block.mask
        if sizes(mask)[-3:-2] == (heads,):  # one for each head: they stand in another order now
            mask = node("Gather", "mask", mask, constant("order", np.array(grouped.order, np.int64)), axis=-3)
        scores = shaped("scores_of_heads", scores, 0, heads, -1, 0)
        scores = node("Add", "scores_masked", scores, mask)
        scores = shaped("scores_of_groups", scores, 0, kv_heads, -1, 0)
    if block.softmax_type is not None:
        scores = node("Cast", "scores_cast", scores, to=int(block.softmax_type))
        scores.dtype = block.softmax_type
    attention = node("Softmax", "softmax", scores, axis=-1)
    if block.softmax_type is not None:
        attention.dtype = block.softmax_type
        attention = node("Cast", "attention", attention, to=int(block.x.dtype or ir.DataType.FLOAT))
    context = shaped("context_of_heads", node("MatMul", "context", attention, v), 0, heads, -1, size)
    context = node("Transpose", "context_turned", context, perm=[0, 2, 1, 3])
    y = linear("out", shaped("context_flat", context, 0, -1, heads * size), grouped.out)
    producer = block.y.producer()
    if producer is None:
        raise AssertionError(block.name)
    y.shape, y.type = block.y.shape, block.y.type
    model.graph.insert_before(producer, made)
    block.y.replace_all_uses_with(y)
