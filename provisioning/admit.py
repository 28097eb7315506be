"""Looks a checkpoint over before any pass touches it: what cannot be used is refused here, by file and node.

Refused are: what is no ONNX file or is cut short; weights in other files; an opset or format newer than the installed
onnx; operators that are not in the standard; weights that are not numbers; tensors of size zero; and what the
checker of onnx refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.errors import SourceError

STANDARD = frozenset({"", "ai.onnx"})
MAX_BYTES = 2**31 - 1
"""What a protobuf message, and so an ONNX file, can hold."""


OF_PACKAGE, OF_FILE = "install its package again", "give a whole ONNX file"
"""What helps against a damaged file, by where it is from."""


def admit(content: bytes, what: str, remedy: str = OF_PACKAGE) -> None:
    """Raise SourceError, naming `what` and the node or tensor at fault, unless passes can work on `content`.

    `remedy` is what helps when the file is damaged.
    """
    import onnx  # noqa: PLC0415 - the workshop's help must not wait for it

    model = parse(content, what, remedy)
    known = onnx.defs.onnx_opset_version()
    if model.ir_version > onnx.IR_VERSION:
        msg = (
            f"{what} has format version {model.ir_version}, onnx {onnx.__version__} knows up to {onnx.IR_VERSION}: "
            "export it anew for an older one, or update onnx"
        )
        raise SourceError(msg)
    opset = next((one.version for one in model.opset_import if one.domain in STANDARD), 0)
    if opset > known:
        msg = (
            f"{what} uses opset {opset}, onnx {onnx.__version__} knows up to {known}: "
            "export it anew with an older opset, or update onnx"
        )
        raise SourceError(msg)
    functions = {(function.domain, function.name) for function in model.functions}
    for node in _nodes(model.graph):
        if (node.domain, node.op_type) not in functions:
            _check_operator(node, opset, what)
    for tensor, where in _tensors(model.graph):
        _check_tensor(tensor, where, what, remedy)
    for value in (*model.graph.input, *model.graph.output):
        sizes = value.type.tensor_type.shape.dim
        if any(size.HasField("dim_value") and size.dim_value == 0 for size in sizes):
            msg = f"{what} says that {value.name!r} has a dimension of size 0: export it with the size it really has"
            raise SourceError(msg)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the checker's own type, and what it meets on the way
        reason = " ".join(str(error).split())[:300]
        msg = f"{what} breaks a rule of ONNX ({reason}): export it anew"
        raise SourceError(msg) from error


def parse(content: bytes, what: str, remedy: str = OF_PACKAGE) -> Any:  # noqa: ANN401 - onnx has no types here
    """The protobuf message of an ONNX file; raises SourceError naming `what`, and the `remedy`, when it is none."""
    import onnx  # noqa: PLC0415 - see admit

    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's own types
        msg = f"{what} is no ONNX graph or is cut short ({type(error).__name__}): {remedy}"
        raise SourceError(msg) from error
    if not model.graph.output or not any(one.domain in STANDARD for one in model.opset_import):
        msg = f"{what} is no ONNX graph: it has no output or no opset"
        raise SourceError(msg)
    return model


def _nodes(graph: Any) -> Iterator[Any]:  # noqa: ANN401 - onnx has no types here
    """Every node, those of branches and loops too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _tensors(graph: Any) -> Iterator[tuple[Any, str]]:  # noqa: ANN401 - onnx has no types here
    """Every constant, with words that say where it stands."""
    readers = {name: node for node in reversed(graph.node) for name in node.input}
    for tensor in graph.initializer:
        reader = readers.get(tensor.name)
        yield tensor, f"{tensor.name!r}" + (f" (read by {_called(reader)})" if reader is not None else "")
    for node in _nodes(graph):
        for attribute in node.attribute:
            for tensor in (attribute.t, *attribute.tensors):
                if tensor.data_type:
                    yield tensor, f"of {_called(node)}"


def _called(node: Any) -> str:  # noqa: ANN401 - onnx has no types here
    return f"{node.op_type} node {node.name or (node.output[0] if node.output else '')!r}"


def _check_operator(node: Any, opset: int, what: str) -> None:  # noqa: ANN401 - onnx has no types here
    import onnx  # noqa: PLC0415 - see admit

    domain = "" if node.domain in STANDARD else node.domain
    try:
        onnx.defs.get_schema(node.op_type, opset, domain)
    except onnx.defs.SchemaError as error:
        of = f"operator {node.op_type} of domain {node.domain!r}" if domain else f"operator {node.op_type}"
        msg = (
            f"{what}: {_called(node)} is {of}, which opset {opset} of the ONNX standard does not have: "
            "export the model with standard operators, or give the operator's body as a function of the model"
        )
        raise SourceError(msg) from error
    if domain:
        msg = f"{what}: {_called(node)} is of domain {domain!r}; only standard operators are taken: export it anew"
        raise SourceError(msg)


def _check_tensor(tensor: Any, where: str, what: str, remedy: str) -> None:  # noqa: ANN401 - onnx has no types here
    import numpy as np  # noqa: PLC0415 - see admit
    import onnx  # noqa: PLC0415

    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        beside = next((entry.value for entry in tensor.external_data if entry.key == "location"), "another file")
        msg = (
            f"{what} keeps weights {where} in a file of its own, {beside}, which is not there: "
            "save the model as one file with onnx.save(onnx.load(PATH), PATH)"
        )
        raise SourceError(msg)
    if len(tensor.dims) > 1 and 0 in tensor.dims:
        msg = f"{what}: the constant {where} has size zero ({list(tensor.dims)}): export the model anew"
        raise SourceError(msg)
    if tensor.data_type not in {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}:
        return
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # fewer bytes than its shape says
        msg = f"{what}: the constant {where} does not hold what its shape says ({error}): {remedy}"
        raise SourceError(msg) from error
    broken = int(np.isnan(array).sum())
    if broken:
        are = "is no number" if broken == 1 else "are no numbers"
        msg = f"{what}: of the constant {where} {broken} of {array.size} elements {are} (NaN): export the model anew"
        raise SourceError(msg)
