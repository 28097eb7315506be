"""The two fused operators as ONNX model-local functions, for runtimes without our kernels; and how to do without them.

Nodes of domain `appliance`, with the weights as inputs in the layout of `kernels.reference`:

    ConvAttention(x_BTC, weights in the order of Neck.shapes()) -> y [B, T, 120];  attributes form, kv_heads
    CtcHead(x_NTC, w_CK, b_K) -> index INT64 [N, T], probability FP32 [N, T]

A runtime that knows neither computes their bodies, which are standard operators and agree with `kernels.reference`.
Weights may be FP16: the bodies widen them first, so that what is stored is what the kernels keep.

`inline` requires nothing; it ensures a graph of standard operators without functions, whose weights are constants
where those of the nodes were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.passes import common
from onnxscript import optimizer

from kernels import plugin
from kernels.reference import BLOCK_EPS, BLOCKS, HEAD_SIZE, HEADS, LAST_EPS, WIDTH, Neck
from provisioning.passes import OPSET

DOMAIN, CONV_ATTENTION, CTC_HEAD = plugin.NAMESPACE, plugin.CONV_ATTENTION, plugin.CTC_HEAD
VERSION = 1


def inline(model: ir.Model) -> ir.Model:
    """Put the bodies of all functions where they are called, and compute at once what depends on constants alone."""
    common.InlinePass()(model)
    model.opset_imports.pop(DOMAIN, None)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    optimizer.optimize(model, input_size_limit=1 << 30, output_size_limit=1 << 30)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)
    return model


def declare(model: ir.Model, function: ir.Function) -> None:
    """Let nodes of `model` call `function`."""
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = VERSION


def best_class(body: Any, logits_NTK: ir.Value) -> tuple[ir.Value, ir.Value]:  # noqa: ANN401 - a tape, or the like
    """`kernels.reference.ctc_head` in standard operators, recorded on `body`: index and probability, both [N, T]."""
    index = body.op("ArgMax", [logits_NTK], {"axis": -1, "keepdims": 0})
    best = body.op("ReduceMax", [logits_NTK], {"axes": [-1], "keepdims": 1})
    exp = body.op("Exp", [body.op("Sub", [logits_NTK, best])])
    last = body.op("Constant", [], {"value_ints": [-1]})
    return index, body.op("Reciprocal", [body.op("ReduceSum", [exp, last], {"keepdims": 0})])


def ctc_head() -> ir.Function:
    """The function CtcHead."""
    body = _Body()
    x_NTC, w_CK, b_K = (ir.Value(name=name) for name in ("x_NTC", "w_CK", "b_K"))
    logits_NTK = body.op("Add", [body.op("MatMul", [x_NTC, body.wide(w_CK)]), body.wide(b_K)])
    return body.function(CTC_HEAD, [x_NTC, w_CK, b_K], best_class(body, logits_NTK), ())


def conv_attention(neck: Neck) -> ir.Function:
    """The function ConvAttention of a neck: `kernels.reference.neck`, operator by operator."""
    body = _Body()
    x_BTC = ir.Value(name="x_BTC")
    stored = {name: ir.Value(name=name) for name in neck.shapes()}
    w = {name: body.wide(value) for name, value in stored.items()}

    def linear(v: ir.Value, name: str) -> ir.Value:
        return body.op("Add", [body.op("MatMul", [v, w[f"{name}.w"]]), w[f"{name}.b"]])

    def conv(v: ir.Value, name: str) -> ir.Value:
        w_OIJ = body.op("Transpose", [w[f"{name}.w"]], {"perm": [2, 1, 0]})
        return body.convolve(v, w_OIJ, w[f"{name}.b"], neck.shapes()[f"{name}.w"][0], 1)

    def norm(v: ir.Value, name: str, eps: float) -> ir.Value:
        return body.op("LayerNormalization", [v, w[f"{name}.gamma"], w[f"{name}.beta"]], {"axis": -1, "epsilon": eps})

    if neck.form == "v4":
        h = body.swish(linear(body.swish(conv(x_BTC, "conv1")), "conv2"))
    else:
        m = body.swish(linear(x_BTC, "main"))
        w_OIJ = body.op("Unsqueeze", [body.op("Transpose", [w["depthwise.w"]], {"perm": [1, 0]}), body.ints(1)])
        depthwise = body.convolve(m, w_OIJ, w["depthwise.b"], neck.shapes()["depthwise.w"][0], WIDTH)
        h = body.op("Add", [m, body.swish(depthwise)])
    for i in range(BLOCKS):
        at = f"block{i}"
        n = norm(h, f"{at}.norm1", BLOCK_EPS)
        q, k, v = (linear(n, f"{at}.{name}") for name in "qkv")
        h = body.op("Add", [h, linear(body.attention(q, k, v, neck.kv_heads), f"{at}.o")])
        n = norm(h, f"{at}.norm2", BLOCK_EPS)
        h = body.op("Add", [h, linear(body.swish(linear(n, f"{at}.mlp1")), f"{at}.mlp2")])
    h = norm(h, "norm", LAST_EPS)
    if neck.form == "v6":
        y = body.op("Add", [h, body.swish(linear(x_BTC, "skip"))])
    else:
        both = body.op("Concat", [x_BTC, body.swish(linear(h, "conv3"))], {"axis": -1})
        y = body.swish(linear(body.swish(conv(both, "conv4")), "conv5"))
    attributes = (ir.AttrString("form", neck.form), ir.AttrInt64("kv_heads", neck.kv_heads))
    return body.function(CONV_ATTENTION, [x_BTC, *stored.values()], [y], attributes)


class _Body:
    """Operators of a function in the order in which they are written."""

    def __init__(self) -> None:
        self._tape = tape.Tape()

    def op(self, kind: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any] | None = None) -> ir.Value:
        """The output of a new operator."""
        made = self._tape.op(kind, inputs, attributes)
        made.name = f"{kind}_{len(self._tape.nodes)}"
        return made

    def ints(self, *numbers: int) -> ir.Value:
        return self.op("Constant", [], {"value_ints": list(numbers)})

    def wide(self, weights: ir.Value) -> ir.Value:
        return self.op("Cast", [weights], {"to": ir.DataType.FLOAT})

    def swish(self, v: ir.Value) -> ir.Value:
        return self.op("Mul", [v, self.op("Sigmoid", [v])])

    def convolve(self, v_BTI: ir.Value, w_OIJ: ir.Value, b_O: ir.Value, taps: int, groups: int) -> ir.Value:
        """A convolution along T; of two dimensions, because that is what every engine has kernels for."""
        v_BI1T = self.op("Unsqueeze", [self.op("Transpose", [v_BTI], {"perm": [0, 2, 1]}), self.ints(2)])
        w_OI1J = self.op("Unsqueeze", [w_OIJ, self.ints(2)])
        attributes = {"kernel_shape": [1, taps], "pads": [0, taps // 2] * 2, "group": groups}
        y_BO1T = self.op("Conv", [v_BI1T, w_OI1J, b_O], attributes)
        return self.op("Transpose", [self.op("Squeeze", [y_BO1T, self.ints(2)])], {"perm": [0, 2, 1]})

    def attention(self, q_BTC: ir.Value, k_BTE: ir.Value, v_BTE: ir.Value, groups: int) -> ir.Value:
        """Attention; with fewer key/value than query heads, they broadcast over the queries of a group."""
        shared = groups < HEADS
        of_group = [groups, HEADS // groups] if shared else [HEADS]
        to_heads = [0, 2, 3, 1, 4] if shared else [0, 2, 1, 3]
        back = [0, 3, 1, 2, 4] if shared else [0, 2, 1, 3]

        def heads(v_BTC: ir.Value, shape: list[int]) -> ir.Value:
            split = self.op("Reshape", [v_BTC, self.ints(0, -1, *shape, HEAD_SIZE)])
            return self.op("Transpose", [split], {"perm": to_heads})

        key_value = [groups, 1] if shared else [HEADS]
        q, k, v = heads(q_BTC, of_group), heads(k_BTE, key_value), heads(v_BTE, key_value)
        scale = self.op("Constant", [], {"value_float": HEAD_SIZE**-0.5})
        across = [*range(len(back) - 2), len(back) - 1, len(back) - 2]
        scores = self.op("MatMul", [self.op("Mul", [q, scale]), self.op("Transpose", [k], {"perm": across})])
        mixed = self.op("MatMul", [self.op("Softmax", [scores], {"axis": -1}), v])
        return self.op("Reshape", [self.op("Transpose", [mixed], {"perm": back}), self.ints(0, -1, WIDTH)])

    def function(
        self, name: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], attributes: Sequence[ir.Attr]
    ) -> ir.Function:
        graph = ir.Graph(inputs, outputs, nodes=self._tape.nodes, opset_imports={"": OPSET}, name=name)
        return ir.Function(DOMAIN, name, graph=graph, attributes=attributes)


def weights_of(neck: Neck, weights: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and FP32 array of each weight input of ConvAttention, in order."""
    neck.check(weights)
    return [(name, np.ascontiguousarray(weights[name], np.float32)) for name in neck.shapes()]
