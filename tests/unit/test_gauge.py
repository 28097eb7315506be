"""What a process takes, measured by itself."""

from __future__ import annotations

import pytest

from appliance.gauge import Gauge

pytestmark = pytest.mark.unit

MIB = 2**20


def test_what_the_gpu_has_taken_meanwhile_counts_where_its_memory_is_that_of_the_machine() -> None:
    held_bytes = 100 * MIB
    gauge = Gauge(lambda: held_bytes)
    before_bytes = gauge.resident_bytes()
    held_bytes += 700 * MIB
    for seen_bytes in (gauge.resident_bytes(), gauge.peak_bytes()):
        assert 690 * MIB < seen_bytes - before_bytes < 800 * MIB
