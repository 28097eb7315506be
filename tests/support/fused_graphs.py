"""A recogniser's end as pass mark leaves it, and kernels for it that only a stand-in driver takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir

from kernels.launch import Kernels
from kernels.plan import head_variants, neck_variants
from kernels.reference import WIDTH, Neck
from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.folder import pack_arrays, write_bundle
from models.spec import Array, ModelSpec, TensorSpec
from provisioning import passes
from provisioning.passes import fused

SPEC = Neck("v4", 2)
CLASSES = 70


def weights(seed: int = 0) -> dict[str, Array]:
    """Of the neck, and under "w_CK" and "b_K" of the head."""
    random = np.random.default_rng(seed)
    found = {name: random.standard_normal(shape).astype(np.float32) / 30 for name, shape in SPEC.shapes().items()}
    return found | {
        "w_CK": random.standard_normal((WIDTH, CLASSES)).astype(np.float32),
        "b_K": random.standard_normal(CLASSES).astype(np.float32),
    }


def marked(held: dict[str, Array]) -> bytes:
    """Make x [B, T, 480] -> neck -> head -> index, probability, as functions."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "t", SPEC.channels]))
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": passes.OPSET}, name="end"), ir_version=8)
    for function in (fused.conv_attention(SPEC), fused.ctc_head()):
        fused.declare(model, function)
    values = {name: passes.initializer(model, name, array) for name, array in held.items()}
    attributes = {"form": SPEC.form, "kv_heads": SPEC.kv_heads}
    neck_inputs = [x, *(values[name] for name in SPEC.shapes())]
    neck = ir.node(fused.CONV_ATTENTION, neck_inputs, attributes, domain=fused.DOMAIN, name="neck")
    head_inputs = [neck.outputs[0], values["w_CK"], values["b_K"]]
    head = ir.node(fused.CTC_HEAD, head_inputs, domain=fused.DOMAIN, num_outputs=2, name="head")
    neck.outputs[0].name, neck.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    for value, name, kind in zip(
        head.outputs, ("index", "probability"), (ir.DataType.INT64, ir.DataType.FLOAT), strict=True
    ):
        value.name, value.type, value.shape = name, ir.TensorType(kind), ir.Shape(["b", "t"])
    model.graph.extend([neck, head])
    model.graph.outputs.extend(head.outputs)
    return passes.save(model)


def bundle(path: Path, graph: bytes, compiled: Kernels) -> Path:
    """A bundle of the task `tensors` with the graph `rec` and kernels for an Orin."""
    spec = ModelSpec(
        (TensorSpec("x", "FP32", (-1, -1, SPEC.channels)),),
        (TensorSpec("index", "INT64", (-1, -1)), TensorSpec("probability", "FP32", (-1, -1))),
    )
    inputs = pack_arrays({"x": np.ones((2, 40, SPEC.channels), np.float32)})
    outputs = pack_arrays({"index": np.zeros((2, 40), np.int64), "probability": np.ones((2, 40), np.float32)})
    manifest = Manifest(
        name="end",
        version="1.0.0",
        licence="Apache-2.0",
        task=TaskSpec("tensors"),
        graphs={"rec": Graph(spec, {"fp32": Variant(Blob.of(graph), Golden(Blob.of(inputs), Blob.of(outputs), 1.0))})},
        provenance=Provenance("0" * 64, {}, {}, (), ()),
        kernels={"sm_87": {name: Blob.of(content) for name, content in compiled.items()}} if compiled else {},
    )
    contents = (graph, inputs, outputs, *compiled.values())
    write_bundle(path, manifest, {Blob.of(content).sha256: content for content in contents}, {})
    return path


def kernels(arch: str = "sm_87") -> Kernels:
    """What kernels.compile would write, but for the code."""
    files: dict[str, bytes] = {}
    for variant in (*neck_variants(arch, SPEC), *head_variants(arch)):
        metadata = {"entry": variant.name.split(".")[0], "warps": 8, "shared_bytes": 100}
        files |= {f"{variant.name}.cubin": b"\x7fELF\0\xff", f"{variant.name}.json": json.dumps(metadata).encode()}
    return files
