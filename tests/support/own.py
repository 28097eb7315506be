"""ONNX files as somebody brings them: tiny, with standard operators, and right by construction; and pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

COLOURS = {"red": (0, 0, 255), "green": (0, 255, 0), "blue": (255, 0, 0)}
"""Classes of `classifier`, as OpenCV spells colours."""
SIDE = 64
"""Of the input of `detector`."""

Picture = npt.NDArray[np.uint8]


def classifier(path: Path, *, layout: str = "NCHW", softmax: bool = False, side: int | str = 32) -> Path:
    """Tells which of red, green and blue a picture has most of, from RGB: FP32 [N, 3, side, side] -> [N, 3]."""
    nodes = [helper.make_node("Transpose", ["image"], ["nchw"], perm=[0, 3, 1, 2])] if layout == "NHWC" else []
    nodes += [
        helper.make_node("Conv", ["nchw" if nodes else "image", "mix"], ["mixed"], kernel_shape=[1, 1]),
        helper.make_node("Relu", ["mixed"], ["bright"]),
        helper.make_node("GlobalAveragePool", ["bright"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "head"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"]) if softmax else _same("logits", "scores"),
    ]
    mix = np.eye(3, dtype=np.float32) * 4 - 1
    weights = {"mix": mix.reshape(3, 3, 1, 1), "head": np.eye(3, dtype=np.float32) * 8}
    shape = ["N", side, side, 3] if layout == "NHWC" else ["N", 3, side, side]
    return _save(path, nodes, shape, ["N", 3], weights)


def detector(path: Path, *, head: str = "yolox") -> Path:
    """Finds bright squares of 8, 16 or 32 pixels on their grid, one class: FP32 [1, 3, 64, 64] with values 0 to 255."""
    parts = []
    nodes = [helper.make_node("Conv", ["image", "mean"], ["bright"], kernel_shape=[1, 1])]
    for stride in (8, 16, 32):
        pool = {"kernel_shape": [stride, stride], "strides": [stride, stride]}
        parts.append(f"rows{stride}")
        nodes += [
            helper.make_node("AveragePool", ["bright"], [f"pool{stride}"], **pool),
            helper.make_node("Reshape", [f"pool{stride}", "column"], [parts[-1]]),
        ]
    nodes += [
        helper.make_node("Concat", parts, ["objectness"], axis=1),
        helper.make_node("Mul", ["objectness", "nothing"], ["zeros"]),
        helper.make_node("Add", ["zeros", "places"], ["boxes"]),
        helper.make_node("Add", ["objectness", "nothing"], ["sure"]),
    ]
    cells = [
        (column, row, stride)
        for stride in (8, 16, 32)
        for row in range(SIDE // stride)
        for column in range(SIDE // stride)
    ]
    inside = np.array([[0.5, 0.5, 0, 0]] * len(cells), np.float32)
    pixels = np.array([[(c + 0.5) * s, (r + 0.5) * s, s, s] for c, r, s in cells], np.float32)
    numbers = 5 if head == "yolov8" else 6
    if head == "yolov8":
        nodes += [
            helper.make_node("Concat", ["boxes", "sure"], ["rows"], axis=2),
            helper.make_node("Transpose", ["rows"], ["scores"], perm=[0, 2, 1]),
        ]
    else:
        nodes += [
            helper.make_node("Mul", ["objectness", "zero"], ["none"]),
            helper.make_node("Add", ["none", "one"], ["certain"]),
            helper.make_node("Concat", ["boxes", "sure", "certain"], ["scores"], axis=2),
        ]
    weights = {
        "mean": np.full((1, 3, 1, 1), 1 / 3 / 255, np.float32),
        "column": np.array([1, -1, 1], np.int64),
        "nothing": np.zeros(1, np.float32),
        "places": (inside if head == "yolox" else pixels)[None],
        "zero": np.zeros(1, np.float32),
        "one": np.ones(1, np.float32),
    }
    rows = [1, numbers, len(cells)] if head == "yolov8" else [1, len(cells), numbers]
    return _save(path, nodes, [1, 3, SIDE, SIDE], rows, weights)


def _same(read: str, made: str) -> object:
    return helper.make_node("Identity", [read], [made])


def _save(
    path: Path,
    nodes: list[object],
    shape: list[int | str],
    answer: list[int | str],
    weights: dict[str, npt.NDArray[np.generic]],
) -> Path:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, answer)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def coloured(colour: str, side: int = 40) -> Picture:
    """A noisy picture that is mostly of one of COLOURS."""
    noise = np.random.default_rng(len(colour)).integers(0, 90, (side, side, 3))
    return np.asarray(np.clip(np.array(COLOURS[colour]) * 0.6 + noise, 0, 255), np.uint8)


def squares(*places: tuple[int, int], side: int = 8) -> Picture:
    """A black picture of 64 x 64 with white squares, by their left top corners."""
    picture = np.zeros((SIDE, SIDE, 3), np.uint8)
    for left, top in places:
        picture[top : top + side, left : left + side] = 255
    return picture


def save(path: Path, picture: Picture) -> Path:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(".png", picture)[1].tobytes())
    return path


def coloured_folder(folder: Path, count: int = 4) -> Path:
    """Pictures of every colour, `count` of each, for calibration and gate alike."""
    for number in range(count):
        for colour in COLOURS:
            save(folder / f"{colour}{number}.png", coloured(colour, 40 + number))
    return folder


def squares_folder(folder: Path, count: int = 8) -> Path:
    """Pictures with squares on the grid."""
    for number in range(count):
        save(folder / f"squares{number}.png", squares((8 * number, 16), (48, 8 * number)))
    return folder
