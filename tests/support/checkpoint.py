"""A tiny checkpoint as exporters write them, installed as a distribution, and labelled data to go with it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

LETTERS = "abcdefgh"
CLASSES = len(LETTERS) + 2
"""The blank, the letters, and the space."""
PACKAGE, VERSION, FILE = "tiny-checkpoint", "1.2.3", "tiny_checkpoint/rec.onnx"

Array = npt.NDArray[np.float32]


def recogniser() -> bytes:
    """A CTC recogniser [N, 3, 48, W] -> [N, W / 8, K] with all that makes real exports awkward.

    Opset 12; constants are nodes; BatchNorm, hard swish and scalar scales are spelled out; a product with 1 and a
    sum with 0 do nothing; the shape of a reshape is computed from the tensor's own sizes.
    """
    random = np.random.default_rng(3)
    constants: dict[str, npt.NDArray[np.generic]] = {
        "w0": random.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32),
        "gamma": random.uniform(0.5, 2, 8).astype(np.float32),
        "beta": random.normal(0, 1, 8).astype(np.float32),
        "mean": random.normal(0, 1, 8).astype(np.float32),
        "variance": random.uniform(0.5, 2, 8).astype(np.float32),
        "w1": (random.normal(0, 0.3, (8, 1, 3, 3)) * np.geomspace(0.1, 10, 8).reshape(-1, 1, 1, 1)).astype(np.float32),
        "b1": random.normal(0, 0.1, 8).astype(np.float32),
        "w2": random.normal(0, 0.3, (16, 8, 1, 1)).astype(np.float32),
        "b2": random.normal(0, 0.1, 16).astype(np.float32),
        "w3": random.normal(0, 0.3, (16, CLASSES)).astype(np.float32),
        "half": np.array([0.5], np.float32),
        "quarter": np.array([0.25], np.float32),
        "one": np.array([1.0], np.float32),
        "nothing": np.array([0.0], np.float32),
        "three": np.array([3.0], np.float32),
        "six": np.array([6.0], np.float32),
        "low": np.array(0.0, np.float32),
        "high": np.array(6.0, np.float32),
        "from": np.array([0], np.int64),
        "to": np.array([2], np.int64),
        "rest": np.array([-1], np.int64),
    }
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))
        for name, array in constants.items()
    ]
    nodes += [
        helper.make_node("Conv", ["image", "w0"], ["c0"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c0", "gamma", "beta", "mean", "variance"], ["n0"]),
        *_activation("n0", "a0"),
        helper.make_node(
            "Conv", ["a0", "w1", "b1"], ["c1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], group=8
        ),
        helper.make_node("Mul", ["half", "c1"], ["scaled"]),
        helper.make_node("Add", ["scaled", "quarter"], ["shifted"]),
        *_activation("shifted", "a1"),
        helper.make_node("Conv", ["a1", "w2", "b2"], ["c2"], kernel_shape=[1, 1]),
        helper.make_node("AveragePool", ["c2"], ["pooled"], kernel_shape=[12, 2], strides=[12, 2]),
        helper.make_node("Mul", ["pooled", "one"], ["same"]),
        helper.make_node("Add", ["nothing", "same"], ["still"]),
        helper.make_node("Shape", ["still"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "from", "to"], ["front"]),
        helper.make_node("Concat", ["front", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["still", "wanted"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["steps"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["steps", "w3"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["softmax"], axis=2),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, "h", "w"])
    softmax = helper.make_tensor_value_info("softmax", TensorProto.FLOAT, ["n", "t", CLASSES])
    graph = helper.make_graph(nodes, "tiny", [image], [softmax])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=7)
    helper.set_model_props(model, {"character": "\n".join(LETTERS)})
    return model.SerializeToString(deterministic=True)


def _activation(read: str, made: str) -> list[object]:
    """`made` = hard swish of `read`, scaled by a half and shifted by a quarter."""
    return [
        helper.make_node("Add", [read, "three"], [f"{made}_plus"]),
        helper.make_node("Clip", [f"{made}_plus", "low", "high"], [f"{made}_clip"]),
        helper.make_node("Mul", [read, f"{made}_clip"], [f"{made}_product"]),
        helper.make_node("Div", [f"{made}_product", "six"], [f"{made}_swish"]),
        helper.make_node("Mul", ["half", f"{made}_swish"], [f"{made}_half"]),
        helper.make_node("Add", [f"{made}_half", "quarter"], [made]),
    ]


def install(folder: Path, content: bytes, *, version: str = VERSION) -> None:
    """Lay down a distribution that holds `content`; `folder` has to be on sys.path."""
    for name, data in {
        FILE: content,
        f"tiny_checkpoint-{version}.dist-info/METADATA": f"Name: {PACKAGE}\nVersion: {version}\n".encode(),
        f"tiny_checkpoint-{version}.dist-info/RECORD": f"{FILE},,\n".encode(),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def recipe(path: Path, content: bytes, **changes: str) -> Path:
    """A recipe for that distribution; `changes` replaces texts in it."""
    text = f"""
        name = "tiny"
        version = "1.0.0"
        licence = "Apache-2.0"
        data = "data"
        source = {{package = "{PACKAGE}", version = "{VERSION}"}}
        task = {{kind = "lines"}}
        [graphs.rec]
        role = "recognise"
        file = "{FILE}"
        sha256 = "{hashlib.sha256(content).hexdigest()}"
        shape = [-1, 3, 48, -1]
        passes = ["normalise", "ctc_head"]
        precisions = ["fp32", "int8"]
        labels = "character"
        gate.exact_drop = 0.5
    """
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def labelled(folder: Path, splits: Mapping[str, int], *, widths: Sequence[int] = (60, 90, 400)) -> Path:
    """Labelled lines of noise: `splits` says how many of each."""
    random = np.random.default_rng(5)
    (folder / "lines").mkdir(parents=True)
    names = [f"noise_{split}{number}.png" for split, count in splits.items() for number in range(count)]
    for i, name in enumerate(names):
        picture = random.integers(0, 255, (20, widths[i % len(widths)], 3), np.uint8)
        (folder / "lines" / name).write_bytes(cv2.imencode(".png", picture)[1].tobytes())
    split_of = {name: split for name in names for split in splits if name.startswith(f"noise_{split}")}
    (folder / "lines" / "labels.tsv").write_text("".join(f"{name}\tabc\n" for name in names))
    (folder / "lines" / "sources.tsv").write_text("".join(f"{name}\t{split_of[name]}/1\n" for name in names))
    (folder / "splits.tsv").write_text("".join(f"{split}/1\t{split}\n" for split in splits))
    return folder
