"""Puts the neck and the head of a recogniser into one node each, of the operators that have a fused kernel.

Requires: pass normalise; the neck of PP-OCRv4, v5 or v6 (`kernels.reference`), with all its key/value heads or with
fewer, and the CTC head of pass ctc_head behind it.
Ensures: an `appliance::ConvAttention` and an `appliance::CtcHead` node with their bodies as model-local functions
(see `provisioning.passes.fused`); channel-last between and before them, the only transpose stands in front;
the same numbers within rounding.

The neck is read backwards from the head, in the order of `kernels.reference.neck`. However queries, keys and values are
spelled (packed or apart, scaled before or after, shared by heads or not), they are affine in the normalised
tokens; so their weights are found by what they make of the zero vector and of the unit vectors.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from kernels.reference import BLOCK_EPS, BLOCKS, HEAD_SIZE, HEADS, LAST_EPS, WIDTH, Form, Neck
from models.errors import SourceError
from models.spec import Array
from provisioning.passes import constant, fused, group, held, initializer, operand

_BIAS = 2
_PAIR = 2
_NORM_INPUTS = 3


class _Unlike(Exception):
    """The graph is not that of a neck, for the reason in the message."""


def mark(model: ir.Model) -> ir.Model:
    """Mark neck and head of `model`; raises SourceError that names the first node that does not fit."""
    try:
        neck, weights, pooled_BC1T, head = _read(model)
    except _Unlike as unlike:
        msg = f"pass mark finds no neck that has a fused kernel: {unlike}; take 'mark' out of the recipe's passes"
        raise SourceError(msg) from unlike
    for function in (fused.conv_attention(neck), fused.ctc_head()):
        fused.declare(model, function)
    flat = ir.node(
        "Squeeze", [pooled_BC1T, initializer(model, "neck_height", np.array([2], np.int64))], name="neck_flat"
    )
    x_BTC = ir.node("Transpose", flat.outputs, {"perm": [0, 2, 1]}, name="neck_input")
    inputs = [initializer(model, name, array) for name, array in fused.weights_of(neck, weights)]
    attention = ir.node(
        fused.CONV_ATTENTION,
        [x_BTC.outputs[0], *inputs],
        {"form": neck.form, "kv_heads": neck.kv_heads},
        domain=fused.DOMAIN,
        name="neck",
    )
    end = ir.node(
        fused.CTC_HEAD,
        [attention.outputs[0], *(initializer(model, f"head.{name}", array) for name, array in head.items())],
        domain=fused.DOMAIN,
        num_outputs=_PAIR,
        name="head",
    )
    for value, name in ((flat.outputs[0], "neck_flat"), (x_BTC.outputs[0], "x_BTC"), (attention.outputs[0], "y_BTC")):
        value.name = name
        value.type = ir.TensorType(ir.DataType.FLOAT)
    for new, old in zip(end.outputs, model.graph.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.name = f"{old.name}_unmarked"
    model.graph.extend([flat, x_BTC, attention, end])
    model.graph.outputs.clear()
    model.graph.outputs.extend(end.outputs)
    common.RemoveUnusedNodesPass()(model)
    return model


def _read(model: ir.Model) -> tuple[Neck, dict[str, Array], ir.Value, dict[str, Array]]:
    """The neck, its weights, what it reads [B, C, 1, T], and the weights of the head."""
    best = _maker(model.graph.outputs[0], "ArgMax")
    y_BTC, head = _linear(operand(best, 0), "")
    y_B120T = operand(_maker(y_BTC, "Transpose"), 0)
    y = operand(_maker(y_B120T, "Squeeze"), 0)
    form: Form = "v6" if _is(y, "Add") else "v4"
    weights: dict[str, Array] = {}

    def swish(value: ir.Value) -> ir.Value:
        """What swish was taken of."""
        for read, gate in _both(_maker(value, "Mul")):
            if _is(gate, "Sigmoid") and operand(_maker(gate, "Sigmoid"), 0) is read:
                return read
        msg = f"{_named(value)} is no swish"
        raise _Unlike(msg)

    def conv(value: ir.Value, name: str, *, depthwise: bool = False) -> ir.Value:
        x, found = _conv(value, name, depthwise=depthwise)
        weights.update(found)
        return x

    def linear(value: ir.Value, name: str) -> ir.Value:
        x, found = _linear(value, f"{name}.")
        weights.update(found)
        return x

    def norm(value: ir.Value, name: str, eps: float) -> ir.Value:
        x, weights[f"{name}.gamma"], weights[f"{name}.beta"] = _norm(value, eps)
        return x

    if form == "v4":
        joined = _maker(conv(swish(conv(swish(y), "conv5")), "conv4"), "Concat")
        pooled, z = (operand(joined, i) for i in range(_PAIR))
        spread = conv(swish(z), "conv3")
    else:
        first, second = _both(_maker(y, "Add"))[0]
        spread, skip = (first, second) if _is(first, "Transpose") else (second, first)
        pooled = conv(swish(skip), "skip")
    tokens = operand(_maker(operand(_maker(spread, "Transpose"), 0), "Reshape"), 0)
    h = norm(tokens, "norm", LAST_EPS)
    kv_heads = HEADS
    for i in reversed(range(BLOCKS)):
        at = f"block{i}"
        h, more = _residual(h, "mlp2")
        n = linear(swish(linear(more, f"{at}.mlp2")), f"{at}.mlp1")
        _same(norm(n, f"{at}.norm2", BLOCK_EPS), h)
        h, more = _residual(h, "the output of attention")
        n, found = _attention(linear(more, f"{at}.o"), h)
        kv_heads = len(found["k.b"]) // HEAD_SIZE
        weights |= {f"{at}.{name}": array for name, array in found.items()}
        _same(norm(n, f"{at}.norm1", BLOCK_EPS), h)
    front = operand(_maker(operand(_maker(h, "Transpose"), 0), "Reshape"), 0)
    if form == "v4":
        _same(conv(swish(conv(swish(front), "conv2")), "conv1"), pooled)
    else:
        for main, other in _both(_maker(front, "Add")):
            try:
                _same(conv(swish(other), "depthwise", depthwise=True), main)
            except _Unlike:
                continue
            _same(conv(swish(main), "main"), pooled)
            break
    neck = Neck(form, kv_heads)
    _fit(neck, weights)
    return neck, weights, pooled, {"w_CK": head["w"], "b_K": head["b"]}


def _fit(neck: Neck, weights: dict[str, Array]) -> None:
    for name, shape in neck.shapes().items():
        if name not in weights or weights[name].shape != shape:
            found = list(weights[name].shape) if name in weights else "missing"
            msg = f"{name} is {found}, the kernel is for {list(shape)}"
            raise _Unlike(msg)


def _named(value: ir.Value) -> str:
    node = value.producer()
    return f"{node.op_type} {node.name}" if node else f"input {value.name}"


def _is(value: ir.Value, kind: str) -> bool:
    node = value.producer()
    return node is not None and node.op_type == kind


def _maker(value: ir.Value, kind: str) -> ir.Node:
    """The node that makes `value`, which must be of type `kind`."""
    node = value.producer()
    if node is None or node.op_type != kind:
        msg = f"{_named(value)} stands where {kind} is expected"
        raise _Unlike(msg)
    return node


def _both(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """The two operands of `node` in both orders."""
    first, second = operand(node, 0), operand(node, 1)
    return [(first, second), (second, first)]


def _same(one: ir.Value, other: ir.Value) -> None:
    if one is not other:
        msg = f"{_named(one)} is read where {_named(other)} is expected"
        raise _Unlike(msg)


def _with_constant(node: ir.Node) -> tuple[ir.Value, Array]:
    """What `node` computes with a constant, and that."""
    for value, other in _both(node):
        array = constant(other)
        if array is not None:
            return value, array
    msg = f"{node.op_type} {node.name} has no constant operand"
    raise _Unlike(msg)


def _linear(value: ir.Value, name: str) -> tuple[ir.Value, dict[str, Array]]:
    """A linear: what it reads, its weights [I, O] and its bias."""
    product, bias = _with_constant(_maker(value, "Add"))
    node = _maker(product, "MatMul")
    return operand(node, 0), {f"{name}w": held(node, 1), f"{name}b": bias.reshape(-1)}


def _conv(value: ir.Value, name: str, *, depthwise: bool) -> tuple[ir.Value, dict[str, Array]]:
    """A convolution along T with stride 1 and zeros around: what it reads, its weights [J, I, O] and its bias."""
    node = _maker(value, "Conv")
    w_OI1J, bias = held(node, 1), constant(node.inputs[_BIAS]) if len(node.inputs) > _BIAS else None
    taps = w_OI1J.shape[3]
    pads = tuple(node.attributes.get_ints("pads", (0,) * 4))
    strides = tuple(node.attributes.get_ints("strides", (1, 1)))
    groups = len(w_OI1J) if depthwise else 1
    plain = w_OI1J.shape[2] == 1 and pads == (0, taps // 2) * 2 and strides == (1, 1)
    if bias is None or group(node) != groups or not plain:
        msg = f"Conv {node.name} has another group, stride, padding or no bias"
        raise _Unlike(msg)
    w_JIO = w_OI1J[:, :, 0].transpose(2, 1, 0)
    if depthwise:
        w_JIO = w_JIO[:, 0]
    elif taps == 1:
        w_JIO = w_JIO[0]
    return operand(node, 0), {f"{name}.w": w_JIO, f"{name}.b": bias}


def _residual(value: ir.Value, what: str) -> tuple[ir.Value, ir.Value]:
    """The two operands of a sum: the stream, and the linear (a sum with a constant) that is added to it."""
    for stream, more in _both(_maker(value, "Add")):
        if (
            constant(more) is None
            and _is(more, "Add")
            and any(constant(one) is not None for one in more.producer().inputs)
        ):  # type: ignore[union-attr]
            return stream, more
    msg = f"{_named(value)} does not add {what} to the stream"
    raise _Unlike(msg)


def _norm(value: ir.Value, eps: float) -> tuple[ir.Value, Array, Array]:
    """A layer normalisation over the last axis, as one operator or spelled out: what it reads, gamma and beta."""
    if _is(value, "LayerNormalization"):
        node = _maker(value, "LayerNormalization")
        if len(node.inputs) < _NORM_INPUTS:
            msg = f"LayerNormalization {node.name} has no shift"
            raise _Unlike(msg)
        found = node.attributes.get_float("epsilon", 1e-5)
        x, gamma, beta = operand(node, 0), held(node, 1), held(node, 2)
    else:
        scaled, beta = _with_constant(_maker(value, "Add"))
        unit, gamma = _with_constant(_maker(scaled, "Mul"))
        ratio = _maker(unit, "Div")
        centred = operand(ratio, 0)
        variance, small = _with_constant(_maker(operand(_maker(operand(ratio, 1), "Sqrt"), 0), "Add"))
        found = float(small.reshape(()))
        _same(operand(_maker(operand(_maker(variance, "ReduceMean"), 0), "Pow"), 0), centred)
        difference = _maker(centred, "Sub")
        x = operand(difference, 0)
        _same(operand(_maker(operand(difference, 1), "ReduceMean"), 0), x)
    if not math.isclose(found, eps, rel_tol=1e-3):
        msg = f"{_named(value)} normalises with epsilon {found:g}, the kernel with {eps:g}"
        raise _Unlike(msg)
    return x, gamma.reshape(-1), beta.reshape(-1)


def _attention(mixed_BTC: ir.Value, stream: ir.Value) -> tuple[ir.Value, dict[str, Array]]:
    """The tokens that attention reads, and weights and biases of q, k and v."""
    mixed = _maker(operand(_maker(operand(_maker(mixed_BTC, "Reshape"), 0), "Transpose"), 0), "MatMul")
    softmax = _maker(operand(mixed, 0), "Softmax")
    scores = _maker(operand(softmax, 0), "MatMul")
    q, k, v = operand(scores, 0), operand(scores, 1), operand(mixed, 1)
    tokens = _tokens(q, stream)
    probed = _probe(tokens, [q, k, v])
    found = {}
    for name, rows in zip("qkv", probed, strict=True):
        rows = rows * HEAD_SIZE**0.5 if name == "q" else rows  # noqa: PLW2901 - the operator scales itself
        found |= {f"{name}.w": (rows[1:] - rows[0]).astype(np.float32), f"{name}.b": rows[0].astype(np.float32)}
    return tokens, found


def _tokens(q: ir.Value, stream: ir.Value) -> ir.Value:
    """The normalised tokens that `q` is made of: what the first linear on the way to the stream reads."""
    value = q
    while value is not stream:
        node = value.producer()
        if node is None:
            break
        if node.op_type == "MatMul":
            return operand(node, 0)
        value = next((one for one in node.inputs if one is not None and constant(one) is None), stream)
    msg = f"no linear makes the queries of {_named(q)}"
    raise _Unlike(msg)


def _probe(tokens: ir.Value, wanted: list[ir.Value]) -> list[Array]:
    """What the zero vector and the unit vectors become: float64 [1 + C, heads D] for each wanted value."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - slow to import

    graph = tokens.graph
    if graph is None:
        raise _Unlike("attention reads the input of the graph")
    try:
        part = ir.convenience.extract(graph, [tokens], wanted)
    except ValueError as error:
        msg = f"queries, keys and values do not all come from {_named(tokens)} ({error})"
        raise _Unlike(msg) from error
    for value in (*part.inputs, *part.outputs):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), None
    session = ReferenceEvaluator(ir.to_proto(ir.Model(part, ir_version=8)))
    rows = np.concatenate([np.zeros((1, WIDTH)), np.eye(WIDTH)])
    (name,) = session.input_names
    made = []
    for array in session.run(None, {name: rows[None].astype(np.float32)}):
        (steps,) = (axis for axis, size in enumerate(array.shape) if size == len(rows))
        made.append(np.moveaxis(array, steps, 0).reshape(len(rows), -1).astype(np.float64))
    return made
