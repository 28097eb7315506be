"""Makes convolutions and products with constant matrices compute on INT8, spelled as explicit Q/DQ.

Requires: pass normalise; for tensors that such operators read (see `expose`) a threshold and the mean of each channel
on calibration samples. Operators that read another tensor stay in float.
Ensures: the first input of each such operator passes QuantizeLinear and DequantizeLinear with one scale for the tensor;
its weights are int8 initializers behind a DequantizeLinear with a scale for each output channel; all zero points
are 0 and signed; nothing is placed on outputs or on biases; everything else stays in float. Weights of operators that
stay in float are stored in FP16, those of fused operators (pass mark) too, as their kernels read them.

    q = clip(round(x / scale), -128, 127),    scale = threshold / 127

Rounding weights shifts the mean of what they compute, most of all over plain areas. A convolution's bias, which is
float, takes that shift back (Nagel et al. 2019, "Data-Free Quantization through Weight Equalization and Bias
Correction", section 4.2; borders are taken for the inside):

    b' = b + sum over inputs (w - w_quantized) E[x]

Left in float: products of two computed matrices (attention, 0.1 % of the arithmetic; the fused kernel computes them
itself), and, unless a recipe asks for them, convolutions of pooled vectors. These gain no time, and one of them can do
more harm than all others together (PP-OCRv4), but four of them hold a twentieth of a recogniser's bytes.

Axes in names: M output channels, G input channels of a group, H and W of the kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from models.errors import SourceError
from models.spec import Array
from provisioning.passes import constant, fused, group, held, initializer, operand, sizes

_CHANNEL_AXIS = {"Conv": 1, "Gemm": -1, "MatMul": -1}
"""The operators, and the axis of channels in what they read."""
_LARGEST = 127
SWITCH = "keep_float"
_HALF = frozenset({*_CHANNEL_AXIS, "ConvTranspose"})
"""Operators with weights worth storing in half the bytes."""


def targets(model: ir.Model) -> list[ir.Node]:
    """The operators of `model` that this pass can take."""
    return [
        node
        for node in model.graph
        if node.op_type in _CHANNEL_AXIS and constant(node.inputs[1]) is not None and constant(node.inputs[0]) is None
    ]


def expose(model: ir.Model, *, pooled: bool = False) -> dict[str, int]:
    """Make outputs of what the operators read, so that it can be watched; answers name -> axis of its channels.

    Vectors that were pooled from a map are left out unless `pooled`.
    """
    axes = {}
    for node in targets(model):
        if not pooled and node.op_type == "Conv" and sizes(operand(node, 0))[2:] == (1, 1):
            continue
        value = operand(node, 0)
        axes[str(value.name)] = _CHANNEL_AXIS[node.op_type]
        if value not in model.graph.outputs and not value.is_graph_input():
            value.type = ir.TensorType(ir.DataType.FLOAT)
            model.graph.outputs.append(value)
    return axes


def quantize(
    model: ir.Model, thresholds: Mapping[str, float], means: Mapping[str, Array], keep_float: Collection[str] = ()
) -> ir.Model:
    """Quantize all `targets` that have a threshold but those whose names are in `keep_float`.

    `thresholds[name]` is the largest |x| that the scale of tensor `name` represents, `means[name]` its channels' E[x].
    """
    to_int8 = _ToInt8(model, thresholds, means)
    for node in targets(model):
        if operand(node, 0).name in thresholds and node.name not in keep_float:
            to_int8.take(node)
    _store_halves(model)
    common.RemoveUnusedNodesPass()(model)
    return model


def switch(model: ir.Model, thresholds: Mapping[str, float], means: Mapping[str, Array]) -> list[str]:
    """Do the same with all of them, but let input `SWITCH` say which stay in float; answers their names, in its order.

    `SWITCH` is BOOL [operators]. Comparing many choices takes one session this way, with `quantize` one a choice.
    What stays in float keeps its weights in FP32 here.
    """
    chosen = [node for node in targets(model) if operand(node, 0).name in thresholds]
    flags = ir.Value(name=SWITCH, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([len(chosen)]))
    model.graph.inputs.append(flags)
    to_int8 = _ToInt8(model, thresholds, means)
    for index, node in enumerate(chosen):
        plain, made = list(node.inputs), node.outputs[0]
        to_int8.take(node)
        place = initializer(model, f"{node.name}_index", np.array(index, np.int64))
        flag = ir.node("Gather", [flags, place], name=f"{node.name}_flag")
        branches = {
            "then_branch": _branch(node, plain, f"{node.name}_float"),
            "else_branch": _branch(node, node.inputs, f"{node.name}_int8"),
        }
        either = ir.node("If", flag.outputs, branches, name=f"{node.name}_either")
        flag.outputs[0].name, either.outputs[0].name, made.name = flag.name, made.name, f"{made.name}_before"
        either.outputs[0].type, either.outputs[0].shape = made.type, made.shape
        model.graph.insert_before(node, [flag, either])
        made.replace_all_uses_with(either.outputs[0], replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    _store_halves(model)
    common.RemoveUnusedNodesPass()(model)
    return [str(node.name) for node in chosen]


def _branch(node: ir.Node, inputs: Sequence[ir.Value | None], name: str) -> ir.Graph:
    """A graph that does what `node` does with `inputs`, which it takes from outside."""
    copy = ir.Node("", node.op_type, inputs, list(node.attributes.values()), name=name)
    copy.outputs[0].name, copy.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    return ir.Graph([], copy.outputs, nodes=[copy], name=name)


class _ToInt8:
    """Makes operators of `model` read INT8; those that read the same tensor share what quantizes it."""

    def __init__(self, model: ir.Model, thresholds: Mapping[str, float], means: Mapping[str, Array]) -> None:
        self._model, self._thresholds, self._means = model, thresholds, means
        self._zero = initializer(model, "q_zero", np.array(0, np.int8))
        self._passed: dict[ir.Value, ir.Value] = {}

    def take(self, node: ir.Node) -> None:
        value = operand(node, 0)
        _store_int8(self._model, node, self._means[str(value.name)])
        if value not in self._passed:
            self._passed[value] = _through_int8(self._model, node, self._thresholds[str(value.name)], self._zero)
        node.replace_input_with(0, self._passed[value])


def _store_halves(model: ir.Model) -> None:
    """Keep in FP16 the weights that are still in FP32."""
    for node in list(model.graph):
        if node.domain == fused.DOMAIN:
            for index in range(len(node.inputs)):
                _store_half(model, node, index)
        elif node.op_type in _HALF and _store_half(model, node, 1):
            wide = ir.node("Cast", [node.inputs[1]], {"to": ir.DataType.FLOAT}, name=f"{node.name}_weights_wide")
            wide.outputs[0].name = wide.name
            model.graph.insert_before(node, wide)
            node.replace_input_with(1, wide.outputs[0])


def _store_half(model: ir.Model, node: ir.Node, index: int) -> bool:
    """Keep input `index` of `node`, if it is constant, in FP16; whether it was."""
    value = node.inputs[index]
    array = constant(value)
    if value is None or array is None:
        return False
    with np.errstate(over="ignore"):  # looked for below
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        msg = f"{value.name} holds {np.abs(array).max():g}, which FP16 cannot: take int8 out of the recipe's precisions"
        raise SourceError(msg)
    node.replace_input_with(index, initializer(model, f"{node.name}_in{index}_half", half))
    return True


def _through_int8(model: ir.Model, node: ir.Node, threshold: float, zero: ir.Value) -> ir.Value:
    """The first input of `node` after QuantizeLinear and DequantizeLinear, which all its readers share."""
    value = operand(node, 0)
    scale = initializer(model, f"{value.name}_scale", np.array(max(threshold, 1e-8) / _LARGEST, np.float32))
    quantized = ir.node("QuantizeLinear", [value, scale, zero], name=f"{value.name}_q")
    restored = ir.node("DequantizeLinear", [quantized.outputs[0], scale, zero], name=f"{value.name}_dq")
    for made in (quantized, restored):
        made.outputs[0].name = made.name
    model.graph.insert_before(node, [quantized, restored])
    return restored.outputs[0]


def _store_int8(model: ir.Model, node: ir.Node, mean: Array) -> None:
    """Replace the weights of `node` by int8 ones behind a DequantizeLinear, and correct its bias for them."""
    weights = held(node, 1)
    first = node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1
    axis = 0 if first else weights.ndim - 1
    others = tuple(i for i in range(weights.ndim) if i != axis)
    scales = (np.maximum(np.abs(weights).max(axis=others), 1e-8) / _LARGEST).astype(np.float32)
    along = np.expand_dims(scales, others)
    whole = np.clip(np.round(weights / along), -_LARGEST, _LARGEST).astype(np.int8)
    restored = ir.node(
        "DequantizeLinear",
        [
            initializer(model, f"{node.name}_weights", whole),
            initializer(model, f"{node.name}_scales", scales),
            initializer(model, f"{node.name}_zeros", np.zeros(len(scales), np.int8)),
        ],
        {"axis": axis},
        name=f"{node.name}_weights_dq",
    )
    restored.outputs[0].name = restored.name
    model.graph.insert_before(node, restored)
    node.replace_input_with(1, restored.outputs[0])
    bias = constant(node.inputs[2]) if node.op_type == "Conv" and len(node.inputs) > 2 else None  # noqa: PLR2004
    if bias is not None:
        lost_MG = (weights.astype(np.float64) - whole * along.astype(np.float64)).sum(axis=(2, 3))
        shift = lost_MG[:, 0] * mean if group(node) > 1 else lost_MG @ mean
        corrected = (bias + shift).astype(np.float32)
        node.replace_input_with(2, initializer(model, f"{node.name}_bias", corrected))
