"""What leaves a device of a picture: only what surrounds the doubtful places, and nothing readable beside them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import cv2
import numpy as np
import pytest

from appliance.crops import Wanted, parts
from models.errors import BadInput
from models.spec import Array
from models.sync import Part

pytestmark = pytest.mark.unit

NOISE_HWC = np.random.default_rng(3).integers(0, 256, (200, 300, 3), np.uint8)
PICTURE = cv2.imencode(".png", NOISE_HWC)[1].tobytes()
SURE = {"text": "TOTAL", "confidence": 0.99, "box": [[10, 10], [80, 10], [80, 30], [10, 30]]}
DOUBTFUL = {"text": "1O.5O", "confidence": 0.6, "box": [[200, 150], [260, 150], [260, 170], [200, 170]]}
CORNER = {"text": "?", "confidence": 0.5, "box": [[290, 195], [300, 195], [300, 200], [290, 200]]}


def pixels(part: Part) -> Array:
    found = cv2.imdecode(np.frombuffer(base64.b64decode(part.picture), np.uint8), cv2.IMREAD_COLOR)
    return np.asarray(found)


def roughness(picture_HWC: Array) -> float:
    """How much neighbouring pixels differ; of what can be read it is high."""
    return float(np.abs(np.diff(picture_HWC.astype(np.float32), axis=1)).mean())


def test_of_each_doubtful_place_what_surrounds_it_leaves_and_its_answer_in_pixels_of_that() -> None:
    (first, second) = parts(PICTURE, Wanted({"lines": [SURE, DOUBTFUL, CORNER]}, (1, 2)))
    assert (first.left, first.top) == (190, 140)
    assert pixels(first).shape == (40, 80, 3)
    assert first.answer == {"lines": [{**DOUBTFUL, "box": [[10, 10], [70, 10], [70, 30], [10, 30]]}]}
    assert np.abs(pixels(first).astype(int) - NOISE_HWC[140:180, 190:270]).mean() < 60
    assert pixels(second).shape[0] > 0
    assert (second.left + pixels(second).shape[1], second.top + pixels(second).shape[0]) == (300, 200)


def test_what_surrounds_a_doubtful_place_can_be_made_unrecognisable() -> None:
    (plain,) = parts(PICTURE, Wanted({"lines": [DOUBTFUL]}, (0,)))
    (blurred,) = parts(PICTURE, Wanted({"lines": [DOUBTFUL]}, (0,), blur=True))
    inside, outside = np.s_[12:28, 12:68], np.s_[:8, :]
    assert roughness(pixels(blurred)[inside]) > 0.8 * roughness(pixels(plain)[inside])
    assert roughness(pixels(blurred)[outside]) < 0.3 * roughness(pixels(plain)[outside])


def test_a_whole_picture_leaves_only_where_that_is_wanted_and_blurred_where_that_is() -> None:
    answer = {"lines": [SURE, DOUBTFUL]}
    (whole,) = parts(PICTURE, Wanted(answer, (1,), whole=True))
    assert (pixels(whole).shape, whole.answer, whole.left, whole.top) == (NOISE_HWC.shape, answer, 0, 0)
    (blurred,) = parts(PICTURE, Wanted(answer, (1,), whole=True, blur=True))
    sure, doubtful = np.s_[10:30, 10:80], np.s_[152:168, 202:258]
    assert roughness(pixels(blurred)[sure]) < 0.3 * roughness(pixels(whole)[sure])
    assert roughness(pixels(blurred)[doubtful]) > 0.8 * roughness(pixels(whole)[doubtful])


def test_a_doubtful_class_has_no_place_so_nothing_leaves_as_a_crop() -> None:
    answer = {"classes": [{"label": "cat", "confidence": 0.4}]}
    assert parts(PICTURE, Wanted(answer, (0,))) == []
    (whole,) = parts(PICTURE, Wanted(answer, (0,), whole=True))
    assert whole.answer == answer


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(BadInput):
        parts(b"GIF89a", Wanted({"lines": [DOUBTFUL]}, (0,)))


def test_the_child_says_in_a_sentence_what_it_cannot_do() -> None:
    asked = json.dumps({"answer": {"lines": [DOUBTFUL]}, "doubtful": [0]}).encode()
    ended = subprocess.run(
        [sys.executable, "-m", "appliance.crops"], input=asked + b"\nno picture", capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"neither a JPEG nor a PNG" in ended.stderr
    assert b"Traceback" not in ended.stderr
