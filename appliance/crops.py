"""Cuts what may leave a device out of a picture: `python -m appliance.crops`, a child that ends after one picture.

Pictures come from outside, and the daemon itself decodes none. Standard input is one line of JSON (`Wanted`) and the
picture behind it; standard output is the JSON of the parts.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np

from models import schema
from models.errors import BadInput, TooLarge
from models.spec import Array
from models.sync import Part
from models.tasks.picture import decode_picture

_NICE = 15
"""Not the lowest: what a caller waits for goes on where models load at 19."""
_QUALITY = 95
_MARGIN = 0.5
"""Of the shorter side of a place: what the larger model needs to see around it."""
_BLUR = 8
"""What is blurred is first made this much smaller than the shorter side of the picture's largest place."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to leave."""

    answer: Mapping[str, Any]
    """The task's part of the predict document: one list of items."""
    doubtful: tuple[int, ...]
    """Which of its items."""
    whole: bool = False
    blur: bool = False
    most_pixels: int = field(default=100_000_000)


def parts(picture: bytes, wanted: Wanted) -> list[Part]:
    """A part for each doubtful item that has a place, or one with the whole picture; raises BadInput, TooLarge."""
    picture_HWC = decode_picture(picture, wanted.most_pixels)
    ((key, items),) = wanted.answer.items()
    chosen = [items[i] for i in wanted.doubtful]
    if wanted.whole:
        if wanted.blur:
            picture_HWC = _blurred(picture_HWC, [item["box"] for item in chosen if "box" in item])
        return [Part(_jpeg(picture_HWC), wanted.answer, whole=True)]
    found = []
    for item in chosen:
        if "box" not in item:
            continue
        left, top, right, bottom = around(item["box"], picture_HWC.shape)
        moved = [[round(x - left, 1), round(y - top, 1)] for x, y in item["box"]]
        crop_HWC = picture_HWC[top:bottom, left:right]
        if wanted.blur:
            crop_HWC = _blurred(crop_HWC, [moved])
        found.append(Part(_jpeg(crop_HWC), {key: [{**item, "box": moved}]}, left=left, top=top))
    return found


def around(box: Sequence[Sequence[float]], shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom, in pixels, of what is cut out for a box of corner points [4, 2]."""
    corners = np.asarray(box, np.float64)
    margin = _MARGIN * min(np.linalg.norm(corners[1] - corners[0]), np.linalg.norm(corners[3] - corners[0]))
    left, top = np.floor(corners.min(axis=0) - margin).clip(0).astype(int)
    right, bottom = np.ceil(corners.max(axis=0) + margin).clip(1, shape[1::-1]).astype(int)
    return min(int(left), int(right) - 1), min(int(top), int(bottom) - 1), int(right), int(bottom)


def _blurred(picture_HWC: Array, boxes: Sequence[Sequence[Sequence[float]]]) -> Array:
    """The picture with all that is outside of `boxes` so coarse that nothing can be read or recognised."""
    height, width = picture_HWC.shape[:2]
    sides = [np.linalg.norm(np.subtract(box[3], box[0])) for box in boxes]
    step = max(_BLUR, float(max(sides, default=0.0)), min(height, width) / _BLUR)
    small = cv2.resize(
        picture_HWC, (max(1, round(width / step)), max(1, round(height / step))), interpolation=cv2.INTER_AREA
    )
    coarse_HWC = cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)
    mask = np.zeros((height, width), np.uint8)
    cv2.fillPoly(mask, [np.asarray(box).round().astype(np.int32) for box in boxes], 1)
    return np.where(mask[..., None] > 0, picture_HWC, coarse_HWC)


def _jpeg(picture_HWC: Array) -> str:
    _done, encoded = cv2.imencode(".jpg", picture_HWC, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return base64.b64encode(encoded.tobytes()).decode()


def main() -> int:
    """0 with the parts on standard output; 1 with a reason on standard error."""
    os.nice(_NICE)
    wanted = schema.load(Wanted, json.loads(sys.stdin.buffer.readline()))
    try:
        found = parts(sys.stdin.buffer.read(), wanted)
    except (BadInput, TooLarge) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(schema.dump(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
