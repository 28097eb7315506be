"""What `appliance infer --out` draws."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from appliance.drawing import drawn
from models.errors import BadInput

pytestmark = pytest.mark.unit

LINE = {"text": "TOTAL", "confidence": 0.9, "box": [[20.4, 30.0], [80.0, 30.0], [80.0, 50.0], [20.0, 50.0]]}


def picture() -> bytes:
    return cv2.imencode(".png", np.full((100, 120, 3), 255, np.uint8))[1].tobytes()


def test_a_box_is_drawn_where_it_is_and_numbered_and_the_rest_stays_as_it_was() -> None:
    result_HWC = cv2.imdecode(np.frombuffer(drawn(picture(), [LINE], ".png"), np.uint8), cv2.IMREAD_COLOR)
    changed_HW = (result_HWC != 255).any(axis=2)
    assert changed_HW[30, 40:80].all()
    assert changed_HW[50, 40:80].all()
    assert changed_HW[35:45, 5:20].any()
    assert not changed_HW[60:].any()
    assert not changed_HW[:28].any()


def test_what_is_no_picture_and_a_format_that_is_none_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        drawn(b"text", [], ".png")
    with pytest.raises(BadInput, match="names no format"):
        drawn(picture(), [], ".txt")
