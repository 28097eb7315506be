"""Finds self-attention, however it was exported.

Requires: a valid ONNX graph of standard operators, as published or normalised.
Ensures: `passes.shapes.clear` was applied, nothing else; every Softmax between two products is either part of a block
or listed as not understood, with its node and the reason, and so is attention that is one operator already.

A block computes, for x [B, T, C],

    q, k, v = x Wq + bq, x Wk + bk, x Wv + bv                      each [B, T, H D]
    y = concat_h(softmax(scale q_h k_h^T + mask) v_h) Wo + bo      [B, T, M]

Its spellings that are understood: one product for q, k and v together, taken apart by Slice, Gather or Split before or
after the heads are, or three products; no bias, or one on either side of its Add; the scale on q, on k, on the scores,
or shared between them, as factor or divisor; a mask added on either side; casts on the way. What normalises x is not
part of the block, so it may be spelled in any way.

Past 400 lines because a block is read as a whole: its pieces have no use, and no test, without each other.

Axes in names: B batch, T time steps, C channels, H heads, D size of a head, M channels of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from models.spec import Array
from provisioning.passes import constant, operand, sizes
from provisioning.passes.shapes import clear

_PRODUCTS = frozenset({"Einsum", "Gemm", "MatMul"})
_BETWEEN = frozenset({
    "Add", "Cast", "Clip", "Div", "Dropout", "Expand", "Flatten", "Identity", "Max", "Min", "Mul", "Reshape",
    "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
"""What may stand between a Softmax and a product when that looks like attention."""
_WHOLE = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention", "PackedAttention", "QAttention"})
_LAST_AXIS_SINCE = 13
"""Opset in which the default axis of Softmax became the last; before that it was the second."""
_PACKED_AXIS = {(2, 0, 3, 1, 4): 0, (3, 0, 2, 1, 4): 1}
"""Permutation of [B, T, 3, H, D] or [B, T, H, 3, D] that brings the 3 to the front -> where the 3 was, after T."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x w + b."""

    w: Array
    b: Array


@dataclass(frozen=True, slots=True)
class Block:
    """One attention block of a graph."""

    name: str
    """Of its Softmax."""
    heads: int
    size: int
    """D: channels of one head."""
    x: ir.Value
    q: Linear
    """[C, H D], the columns of one head side by side, head after head; k and v as well."""
    k: Linear
    v: Linear
    out: Linear
    """[H D, M]"""
    scale: float
    mask: ir.Value | None
    packed: bool
    """Whether one product makes q, k and v."""
    softmax_type: ir.DataType | None
    """What the scores are cast to for the Softmax; None when they are not cast."""
    y: ir.Value
    made_by: ir.Node
    """The node that computes y."""

    @property
    def x_width(self) -> int:
        """C."""
        return int(self.q.w.shape[0])


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """Something that looks like attention."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """All attention of a graph, in the order of its nodes."""

    blocks: tuple[Block, ...]
    not_understood: tuple[NotUnderstood, ...]


class _UnknownError(Exception):
    """This spelling is not understood, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """Where queries, keys or values come from: columns of a linear layer."""

    x: ir.Value
    layer: ir.Value
    linear: Linear
    heads: int
    size: int


def find(model: ir.Model) -> Found:
    """Clear `model` and find its attention blocks."""
    clear(model)
    contexts = {}
    for node in model.graph:
        match = _match(model, _CONTEXT, node.outputs[0]) if node.op_type == "MatMul" else None
        if match:
            contexts[match["p"].producer()] = match
    looking = [node for node in _all_nodes(model) if node.op_type in _WHOLE or _between_products(node)]
    found = [_understood(model, node, contexts.get(node)) for node in looking]
    return Found(
        tuple(one for one in found if isinstance(one, Block)),
        tuple(one for one in found if isinstance(one, NotUnderstood)),
    )


def _understood(model: ir.Model, node: ir.Node, context: Mapping[str, Any] | None) -> Block | NotUnderstood:
    """The block around `node`, or why it is not understood."""
    if node.op_type in _WHOLE:
        reason = f"{node.op_type} is one operator, and only attention made of products is understood"
        return NotUnderstood(name_of(node), reason)
    try:
        return _block(model, node, context)
    except _UnknownError as error:
        return NotUnderstood(name_of(node), str(error))


def name_of(node: ir.Node) -> str:
    """The node's name, or that of what it computes when it has none."""
    return str(node.name or node.outputs[0].name)


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _between_products(node: ir.Node) -> bool:
    return (
        node.op_type == "Softmax"
        and _meets_product(_makers(node), _makers)
        and _meets_product(_readers(node), _readers)
    )


def _makers(node: ir.Node) -> list[ir.Node | None]:
    return [value.producer() for value in node.inputs if value]


def _readers(node: ir.Node) -> list[ir.Node]:
    return [reader for value in node.outputs for reader in value.consumers()]


def _meets_product(start: Sequence[ir.Node | None], following: Callable[[ir.Node], Sequence[ir.Node | None]]) -> bool:
    """Whether a way from `start` on meets a product before anything but what attention has between its products."""
    waiting, seen = list(start), set[ir.Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in _PRODUCTS:
            return True
        if node.op_type in _BETWEEN:
            waiting += following(node)
    return False


def _or_cast(op: Any, value: Any) -> Any:  # noqa: ANN401 - onnxscript traces patterns
    return pattern.OrValue([op.Cast(value), value])


def _context(op: Any, v: Any, shape: Any, w: Any) -> Any:  # noqa: ANN401 - traced
    """Match concat_h(p_h v_h) Wo."""
    p = op.Softmax(pattern.ANY_VALUE, _outputs=["p"])
    context = op.Transpose(op.MatMul(_or_cast(op, p), v, _outputs=["context"]), perm=[0, 2, 1, 3])
    return op.MatMul(_or_cast(op, op.Reshape(context, shape)), w, _outputs=["y"])


def _scores(op: Any, q: Any, k: Any, scale: Any, mask: Any) -> Any:  # noqa: ANN401 - traced
    """Match softmax(scale q k^T + mask)."""
    product = op.MatMul(q, k, _outputs=["product"])
    factor = [op.Mul(product, scale), op.Mul(scale, product), op.Div(product, scale), product]
    scaled = pattern.OrValue(factor, tag_var="operator", tag_values=["Mul", "Mul", "Div", ""])
    masked = pattern.OrValue([op.Add(scaled, mask), op.Add(mask, scaled), scaled])
    return op.Softmax(pattern.OrValue([op.Cast(masked, _outputs=["cast"]), masked]))


_CONTEXT = pattern.Pattern(_context)
_SCORES = pattern.Pattern(_scores)
_LINEAR = (
    pattern.Pattern(lambda op, x, w, b: op.Add(_or_cast(op, op.MatMul(x, w)), b)),
    pattern.Pattern(lambda op, x, w, b: op.Add(b, _or_cast(op, op.MatMul(x, w)))),
    pattern.Pattern(lambda op, x, w: op.MatMul(x, w)),
)
_HEADS = pattern.Pattern(lambda op, y, shape: op.Transpose(op.Reshape(y, shape), perm=[0, 2, 1, 3]))
_TURNED_HEADS = pattern.Pattern(lambda op, y, shape: op.Transpose(op.Reshape(y, shape), perm=[0, 2, 3, 1]))
_TURN = pattern.Pattern(lambda op, heads: op.Transpose(heads, perm=[0, 1, 3, 2]))
_PARTS = pattern.Pattern(lambda op, y, shape, perm: op.Transpose(op.Reshape(y, shape), perm=perm))


def _match(model: ir.Model, one: pattern.Pattern, value: ir.Value | None) -> dict[str, Any] | None:
    """What the variables of a pattern are bound to that ends in `value`; None when it does not."""
    node = value.producer() if value is not None else None
    if node is None or node.graph is not model.graph:
        return None
    match = one.match(model, model.graph, node, check_nodes_are_removable=False)
    return dict(match.bindings) if match else None


def _block(model: ir.Model, softmax: ir.Node, context: Mapping[str, Any] | None) -> Block:
    """The block around `softmax`; `context` is its match of _CONTEXT."""
    if softmax.graph is not model.graph:
        raise _UnknownError("it stands in the body of another operator or function")
    scores = _match(model, _SCORES, softmax.outputs[0])
    if scores is None:
        raise _UnknownError("it does not read a product of queries and keys that is scaled and masked at most")
    if context is None:
        raise _UnknownError("its product with the values does not reach a linear layer by Transpose and Reshape alone")
    if softmax.attributes.get_int("axis", 1 if model.opset_imports[""] < _LAST_AXIS_SINCE else -1) not in {-1, 3}:
        raise _UnknownError("it does not run along the last of four axes")
    for value in (scores["product"], softmax.outputs[0], context["context"]):
        if value.is_graph_output() or len(set(value.consumers())) > 1:
            msg = f"{value.name} is read by others as well"
            raise _UnknownError(msg)
    q_4d, q_scale = _unscaled(scores["q"])
    k_turned, k_scale = _unscaled(scores["k"])
    q, v = _heads(model, q_4d, "queries"), _heads(model, context["v"], "values")
    k = _turned_heads(model, k_turned)
    if len({_plain(one.x) for one in (q, k, v)}) > 1:
        raise _UnknownError("queries, keys and values are not made of the same tensor")
    if not (q.heads, q.size) == (k.heads, k.size) == (v.heads, v.size):
        msg = f"its queries have {q.heads} heads of {q.size}, its keys {k.heads} of {k.size}, "
        msg += f"its values {v.heads} of {v.size}"
        raise _UnknownError(msg)
    _check_mask(scores["mask"], q.heads)
    cast = scores.get("cast")
    out, adder = _out(context["y"].producer(), context["w"], q.heads * q.size)
    return Block(
        name=name_of(softmax),
        heads=q.heads,
        size=q.size,
        x=q.x,
        q=q.linear,
        k=k.linear,
        v=v.linear,
        out=out,
        scale=_factor(scores["scale"], scores["operator"]) * q_scale * k_scale,
        mask=scores["mask"],
        packed=q.layer is k.layer,
        softmax_type=cast.dtype if cast is not None else None,
        y=adder.outputs[0],
        made_by=adder,
    )


def _check_mask(mask: ir.Value | None, heads: int) -> None:
    if mask is None:
        return
    if mask.shape is None or sizes(mask)[-3:-2] not in {(), (1,), (heads,)}:
        msg = f"it is not known whether its mask {mask.name} is the same for all heads"
        raise _UnknownError(msg)


def _factor(number: ir.Value | None, operator: str) -> float:
    """By what `operator` (Mul, Div or none) multiplies with a constant number."""
    if not operator:
        return 1.0
    array = constant(number)
    if array is None or array.size != 1:
        raise _UnknownError("its scale is no constant number")
    return float(array.item()) ** (-1 if operator == "Div" else 1)


def _unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    """What `value` is a multiple of, and the factor."""
    value = _plain(value)
    node = value.producer()
    if node is None or node.op_type not in {"Mul", "Div"}:
        return value, 1.0
    one, other = operand(node, 0), operand(node, 1)
    if node.op_type == "Mul" and constant(one) is not None:
        one, other = other, one
    return _plain(one), _factor(other, node.op_type)


def _plain(value: ir.Value) -> ir.Value:
    """What `value` was before casts and sums with nothing."""
    while (node := value.producer()) is not None:
        if node.op_type == "Cast":
            value = operand(node, 0)
            continue
        added = [one for one in node.inputs if (array := constant(one)) is not None and array.shape in {(), (1,)}]
        if node.op_type != "Add" or len(added) != 1 or np.any(constant(added[0])):
            break
        value = operand(node, 1 if node.inputs[0] is added[0] else 0)
    return value


def _turned_heads(model: ir.Model, value: ir.Value) -> _Heads:
    """Keys [B, H, D, T]."""
    if match := _match(model, _TURNED_HEADS, value):
        return _cut(model, match["y"], match["shape"], "keys")
    if match := _match(model, _TURN, value):
        return _heads(model, match["heads"], "keys")
    raise _UnknownError(_foreign("keys", value))


def _heads(model: ir.Model, value: ir.Value, what: str) -> _Heads:
    """Queries, keys or values [B, H, T, D]."""
    value = _plain(value)
    if match := _match(model, _HEADS, value):
        return _cut(model, match["y"], match["shape"], what)
    part = _part(value)
    match = _match(model, _PARTS, part[0]) if part else None
    axis = _PACKED_AXIS.get(tuple(match["perm"].as_ints())) if match else None
    if part is None or match is None or axis is None:
        raise _UnknownError(_foreign(what, value))
    return _cut(model, match["y"], match["shape"], what, axis, part[1])


def _foreign(what: str, value: ir.Value) -> str:
    node = value.producer()
    return f"its {what} are no columns of a linear layer: {name_of(node) if node else value.name} makes them"


def _part(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The tensor of which `value` is one element along the first axis, and its index there."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        index = constant(node.inputs[1])
        return (operand(node, 0), int(index)) if index is not None and index.ndim == 0 else None
    if node.op_type != "Squeeze" or _integers(node, "axes", 1) != [0]:
        return None
    whole, start, stop, axis = _range(operand(node, 0))
    return (whole, start) if axis == 0 and stop == start + 1 else None


def _range(value: ir.Value) -> tuple[ir.Value, int, int, int | None]:
    """The tensor that `value` is a range of: start, stop and axis there; the axis is None when it is none of any."""
    node = value.producer()
    if node is not None and node.op_type == "Split":
        whole, axis = operand(node, 0), node.attributes.get_int("axis", 0)
        size, parts = sizes(whole)[axis] if sizes(whole) else -1, len(node.outputs)
        lengths = _integers(node, "split", 1) or [size // parts] * parts
        start = sum(lengths[: value.index() or 0])
        return whole, start, start + lengths[value.index() or 0], axis
    if node is not None and node.op_type == "Slice":
        starts, stops, axes, steps = (_integers(node, "", place) for place in (1, 2, 3, 4))
        if len(starts) == len(stops) == len(axes) == 1 and steps in ([], [1]):
            return operand(node, 0), starts[0], stops[0], axes[0]
    return value, 0, 0, None


def _integers(node: ir.Node, attribute: str, place: int) -> list[int]:
    """Constant integers that older opsets hold in an attribute and newer ones in input `place`; empty without any."""
    if attribute in node.attributes:
        return list(node.attributes[attribute].as_ints())
    array = constant(node.inputs[place]) if len(node.inputs) > place else None
    return [] if array is None else [int(one) for one in array.reshape(-1)]


def _cut(model: ir.Model, y: ir.Value, shape: ir.Value, what: str, axis: int = 0, part: int | None = None) -> _Heads:
    """Heads of y [B, T, W], reshaped to [B, T, H, D], or with a 3 at `axis` after T, of which `part` is meant."""
    whole, start, stop, along = _range(_plain(y))
    layer = whole if along in {-1, 2} else _plain(y)
    x, linear = _linear(model, layer, what)
    columns = np.arange(linear.w.shape[1])[slice(start, stop) if layer is whole and along is not None else slice(None)]
    wanted = constant(shape)
    tail = [] if wanted is None else [int(size) for size in wanted[2:]]
    if len(tail) != (2 if part is None else 3) or tail.count(-1) > 1 or 0 in tail:
        msg = f"how its {what} are cut into heads is not constant"
        raise _UnknownError(msg)
    columns = columns.reshape(tail)
    if part is not None:
        columns = np.take(columns, part, axis)
    heads, size = (int(one) for one in columns.shape)
    columns = columns.reshape(-1)
    return _Heads(x, layer, Linear(linear.w[:, columns], linear.b[columns]), heads, size)


def _linear(model: ir.Model, y: ir.Value, what: str) -> tuple[ir.Value, Linear]:
    """The input of the linear layer whose output is `y`, and the layer."""
    for one in _LINEAR:
        match = _match(model, one, y)
        w = constant(match["w"]) if match else None
        if match is None or w is None or w.ndim != 2:  # noqa: PLR2004 - a matrix
            continue
        b = constant(match["b"]) if "b" in match else np.zeros(w.shape[1], w.dtype)
        if b is not None and b.shape == w.shape[1:]:
            return match["x"], Linear(w, b)
    raise _UnknownError(_foreign(what, y))


def _out(product: ir.Node, weights: ir.Value, width: int) -> tuple[Linear, ir.Node]:
    """The linear layer behind the heads, and its last node: it adds the bias, if there is one."""
    y = product.outputs[0]
    w = constant(weights)
    if w is None or w.shape[:-1] != (width,):
        raise _UnknownError("what reads its heads is no linear layer")
    readers = set(y.consumers())
    adder = readers.pop() if len(readers) == 1 and not y.is_graph_output() else None
    if adder is not None and adder.op_type == "Add":
        for value in adder.inputs:
            b = constant(value)
            if b is not None and b.shape == w.shape[1:]:
                return Linear(w, b), adder
    return Linear(w, np.zeros(w.shape[1], w.dtype)), product
