"""Encoded pictures: JPEG or PNG bytes in, pixels out, and nothing allocated before the header was read.

OpenCV allocates what a header claims and fills the missing part of a cut JPEG with grey,
so both formats are walked here, marker by marker or chunk by chunk, before it sees them.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import cv2
import numpy as np

from models.errors import BadInput, TooLarge
from models.spec import Array

Data: TypeAlias = "bytes | bytearray | memoryview"

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG start of frame; the three left out are tables and a reserved code."""
_SCAN_MARKER = 0xDA
_END_MARKER = 0xD9
_NEXT_MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])", re.DOTALL)
"""The next segment. Inside the compressed data of a scan FF is always followed by 00 or is a restart marker."""
_MAX_SCANS = 100
"""A progressive JPEG has about ten scans; each costs a pass over all pixels, however few bytes it has."""


def picture_size(data: Data, max_pixels: int) -> tuple[int, int]:
    """Width and height in pixels of a whole JPEG or PNG, of which nothing is decoded.

    Raises BadInput for anything else or a file that is cut short, TooLarge above `max_pixels`.
    """
    view = memoryview(data).cast("B")
    if view[: len(_JPEG)] == _JPEG:
        width, height = _walk_jpeg(view)
    elif view[: len(_PNG)] == _PNG:
        width, height = _walk_png(view)
    else:
        raise BadInput("this is neither a JPEG nor a PNG file: send one of these")
    if width * height > max_pixels:
        msg = f"the picture has {width} x {height} pixels, but at most {max_pixels} are taken: scale it down first"
        raise TooLarge(msg)
    return width, height


def decode_picture(data: Data, max_pixels: int) -> Array:
    """Pixels of a whole JPEG or PNG: uint8 [H, W, 3], blue green red.

    Rows and columns are those of the picture as sent: an orientation noted in its EXIF data is not
    applied, so boxes found in it are pixels of the file, not of what a viewer shows.
    Grey, palette and 16-bit pictures become 8-bit colour; transparency is dropped.
    Raises BadInput for anything else or a file that is cut short, TooLarge above `max_pixels`
    before any pixel is decoded.
    """
    picture_size(data, max_pixels)
    try:
        encoded = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        picture = cv2.imdecode(encoded, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        picture = None
    if picture is None:
        raise BadInput("the picture's data is damaged: send the file again or save it anew")
    return np.asarray(picture)


def _walk_jpeg(view: memoryview) -> tuple[int, int]:
    """Width and height in pixels; raises BadInput unless all segments up to the end marker are there."""
    size = (0, 0)
    frames = scans = 0
    at = 2
    while found := _NEXT_MARKER.search(view, at):
        marker = found[1][0]
        at = found.end()
        if marker == _END_MARKER:
            if not scans or 0 in size:
                break
            return size
        length = int.from_bytes(view[at : at + 2], "big")
        if marker in _FRAME_MARKERS:
            frames += 1
            size = (int.from_bytes(view[at + 5 : at + 7], "big"), int.from_bytes(view[at + 3 : at + 5], "big"))
        scans += marker == _SCAN_MARKER
        if length < 2 or frames > 1 or scans > _MAX_SCANS:  # noqa: PLR2004 - the length counts its own two bytes
            break
        at += length
    raise BadInput("the JPEG file is cut short or damaged: send it whole, or save it anew")


def _walk_png(view: memoryview) -> tuple[int, int]:
    """Width and height in pixels; raises BadInput unless all chunks up to the last one are there."""
    size = (0, 0)
    at = len(_PNG)
    while at + 12 <= len(view):
        length = int.from_bytes(view[at : at + 4], "big")
        kind = bytes(view[at + 4 : at + 8])
        if (kind == b"IHDR") != (size == (0, 0)):
            break  # the header comes first and once
        if kind == b"IHDR":
            size = (int.from_bytes(view[at + 8 : at + 12], "big"), int.from_bytes(view[at + 12 : at + 16], "big"))
        at += 12 + length
        if 0 in size:
            break
        if kind == b"IEND" and at <= len(view):
            return size
    raise BadInput("the PNG file is cut short or damaged: send it whole, or save it anew")
