"""Text lines: makes pictures of one line fit a CTC recogniser and reads its answer.

The graph is called "rec". Its input `x` is FP32 [N, 3, 48, W]; its outputs are `index`, the best class of each
time step, INT64 or INT32 [N, T], and `probability`, that class's probability, FP32 [N, T].
Class 0 is the blank; class i is `labels[i - 1]`.
Axes in names: N batch, C channels (blue, green, red), H height, W width, T time steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import cv2
import numpy as np

from models import schema
from models.errors import BundleError, ModelError
from models.spec import Array
from models.tasks import Run

Settings = TypeVar("Settings")

HEIGHT = 48
MIN_WIDTH = 320
"""What PP-OCR was trained with: shorter lines are padded to it, unless a bundle's settings say otherwise."""
MAX_WIDTH = 3200
WIDTH_STEP = 32


@dataclass(frozen=True, slots=True)
class LinesSettings:
    """Settings of the task, in pixels of the recogniser's input."""

    max_width: int = MAX_WIDTH
    """A longer line is squeezed to this width, so that one picture cannot ask for unbounded memory."""
    min_width: int = MIN_WIDTH
    """A shorter line is padded to it, at least."""
    min_padding: int = 0
    """And by so much, at least, though not beyond 320: a recogniser misses the end of a text without any."""


class Lines:
    """A bundle whose picture is one line of text."""

    def __init__(self, settings: Mapping[str, Any], labels: Sequence[str]) -> None:
        """Take the settings and labels of a bundle; raises BundleError when the settings do not fit."""
        self._settings = load_settings(LinesSettings, settings)
        self._labels = labels

    def predict(self, picture_HWC: Array, run: Run) -> dict[str, Any]:
        """`{"lines": [{"text", "confidence", "box"}]}` with one line, whose box is the whole picture."""
        settings = self._settings
        prepared = prepare(picture_HWC, settings.max_width, settings.min_width, settings.min_padding)
        ((text, confidence),) = recognise([prepared], self._labels, run)
        height, width = picture_HWC.shape[:2]
        box = [[0, 0], [width, 0], [width, height], [0, height]]
        return {"lines": [{"text": text, "confidence": confidence, "box": box}]}


def load_settings(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Settings of a task; raises BundleError for unknown keys, wrong types, counts below 1 and negative numbers."""
    try:
        loaded = schema.load(kind, dict(settings))
    except schema.SchemaError as error:
        msg = f"the task's settings do not fit: {error}"
        raise BundleError(msg) from error
    for name, value in settings.items():
        least = 1 if isinstance(getattr(loaded, name), int) else 0
        if isinstance(value, (int, float)) and value < least:
            msg = f"the task's settings do not fit: {name} must be {least} or more, not {value}"
            raise BundleError(msg)
    return loaded


def recognise(
    prepared: Sequence[Array], labels: Sequence[str], run: Run, max_batch: int = 8
) -> list[tuple[str, float]]:
    """Text and confidence of each line as `prepare` gives it, in the order given."""
    results: list[tuple[str, float]] = [("", 0.0)] * len(prepared)
    for members in batches([line.shape[3] for line in prepared], max_batch):
        outputs = run("rec", {"x": np.concatenate([prepared[i] for i in members])})
        for i, best_class, probability in zip(members, outputs["index"], outputs["probability"], strict=True):
            results[i] = decode(best_class, probability, labels)
    return results


def prepare(line_HWC: Array, max_width: int = MAX_WIDTH, min_width: int = MIN_WIDTH, min_padding: int = 0) -> Array:
    """FP32 [1, 3, 48, W] of one picture (uint8 BGR): scaled to height 48, values from -1 to 1, padded right.

    The padding is 0, which is what PP-OCR was trained with: zeros after normalisation, a mid grey.
    W is at least `min_width` and a multiple of 32: few distinct widths mean few shapes for a runtime to plan.
    What is shorter than 320 gets `min_padding` at least, but no more than makes it 320.
    What would be wider than `max_width` is squeezed to it.
    """
    height, width = line_HWC.shape[:2]
    content = min(max(math.ceil(HEIGHT * width / height), 1), max_width)
    wanted = max(content, min(content + min_padding, MIN_WIDTH), min_width)
    padded = math.ceil(wanted / WIDTH_STEP) * WIDTH_STEP
    resized = cv2.resize(line_HWC, (content, HEIGHT), interpolation=cv2.INTER_LINEAR)
    prepared = np.zeros((1, 3, HEIGHT, padded), np.float32)
    prepared[0, :, :, :content] = resized.transpose(2, 0, 1)
    prepared[0, :, :, :content] /= 127.5
    prepared[0, :, :, :content] -= 1
    return prepared


def batches(widths: Sequence[int], max_batch: int) -> list[list[int]]:
    """Indices of lines grouped for the recogniser: equal widths together, at most `max_batch` in a group.

    Lines of different width never share a batch: the recogniser sees padding, so a line
    padded to its neighbour's width could be read differently from page to page.
    """
    by_width: dict[int, list[int]] = {}
    for i, width in enumerate(widths):
        by_width.setdefault(width, []).append(i)
    return [
        members[start : start + max_batch]
        for _, members in sorted(by_width.items())
        for start in range(0, len(members), max_batch)
    ]


def decode(best_class: Array, probability: Array, labels: Sequence[str]) -> tuple[str, float]:
    """Text and confidence of one line from the best class [T] and its probability [T] (greedy CTC).

    Repeats of a class in a row are one character, and blanks are none. The confidence is the mean
    probability of the kept characters, 0.0 when there are none.
    Raises ModelError when a class has no label.
    """
    kept = best_class != 0
    kept[1:] &= best_class[1:] != best_class[:-1]
    classes = best_class[kept].tolist()
    if not classes:
        return "", 0.0
    if not 0 < min(classes) <= max(classes) <= len(labels):
        msg = (
            f"the recogniser answered class {max(classes)}, but the bundle has {len(labels)} labels: "
            "graph and labels do not belong together, build the bundle again"
        )
        raise ModelError(msg)
    text = "".join(labels[i - 1] for i in classes)
    return text, float(np.mean(probability[kept], dtype=np.float64))
