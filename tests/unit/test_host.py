"""What the machine says about itself; what it does not say is absent, never zero."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.boards import plant

from appliance.adapters import host
from appliance.machine_memory import Sampler

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
    assert host.held_bytes(2**22 + 1) is None
    own_bytes, held_bytes = host.process_bytes(os.getpid()), host.held_bytes(os.getpid())
    assert own_bytes
    assert held_bytes
    assert own_bytes < held_bytes * 1.1


def test_what_a_process_takes_is_found_out_anew_when_it_has_changed_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib = 2**20
    held_bytes = iter([100 * mib, 101 * mib, 99 * mib, 150 * mib, 150 * mib, None])
    size_bytes = iter([80 * mib, 130 * mib, None])
    monkeypatch.setattr("appliance.adapters.host.held_bytes", lambda _pid: next(held_bytes))
    monkeypatch.setattr("appliance.adapters.host.process_bytes", lambda _pid: next(size_bytes))
    sample = Sampler()
    seen = [sample([7]).process_bytes.get(7) for _ in range(6)]
    assert seen == [80 * mib, 80 * mib, 80 * mib, 130 * mib, 130 * mib, None]


def test_what_a_process_takes_is_found_out_anew_when_another_ends_with_which_it_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib, sharing = 2**20, {7, 8}
    monkeypatch.setattr("appliance.adapters.host.held_bytes", lambda pid: 100 * mib if pid in sharing else None)
    monkeypatch.setattr("appliance.adapters.host.process_bytes", lambda _pid: 100 * mib // len(sharing))
    sample = Sampler()
    assert sample([7, 8]).process_bytes == {7: 50 * mib, 8: 50 * mib}
    sharing.remove(8)
    assert sample([7]).process_bytes == {7: 100 * mib}


def test_what_a_process_takes_holds_what_of_it_is_swapped_out() -> None:
    assert host.process_bytes(7, "Rss: 9 kB\nPss: 3 kB\nSwap: 9 kB\nSwapPss: 2 kB\n") == 5 * 1024
    assert host.process_bytes(7, "Pss: 3 kB\n") == 3 * 1024
    assert host.held_bytes(7, "VmRSS:\t 5 kB\nRssAnon: 4 kB\nVmSwap:\t 2 kB\n") == 7 * 1024


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


@pytest.mark.parametrize("release", ["36.4.3", "39.2.0"])
@pytest.mark.parametrize(
    ("board", "model", "mode", "gpu_max_hz"),
    [
        ("orin-nano", "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", "MAXN_SUPER", 1_020_000_000),
        ("orin-nx", "NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "25W", 918_000_000),
        ("agx-orin", "NVIDIA Jetson AGX Orin Developer Kit", "MAXN", 1_300_500_000),
    ],
)
def test_a_jetson_tells_what_it_is_and_how_fast_it_runs(
    board: str, model: str, mode: str, gpu_max_hz: int, release: str, tmp_path: Path
) -> None:
    facts = host.board(plant(tmp_path, board, release))
    assert (facts["model"], facts["l4t"], facts["power_mode"]["name"]) == (model, release, mode)
    assert facts["clocks_hz"]["gpu"] < facts["clocks_hz"]["gpu_max"] == gpu_max_hz
    assert facts["clocks_hz"]["cpu"] < facts["clocks_hz"]["cpu_max"]
    assert facts["gpu_load"] == pytest.approx(0.423)
    assert facts["rtc_present"]


def test_heat_is_told_for_sensors_that_are_awake_with_the_degrees_at_which_each_slows_something(tmp_path: Path) -> None:
    facts = host.board(plant(tmp_path, "orin-nx", "36.4.3"))
    assert facts["temperatures_celsius"] == {
        "cpu-thermal": 99.2,
        "gpu-thermal": 97.7,
        "soc0-thermal": 96.0,
        "tj-thermal": 99.2,
    }
    assert facts["slows_at_celsius"]["cpu-thermal"] == 99.0
    warm = host.board(plant(tmp_path / "agx", "agx-orin", "36.4.3"))
    assert warm["temperatures_celsius"]["tboard-thermal"] == 39.2
    assert "tboard-thermal" not in warm["slows_at_celsius"]


def test_what_slows_a_jetson_down_is_named_and_a_fan_or_a_warm_surface_is_not_that(tmp_path: Path) -> None:
    hot, cool = (host.board(plant(tmp_path / board, board, "36.4.3")) for board in ("orin-nx", "orin-nano"))
    assert hot["slowed_by"] == ["gpu-throttle-alert"]
    assert cool["slowed_by"] == []
    assert hot["power_events"] == {"under_voltage": 2, "average_over_current": 0, "instant_over_current": 11}


def test_rails_are_told_by_name_in_volts_amperes_and_watts_and_unused_channels_are_not(tmp_path: Path) -> None:
    rails = host.board(plant(tmp_path, "orin-nx", "39.2.0"))["rails"]
    assert rails.keys() == {"VDD_IN", "VDD_CPU_GPU_CV"}
    assert rails["VDD_IN"] == {"volts": 19.416, "amperes": 1.288, "watts": 25.008, "over_current": True}
    assert not rails["VDD_CPU_GPU_CV"]["over_current"]
    assert len(host.board(plant(tmp_path / "agx", "agx-orin", "39.2.0"))["rails"]) == 4


@pytest.mark.parametrize(
    ("board", "slots"),
    [
        ("orin-nano", {"armed": True, "booted": "A", "bootable": {"A": True, "B": False}}),
        ("orin-nx", {"armed": False, "booted": "B"}),
        ("agx-orin", {"armed": True, "booted": "B", "bootable": {"A": True, "B": True}}),
    ],
)
def test_the_systems_slots_are_told_with_one_that_will_never_boot_again(
    board: str, slots: dict[str, object], tmp_path: Path
) -> None:
    assert host.board(plant(tmp_path, board, "36.4.3"))["slots"] == slots


def test_disks_tell_their_health_and_what_is_no_disk_is_left_out(tmp_path: Path) -> None:
    (worn,) = host.board(plant(tmp_path, "agx-orin", "36.4.3"))["storage"]
    assert (worn["disk"], worn["life_used_percent"], worn["reserve"]) == ("mmcblk0", 30, "normal")
    (dead,) = host.board(plant(tmp_path / "nx", "orin-nx", "36.4.3"))["storage"]
    assert (dead["disk"], dead["state"], dead["read_only"], dead["celsius"]) == ("nvme0n1", "dead", True, 41.85)
    assert dead["model"] == "Samsung SSD 980 500GB"


def test_the_largest_free_block_is_that_of_the_highest_order_of_which_one_is_left() -> None:
    zones = "Node 0, zone DMA 5 0 1 0 0\nNode 0, zone Normal 9 9 9 1 0\n"
    assert host.largest_free_block_bytes(zones, 4096) == 8 * 4096
    assert host.largest_free_block_bytes("", 4096) is None
    assert host.largest_free_block_bytes("Node 0, zone DMA 0 0\n", 4096) is None


@pytest.mark.parametrize(
    ("status", "conf", "mode"),
    [
        ("pmode:0002 fmode:quiet", "< POWER_MODEL ID=2 NAME=MAXN_SUPER >", {"id": 2, "name": "MAXN_SUPER"}),
        ("pmode:0001", "", {"id": 1}),
        ("", "< POWER_MODEL ID=0 NAME=15W >", {}),
    ],
)
def test_the_power_mode_has_the_name_that_this_boards_configuration_gives_it(
    status: str, conf: str, mode: dict[str, object]
) -> None:
    assert host.power_mode(status, conf) == mode


def test_the_unified_memory_of_each_jetson_names_what_its_gpu_holds(tmp_path: Path) -> None:
    root = plant(tmp_path, "orin-nano", "36.4.3")
    memory = host.memory_bytes((root / "proc/meminfo").read_text())
    assert memory == {"total": 7802756 * 1024, "available": 4402112 * 1024, "nvmap": 912384 * 1024}


def test_a_machine_without_sensors_has_no_facts_rather_than_zeros(tmp_path: Path) -> None:
    assert host.board(tmp_path) == {}
