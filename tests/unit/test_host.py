"""What the machine says about itself; what it does not say is absent, never zero."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_the_memory_of_a_jetson_names_what_its_gpu_holds() -> None:
    meminfo = "MemTotal: 16 kB\nMemAvailable: 8 kB\nNvMapMemFree: 0 kB\nNvMapMemUsed: 3 kB\n"
    assert host.memory_bytes(meminfo) == {"total": 16384, "available": 8192, "nvmap": 3072}


@pytest.mark.parametrize(
    ("pressure", "stall"),
    [
        ("some avg10=12.34 avg60=1.00 avg300=0.00 total=9\nfull avg10=2.00 avg60=0.00 avg300=0.00 total=1\n", 12.34),
        ("full avg10=2.00 avg60=0.00 avg300=0.00 total=1\n", None),
        ("", None),
    ],
)
def test_a_stall_for_memory_is_told_in_percent_of_the_last_ten_seconds(pressure: str, stall: float | None) -> None:
    assert host.memory_stall(pressure) == stall


def test_the_memory_of_a_process_grows_by_what_it_touches_and_one_that_is_gone_has_none() -> None:
    touched_bytes = 32 * 2**20
    program = f"print(flush=True); input(); touched = bytearray(b'1') * {touched_bytes}; print(flush=True); input()"
    # Another process, which does nothing else meanwhile.
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = host.process_bytes(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = host.process_bytes(process.pid)
        process.stdin.write(b"\n")
    assert before is not None
    assert after is not None
    assert touched_bytes * 0.9 < after - before < touched_bytes * 1.5
    assert host.process_bytes(2**22 + 1) is None


def test_the_smallest_limit_of_our_control_group_and_those_above_counts(tmp_path: Path) -> None:
    group = tmp_path / "system.slice" / "appliance.service"
    group.mkdir(parents=True)
    assert host.group_limit_bytes(tmp_path, "0::/system.slice/appliance.service\n") is None
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("4096\n")
    assert host.group_limit_bytes(tmp_path, "0::/system.slice/appliance.service\n") == 4096
    (group / "memory.max").write_text("1024\n")
    assert host.group_limit_bytes(tmp_path, "5:cpu:/x\n0::/system.slice/appliance.service\n") == 1024
    assert host.group_limit_bytes(tmp_path, "4:memory:/old\n") is None
