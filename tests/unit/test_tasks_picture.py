"""Encoded pictures: what is taken, and what is refused before it costs anything."""

from __future__ import annotations

import contextlib
import tracemalloc

import cv2
import numpy as np
import pytest

from models.errors import BadInput, TooLarge
from models.spec import Array
from models.tasks.picture import decode_picture

pytestmark = pytest.mark.unit

MAX_PIXELS = 1_000_000
PICTURE = cv2.GaussianBlur(np.random.default_rng(5).integers(0, 256, (60, 90, 3), np.uint8), (0, 0), 4)
PROGRESSIVE = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_RST_INTERVAL, 2]


def encode(extension: str, picture: Array = PICTURE, options: tuple[int, ...] | list[int] = ()) -> bytes:
    return bytes(cv2.imencode(extension, picture, options)[1])


JPEG = encode(".jpg")
PNG = encode(".png")
ENCODED = {"jpeg": JPEG, "progressive jpeg": encode(".jpg", options=PROGRESSIVE), "png": PNG}


def with_size(encoded: bytes, width: int, height: int) -> bytes:
    """The same file with another size in its header."""
    if encoded.startswith(b"\x89PNG"):
        return encoded[:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + encoded[24:]
    at = encoded.index(b"\xff\xc0") + 5
    return encoded[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + encoded[at + 4 :]


def with_exif(jpeg: bytes, exif: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + jpeg[2:]


def test_a_png_comes_back_pixel_by_pixel() -> None:
    assert (decode_picture(memoryview(PNG), MAX_PIXELS) == PICTURE).all()


@pytest.mark.parametrize("encoded", ENCODED.values(), ids=ENCODED)
def test_bytes_after_the_end_do_not_matter(encoded: bytes) -> None:
    picture = decode_picture(encoded + b"\0\xff\xd8trailer", MAX_PIXELS)
    assert picture.shape == PICTURE.shape
    assert np.abs(picture.astype(int) - PICTURE).mean() < 3


@pytest.mark.parametrize(
    "picture",
    [
        PICTURE[..., 0],
        PICTURE.astype(np.uint16) * 257,
        np.dstack([PICTURE, PICTURE[..., :1]]),
        PICTURE[..., 0].astype(np.uint16) * 257,
    ],
    ids=["grey", "16 bit", "alpha", "grey 16 bit"],
)
def test_every_kind_of_png_becomes_8_bit_colour(picture: Array) -> None:
    decoded = decode_picture(encode(".png", picture), MAX_PIXELS)
    wanted = PICTURE if picture.ndim == 3 else np.dstack([PICTURE[..., 0]] * 3)
    assert decoded.dtype == np.uint8
    assert (decoded == wanted).all()


def test_rows_stay_as_sent_whatever_the_camera_noted_about_orientation() -> None:
    quarter_turn = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    turned = with_exif(JPEG, quarter_turn)
    assert cv2.imdecode(np.frombuffer(turned, np.uint8), cv2.IMREAD_COLOR).shape == (90, 60, 3)
    assert decode_picture(turned, MAX_PIXELS).shape == (60, 90, 3)


@pytest.mark.parametrize("encoded", [JPEG, PNG], ids=["jpeg", "png"])
def test_a_header_over_the_limit_is_refused_before_pixels_are_allocated(encoded: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=r"20000 x 20000 .* at most 1000000"):
            decode_picture(with_size(encoded, 20_000, 20_000), MAX_PIXELS)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_limit_itself_is_allowed() -> None:
    assert decode_picture(PNG, 60 * 90).shape == (60, 90, 3)
    with pytest.raises(TooLarge):
        decode_picture(PNG, 60 * 90 - 1)


@pytest.mark.parametrize("encoded", ENCODED.values(), ids=ENCODED)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_short_is_refused(encoded: bytes, share: float) -> None:
    with pytest.raises(BadInput, match=r"cut short|neither"):
        decode_picture(encoded[: int(len(encoded) * share)], MAX_PIXELS)


def test_the_end_marker_of_a_thumbnail_does_not_make_a_cut_file_whole() -> None:
    with_thumbnail = with_exif(JPEG, b"Exif\0\0" + JPEG)
    assert decode_picture(with_thumbnail, MAX_PIXELS).shape == PICTURE.shape
    with pytest.raises(BadInput, match="cut short"):
        decode_picture(with_thumbnail[: -len(JPEG) // 2], MAX_PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"hello",
        encode(".bmp"),
        encode(".webp"),
        JPEG[:2] + JPEG[-2:],
        with_size(JPEG, 0, 60),
        with_size(PNG, 90, 0),
        PNG[:8] + PNG[33:],
        PNG[:33] + PNG[8:],
        PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:],
    ],
    ids=[
        "empty",
        "jpeg magic",
        "png magic",
        "text",
        "bmp",
        "webp",
        "no frame",
        "no width",
        "no height",
        "no header",
        "two headers",
        "flipped bit",
    ],
)
def test_what_is_no_whole_picture_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(BadInput, match=r"send|save"):
        decode_picture(data, MAX_PIXELS)


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    scan = b"\xff\xda\0\x02\0"
    with pytest.raises(BadInput, match="damaged"):
        decode_picture(JPEG[:-2] + scan * 1000 + JPEG[-2:], MAX_PIXELS)


def test_random_damage_gives_a_picture_or_bad_input() -> None:
    rng = np.random.default_rng(11)
    for encoded in [*ENCODED.values()] * 50:
        damaged = bytearray(encoded)
        for at in rng.integers(0, len(damaged), 5):
            damaged[at] = rng.integers(0, 256)
        with contextlib.suppress(BadInput, TooLarge):
            assert decode_picture(damaged, MAX_PIXELS).ndim == 3
