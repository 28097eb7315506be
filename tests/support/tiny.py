"""Tiny real models, built on the spot: what the journey tests serve instead of hundreds of megabytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.folder import pack_arrays, write_bundle
from models.spec import ModelSpec, TensorSpec

DATATYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
WIDTH = 512
"""Of what `scale_model` multiplies."""
WEIGHTS = np.random.default_rng(7).normal(size=(16, 16)).astype(np.float32)


def null_model(path: Path, delay_s: float = 0.0, **sizes_bytes: int) -> Path:
    """A graph of the null runtime: `y` [any, any] is `x` after `delay_s`, with the memory of its keys."""
    path.write_text(json.dumps({"delay_s": delay_s, **sizes_bytes}))
    return path


def linear_model(path: Path) -> Path:
    """`y` = `x` WEIGHTS, FP32 [N, 16]."""
    return _save(
        path,
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        [_value("x", TensorProto.FLOAT, ["N", 16])],
        [_value("y", TensorProto.FLOAT, ["N", 16])],
        [numpy_helper.from_array(WEIGHTS, "weights")],
    )


def fours_model(path: Path) -> Path:
    """`y` is `x`, FP32 [1, 4]."""
    return _save(
        path,
        [helper.make_node("Identity", ["x"], ["y"])],
        [_value("x", TensorProto.FLOAT, [1, 4])],
        [_value("y", TensorProto.FLOAT, [1, 4])],
    )


def root_model(path: Path) -> Path:
    """`y` is the square root of `x`, FP32 [any, any]: NaN below zero."""
    return _save(
        path,
        [helper.make_node("Sqrt", ["x"], ["y"])],
        [_value("x", TensorProto.FLOAT, ["N", "M"])],
        [_value("y", TensorProto.FLOAT, ["N", "M"])],
    )


def types_model(path: Path) -> Path:
    """Every datatype, [N] each, comes back as it was: input `FP32` as output `FP32_out`, and so on."""
    return _save(
        path,
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in DATATYPES],
        [_value(name, kind, ["N"]) for name, kind in DATATYPES.items()],
        [_value(f"{name}_out", kind, ["N"]) for name, kind in DATATYPES.items()],
    )


def text_model(path: Path) -> Path:
    """`y` is `x`, BYTES [N]."""
    return _save(
        path,
        [helper.make_node("Identity", ["x"], ["y"])],
        [_value("x", TensorProto.STRING, ["N"])],
        [_value("y", TensorProto.STRING, ["N"])],
    )


def elevens_model(path: Path, dimensions: int = 1) -> Path:
    """`y` [M, 11] is `x`, all of whose dimensions vary: no size that a daemon would guess goes through."""
    return _save(
        path,
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [_value("x", TensorProto.FLOAT, [f"N{i}" for i in range(dimensions)])],
        [_value("y", TensorProto.FLOAT, ["M", 11])],
        [numpy_helper.from_array(np.array([-1, 11], np.int64), "shape")],
    )


def wide_model(path: Path, width: int) -> Path:
    """`y` [1, `width`] is `x` [1, 1], over and over."""
    return _save(
        path,
        [helper.make_node("Expand", ["x", "shape"], ["y"])],
        [_value("x", TensorProto.FLOAT, [1, 1])],
        [_value("y", TensorProto.FLOAT, [1, width])],
        [numpy_helper.from_array(np.array([1, width], np.int64), "shape")],
    )


def crowded_model(path: Path, outputs: int) -> Path:
    """`x` [1] under very many names."""
    names = [f"an_output_with_a_long_name_{i}" for i in range(outputs)]
    return _save(
        path,
        [helper.make_node("Identity", ["x"], [name]) for name in names],
        [_value("x", TensorProto.FLOAT, [1])],
        [_value(name, TensorProto.FLOAT, [1]) for name in names],
    )


def pair_model(path: Path) -> Path:
    """`sum` and `difference` of `a` and `b`, FP32 [4]."""
    return _save(
        path,
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [_value(name, TensorProto.FLOAT, [4]) for name in ("a", "b")],
        [_value(name, TensorProto.FLOAT, [4]) for name in ("sum", "difference")],
    )


def blank_bundle(path: Path) -> Path:
    """A bundle of task `reading` that takes every picture and finds no text in it.

    Its detector is real, sees every pixel, and says 0 everywhere.
    """
    spec = ModelSpec((TensorSpec("x", "FP32", (1, 3, -1, -1)),), (TensorSpec("y", "FP32", (1, 1, -1, -1)),))
    graph = _save(
        path.with_suffix(".onnx"),
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
            helper.make_node("Mul", ["mean", "zero"], ["y"]),
        ],
        [_value("x", TensorProto.FLOAT, [1, 3, "H", "W"])],
        [_value("y", TensorProto.FLOAT, [1, 1, "H", "W"])],
        [numpy_helper.from_array(np.zeros(1, np.float32), "zero")],
    ).read_bytes()
    inputs = pack_arrays({"x": np.ones((1, 3, 32, 32), np.float32)})
    outputs = pack_arrays({"y": np.zeros((1, 1, 32, 32), np.float32)})
    _write_bundle(path, "det", TaskSpec("reading"), spec, graph, inputs, outputs)
    return path


def guess_bundle(path: Path, *scores: float) -> Path:
    """A bundle of task `classification` that says the same of every picture: these probabilities of classes."""
    spec = ModelSpec((TensorSpec("x", "FP32", (1, 3, 8, 8)),), (TensorSpec("y", "FP32", (1, len(scores))),))
    graph = _save(
        path.with_suffix(".onnx"),
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=0),
            helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
            helper.make_node("Add", ["nothing", "scores"], ["y"]),
        ],
        [_value("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [_value("y", TensorProto.FLOAT, [1, len(scores)])],
        [
            numpy_helper.from_array(np.zeros((1,), np.float32), "zero"),
            numpy_helper.from_array(np.array([scores], np.float32), "scores"),
        ],
    ).read_bytes()
    inputs = pack_arrays({"x": np.ones((1, 3, 8, 8), np.float32)})
    outputs = pack_arrays({"y": np.array([scores], np.float32)})
    task = TaskSpec("classification", {"width": 8, "height": 8})
    _write_bundle(path, "cls", task, spec, graph, inputs, outputs)
    return path


def pick_bundle(path: Path) -> Path:
    """A bundle of raw tensors: graph `pick` takes FP32 `y` [N] out of 0, 10, 20, 30 by INT64 `x` [N], N a batch."""
    spec = ModelSpec((TensorSpec("x", "INT64", (-1,), "N"),), (TensorSpec("y", "FP32", (-1,), "N"),))
    graph = _save(
        path.with_suffix(".onnx"),
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        [_value("x", TensorProto.INT64, ["N"])],
        [_value("y", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(np.array([0, 10, 20, 30], np.float32), "table")],
    ).read_bytes()
    inputs = pack_arrays({"x": np.array([3, 1])})
    outputs = pack_arrays({"y": np.array([30, 10], np.float32)})
    _write_bundle(path, "pick", TaskSpec("tensors"), spec, graph, inputs, outputs)
    return path


def _write_bundle(
    path: Path, graph_name: str, task: TaskSpec, spec: ModelSpec, graph: bytes, inputs: bytes, outputs: bytes
) -> None:
    """A bundle of one graph, named after its folder's stem."""
    golden = Golden(Blob.of(inputs), Blob.of(outputs), tolerance=1e-6)
    manifest = Manifest(
        name=path.stem,
        version="1.0.0",
        licence="Apache-2.0",
        task=task,
        graphs={graph_name: Graph(spec, {"fp32": Variant(Blob.of(graph), golden)})},
        provenance=Provenance("0" * 64, {}, {}, (), ()),
    )
    write_bundle(path, manifest, {Blob.of(content).sha256: content for content in (graph, inputs, outputs)}, {})


def scale_model(path: Path, scale: float, products: int = 0) -> Path:
    """`y` is `x` times `scale`, FP32 [N, M], or [N, 512] after so many products with a matrix that changes nothing."""
    names = ["x", *(f"same{i}" for i in range(products))]
    return _save(
        path,
        [
            *(helper.make_node("MatMul", [have, "one"], [gets]) for have, gets in itertools.pairwise(names)),
            helper.make_node("Mul", [names[-1], "scale"], ["y"]),
        ],
        [_value("x", TensorProto.FLOAT, ["N", WIDTH if products else "M"])],
        [_value("y", TensorProto.FLOAT, ["N", WIDTH if products else "M"])],
        [
            numpy_helper.from_array(np.float32([scale]), "scale"),
            *([numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "one")] if products else []),
        ],
    )


def scale_bundle(
    path: Path,
    scale: float,
    graphs: Sequence[str] = ("g",),
    *,
    products: int = 0,
    null: bool = False,
    proven: bool = True,
    **keys: float,
) -> Path:
    """A bundle `scale` whose version is `scale`.0.0 (the number): `y` of each of its graphs is `x` times that number.

    Its graphs are those of `scale_model`, or with `null` of the null runtime with `keys`; its golden vector is wrong
    unless `proven`.
    """
    width = WIDTH if products else -1
    spec = ModelSpec((TensorSpec("x", "FP32", (-1, width)),), (TensorSpec("y", "FP32", (-1, width)),))
    graph = json.dumps({"scale": scale, **keys}).encode()
    if not null:
        graph = scale_model(path.with_suffix(".onnx"), scale, products).read_bytes()
    x = np.ones((2, WIDTH), np.float32)
    inputs, outputs = pack_arrays({"x": x}), pack_arrays({"y": x * np.float32(scale if proven else scale + 1)})
    golden = Golden(Blob.of(inputs), Blob.of(outputs), tolerance=1e-6)
    manifest = Manifest(
        name="scale",
        version=f"{scale:g}.0.0",
        licence="Apache-2.0",
        task=TaskSpec("tensors"),
        graphs={name: Graph(spec, {"fp32": Variant(Blob.of(graph), golden)}) for name in graphs},
        provenance=Provenance("0" * 64, {}, {}, (), ()),
    )
    write_bundle(path, manifest, {Blob.of(content).sha256: content for content in (graph, inputs, outputs)}, {})
    return path


def _value(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: list[onnx.TensorProto] | None = None,
) -> Path:
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, weights or [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def picture(width: int, height: int) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    _done, content = cv2.imencode(".png", pixels)
    return content.tobytes()


def plain_picture(width: int, height: int) -> bytes:
    """A PNG of one colour: few bytes, many pixels."""
    _done, content = cv2.imencode(".png", np.zeros((height, width, 3), np.uint8))
    return content.tobytes()


def jpeg(width: int, height: int) -> bytes:
    """A JPEG of noise."""
    pixels = np.random.default_rng(height).integers(0, 255, (height, width, 3), np.uint8)
    _done, content = cv2.imencode(".jpg", pixels)
    return content.tobytes()
