"""Whole pictures made to fit a graph whose input has one size: what classification and detection share.

Axes in names: N batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from models.errors import BundleError
from models.spec import Array

_WORDS = {
    "fit": ("crop", "pad", "stretch"),
    "colours": ("rgb", "bgr", "grey"),
    "layout": ("NCHW", "NHWC"),
}


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How a picture becomes the graph's input: value = (pixel / scale - mean) / deviation."""

    width: int = 224
    height: int = 224
    """Of the graph's input, in pixels."""
    fit: str = "crop"
    """For a picture of another shape: "crop" cuts its middle out, "pad" adds grey at its right or bottom, "stretch"
    distorts it."""
    crop_share: float = 0.875
    """With "crop": how much of the width and height of the largest possible middle is taken."""
    pad_value: float = 114.0
    """With "pad": value of the added pixels, 0 to 255."""
    colours: str = "rgb"
    """Order of the channels, or "grey" for a graph with one."""
    layout: str = "NCHW"
    """Of the graph's input; "NHWC" has the channels last."""
    scale: float = 255.0
    """What pixel values (0 to 255) are divided by first; 1 for a graph that takes them as they are."""
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    """One number, or one a channel in the order of `colours`."""

    @property
    def channels(self) -> int:
        """Of the graph's input."""
        return 1 if self.colours == "grey" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the graph's input, without the batch."""
        sizes = (self.channels, self.height, self.width)
        return sizes if self.layout == "NCHW" else (*sizes[1:], sizes[0])


def check(settings: FitSettings) -> None:
    """Raise BundleError for words that are not known and numbers that fit nothing."""
    for key, known in _WORDS.items():
        value = getattr(settings, key)
        if value not in known:
            msg = f"the task's settings do not fit: {key} is {value!r}; known: {', '.join(known)}"
            raise BundleError(msg)
    for key in ("mean", "deviation"):
        if len(getattr(settings, key)) not in {1, settings.channels}:
            msg = f"the task's settings do not fit: {key} must be one number, or {settings.channels}, one a channel"
            raise BundleError(msg)
    if settings.scale <= 0 or min(settings.deviation) <= 0:
        raise BundleError("the task's settings do not fit: scale and deviation must be above 0")
    if not 0 < settings.crop_share <= 1 or settings.pad_value > np.iinfo(np.uint8).max:
        raise BundleError("the task's settings do not fit: crop_share is between 0 and 1, pad_value at most 255")


def prepare(picture_HWC: Array, settings: FitSettings) -> Array:
    """The graph's input for one picture (uint8 BGR): FP32 [1, C, H, W], or [1, H, W, C] by its layout."""
    fitted_HWC = _fitted(picture_HWC, settings)
    if settings.colours == "grey":
        planes = [cv2.cvtColor(fitted_HWC, cv2.COLOR_BGR2GRAY)]
    else:
        planes = list(cv2.split(fitted_HWC))[:: -1 if settings.colours == "rgb" else 1]
    x_NCHW = np.empty((1, len(planes), settings.height, settings.width), np.float32)
    pixels = np.arange(256) / settings.scale
    for channel, plane in enumerate(planes):
        mean, deviation = (each[channel % len(each)] for each in (settings.mean, settings.deviation))
        x_NCHW[0, channel] = cv2.LUT(plane, ((pixels - mean) / deviation).astype(np.float32))
    return x_NCHW if settings.layout == "NCHW" else np.ascontiguousarray(x_NCHW.transpose(0, 2, 3, 1))


def scales(picture_HWC: Array, settings: FitSettings) -> tuple[float, float]:
    """Pixels of the graph's input for one of the picture, across and down; with fit "pad" or "stretch"."""
    height, width = picture_HWC.shape[:2]
    inner_width, inner_height = _inner(width, height, settings)
    return inner_width / width, inner_height / height


def _inner(width: int, height: int, settings: FitSettings) -> tuple[int, int]:
    """Size of a whole picture inside the graph's input."""
    if settings.fit != "pad":
        return settings.width, settings.height
    scale = min(settings.width / width, settings.height / height)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def _fitted(picture_HWC: Array, settings: FitSettings) -> Array:
    height, width = picture_HWC.shape[:2]
    if settings.fit == "crop":
        share = settings.crop_share * min(width / settings.width, height / settings.height)
        cut_width, cut_height = (max(round(size * share), 1) for size in (settings.width, settings.height))
        left, top = (width - cut_width) // 2, (height - cut_height) // 2
        picture_HWC = picture_HWC[top : top + cut_height, left : left + cut_width]
        height, width = cut_height, cut_width
    inner_width, inner_height = _inner(width, height, settings)
    interpolation = cv2.INTER_AREA if inner_width < width else cv2.INTER_LINEAR
    resized = cv2.resize(picture_HWC, (inner_width, inner_height), interpolation=interpolation)
    if settings.fit != "pad":
        return np.asarray(resized)
    below, right = settings.height - inner_height, settings.width - inner_width
    grey = (int(settings.pad_value),) * 3
    return np.asarray(cv2.copyMakeBorder(resized, 0, below, 0, right, cv2.BORDER_CONSTANT, value=grey))
