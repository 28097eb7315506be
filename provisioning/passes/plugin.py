"""Turns the nodes of pass mark into plugins of TensorRT (`kernels.plugin`), for one architecture.

Requires: pass mark, and the kernels of that architecture.
Ensures: the same nodes without their bodies, on FP16 between casts; their weights, packed, and their kernels in an
attribute, plugin_version and plugin_namespace beside it, because TensorRT before 10.10 does not look a plugin up by the
node's domain. The graph's inputs and outputs are as they were. No runtime but TensorRT opens it.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from kernels import plugin as face
from kernels.launch import Kernels
from kernels.reference import Form, Neck
from provisioning.passes import held, operand


def necks(model: ir.Model) -> set[Neck]:
    """The necks that pass mark has left in `model`."""
    return {_neck(node) for node in _marked(model) if node.op_type == face.CONV_ATTENTION}


def plugin(model: ir.Model, arch: str, kernels: Kernels) -> ir.Model:
    """Make every marked node of `model` a plugin for `arch` ("sm_87")."""
    halves: dict[ir.Value, ir.Value] = {}
    for node in _marked(model):
        x = operand(node, 0)
        if x not in halves:
            cast = _cast(x, ir.DataType.FLOAT16)
            node.prepend(cast)
            halves[x] = cast.outputs[0]
        if node.op_type == face.CONV_ATTENTION:
            neck = _neck(node)
            weights = {name: held(node, at) for at, name in enumerate(neck.shapes(), 1)}
            payload = face.neck_payload(arch, neck, weights, kernels)
            y = node.outputs[0]
            back = _cast(y, ir.DataType.FLOAT)
            node.append(back)
            wide = back.outputs[0]
            y.replace_all_uses_with(wide, replace_graph_outputs=True)
            back.replace_input_with(0, y)
            wide.name, y.name = y.name, wide.name
            y.type, halves[wide] = ir.TensorType(ir.DataType.FLOAT16), y
        else:
            payload = face.head_payload(arch, held(node, 1), held(node, 2), kernels)
        node.resize_inputs(1)
        node.replace_input_with(0, halves[x])
        said = {"payload": payload, "plugin_version": face.VERSION, "plugin_namespace": face.NAMESPACE}
        node.attributes.update({name: ir.AttrString(name, text) for name, text in said.items()})
    model.functions.clear()
    common.RemoveUnusedNodesPass()(model)
    return model


def _marked(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain == face.NAMESPACE]


def _neck(node: ir.Node) -> Neck:
    form: Form = "v6" if node.attributes["form"].as_string() == "v6" else "v4"
    return Neck(form, node.attributes["kv_heads"].as_int())


def _cast(value: ir.Value, kind: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": kind}, name=f"{value.name}_to_{kind.name.lower()}")
    made = cast.outputs[0]
    made.name, made.type, made.shape = f"{value.name}_{kind.name.lower()}", ir.TensorType(kind), value.shape
    return cast
