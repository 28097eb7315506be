"""Puts the neck and the head of a recogniser into one node each, of the operators that have a fused kernel.

Requires: pass normalise; the neck of PP-OCRv4, v5 or v6 (`kernels.reference`), with all its key/value heads or with
fewer, and the CTC head of pass ctc_head behind it.
Ensures: an `appliance::ConvAttention` and an `appliance::CtcHead` node with their bodies as model-local functions
(see `provisioning.passes.fused`); channel-last between and before them, the only transpose stands in front;
the same numbers within rounding.

The neck is read backwards from the head, in the order of `kernels.reference.neck`. However queries, keys and values are
spelled (packed or apart, scaled before or after, shared by heads or not), they are affine in the normalised
tokens; so their weights are found by what they make of the zero vector and of the unit vectors. What was read is proven
on random numbers before anything is changed.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from kernels import reference
from kernels.reference import BLOCK_EPS, BLOCKS, HEAD_SIZE, LAST_EPS, WIDTH, Form, Neck
from models.errors import SourceError
from models.spec import Array
from provisioning.passes import IR_VERSION, constant, fused, group, held, initializer, operand

_BIAS = 2
_PAIR = 2
_NORM_INPUTS = 3
_STEPS = 9
"""Time steps of the proof: more than the longest convolution reaches."""
_TOLERANCE = 1e-4
"""FP32 in the graph against float64: some 1e-6 was seen."""


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
    height = initializer(model, "neck_height", np.array([2], np.int64))
    flat = ir.node("Squeeze", [pooled_BC1T, height], name="neck_flat")
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
    y = operand(_maker(operand(_maker(y_BTC, "Transpose"), 0), "Squeeze"), 0)
    reader = _Reader("v6" if _is(y, "Add") else "v4")
    spread_BC1T, pooled_BC1T = reader.back(y)
    front_BC1T = reader.blocks(_flat(spread_BC1T))
    _same(reader.front(front_BC1T), pooled_BC1T)
    neck, weights = reader.neck(), reader.weights
    _prove(neck, weights, pooled_BC1T, y_BTC)
    return neck, weights, pooled_BC1T, {"w_CK": head["w"], "b_K": head["b"]}


class _Reader:
    """Reads a neck from its output to its input, and keeps the weights it comes by."""

    def __init__(self, form: Form) -> None:
        self.weights: dict[str, Array] = {}
        self._form = form

    def back(self, y_BC1T: ir.Value) -> tuple[ir.Value, ir.Value]:
        """What the blocks made, and the input of the neck."""
        if self._form == "v4":
            joined = _maker(self._conv(_swish(self._conv(_swish(y_BC1T), "conv5")), "conv4"), "Concat")
            pooled, z = operand(joined, 0), operand(joined, 1)
            return self._conv(_swish(z), "conv3"), pooled
        first, second = _both(_maker(y_BC1T, "Add"))[0]
        spread, skip = (first, second) if _is(first, "Transpose") else (second, first)
        return spread, self._conv(_swish(skip), "skip")

    def blocks(self, y_BTC: ir.Value) -> ir.Value:
        """What the blocks read, [B, C, 1, T], of what the last normalisation made."""
        h = self._norm(y_BTC, "norm", LAST_EPS)
        for i in reversed(range(BLOCKS)):
            at = f"block{i}"
            h, more = _residual(h, "mlp2")
            n = self._linear(_swish(self._linear(more, f"{at}.mlp2")), f"{at}.mlp1")
            _same(self._norm(n, f"{at}.norm2", BLOCK_EPS), h)
            h, more = _residual(h, "the output of attention")
            n, found = _attention(self._linear(more, f"{at}.o"), h)
            self.weights |= {f"{at}.{name}": array for name, array in found.items()}
            _same(self._norm(n, f"{at}.norm1", BLOCK_EPS), h)
        return _flat(h)

    def front(self, h_BC1T: ir.Value) -> ir.Value:
        """The input of the neck, of what the blocks read."""
        if self._form == "v4":
            return self._conv(_swish(self._conv(_swish(h_BC1T), "conv2")), "conv1")
        first, second = _both(_maker(h_BC1T, "Add"))[0]
        main, other = (second, first) if _reads_through_conv(first, second) else (first, second)
        _same(self._conv(_swish(other), "depthwise", depthwise=True), main)
        return self._conv(_swish(main), "main")

    def neck(self) -> Neck:
        """What was read, whose weights all have the shapes that the kernel is for."""
        neck = Neck(self._form, len(self.weights["block0.k.b"]) // HEAD_SIZE)
        for name, shape in neck.shapes().items():
            if self.weights[name].shape != shape:
                msg = f"{name} is {list(self.weights[name].shape)}, the kernel is for {list(shape)}"
                raise _Unlike(msg)
        return neck

    def _conv(self, value: ir.Value, name: str, *, depthwise: bool = False) -> ir.Value:
        x, found = _conv(value, name, depthwise=depthwise)
        self.weights |= found
        return x

    def _linear(self, value: ir.Value, name: str) -> ir.Value:
        x, found = _linear(value, f"{name}.")
        self.weights |= found
        return x

    def _norm(self, value: ir.Value, name: str, eps: float) -> ir.Value:
        x, self.weights[f"{name}.gamma"], self.weights[f"{name}.beta"] = _norm(value, eps)
        return x


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


def _flat(value: ir.Value) -> ir.Value:
    """The other side of a transpose and a reshape between [B, C, 1, T] and [B, T, C]."""
    return operand(_maker(operand(_maker(value, "Transpose"), 0), "Reshape"), 0)


def _swish(value: ir.Value) -> ir.Value:
    """What swish was taken of."""
    for read, gate in _both(_maker(value, "Mul")):
        if _is(gate, "Sigmoid") and operand(_maker(gate, "Sigmoid"), 0) is read:
            return read
    msg = f"{_named(value)} is no swish"
    raise _Unlike(msg)


def _reads_through_conv(value: ir.Value, source: ir.Value) -> bool:
    """Whether `value` is the swish of a convolution of `source`."""
    try:
        return operand(_maker(_swish(value), "Conv"), 0) is source
    except _Unlike:
        return False


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
        node = more.producer()
        if node is not None and node.op_type == "Add" and any(constant(one) is not None for one in node.inputs):
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
    mixed = _maker(_through(mixed_BTC, {"Reshape", "Transpose"}), "MatMul")
    softmax = _maker(operand(mixed, 0), "Softmax")
    scores = _maker(operand(softmax, 0), "MatMul")
    q, k, v = operand(scores, 0), operand(scores, 1), operand(mixed, 1)
    tokens = _tokens(q, stream)
    probed = _probe(tokens, [q, k, v])
    found: dict[str, Array] = {}
    for name, rows in zip("qkv", probed, strict=True):
        rows = rows * HEAD_SIZE**0.5 if name == "q" else rows  # noqa: PLW2901 - the operator scales itself
        found |= {f"{name}.w": (rows[1:] - rows[0]).astype(np.float32), f"{name}.b": rows[0].astype(np.float32)}
    return tokens, found


def _through(value: ir.Value, kinds: set[str]) -> ir.Value:
    """What stands before operators that only arrange numbers anew."""
    while (node := value.producer()) is not None and node.op_type in kinds:
        value = operand(node, 0)
    return value


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
    rows = np.concatenate([np.zeros((1, WIDTH)), np.eye(WIDTH)])[None]
    made = []
    for array in _computed(tokens, wanted, rows):
        # The queries of a group may stand below each other: R rows for each token.
        steps = [axis for axis, size in enumerate(array.shape) if size % rows.shape[1] == 0]
        if len(steps) != 1:
            msg = f"queries, keys or values have the shape {list(array.shape)} for {rows.shape[1]} tokens"
            raise _Unlike(msg)
        apart = array.reshape(*array.shape[: steps[0]], -1, rows.shape[1], *array.shape[steps[0] + 1 :])
        made.append(np.moveaxis(apart, steps[0] + 1, 0).reshape(rows.shape[1], -1).astype(np.float64))
    return made


def _computed(given: ir.Value, wanted: list[ir.Value], array: Array) -> list[Array]:
    """What the graph makes of `given` as `wanted`."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - slow to import

    graph = given.graph
    if graph is None:
        raise _Unlike("it reads the input of the graph")
    try:
        part = ir.convenience.extract(graph, [given], wanted)
    except ValueError as error:
        msg = f"{', '.join(map(_named, wanted))} do not come from {_named(given)} alone ({error})"
        raise _Unlike(msg) from error
    for value in (*part.inputs, *part.outputs):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), None
    session = ReferenceEvaluator(ir.to_proto(ir.Model(part, ir_version=IR_VERSION)))
    (name,) = session.input_names
    made: list[Array] = session.run(None, {name: array.astype(np.float32)})
    return made


def _prove(neck: Neck, weights: dict[str, Array], pooled_BC1T: ir.Value, y_BTC: ir.Value) -> None:
    """Compare what was read with the graph on random numbers: an order of heads cannot be told from shapes."""
    x_BC1T = np.random.default_rng(0).normal(size=(2, neck.channels, 1, _STEPS))
    (found,) = _computed(pooled_BC1T, [y_BTC], x_BC1T)
    expected = reference.neck(neck, weights, x_BC1T[:, :, 0].transpose(0, 2, 1))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    if not error <= _TOLERANCE:
        msg = f"the neck computes other numbers than the kernel would (they differ by {error:.2g} of the largest)"
        raise _Unlike(msg)
