"""Draws what a model found into a copy of the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from models.errors import BadInput

_COLOUR_BGR = (111, 19, 194)
_WHITE_BGR = (255, 255, 255)
_SMALLEST_SCALE = 0.4
_WIDTH_PER_SCALE = 1600.0
"""Pixels of a picture at which numbers have OpenCV's own size."""


def drawn(content: bytes, found: Sequence[Mapping[str, Any]], suffix: str) -> bytes:
    """The encoded picture with each box and its number, encoded as the file name's `suffix` says.

    `found` are the items of an answer (see `models.answers`), whose boxes are pixels of the picture as it was sent,
    its EXIF orientation not applied; what has no box is not drawn.
    Raises BadInput for a picture that cannot be read, or a suffix that names no format.
    """
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    picture_HWC = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    if picture_HWC is None:
        raise BadInput("the picture cannot be read: give a JPEG or PNG")
    scale = max(picture_HWC.shape[1] / _WIDTH_PER_SCALE, _SMALLEST_SCALE)
    thickness = max(1, round(2 * scale))
    for number, item in enumerate(found, 1):
        if "box" not in item:
            continue
        corners = np.array(item["box"], np.int32)
        cv2.polylines(picture_HWC, [corners], isClosed=True, color=_COLOUR_BGR, thickness=thickness)
        (width, height), _baseline = cv2.getTextSize(str(number), cv2.FONT_HERSHEY_SIMPLEX, scale, thickness)
        x, y = max(int(corners[0][0]) - width - 2, 0), int(corners[0][1])
        cv2.rectangle(picture_HWC, (x, y), (x + width + 2, y + height + 4), _COLOUR_BGR, cv2.FILLED)
        place = (x + 1, y + height + 2)
        cv2.putText(picture_HWC, str(number), place, cv2.FONT_HERSHEY_SIMPLEX, scale, _WHITE_BGR, thickness)
    try:
        _done, encoded = cv2.imencode(suffix or ".png", picture_HWC)
    except cv2.error as error:
        msg = f"{suffix!r} names no format of pictures: use .png or .jpg"
        raise BadInput(msg) from error
    return encoded.tobytes()
