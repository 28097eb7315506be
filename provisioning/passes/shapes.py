"""Drops what computes nothing, and writes down as constants the shapes that exporters compute node by node.

Ensures: the same numbers; constants are initializers; no identity; the shape of a reshape is constant wherever it
follows from sizes of tensors.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from provisioning.passes import constant, initializer, operand, sizes

_Element: TypeAlias = "int | tuple[ir.Value, int]"
"""One element of a computed shape: a number, or the size of a value along an axis."""
_SLICE_STEPS = 4
"""The input of Slice that holds its steps, when there are any."""
_SLICE_BOUNDS = 3
_PASSING_ON = frozenset({"Cast", "Squeeze", "Unsqueeze"})
"""Operators that hand the elements of a shape on as they are."""


def clear(model: ir.Model) -> None:
    """Change `model` as the top of this file says."""
    lift(model)
    optimizer.optimize(model)
    while _fix_reshapes(model):
        optimizer.optimize(model)


def lift(model: ir.Model) -> None:
    """Make every constant an initializer."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _fix_reshapes(model: ir.Model) -> bool:
    """Make the shapes of reshapes constant that exporters compute from sizes of tensors; whether any was.

    An element that is the size of the reshaped tensor along the same axis is spelled 0 (copy);
    one other unknown element can be spelled -1, because it follows from the rest.
    A reshape that only copies goes.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type != "Reshape" or constant(node.inputs[1]) is not None:
            continue
        data, elements = operand(node, 0), _elements(node.inputs[1])
        if elements is None:
            continue
        alike = (data, _scaled(data))
        fixed: list[_Element] = [
            0 if any(element == (one, axis) for one in alike) else element for axis, element in enumerate(elements)
        ]
        unknown = [element for element in fixed if not isinstance(element, int)]
        if len(unknown) + fixed.count(-1) > 1:
            continue
        changed = True
        if not any(fixed) and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(data)
            continue
        shape = np.array([element if isinstance(element, int) else -1 for element in fixed], np.int64)
        node.replace_input_with(1, initializer(model, f"{node.outputs[0].name}_shape", shape))
    common.RemoveUnusedNodesPass()(model)
    return changed


def _scaled(value: ir.Value) -> ir.Value | None:
    """What `value` was made of by multiplying every element by one number; None when it was not."""
    node = value.producer()
    if node is None or node.op_type != "Mul":
        return None
    numbers = [one for one in node.inputs if (array := constant(one)) is not None and array.size == 1]
    others = [one for one in node.inputs if one not in numbers]
    return others[0] if len(others) == 1 else None


def _elements(value: ir.Value | None) -> list[_Element] | None:
    """What each element of an integer value with at most one axis is; None when that cannot be told."""
    array = constant(value)
    if array is not None:
        return [int(element) for element in array.reshape(-1)]
    node = value.producer() if value is not None else None
    if node is None:
        return None
    if node.op_type in _PASSING_ON:
        return _elements(node.inputs[0])
    if node.op_type == "Shape":
        measured = operand(node, 0)
        return [(measured, axis) for axis in range(len(sizes(measured)))] or None
    parts = [_elements(part) for part in node.inputs]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if node.op_type == "Concat":
        return [element for part in known for element in part]
    if node.op_type == "Gather":
        whole, places = known
        return [whole[place] for place in places if isinstance(place, int)]
    if node.op_type == "Slice":
        whole, starts, ends = known[:3]
        steps = known[_SLICE_STEPS] if len(known) > _SLICE_STEPS else [1]
        bounds = [part[0] for part in (starts, ends, steps) if isinstance(part[0], int)]
        return whole[slice(*bounds)] if len(bounds) == _SLICE_BOUNDS else None
    return None
