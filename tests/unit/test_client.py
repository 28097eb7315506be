"""The client for cameras, without a daemon."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.client import Client

pytestmark = pytest.mark.unit


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
