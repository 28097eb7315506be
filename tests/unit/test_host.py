"""What the machine says about itself; what it does not say is absent, never zero."""

from __future__ import annotations

import pytest

from appliance.adapters import host

pytestmark = pytest.mark.unit


def test_memory_is_told_in_bytes() -> None:
    meminfo = "MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:   8192 kB\nHugePages_Total:       0\n"
    assert host.memory_bytes(meminfo) == {"total": 16384 * 1024, "available": 8192 * 1024}


@pytest.mark.parametrize(
    ("meminfo", "known"), [("", {}), ("MemTotal:\n", {}), ("MemTotal: 4 kB\nSwapTotal: 9 kB\n", {"total": 4096})]
)
def test_memory_that_the_kernel_does_not_tell_is_absent_not_zero(meminfo: str, known: dict[str, int]) -> None:
    assert host.memory_bytes(meminfo) == known


def test_this_machine_has_memory_and_perhaps_a_synchronised_clock() -> None:
    memory = host.memory_bytes()
    assert 0 < memory["available"] <= memory["total"]
    assert host.clock_synced() in {True, False, None}
