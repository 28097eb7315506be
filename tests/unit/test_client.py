"""The client for cameras, without a daemon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from appliance.client import Client
from models.errors import ApplianceError, BadInput, Unavailable

pytestmark = pytest.mark.unit


class Film:
    """A file with that many frames; one that cannot be opened has none."""

    def __init__(self, frames: int) -> None:
        self.frames = frames

    def read(self) -> tuple[bool, Any]:
        """The next frame."""
        self.frames -= 1
        return self.frames >= 0, np.zeros((8, 8, 3), np.uint8)


class Unplugged:
    """A camera whose driver raises."""

    def read(self) -> tuple[bool, Any]:
        """No frame."""
        raise OSError("the camera was unplugged")


@pytest.mark.timeout(30)
def test_a_camera_that_fails_ends_the_following_with_what_it_said() -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(OSError, match="unplugged"):
        next(client.follow("m", Unplugged()))
    client.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("frames", "error", "reason"),
    [(0, BadInput, "the capture gives no frame: check"), (1, Unavailable, "the daemon does not answer at http://127")],
)
def test_a_film_of_which_nothing_was_answered_ends_with_the_reason(
    frames: int, error: type[ApplianceError], reason: str
) -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(error, match=reason):
        next(client.follow("m", Film(frames)))
    client.close()
