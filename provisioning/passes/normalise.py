"""Brings a graph, however it was exported, into the one form that the other passes rely on.

Requires: a valid ONNX graph of standard operators, opset 7 to 17, with one input and one output.
Ensures: the input is called `x`, the output `y`; opset 17, ir_version 8; constants are initializers and the shapes of reshapes are among them; BatchNorm,
and the scalar scale and shift behind a convolution, are folded into it; no identity, no cast to the same type,
no multiplication by 1, no addition of 0; x * clip(x + 3, 0, 6) / 6 is one HardSwish; no metadata; names of
nodes and of what they compute depend on the graph alone; the same numbers as before within rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter, version_converter
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules import common as rules

from models.errors import SourceError
from provisioning.passes import IR_VERSION, OPSET, constant, initializer

_Element: TypeAlias = "int | tuple[ir.Value, int]"
"""One element of a computed shape: a number, or the size of a value along an axis."""


def normalise(model: ir.Model, shape: Sequence[int]) -> ir.Model:
    """Normalise `model`, whose input gets `shape` (-1 is any size); raises SourceError when it cannot be done."""
    inputs, outputs = model.graph.inputs, model.graph.outputs
    if len(inputs) != 1 or len(outputs) != 1 or len(inputs[0].shape or ()) != len(shape):
        msg = f"the graph must have one output and one input with {len(shape)} axes, as its recipe says"
        raise SourceError(msg)
    inputs[0].shape = ir.Shape([size if size >= 0 else f"d{axis}" for axis, size in enumerate(shape)])
    _lift(model)
    optimizer.optimize(model)
    # The ranks must be known before the opset changes: without them each Softmax gets a flatten and two reshapes.
    while _fix_reshapes(model):
        optimizer.optimize(model)
    _convert(model)
    _fix_singletons(model)
    for fusion in (
        pattern.RewriteRuleSet([rules.conv_affine_fusion_rule], commute=True),
        rules.fuse_hardswish_rules(),
        pattern.RewriteRuleSet([_ConvTransposeBias.rule()], commute=True),
    ):
        model = rewriter.rewrite(model, fusion)
    model = rewriter.rewrite(model)  # the rules that onnxscript applies by default, BatchNorm among them
    optimizer.optimize(model)
    _tidy(model)
    return model


def _lift(model: ir.Model) -> None:
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _fix_reshapes(model: ir.Model) -> bool:
    """Make the shapes of reshapes constant that exporters compute from sizes of tensors; whether any was.

    An element that is the size of the reshaped tensor along the same axis is spelled 0 (copy);
    one other unknown element can be spelled -1, because it follows from the rest.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type != "Reshape" or constant(node.inputs[1]) is not None:
            continue
        data, elements = node.inputs[0], _elements(node.inputs[1])
        if elements is None:
            continue
        fixed = [0 if element == (data, axis) else element for axis, element in enumerate(elements)]
        unknown = [element for element in fixed if not isinstance(element, int)]
        if len(unknown) + fixed.count(-1) > 1:
            continue
        shape = np.array([element if isinstance(element, int) else -1 for element in fixed], np.int64)
        node.replace_input_with(1, initializer(model, f"{node.outputs[0].name}_shape", shape))
        changed = True
    common.RemoveUnusedNodesPass()(model)
    return changed


def _elements(value: ir.Value | None) -> list[_Element] | None:
    """What each element of a one-dimensional integer value is; None when that cannot be told."""
    tensor = constant(value)
    if tensor is not None:
        return [int(element) for element in tensor.numpy().reshape(-1)]
    node = value.producer() if value is not None else None
    if node is None:
        return None
    if node.op_type == "Cast":
        return _elements(node.inputs[0])
    if node.op_type == "Shape":
        measured = node.inputs[0]
        known = measured is not None and measured.shape is not None
        return [(measured, axis) for axis in range(len(measured.shape))] if known else None
    parts = [_elements(part) for part in node.inputs]
    if any(part is None for part in parts):
        return None
    if node.op_type == "Concat":
        return [element for part in parts for element in part]
    if node.op_type == "Slice":
        starts, ends, _, steps = (*parts[1:], [0], [1])[:4] if len(parts) == 3 else (*parts[1:], [1])[:4]
        return parts[0][starts[0] : ends[0] : steps[0]]
    return None


def _fix_singletons(model: ir.Model) -> None:
    """Make one-element operands of arithmetic scalars, the only form in which no-op rules recognise 0 and 1."""
    for value in model.graph.initializers.values():
        users = value.consumers()
        arithmetic = all(
            user.op_type in {"Add", "Sub", "Mul", "Div", "Pow"}
            and any(other is not value and other.shape is not None and len(other.shape) > 0 for other in user.inputs)
            for user in users
        )
        if tuple(value.shape) == (1,) and arithmetic:
            value.const_value = ir.tensor(value.const_value.numpy().reshape(()), name=value.name)
            value.shape = ir.Shape(())


class _ConvTransposeBias(pattern.RewriteRuleClassBase):
    """ConvTranspose(x, w) + b, with b [1, C, 1, 1] -> ConvTranspose(x, w, b): only then BatchNorm can be folded."""

    def pattern(self, op: Any, x: Any, w: Any, b: Any) -> Any:
        return op.ConvTranspose(x, w, _allow_other_attributes=True, _outputs=["y"]) + b

    def check(self, context: Any, b: ir.Value, **_: Any) -> pattern.MatchResult:
        del context
        result = pattern.MatchResult()
        tensor = constant(b)
        if tensor is None or len(tensor.shape) != 4 or tensor.size != tensor.shape[1]:
            return result.fail("not a constant with one number a channel")
        return result

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, b: ir.Value, y: ir.Value) -> ir.Value:
        bias = op.initializer(ir.tensor(constant(b).numpy().reshape(-1)), name=f"{b.name}_bias")
        return op.ConvTranspose(x, w, bias, **y.producer().attributes)


def _convert(model: ir.Model) -> None:
    """Raise the opset to 17 by way of onnx, whose converter is the only one that starts this low."""
    log = logging.getLogger("onnxscript.version_converter")
    level = log.level
    log.setLevel(logging.ERROR)  # it would warn that it takes that way
    try:
        version_converter.convert_version(model, OPSET, fallback=True)
    finally:
        log.setLevel(level)
    if model.opset_imports.get("") != OPSET:
        msg = f"the graph cannot be converted to opset {OPSET}"
        raise SourceError(msg)
    _lift(model)
    model.ir_version = IR_VERSION


def _tidy(model: ir.Model) -> None:
    """Drop what no runtime reads, and rename what the tools named by counters that outlive one graph."""
    _lift(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.producer_name = model.producer_version = None
    for number, node in enumerate(model.graph):
        node.name = f"{node.op_type}_{number}"
        for value in node.outputs:
            value.name = f"{node.name}_out{value.index()}"
    model.graph.inputs[0].name = "x"
    model.graph.outputs[0].name = "y"
