"""Writes a recipe for somebody's own ONNX file, with what the file itself tells.

Inputs, sizes, layout and classes are read from the file; the likely task follows from what it answers to a picture of
zeros. How pixels are scaled is in no file: such lines carry the word CHECK, with the usual values.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from appliance.runtime import Session, choose
from models.errors import ApplianceError, ConfigError
from models.spec import DTYPES, Array, TensorSpec
from models.tasks.detection import STRIDES
from models.tasks.lines import HEIGHT
from provisioning import admit, passes
from provisioning.overlay import toml_value
from provisioning.steps import RUNTIME

CHECK = "CHECK"
TASKS = ("classification", "detection", "lines", "tensors")
_PICTURE_AXES, _ROW_AXES = 4, 3
_PROBED = 224
"""Side of the picture that a graph is tried on that takes any size ..."""
_USUAL = {"classification": 224, "detection": 640}
"""... and what its task then makes of pictures, unless the file says more."""
_SCALING = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})
"""An operator that reads the picture first and is one of these scales it, so it wants pixels as they are."""
_IMAGENET = {"mean": [0.485, 0.456, 0.406], "deviation": [0.229, 0.224, 0.225]}
_LEAST_CLASSES = 2
_LEAST_SAMPLES, _MOST_SAMPLES = 16, 200
_HELD_ELEMENTS = 40_000_000
"""Of all samples of one half, which are held in memory: 160 MB."""


@dataclass(slots=True)
class Skeleton:
    """What was found out, and the recipe that follows from it."""

    task: str
    shape: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    labels: Sequence[str] = ()
    label_key: str = ""
    """Of the file's metadata, where it holds the characters of a recogniser."""
    samples: str = "pictures"
    classes: int = 0
    found: list[str] = field(default_factory=list)
    """In words, what the file tells."""
    guessed: dict[str, str] = field(default_factory=dict)
    """Key of the recipe -> what is only usual, and has to be checked."""


def write(model: Path, out: Path, task: str, labels: Sequence[str]) -> Skeleton:
    """Write the recipe of `model` to `out`, for `task` or the likely one if that is empty, and tell what was found.

    Raises SourceError for a file that is no usable graph, ConfigError when it cannot be of `task`, cannot be built, or
    `out` is there already.
    """
    if out.exists():
        msg = f"{out} is there already: take it away, or give another file with --out"
        raise ConfigError(msg)
    try:
        content = model.read_bytes()
    except OSError as error:
        msg = f"{model} cannot be read ({error.strerror}): give an ONNX file with --from"
        raise ConfigError(msg) from error
    admit.admit(content, model.name, admit.OF_FILE)
    found = _look(content, model.name, task)
    if labels:
        found.labels = labels
    name = re.sub(r"[^a-z0-9._-]+", "-", model.stem.lower()).strip("._-")[:64] or "model"
    text = _toml(found, name, os.path.relpath(model, out.parent), hashlib.sha256(content).hexdigest())
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{out} cannot be written ({error.strerror}): give another file with --out"
        raise ConfigError(msg) from error
    return found


def _look(content: bytes, what: str, wanted: str) -> Skeleton:
    read = passes.load(content, what)
    session = choose(RUNTIME).open(content, threads=1)
    inputs = session.spec.inputs
    if len({len(one.shape) for one in inputs}) != 1:
        msg = (
            f"{what} has inputs of different shapes, which cannot be built yet: serve it as it is with "
            "`appliance run --onnx NAME=FILE`"
        )
        raise ConfigError(msg)
    found = [f"input {one.name}: {one.datatype} {list(one.shape)}" for one in inputs]
    found += [f"output {one.name}: {one.datatype} {list(one.shape)}" for one in session.spec.outputs]
    likely = _likely(session, read.graph, read.metadata_props) if len(inputs) == 1 else None
    if likely is None or wanted == "tensors":
        (x, *more) = inputs
        sides = x.shape[2:] if len(x.shape) == _PICTURE_AXES and x.shape[1] == len("RGB") else ()
        of_pictures = not more and x.datatype == "FP32" and min(sides, default=-1) > 0
        likely = Skeleton("tensors", list(x.shape), samples="pictures" if of_pictures else "tensors")
    if wanted and likely.task != wanted:
        msg = f"{what} does not look like task {wanted!r} ({'; '.join(found)}): leave --task out, or take 'tensors'"
        raise ConfigError(msg)
    likely.found = [*found, *likely.found]
    return likely


def _likely(session: Session, graph: ir.Graph, metadata: Mapping[str, str]) -> Skeleton | None:
    """The task of a graph with one input; None when that is no picture, or nothing known is made of it."""
    (x,) = session.spec.inputs
    axis = next((axis for axis in (1, 3) if len(x.shape) == _PICTURE_AXES and x.shape[axis] in {1, 3}), None)
    if axis is None or x.datatype != "FP32":
        return None
    layout, channels = ("NCHW" if axis == 1 else "NHWC"), x.shape[axis]
    height, width = x.shape[2:] if axis == 1 else x.shape[1:3]
    steps = len(session.spec.outputs) == 1 and len(session.spec.outputs[0].shape) == _ROW_AXES
    if steps and axis == 1 and channels != 1 and width == -1 and (height == HEIGHT or "character" in metadata):
        return _lines(metadata)
    answer = _try(session, x)
    settings: dict[str, Any] = {"width": width, "height": height, "layout": layout}
    found: Skeleton | None = None
    if answer is not None and answer.ndim in {2, 4} and answer.shape[1] == answer.size >= _LEAST_CLASSES:
        found = _classifier(answer.size)
    elif answer is not None and answer.ndim == _ROW_AXES and len(answer) == 1:
        found = _detector(answer, height if height > 0 else _PROBED, width if width > 0 else _PROBED)
    if found is None:
        return None
    side = _metadata_sizes(metadata) or [_USUAL[found.task]] * 2
    for key, usual in zip(("height", "width"), side, strict=True):
        if settings[key] == -1:
            settings[key] = usual
            found.guessed[key] = "the file takes any size"
    found.settings = settings | found.settings | _colours(found, graph, channels)
    sides = [channels, settings["height"], settings["width"]]
    found.shape = [x.shape[0], *(sides if layout == "NCHW" else [*sides[1:], channels])]
    names = _names(metadata)
    found.labels = names if len(names) == found.classes else ()
    found.found.append(f"{found.classes} classes, {'' if found.labels else 'not '}named in the file")
    return found


def _lines(metadata: Mapping[str, str]) -> Skeleton:
    found = Skeleton("lines", [-1, 3, HEIGHT, -1], label_key="character" if "character" in metadata else "")
    found.found.append("it takes text lines of any width")
    if not found.label_key:
        found.guessed["labels"] = "the file names no characters: give them with --labels, without the blank, in order"
    return found


def _try(session: Session, x: TensorSpec) -> Array | None:
    """The only output for a picture of zeros; None when there are several, or none of a size that was tried."""
    shape = [1 if size == -1 and axis == 0 else _PROBED if size == -1 else size for axis, size in enumerate(x.shape)]
    try:
        answers = session.run({x.name: np.zeros(shape, DTYPES[x.datatype])})
    except ApplianceError:
        return None
    return next(iter(answers.values())) if len(answers) == 1 else None


def _classifier(classes: int) -> Skeleton:
    said = f"it answers with {classes} scores for a picture"
    return Skeleton("classification", [], {"fit": "crop"}, classes=classes, found=[said])


def _detector(answer: Array, height: int, width: int) -> Skeleton | None:
    """A detector by the form of its output; None when that is of none that is known."""
    cells = sum((height // stride) * (width // stride) for stride in STRIDES)
    _, one, other = answer.shape
    head, classes = "", 0
    if other == cells and one > len(("x", "y", "w", "h")):
        head, classes = "yolov8", one - 4
    elif one in {cells, 3 * cells} and other > len(("x", "y", "w", "h", "objectness")):
        # Centres that lie all over the picture are in pixels; those in cells of a grid are about 0.
        in_pixels = one > cells or float(answer[0, :, :2].max()) > min(height, width) / 2
        head, classes = ("yolov5" if in_pixels else "yolox"), other - 5
    if not head:
        return None
    said = f"it answers with {other if head == 'yolov8' else one} candidates in the form of {head}"
    return Skeleton("detection", [], {"head": head}, classes=classes, found=[said])


def _colours(found: Skeleton, graph: ir.Graph, channels: int) -> dict[str, Any]:
    """How pixels become numbers: usual values, and what has to be checked."""
    plain = any(node.op_type in _SCALING for node in graph.inputs[0].consumers())
    chosen: dict[str, Any] = {"colours": "grey" if channels == 1 else "rgb", "scale": 1.0 if plain else 255.0}
    if found.settings.get("head") == "yolox":
        chosen |= {"colours": "grey" if channels == 1 else "bgr", "scale": 1.0}
    elif found.task == "classification" and channels == len("RGB") and not plain:
        chosen |= _IMAGENET
        found.guessed["mean"] = "as for ImageNet; value = (pixel / scale - mean) / deviation"
    if channels != 1:
        found.guessed["colours"] = "the order that the model was trained with, rgb or bgr"
    found.guessed["scale"] = "the graph scales by itself" if plain else "what pixels are divided by first"
    if found.task == "classification":
        found.guessed["fit"] = "crop, pad or stretch, as in training"
    return chosen


def _metadata_sizes(metadata: Mapping[str, str]) -> list[int]:
    """Height and width that some exporters note."""
    sides = _literal(metadata.get("imgsz", ""))
    fits = isinstance(sides, list) and [type(side) for side in sides] == [int, int]
    return sides if fits else []


def _names(metadata: Mapping[str, str]) -> list[str]:
    """Names of the classes that some exporters note: by number, or one a row."""
    names = _literal(metadata.get("names", "")) or metadata.get("character", "").splitlines()
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    return [str(name) for name in names] if isinstance(names, list) else []


def _literal(text: str) -> Any:  # noqa: ANN401 - whatever the exporter wrote
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


_GRAPHS = {
    "classification": ("cls", "classify"),
    "detection": ("det", "locate"),
    "lines": ("rec", "recognise"),
    "tensors": ("net", "encode"),
}
_GATES = {
    "classification": "gate.same_class = 0.98  # share of unlabelled pictures that get the class of the float model",
    "detection": "gate.matched = 0.9  # share of boxes, on unlabelled pictures, that the float model has and INT8 too",
    "lines": "gate.exact_drop = 0.01  # of exact match on the labelled gate lines",
    "tensors": "gate.cosine = 0.99  # of the outputs with those of the file as it is",
}
_DATA = {
    "pictures": ("pictures", "JPEG and PNG files as the cameras send them; every second one is kept for the gate"),
    "tensors": ("tensors", "npz files, each one input of the graph; every second one is kept for the gate"),
    "": ("labelled", "labelled lines, in the layout of docs/accuracy.md"),
}


def _toml(found: Skeleton, name: str, file: str, sha256: str) -> str:
    graph, role = _GRAPHS[found.task]
    samples = "" if found.task == "lines" else found.samples
    data, meaning = _DATA[samples]
    rows = [
        f"# Recipe of {file}, written by `provision new`. Lines with {CHECK} are usual values that no file tells.",
        *(f"# {sentence}" for sentence in found.found),
        "",
        _row("name", name),
        _row("version", "1.0.0"),
        _row("licence", "unknown", f"{CHECK}: of the model, it is shown wherever the bundle goes"),
        _row("data", data, meaning),
        "",
        "[task]",
        _row("kind", found.task),
    ]
    if found.labels:
        rows.append("labels = [\n" + "".join(f"  {toml_value(label)},\n" for label in found.labels) + "]")
    if found.settings:
        rows += ["", "[task.settings]"]
        rows += [_row(key, value, _check(found, key)) for key, value in found.settings.items()]
    rows += [
        "",
        f"[graphs.{graph}]",
        _row("role", role),
        _row("file", file),
        _row("sha256", sha256),
        _row("shape", found.shape),
        _row("passes", ["normalise", "ctc_head"] if found.task == "lines" else ["normalise"]),
        _row("precisions", ["fp32"] if found.task == "tensors" else ["fp32", "int8"]),
        _GATES[found.task],
    ]
    if found.label_key:
        rows.append(_row("labels", found.label_key, "key of the file's metadata"))
    if samples:
        elements = math.prod(found.shape[1:]) if -1 not in found.shape[1:] else 1
        count = min(max(_HELD_ELEMENTS // elements, _LEAST_SAMPLES), _MOST_SAMPLES)
        rows += ["", f"[graphs.{graph}.samples]", _row("kind", samples), _row("count", count, "of each half, at most")]
    return "\n".join(rows) + "\n"


def _check(found: Skeleton, key: str) -> str:
    return f"{CHECK}: {found.guessed[key]}" if key in found.guessed else ""


def _row(key: str, value: object, comment: str = "") -> str:
    return f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else "")
