"""What the machine says about itself; what it does not say is absent, never zero."""

from __future__ import annotations

import pytest

from appliance.adapters import host

pytestmark = pytest.mark.unit

X86 = "processor\t: 0\nmodel name\t: AMD EPYC 7R13 Processor\nflags\t\t: fpu\n\nmodel name\t: second\n"
RASPBERRY = "processor\t: 0\nCPU part\t: 0xd08\n\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4: rev 1.1\n"
ORIN = "processor\t: 0\nBogoMIPS\t: 62.50\nCPU part\t: 0xd42\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"), [(X86, "AMD EPYC 7R13 Processor"), (RASPBERRY, "Raspberry Pi 4: rev 1.1")]
)
def test_the_processor_is_called_what_the_kernel_calls_it(cpuinfo: str, name: str) -> None:
    assert host.cpu_name(cpuinfo) == name


@pytest.mark.parametrize("cpuinfo", [ORIN, "", "garbage"])
def test_a_processor_without_a_name_goes_by_its_architecture(cpuinfo: str) -> None:
    assert host.cpu_name(cpuinfo) == host.platform.machine()


def test_memory_is_told_in_bytes() -> None:
    meminfo = "MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:   8192 kB\nHugePages_Total:       0\n"
    assert host.memory_bytes(meminfo) == {"total": 16384 * 1024, "available": 8192 * 1024}


@pytest.mark.parametrize(
    ("meminfo", "known"), [("", {}), ("MemTotal:\n", {}), ("MemTotal: 4 kB\nSwapTotal: 9 kB\n", {"total": 4096})]
)
def test_memory_that_the_kernel_does_not_tell_is_absent_not_zero(meminfo: str, known: dict[str, int]) -> None:
    assert host.memory_bytes(meminfo) == known


def test_this_machine_has_a_name_memory_and_perhaps_a_synchronised_clock() -> None:
    assert host.cpu_name()
    memory = host.memory_bytes()
    assert 0 < memory["available"] <= memory["total"]
    assert host.clock_synced() in {True, False, None}
