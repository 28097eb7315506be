"""Lets groups of query heads share one key and value head (grouped-query attention), without training.

Requires: attention blocks that `passes.attention` finds, with a number of heads that the wanted number divides;
samples of what flows into them.
Ensures: every such block computes keys and values for the wanted number of heads only, and no copy of any of them:
queries [B, G, R, T, D] meet keys [B, G, 1, D, T] in a product that broadcasts. Opset 17, standard operators.

Method "average" takes the mean of the keys' and of the values' weights of neighbouring heads (Ainslie et al. 2023,
"GQA"). Method "subspace" chooses the groups and their shared heads for the smallest error on the samples, as
`passes.subspace` says. Blocks are converted in order, and samples are taken again after each.

Axes in names: B batch, T time steps, C channels, H heads, G groups, R heads of a group, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from models.spec import Array
from provisioning.passes import constant, initializer, sizes
from provisioning.passes.attention import Block, Found, Linear
from provisioning.passes.subspace import Grouped, Samples, share

Collect: TypeAlias = Callable[[ir.Model, Sequence[str]], Iterable[Mapping[str, Array]]]
"""Runs the samples through a model and hands out the named tensors, a mapping for each sample."""
_AXES = 4
"""Of scores [B, H, T, T] as published."""


def convert(model: ir.Model, found: Found, kv_heads: int, method: str, collect: Collect) -> ir.Model:
    """Convert the blocks that were `found` in `model`, with a number of heads that `kv_heads` divides, in place."""
    for number, block in enumerate(found.blocks):
        if kv_heads == block.heads:
            continue
        if method == "average":
            grouped = _average(block, kv_heads)
        else:
            names = [
                str(value.name) for value in (block.x, block.mask) if value is not None and constant(value) is None
            ]
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
    write = _Writer(model, block, name)
    heads, size = block.heads, block.size
    rows = heads // kv_heads
    q, k, v = write.projections(grouped)
    q = write.transposed("q_heads", write.reshaped("q_cut", q, 0, -1, kv_heads, rows, size), 0, 2, 3, 1, 4)
    k = write.transposed("k_heads", write.reshaped("k_cut", k, 0, -1, kv_heads, 1, size), 0, 2, 3, 4, 1)
    v = write.transposed("v_heads", write.reshaped("v_cut", v, 0, -1, kv_heads, 1, size), 0, 2, 3, 1, 4)
    if block.scale != 1:
        q = write.node("Mul", "q_scaled", q, write.constant("scale", np.array(block.scale)))
    scores = write.node("MatMul", "scores", q, k)
    if block.mask is not None:
        scores = write.node("Add", "scores_masked", scores, write.mask(block.mask, grouped.order, rows))
    attention = write.softmax(scores)
    context = write.transposed("context_turned", write.node("MatMul", "context", attention, v), 0, 3, 1, 2, 4)
    y = write.linear("out", write.reshaped("context_flat", context, 0, -1, heads * size), grouped.out)
    y.shape, y.type = block.y.shape, block.y.type
    model.graph.insert_before(block.made_by, write.made)
    if block.y.is_graph_output():
        y.name, block.y.name = block.y.name, y.name
    block.y.replace_all_uses_with(y, replace_graph_outputs=True)


@dataclass(slots=True)
class _Writer:
    """Makes the nodes of one block."""

    model: ir.Model
    block: Block
    name: str
    made: list[ir.Node] = field(default_factory=list)

    @property
    def dtype(self) -> ir.DataType:
        """What the block computes in."""
        return ir.DataType.from_numpy(self.block.q.w.dtype)

    def constant(self, what: str, array: Array) -> ir.Value:
        array = array.astype(self.block.q.w.dtype) if array.dtype.kind == "f" else array
        return initializer(self.model, f"{self.name}_{what}", array)

    def nodes(
        self,
        operator: str,
        what: str,
        inputs: Sequence[ir.Value],
        outputs: int,
        **attributes: int | Sequence[int],
    ) -> list[ir.Value]:
        one = ir.node(operator, inputs, attributes, num_outputs=outputs, name=f"{self.name}_{what}")
        for index, value in enumerate(one.outputs):
            value.name = f"{one.name}_{index}" if outputs > 1 else one.name
            value.type = ir.TensorType(self.dtype)
        self.made.append(one)
        return list(one.outputs)

    def node(self, operator: str, what: str, *inputs: ir.Value, **attributes: int | Sequence[int]) -> ir.Value:
        return self.nodes(operator, what, inputs, 1, **attributes)[0]

    def reshaped(self, what: str, value: ir.Value, *shape: int) -> ir.Value:
        return self.node("Reshape", what, value, self.constant(f"{what}_shape", np.array(shape, np.int64)))

    def transposed(self, what: str, value: ir.Value, *perm: int) -> ir.Value:
        return self.node("Transpose", what, value, perm=perm)

    def linear(self, what: str, value: ir.Value, layer: Linear) -> ir.Value:
        product = self.node("MatMul", f"{what}_product", value, self.constant(f"{what}_weights", layer.w))
        return self.node("Add", what, product, self.constant(f"{what}_bias", layer.b))

    def projections(self, grouped: Grouped) -> Sequence[ir.Value]:
        """Queries, keys and values, by as many products as the block had."""
        layers = (grouped.q, grouped.k, grouped.v)
        if not self.block.packed:
            return [self.linear(what, self.block.x, layer) for what, layer in zip("qkv", layers, strict=True)]
        packed = Linear(np.concatenate([one.w for one in layers], axis=1), np.concatenate([one.b for one in layers]))
        lengths = self.constant("lengths", np.array([len(one.b) for one in layers], np.int64))
        return self.nodes("Split", "part", [self.linear("qkv", self.block.x, packed), lengths], 3, axis=-1)

    def mask(self, mask: ir.Value, order: Sequence[int], rows: int) -> ir.Value:
        """`mask` for scores [B, G, R, T, T]: `passes.attention` knows how many heads it tells apart."""
        of_heads = sizes(mask)[-3:-2]
        if of_heads == (self.block.heads,):
            heads_GR = self.constant("order", np.array(order, np.int64).reshape(-1, rows))
            return self.node("Gather", "mask", mask, heads_GR, axis=len(sizes(mask)) - 3)
        if len(sizes(mask)) < _AXES:
            return mask
        return self.node("Unsqueeze", "mask", mask, self.constant("mask_axis", np.array([2], np.int64)))

    def softmax(self, scores: ir.Value) -> ir.Value:
        wide = self.block.softmax_type
        if wide is None:
            return self.node("Softmax", "softmax", scores, axis=-1)
        attention = self.node("Softmax", "softmax", self.node("Cast", "wide", scores, to=int(wide)), axis=-1)
        for node in self.made[-2:]:
            node.outputs[0].dtype = wide
        return self.node("Cast", "attention", attention, to=int(self.dtype))
