"""Reading: finds the text of a whole picture and reads it, line by line.

Three graphs: "det" finds text (`x` FP32 [1, 3, H, W] -> probability of text FP32 [1, 1, H, W]), "cls" tells
upright lines from lines upside down (`x` FP32 [N, 3, 48, 192] -> FP32 [N, 2]), "rec" reads lines
(see `models.tasks.lines`). "det" and "cls" have one output, whatever its name.
Axes in names: N batch, C channels (blue, green, red), H height, W width; N42 is N boxes of 4 corner
points of 2 coordinates (x, y), clockwise from top left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from models.spec import Array
from models.tasks import Run
from models.tasks.lines import MAX_WIDTH, MIN_WIDTH, load_settings, prepare, recognise

SIDE_STEP = 32
"""The detector halves a picture five times on the way down."""
_DETECT_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DETECT_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
_DETECT_VALUE = (np.arange(256, dtype=np.float32)[:, None] / 255 - _DETECT_MEAN) / _DETECT_DEVIATION
"""What a pixel's value becomes in each channel, FP32 [256, C]."""
_MIN_CORE = 3
"""Pixels of the probability map; text whose core is thinner cannot be read."""
CLASSIFY_WIDTH = 192
_UPSIDE_DOWN = 1
_TALL = 1.5
"""A crop this much higher than wide holds a line that runs up or down."""
_MAX_SKEW = 0.35
"""Radians. Steeper boxes are vertical text or noise, which say nothing about how a page was held."""


@dataclass(frozen=True, slots=True)
class ReadingSettings:
    """Settings of the task."""

    min_side: int = 736
    """Pixels: a smaller picture is scaled up until its short side is this long ..."""
    max_side: int = 2000
    """... but never beyond this long side, to which larger pictures are scaled down."""
    max_scale: float = 4.0
    """Nothing is gained by blowing a tiny picture up further."""
    text_threshold: float = 0.3
    """Probability above which a pixel belongs to text."""
    box_threshold: float = 0.5
    """Smallest mean probability inside a box."""
    expansion: float = 1.6
    """How far a box grows: the detector is trained to mark the shrunken core of a line."""
    max_boxes: int = 1000
    upside_down_threshold: float = 0.9
    """Probability of being upside down above which a line is read both ways, the surer reading being kept."""
    min_confidence: float = 0.5
    """Lines that were read with less are dropped."""
    max_line_width: int = MAX_WIDTH
    min_line_width: int = MIN_WIDTH
    min_line_padding: int = 0
    """See `LinesSettings`."""
    max_batch: int = 8


class Reading:
    """A bundle that reads whole pictures."""

    def __init__(self, settings: Mapping[str, Any], labels: Sequence[str]) -> None:
        """Take the settings and labels of a bundle; raises BundleError when the settings do not fit."""
        self._settings = load_settings(ReadingSettings, settings)
        self._labels = labels

    def predict(self, picture_HWC: Array, run: Run) -> dict[str, Any]:
        """`{"lines": [{"text", "confidence", "box"}]}` in reading order.

        `box` is [[x, y] x 4], clockwise from top left, in pixels of `picture_HWC` (uint8 BGR).
        A picture without text has no lines.
        """
        settings = self._settings
        boxes_N42 = detect(picture_HWC, settings, run)
        boxes_N42 = boxes_N42[reading_order(boxes_N42)]
        crops = [crop(picture_HWC, box) for box in boxes_N42]
        doubtful = upside_down(crops, settings, run)
        turned = [np.rot90(crops[i], 2) for i in doubtful]
        prepared = [prepare_line(line, settings) for line in (*crops, *turned)]
        read = recognise(prepared, self._labels, run, settings.max_batch)
        texts = read[: len(crops)]
        for i, other_way in zip(doubtful, read[len(crops) :], strict=True):
            texts[i] = max(texts[i], other_way, key=_confidence)
        height, width = picture_HWC.shape[:2]
        return {
            "lines": [
                {"text": text, "confidence": confidence, "box": np.clip(box, 0, (width, height)).round(1).tolist()}
                for box, (text, confidence) in zip(boxes_N42, texts, strict=True)
                if text.strip() and confidence >= settings.min_confidence
            ]
        }


def _confidence(read: tuple[str, float]) -> float:
    return read[1]


def prepare_line(line_HWC: Array, settings: ReadingSettings) -> Array:
    """What the recogniser gets to see of one line; see `models.tasks.lines.prepare`."""
    return prepare(line_HWC, settings.max_line_width, settings.min_line_width, settings.min_line_padding)


def detect(picture_HWC: Array, settings: ReadingSettings, run: Run) -> Array:
    """Boxes of text lines, float64 [N, 4, 2], in pixels of `picture_HWC`, in no particular order.

    Boxes at the edge may reach a little beyond the picture.
    """
    height, width = picture_HWC.shape[:2]
    scale = min(
        max(settings.min_side / min(height, width), 1.0), settings.max_scale, settings.max_side / max(height, width)
    )
    inner_width, inner_height = max(round(width * scale), 1), max(round(height * scale), 1)
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    resized = cv2.resize(picture_HWC, (inner_width, inner_height), interpolation=interpolation)
    padded = cv2.copyMakeBorder(
        resized, 0, -inner_height % SIDE_STEP, 0, -inner_width % SIDE_STEP, cv2.BORDER_REPLICATE
    )
    x_NCHW = np.empty((1, 3, *padded.shape[:2]), np.float32)
    for channel, values in enumerate(_DETECT_VALUE.T):
        cv2.LUT(cv2.extractChannel(padded, channel), np.ascontiguousarray(values), dst=x_NCHW[0, channel])
    (probability,) = run("det", {"x": x_NCHW}).values()
    boxes_N42 = boxes_of(probability[0, 0, :inner_height, :inner_width], settings)
    return np.asarray(boxes_N42 * (width / inner_width, height / inner_height))


def boxes_of(probability_HW: Array, settings: ReadingSettings) -> Array:
    """Boxes, float64 [N, 4, 2], around the connected regions of a probability map FP32 [H, W].

    This is the postprocessing of differentiable binarization (Liao et al., "Real-time Scene Text Detection
    with Differentiable Binarization", AAAI 2020): the network marks cores of text that were shrunk by a
    distance, so each region grows by the distance area * expansion / perimeter. The paper offsets a polygon.
    Here the region is already a rectangle, and offsetting a rectangle by a distance, then taking
    the smallest rectangle around the result, moves each side outwards by exactly that distance.
    """
    text_HW = (probability_HW > settings.text_threshold).astype(np.uint8)
    contours, _ = cv2.findContours(text_HW, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    boxes = []
    for contour in contours:
        middle, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < _MIN_CORE:
            continue
        corners = cv2.boxPoints((middle, (width, height), angle))
        if _mean_inside(probability_HW, corners) < settings.box_threshold:
            continue
        distance = width * height * settings.expansion / (2 * (width + height))
        grown = (width + 2 * distance, height + 2 * distance)
        boxes.append(_clockwise(cv2.boxPoints((middle, grown, angle))))
        if len(boxes) == settings.max_boxes:
            break
    return np.array(boxes, np.float64).reshape(-1, 4, 2)


def _mean_inside(probability_HW: Array, corners: Array) -> float:
    """Mean of the map inside a rectangle, float [4, 2], that may reach beyond the map."""
    limit = np.array(probability_HW.shape[::-1]) - 1
    left, top = np.clip(np.floor(corners.min(axis=0)), 0, limit).astype(int)
    right, bottom = np.clip(np.ceil(corners.max(axis=0)), 0, limit).astype(int)
    mask = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(mask, [(corners - (left, top)).astype(np.int32)], 1)
    return float(cv2.mean(probability_HW[top : bottom + 1, left : right + 1], mask)[0])


def _clockwise(corners: Array) -> Array:
    """Corners of a rectangle, float [4, 2], clockwise from top left."""
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    top_left, bottom_left = by_x[:2][np.argsort(by_x[:2, 1], kind="stable")]
    top_right, bottom_right = by_x[2:][np.argsort(by_x[2:, 1], kind="stable")]
    return np.array([top_left, top_right, bottom_right, bottom_left])


def crop(picture_HWC: Array, box: Array) -> Array:
    """The picture inside `box`, float [4, 2], laid flat; a tall one is turned a quarter to the left.

    Three corners are enough because `box` is a rectangle; what lies beyond the picture repeats its edge.
    """
    width = max(math.ceil(np.linalg.norm(box[1] - box[0])), 1)
    height = max(math.ceil(np.linalg.norm(box[3] - box[0])), 1)
    corners = np.array([[0, 0], [width, 0], [width, height]], np.float32)
    transform = cv2.getAffineTransform(box[:3].astype(np.float32), corners)
    flat = cv2.warpAffine(picture_HWC, transform, (width, height), borderMode=cv2.BORDER_REPLICATE)
    return np.rot90(flat) if height >= _TALL * width else flat


def upside_down(crops: Sequence[Array], settings: ReadingSettings, run: Run) -> list[int]:
    """Indices of the crops that the classifier sees upside down.

    It is wrong about short words too often to be obeyed: the caller reads these both ways.
    """
    found = []
    for start in range(0, len(crops), settings.max_batch):
        batch = [prepare(line, CLASSIFY_WIDTH, CLASSIFY_WIDTH) for line in crops[start : start + settings.max_batch]]
        (probability,) = run("cls", {"x": np.concatenate(batch)}).values()
        turned = probability[:, _UPSIDE_DOWN] > settings.upside_down_threshold
        found += (start + np.flatnonzero(turned)).tolist()
    return found


def reading_order(boxes_N42: Array) -> list[int]:
    """Indices of boxes, float [N, 4, 2]: rows from top to bottom, and from left to right within a row.

    The boxes of a row share a band of heights; a box joins when it overlaps the band by more than half of
    the smaller of the two. A fixed distance in pixels would join rows of small print and split large ones.
    Heights are measured across the page's own skew, the median angle of its lines.
    """
    if not len(boxes_N42):
        return []
    angle = _skew(boxes_N42)
    left = (boxes_N42 @ (math.cos(angle), math.sin(angle))).min(axis=1)
    middle = (boxes_N42 @ (-math.sin(angle), math.cos(angle))).mean(axis=1)
    half = np.linalg.norm(boxes_N42[:, 3] - boxes_N42[:, 0], axis=1) / 2
    tops, bottoms = (middle - half).tolist(), (middle + half).tolist()

    rows: list[list[int]] = []
    bands: list[tuple[float, float]] = []
    for box in np.lexsort((left, middle)).tolist():
        for i in reversed(range(len(rows))):
            band = max(bands[i][0], tops[box]), min(bands[i][1], bottoms[box])
            if band[1] - band[0] > min(bands[i][1] - bands[i][0], bottoms[box] - tops[box]) / 2:
                rows[i].append(box)
                bands[i] = band
                break
        else:
            rows.append([box])
            bands.append((tops[box], bottoms[box]))
    return [box for row in rows for box in sorted(row, key=left.__getitem__)]


def _skew(boxes_N42: Array) -> float:
    """Median angle in radians of the boxes that are clearly wider than high; 0.0 when there are none."""
    across = boxes_N42[:, 1] - boxes_N42[:, 0]
    down = boxes_N42[:, 3] - boxes_N42[:, 0]
    angles = np.arctan2(across[:, 1], across[:, 0])
    wide = np.linalg.norm(across, axis=1) > 2 * np.linalg.norm(down, axis=1)
    angles = angles[wide & (np.abs(angles) < _MAX_SKEW)]
    return float(np.median(angles)) if len(angles) else 0.0
