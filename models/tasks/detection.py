"""Detection: finds objects in a whole picture and says of each what it is and where.

The graph is called "det". It has one input `x`, FP32 [N, 3, H, W] or another layout of the settings, and one output in
one of three forms, called by the family of detectors that made them usual (A candidates, K classes):

    yolov5   [N, A, 5 + K]   centre x, centre y, width, height in pixels of the input; objectness; K class scores
    yolov8   [N, 4 + K, A]   the same without objectness, candidates last
    yolox    [N, A, 5 + K]   as yolov5, but in cells of a grid with strides 8, 16, 32, sizes as logarithms:
                             centre = (cell + value) * stride, size = exp(value) * stride

All scores are probabilities. Of candidates of one class that overlap, the surest is kept (non-maximum suppression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cv2
import numpy as np

from models.errors import BundleError, ModelError
from models.spec import Array
from models.tasks import Run, fit
from models.tasks.classification import check_finite, named
from models.tasks.lines import load_settings

HEADS = ("yolov5", "yolov8", "yolox")
STRIDES = (8, 16, 32)
_BOX, _OBJECTNESS = 4, 5
"""Numbers of a candidate before its objectness, and before its classes."""
_AXES = 3
"""Of an output: batch, candidates, numbers."""
_MOST_CANDIDATES = 3000
"""The surest, which are compared with each other: the time that takes grows with their square."""
_LARGEST_LOG = 10.0
"""A size above that, in logarithms of a stride, is larger than any picture."""


@dataclass(frozen=True, slots=True)
class DetectionSettings(fit.FitSettings):
    """Settings of the task."""

    width: int = 640
    height: int = 640
    fit: str = "pad"
    head: str = "yolov8"
    """Form of the output, one of HEADS."""
    min_confidence: float = 0.25
    """Objects that are less sure are dropped."""
    overlap: float = 0.45
    """Intersection over union above which two boxes of one class are the same object."""
    max_boxes: int = 300


@dataclass(frozen=True, slots=True)
class Boxes:
    """What was found, surest first: corners float64 [B, 4] (left, top, right, bottom) in pixels of the input."""

    corners: Array
    classes: Array
    """INT64 [B]."""
    confidences: Array
    """FP32 [B]."""


class Detection:
    """A bundle that finds objects."""

    def __init__(self, settings: Mapping[str, Any], labels: Sequence[str]) -> None:
        """Take the settings and labels of a bundle; raises BundleError when the settings do not fit."""
        self._settings = checked(settings)
        self._labels = labels

    def predict(self, picture_HWC: Array, run: Run) -> dict[str, Any]:
        """`{"objects": [{"label", "confidence", "box"}]}`, surest first, boxes inside the picture."""
        settings = self._settings
        (output,) = run("det", {"x": fit.prepare(picture_HWC, settings)}).values()
        found = boxes_of(output, settings)
        names = named(self._labels, class_count(output, settings))
        height, width = picture_HWC.shape[:2]
        across, down = fit.scales(picture_HWC, settings)
        corners = np.clip(found.corners / (across, down, across, down), 0, (width, height, width, height)).round(1)
        return {
            "objects": [
                {
                    "label": names[kind],
                    "confidence": confidence,
                    "box": [[left, top], [right, top], [right, bottom], [left, bottom]],
                }
                for (left, top, right, bottom), kind, confidence in zip(
                    corners.tolist(), found.classes.tolist(), found.confidences.tolist(), strict=True
                )
            ]
        }


def checked(settings: Mapping[str, Any]) -> DetectionSettings:
    """Settings of the task; raises BundleError when they do not fit."""
    loaded = load_settings(DetectionSettings, settings)
    fit.check(loaded)
    if loaded.fit == "crop":
        raise BundleError("the task's settings do not fit: a detector sees whole pictures, fit is 'pad' or 'stretch'")
    if loaded.head not in HEADS:
        msg = f"the task's settings do not fit: head is {loaded.head!r}; known: {', '.join(HEADS)}"
        raise BundleError(msg)
    return loaded


def class_count(output: Array, settings: DetectionSettings) -> int:
    """Classes that an output tells apart."""
    return int(scores(output, settings.head).shape[1])


def scores(output: Array, head: str) -> Array:
    """Probability of each class for each candidate, FP32 [A, K], of the output for one picture."""
    rows = _rows(output, head)
    return rows[:, _BOX:] if head == "yolov8" else rows[:, _BOX:_OBJECTNESS] * rows[:, _OBJECTNESS:]


def boxes_of(output: Array, settings: DetectionSettings) -> Boxes:
    """What the graph found in one picture; raises ModelError for an output that has not the form of `head`, or NaN."""
    scores_AK = scores(output, settings.head)
    confidences, classes = scores_AK.max(axis=1), scores_AK.argmax(axis=1)
    check_finite(confidences)
    sure = np.flatnonzero(confidences >= settings.min_confidence)
    most = max(_MOST_CANDIDATES, settings.max_boxes)
    sure = sure[np.argsort(-confidences[sure], kind="stable")[:most]]
    places = _rows(output, settings.head)[:, :_BOX]
    if settings.head == "yolox":
        places = _off_the_grid(places, settings)
    centres, sizes = places[sure, :2].astype(np.float64), places[sure, 2:].astype(np.float64)
    check_finite(centres)
    check_finite(sizes)
    left_top = centres - sizes / 2
    kept = np.asarray(
        cv2.dnn.NMSBoxesBatched(
            np.concatenate([left_top, sizes], axis=1).tolist(),
            confidences[sure].tolist(),
            classes[sure].tolist(),
            settings.min_confidence,
            settings.overlap,
        ),
        np.int64,
    )
    kept = kept[np.argsort(-confidences[sure][kept], kind="stable")][: settings.max_boxes]
    corners = np.concatenate([left_top, left_top + sizes], axis=1)[kept]
    return Boxes(corners, classes[sure][kept], confidences[sure][kept])


def _rows(output: Array, head: str) -> Array:
    """Candidates, FP32 [A, numbers]."""
    least, rows_NAC = (_BOX, output.swapaxes(1, -1)) if head == "yolov8" and output.ndim > 1 else (_OBJECTNESS, output)
    if rows_NAC.ndim != _AXES or len(rows_NAC) != 1 or rows_NAC.shape[2] <= least:
        msg = f"the detector answers {list(output.shape)}, which has not the form of {head}: correct task.settings.head"
        raise ModelError(msg)
    return np.asarray(rows_NAC[0])


def _off_the_grid(places_A4: Array, settings: DetectionSettings) -> Array:
    """Centres and sizes in pixels, of those in cells of the grid."""
    grid_A3 = _grid(settings.width, settings.height)
    if len(grid_A3) != len(places_A4):
        msg = (
            f"the detector answers with {len(places_A4)} candidates, but a grid of {settings.width} x "
            f"{settings.height} has {len(grid_A3)} cells: correct task.settings.head"
        )
        raise ModelError(msg)
    cells, stride = grid_A3[:, :2], grid_A3[:, 2:]
    sizes = np.exp(np.minimum(places_A4[:, 2:], _LARGEST_LOG))
    return np.asarray(np.concatenate([places_A4[:, :2] + cells, sizes], axis=1) * stride)


@lru_cache(maxsize=8)
def _grid(width: int, height: int) -> Array:
    """Column, row and stride of every cell, FP32 [A, 3], strides upwards and rows first."""
    parts = []
    for stride in STRIDES:
        row, column = np.mgrid[: height // stride, : width // stride]
        parts.append(np.stack([column.ravel(), row.ravel(), np.full(row.size, stride)], axis=1))
    return np.concatenate(parts).astype(np.float32)
