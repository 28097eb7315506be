"""Brings a graph, however it was exported, into the one form that the other passes rely on.

Requires: a valid ONNX graph of standard operators, opset 7 to 17, whose inputs have one shape.
Ensures: an only input is called `x`, an only output `y`; opset 17, ir_version 8; constants are initializers, the
shapes of reshapes among them; BatchNorm, a bias, and the scalar scale and shift behind a convolution, are folded into
it, which always has a bias; no identity, no cast to the same type, no multiplication by 1, no addition of 0;
x * clip(x + 3, 0, 6) / 6 is one HardSwish; no metadata; names of nodes and of what they compute depend on the graph
alone; the same numbers within rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter, version_converter
from onnxscript.rewriter import MatchResult, pattern
from onnxscript.rewriter.rules import common as rules

from models.errors import SourceError
from provisioning.passes import IR_VERSION, OPSET, constant, initializer, sizes
from provisioning.passes.shapes import clear, lift

_WITHOUT_BIAS = 2
_ARITHMETIC = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})


def normalise(model: ir.Model, shape: Sequence[int]) -> ir.Model:
    """Normalise `model`, whose input gets `shape` (-1 is any size); raises SourceError when it cannot be done."""
    if not all(len(value.shape or ()) == len(shape) for value in model.graph.inputs):
        msg = f"the graph must have one input with {len(shape)} axes, or several of that shape, as its recipe says"
        raise SourceError(msg)
    for value in model.graph.inputs:
        value.shape = ir.Shape([size if size >= 0 else f"d{axis}" for axis, size in enumerate(shape)])
    # The ranks must be known before the opset changes: without them each Softmax gets a flatten and two reshapes.
    clear(model)
    _convert(model)
    _fix_singletons(model)
    for fusion in (
        pattern.RewriteRuleSet([_Bias.rule("Conv"), _Bias.rule("ConvTranspose")], commute=True),
        pattern.RewriteRuleSet([rules.conv_affine_fusion_rule], commute=True),
        rules.fuse_hardswish_rules(),
    ):
        model = rewriter.rewrite(model, fusion)
    model = rewriter.rewrite(model)  # the rules that onnxscript applies by default, BatchNorm among them
    optimizer.optimize(model)
    _tidy(model)
    return model


def _fix_singletons(model: ir.Model) -> None:
    """Make one-element operands of arithmetic scalars, the only form in which no-op rules recognise 0 and 1."""
    for value in model.graph.initializers.values():
        array = constant(value)
        if array is None or array.shape != (1,):
            continue
        others = [
            [other for other in user.inputs if other is not None and other is not value and sizes(other)]
            for user in value.consumers()
        ]
        if all(others) and all(user.op_type in _ARITHMETIC for user in value.consumers()):
            value.const_value = ir.tensor(array.reshape(()), name=value.name)
            value.shape = ir.Shape(())


class _Bias(pattern.RewriteRuleClassBase):  # type: ignore[misc] # onnxscript has no types
    """Conv(x, w) + b, with b [1, C, 1, 1] -> Conv(x, w, b): only then what stands behind it can be folded."""

    def __init__(self, kind: str) -> None:
        """For operators of type `kind`, Conv or ConvTranspose."""
        super().__init__(f"{kind}Bias")
        self._kind = kind

    def pattern(self, op: Any, x: Any, w: Any, b: Any) -> Any:  # noqa: ANN401 - onnxscript traces this
        return getattr(op, self._kind)(x, w, _allow_other_attributes=True, _outputs=["y"]) + b

    def check(self, context: object, b: ir.Value, **_: object) -> MatchResult:
        del context
        array = constant(b)
        result = MatchResult()
        one_a_channel = array is not None and array.shape == (1, array.size, 1, 1)
        return result if one_a_channel else result.fail("not a constant with one number a channel")

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, b: ir.Value, y: ir.Value) -> Any:  # noqa: ANN401 - traced
        array, node = constant(b), y.producer()
        if array is None or node is None:
            return None
        bias = op.initializer(ir.tensor(array.reshape(-1)), name=f"{b.name}_bias")
        return getattr(op, self._kind)(x, w, bias, **node.attributes)


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
    lift(model)
    model.ir_version = IR_VERSION


def _give_biases(model: ir.Model) -> None:
    """Let every convolution with constant weights have a bias, which later passes can then change."""
    for node in model.graph:
        weights = constant(node.inputs[1]) if node.op_type == "Conv" else None
        if weights is not None and len(node.inputs) == _WITHOUT_BIAS:
            node.resize_inputs(_WITHOUT_BIAS + 1)
            zeros = initializer(model, f"{node.outputs[0].name}_bias", np.zeros(len(weights), np.float32))
            node.replace_input_with(_WITHOUT_BIAS, zeros)


def _tidy(model: ir.Model) -> None:
    """Drop what no runtime reads, and rename what the tools named by counters that outlive one graph."""
    lift(model)
    _give_biases(model)
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
    for values, name in ((model.graph.inputs, "x"), (model.graph.outputs, "y")):
        if len(values) == 1:
            values[0].name = name
