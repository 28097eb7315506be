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
    from provisioning.admit import parse  # noqa: PLC0415 - onnx is slow to import

    proto = parse(content, what)
    try:
        model: ir.Model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises unrelated types
        msg = f"{what} is no ONNX graph that can be worked on ({type(error).__name__}): export it anew"
        raise SourceError(msg) from error
    return model


def save(model: ir.Model) -> bytes:
    """Bytes of a graph, the same for the same graph."""
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def constant(value: ir.Value | None) -> Array | None:
    """What a value always holds, or None when it is computed or given."""
    if value is None or value.is_graph_input() or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy()


def operand(node: ir.Node, index: int) -> ir.Value:
    """Input `index` of `node`, which must be there."""
    value = node.inputs[index]
    if value is None:
        msg = f"{node.op_type} {node.name} lacks its input {index}"
        raise SourceError(msg)
    return value


def held(node: ir.Node, index: int) -> Array:
    """The constant that input `index` of `node` must hold."""
    array = constant(operand(node, index))
    if array is None:
        msg = f"input {index} of {node.op_type} {node.name} is not constant"
        raise SourceError(msg)
    return array


def sizes(value: ir.Value) -> tuple[int, ...]:
    """Shape of a value, -1 where a size is not known; empty when nothing is known."""
    return tuple(size if isinstance(size, int) else -1 for size in value.shape or ())


def group(node: ir.Node) -> int:
    """Groups of a convolution."""
    return node.attributes.get_int("group", 1)


def initializer(model: ir.Model, name: str, array: Array) -> ir.Value:
    """A new constant of `model`."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value
