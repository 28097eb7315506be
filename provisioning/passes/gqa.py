"""Lets groups of query heads share one key and value head (grouped-query attention), without training.

Requires: attention blocks that `passes.attention` finds, with a number of heads that the wanted number divides;
samples of what flows into them.
Ensures: every such block computes keys and values for the wanted number of heads only. It is written as products of
four axes: the queries of a group stand below each other as rows [B, G, R T, D] and meet the keys [B, G, D, T] of their
group once, so no key and no value is repeated. Opset 17, standard operators.

Method "average" takes the mean of the keys' and of the values' weights of neighbouring heads (Ainslie et al. 2023,
"GQA"). Method "subspace" chooses the groups and their shared heads for the smallest error on the samples, as
`passes.subspace` says. Blocks are converted in order, and samples are taken again after each.

Axes in names: B batch, T time steps, C channels, H heads, G groups, R heads of a group, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from models.errors import ConfigError
from models.spec import Array
from provisioning.passes import initializer, sizes
from provisioning.passes.attention import Block, Found, Linear
from provisioning.passes.subspace import Grouped, Samples, share

METHODS = ("subspace", "average")
Collect: TypeAlias = Callable[[ir.Model, Sequence[str]], Iterable[Mapping[str, Array]]]
"""Runs the samples through a model and hands out the named tensors, a mapping for each sample."""


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
            grouped = share(block, kv_heads, Samples(block, collect(model, names)))
        _replace(model, block, grouped, kv_heads, f"attention{number}")
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    return model


def _average(block: Block, kv_heads: int) -> Grouped:
    def mean(layer: Linear) -> Linear:
        w, b = (
            array.reshape(-1, kv_heads, block.heads // kv_heads, block.size)
            .mean(axis=2)
            .reshape(-1, kv_heads * block.size)
            for array in (layer.w, layer.b)
        )
        return Linear(w, b[0])

    return Grouped(tuple(range(block.heads)), block.q, mean(block.k), mean(block.v), block.out)


def _replace(model: ir.Model, block: Block, grouped: Grouped, kv_heads: int, name: str) -> None:
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
