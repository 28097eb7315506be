"""Lines that would be written too often."""

from __future__ import annotations

import pytest

from appliance.core.seldom import Seldom

pytestmark = pytest.mark.unit


def test_the_first_line_is_written_at_once_then_one_in_some_time_that_counts_those_left_out() -> None:
    seldom = Seldom(1.0)
    written = [(now, seldom.left_out()) for now in (10.0, 10.1, 10.5, 11.0, 11.5, 12.5, 20.0) if seldom.due(now)]
    assert written == [(10.0, 0), (11.0, 2), (12.5, 1), (20.0, 0)]
