"""Graph in, graph out: one transformation a file, each with what it requires and what it ensures.

A pass takes an `onnx_ir.Model` and changes it in place. What onnx_ir, onnxscript and onnx already do is
used as it is; what stands here is what they lack. Passes are chained by `provisioning.build`,
which keeps every intermediate graph as bytes, so that each has a digest.
"""

from __future__ import annotations

import onnx_ir as ir

from models.errors import SourceError
from models.spec import Array

OPSET = 17
"""The newest opset that TensorRT 10.3 (JetPack 6.2) reads in full."""

IR_VERSION = 8
"""Goes with opset 17; every runtime of the target matrix reads it."""


def load(content: bytes, what: str) -> ir.Model:
    """Parse an ONNX file; raises SourceError naming `what` when it is none."""
    import onnx  # noqa: PLC0415 - the workshop's help must not wait for it

    try:
        model = ir.from_proto(onnx.load_model_from_string(content))
        complete = bool(model.graph.outputs) and "" in model.opset_imports
    except Exception as error:  # protobuf and onnx_ir raise unrelated types
        msg = f"{what} is no ONNX graph or is cut short ({type(error).__name__}): install its package again"
        raise SourceError(msg) from error
    if not complete:
        msg = f"{what} is no ONNX graph: it has no output or no opset"
        raise SourceError(msg)
    return model


def save(model: ir.Model) -> bytes:
    """Bytes of a graph, the same for the same graph."""
    return ir.to_proto(model).SerializeToString(deterministic=True)


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor behind a value that never changes, or None."""
    if value is None or value.is_graph_input():
        return None
    return value.const_value if value.is_initializer() else None


def initializer(model: ir.Model, name: str, array: Array) -> ir.Value:
    """A new constant of `model`."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    model.graph.register_initializer(value)
    return value
