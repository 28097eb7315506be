"""A small graph with all that our graphs ask of an engine builder and a toy would not have.

INT8 by Q/DQ with a scale for each channel, then attention whose key/value heads are shared by broadcasting, as
`--kv-heads` writes it for parsers that know no Attention operator, then half precision inside a model-local function.
Axes in names: N batch, T steps, C channels, K key/value heads, G query heads of each, D size of a head.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KV_HEADS, GROUP, SIZE = 2, 3, 8
CHANNELS = KV_HEADS * GROUP * SIZE


def graph() -> bytes:
    """`x` FP32 [N, C, 1, T] -> `y` FP32 [N, T, C]."""
    random = np.random.default_rng(0)
    weights = {
        "w_scale": np.full(CHANNELS, 0.01, np.float32),
        "w_zero": np.zeros(CHANNELS, np.int8),
        "w": random.integers(-127, 127, (CHANNELS, CHANNELS, 1, 3), np.int8),
        "x_scale": np.array(0.05, np.float32),
        "x_zero": np.array(0, np.int8),
        "one": np.array([2], np.int64),
        "group_axis": np.array([2], np.int64),
        "wq": random.normal(size=(CHANNELS, CHANNELS)).astype(np.float32),
        "wk": random.normal(size=(CHANNELS, KV_HEADS * SIZE)).astype(np.float32),
        "wv": random.normal(size=(CHANNELS, KV_HEADS * SIZE)).astype(np.float32),
        "q_shape": np.array([0, -1, KV_HEADS, GROUP, SIZE], np.int64),
        "kv_shape": np.array([0, -1, KV_HEADS, SIZE], np.int64),
        "y_shape": np.array([0, -1, CHANNELS], np.int64),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x8"]),
        helper.make_node("DequantizeLinear", ["x8", "x_scale", "x_zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wq8"], axis=0),
        helper.make_node("Conv", ["xq", "wq8"], ["conv"], kernel_shape=[1, 3], pads=[0, 1, 0, 1]),
        helper.make_node("Squeeze", ["conv", "one"], ["c_NCT"]),
        helper.make_node("Transpose", ["c_NCT"], ["c_NTC"], perm=[0, 2, 1]),
    ]
    for name, shape, order in (
        ("q", "q_shape", [0, 2, 3, 1, 4]),
        ("k", "kv_shape", [0, 2, 3, 1]),
        ("v", "kv_shape", [0, 2, 1, 3]),
    ):
        nodes += [
            helper.make_node("MatMul", ["c_NTC", f"w{name}"], [f"{name}_flat"]),
            helper.make_node("Reshape", [f"{name}_flat", shape], [f"{name}_heads"]),
            helper.make_node("Transpose", [f"{name}_heads"], [f"{name}_by_head"], perm=order),
        ]
    nodes += [
        helper.make_node("Unsqueeze", ["k_by_head", "group_axis"], ["k_NK1DT"]),
        helper.make_node("Unsqueeze", ["v_by_head", "group_axis"], ["v_NK1TD"]),
        helper.make_node("MatMul", ["q_by_head", "k_NK1DT"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["shares"], axis=-1),
        helper.make_node("MatMul", ["shares", "v_NK1TD"], ["mixed_NKGTD"]),
        helper.make_node("Transpose", ["mixed_NKGTD"], ["mixed_NTKGD"], perm=[0, 3, 1, 2, 4]),
        helper.make_node("Reshape", ["mixed_NTKGD", "y_shape"], ["mixed"]),
        helper.make_node("Halved", ["mixed"], ["y"], domain="appliance"),
    ]
    body = [
        helper.make_node("Cast", ["a"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Sigmoid", ["half"], ["gate"]),
        helper.make_node("Mul", ["half", "gate"], ["gated"]),
        helper.make_node("Cast", ["gated"], ["b"], to=TensorProto.FLOAT),
    ]
    opset = helper.make_opsetid("", 17)
    made = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", CHANNELS, 1, "T"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "T", CHANNELS])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(
        made,
        opset_imports=[opset, helper.make_opsetid("appliance", 1)],
        functions=[helper.make_function("appliance", "Halved", ["a"], ["b"], body, [opset])],
        ir_version=8,
    )
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
