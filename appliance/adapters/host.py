"""What the machine says about itself: files of /proc and /sys, UEFI variables, and the kernel's clock state.

A fact that is missing is absent (None, or no key), never zero. Jetson's facts are found by what is there, never by
which release it is: paths and names have changed with nearly every release.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from appliance.runtime import machine
from models.errors import ConfigError

_STA_UNSYNC = 0x0040
_ADJTIMEX_ERROR = 5
_TIMEX_BYTES = 208  # sizeof(struct timex) on 64-bit Linux
_STATUS_OFFSET_BYTES = 40  # modes, offset, freq, maxerror, esterror come before `status`
_REBOOT_S = 30.0
_LONGEST_QUOTE = 200


class WallClock:
    """Unix time, and the step by which a drill pretends that it has jumped."""

    def __init__(self) -> None:
        """Tell the truth."""
        self._step_s = 0.0

    def __call__(self) -> float:
        """Seconds since 1970."""
        return time.time() + self._step_s

    def step(self, on: bool, step_s: float) -> None:
        """Jump by `step_s` from now on, or tell the truth again."""
        self._step_s = step_s if on else 0.0


def clock_synced() -> bool | None:
    """Whether the kernel takes its clock for synchronised; None when it does not say."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None).adjtimex(timex)
    if state < 0:
        return None
    status = int.from_bytes(timex.raw[_STATUS_OFFSET_BYTES : _STATUS_OFFSET_BYTES + 4], "little")
    return state != _ADJTIMEX_ERROR and not status & _STA_UNSYNC


def boot_id() -> str:
    """Names this start of the machine; empty where the kernel does not say."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def reboot(command: Sequence[str]) -> None:
    """Start the machine anew by running `command`; raises ConfigError where that cannot be done."""
    advice = "give the daemon's user the right to it, or set reboot_command"
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REBOOT_S, check=False)  # noqa: S603 - the operator's own
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"`{' '.join(command)}` does not work ({error}): {advice}"
        raise ConfigError(msg) from error
    if run.returncode:
        said = " ".join(run.stderr.decode(errors="replace").split())[:_LONGEST_QUOTE]
        msg = f"`{' '.join(command)}` failed with status {run.returncode} ({said}): {advice}"
        raise ConfigError(msg)


_MEMINFO = {"MemTotal": "total", "MemAvailable": "available", "NvMapMemUsed": "nvmap"}
"""The last is what the GPU holds on Jetson, where it comes out of the same memory; other kernels have no such line."""


def memory_bytes(meminfo: str | None = None) -> dict[str, int]:
    """`total` and `available` memory, and `nvmap` where there is one."""
    if meminfo is None:
        meminfo = _read("/proc/meminfo")
    found = {}
    for line in meminfo.splitlines():
        key, _colon, value = line.partition(":")
        name = _MEMINFO.get(key)
        if name and value.split():
            found[name] = int(value.split()[0]) * 1024
    return found


def memory_stall(pressure: str | None = None) -> float | None:
    """Percent of the last 10 s in which something waited for memory (PSI, `some avg10`); None without PSI."""
    if pressure is None:
        pressure = _read("/proc/pressure/memory")
    for line in pressure.splitlines():
        kind, *fields = line.split()
        if kind == "some":
            return next((float(field[6:]) for field in fields if field.startswith("avg10=")), None)
    return None


def process_bytes(pid: int, rollup: str | None = None) -> int | None:
    """Memory of a process (PSS: its own pages, and its share of those it shares, swapped out or not); None when gone.

    The kernel walks every page for it, which takes milliseconds: not for the event loop.
    """
    return _sum_bytes(_read(f"/proc/{pid}/smaps_rollup") if rollup is None else rollup, "Pss", "SwapPss")


def held_bytes(pid: int, status: str | None = None) -> int | None:
    """Pages of a process, in memory or swapped out, shared ones in full, by the kernel's own count; None when gone."""
    return _sum_bytes(_read(f"/proc/{pid}/status") if status is None else status, "VmRSS", "VmSwap")


def _sum_bytes(text: str, *keys: str) -> int | None:
    found = [line.partition(":")[2].split()[0] for line in text.splitlines() if line.partition(":")[0] in keys]
    return sum(map(int, found)) * 1024 if found else None


def group_limit_bytes(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> int | None:
    """The smallest `memory.max` of our control group (v2) and those above; None where nothing limits us."""
    if membership is None:
        membership = _read("/proc/self/cgroup")
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "")
    limits = []
    folder = root / path.lstrip("/")
    while path and folder != root:
        text = _read(str(folder / "memory.max")).strip()
        if text.isdigit():
            limits.append(int(text))
        folder = folder.parent
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


_ROOT = Path("/")
_GPUS = {"gpu", "ga10b", "gb10b", "gv11b", "gp10b"}
"""Names of the GPU's node in device trees."""
_OFFLINE_CELSIUS = -200.0
"""A sensor that is switched off reads -256."""
_SLOWING = re.compile(r".*-throttle-alert|(thermal-)?(cpufreq|devfreq)-.*")
"""Cooling devices that cool by slowing down; the others are fans, and alerts about the surface."""
_OVER_CURRENT = {"oc1": "under_voltage", "oc2": "average_over_current", "oc3": "instant_over_current"}
"""Counters of Orin's power monitor -> what they count."""
_NVIDIA_GUID = "781e084c-a330-417c-b678-38e696380cb9"
_UNBOOTABLE = 0xFF
_DISKS = re.compile(r"nvme\d+n\d+|mmcblk\d+|sd[a-z]+")
_SECTOR_BYTES = 512
_EMMC_STEP_PERCENT = 10
"""Of its life, in which an eMMC tells how much is used up."""
_EMMC_RESERVE = {1: "normal", 2: "warning", 3: "urgent"}


def board(root: Path = _ROOT) -> dict[str, Any]:
    """What this board says of itself, as plain data; what it does not say is no key of it.

    `root` is where /proc, /sys, /etc and /var are. Takes some milliseconds, as sensors are asked over a bus: not for
    the event loop.
    """
    sys = root / "sys"
    facts = {
        "model": machine.module(_text(root / "proc/device-tree/model")),
        "serial": _text(root / "proc/device-tree/serial-number").rstrip("\0\n"),
        "l4t": machine.l4t(_text(root / "etc/nv_tegra_release")),
        "power_mode": power_mode(_text(root / "var/lib/nvpmodel/status"), _text(root / "etc/nvpmodel.conf")),
        "clocks_hz": _clocks_hz(sys),
        "gpu_load": _gpu_load(sys),
        **_heat(sys),
        "slowed_by": _slowed_by(sys),
        "power_events": _power_events(sys),
        "rails": _rails(sys),
        "largest_free_block_bytes": largest_free_block_bytes(
            _text(root / "proc/buddyinfo"), os.sysconf("SC_PAGE_SIZE")
        ),
        "slots": _slots(sys / "firmware/efi/efivars"),
        "rtc_present": any((sys / "class/rtc").iterdir()) if (sys / "class/rtc").is_dir() else None,
        "storage": _storage(sys),
    }
    return {name: fact for name, fact in facts.items() if fact is not None and fact not in ("", {})}


def power_mode(status: str, conf: str) -> dict[str, Any]:
    """Mode that nvpmodel has set, from its state file, with the name that its configuration gives it."""
    found = re.search(r"pmode:(\d+)", status)
    if not found:
        return {}
    mode = int(found[1])
    names = {int(number): name for number, name in re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", conf)}
    return {"id": mode} | ({"name": names[mode]} if mode in names else {})


def largest_free_block_bytes(buddyinfo: str, page_bytes: int) -> int | None:
    """The largest piece of memory that is free in one: the GPU's driver fails when that is small, whatever is free."""
    orders = [
        order
        for line in buddyinfo.splitlines()
        for order, count in enumerate(line.partition(" zone ")[2].split()[1:])
        if count != "0"
    ]
    return page_bytes << max(orders) if orders else None


def _clocks_hz(sys: Path) -> dict[str, int]:
    """Of the fastest CPU core and the GPU, now and at most."""
    found = {}
    for name, file in (("cpu", "scaling_cur_freq"), ("cpu_max", "scaling_max_freq")):
        khz = [_number(core / file) for core in sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq")]
        found[name] = max((int(each * 1000) for each in khz if each is not None), default=None)
    for gpu in _gpus(sys):
        for name, file in (("gpu", "cur_freq"), ("gpu_max", "max_freq")):
            hz = _number(gpu / file)
            found[name] = None if hz is None else int(hz)
    return {name: hz for name, hz in found.items() if hz is not None}


def _gpu_load(sys: Path) -> float | None:
    """Between 0 and 1."""
    loads = (_number(gpu / "device/load") for gpu in _gpus(sys))  # per mille
    return next((load / 1000 for load in loads if load is not None), None)


def _gpus(sys: Path) -> Iterator[Path]:
    return (
        node
        for node in sorted(sys.glob("class/devfreq/*"))
        if _text(node / "device/of_node/name").rstrip("\0\n") in _GPUS
    )


def _heat(sys: Path) -> dict[str, dict[str, float]]:
    """Degrees by zone, and those from which the kernel slows something down."""
    now: dict[str, float] = {}
    slows_at: dict[str, float] = {}
    for zone in sorted(sys.glob("class/thermal/thermal_zone*")):
        name, thousandths = _text(zone / "type").strip(), _number(zone / "temp")
        if not name or thousandths is None or thousandths / 1000 < _OFFLINE_CELSIUS:
            continue
        now[name] = round(thousandths / 1000, 1)
        trips = [
            _number(kind.with_name(kind.name.replace("_type", "_temp")))
            for kind in zone.glob("trip_point_*_type")
            if _text(kind).strip() == "passive"
        ]
        known = [trip / 1000 for trip in trips if trip is not None and trip > 0]
        if known:
            slows_at[name] = min(known)
    return {"temperatures_celsius": now, "slows_at_celsius": slows_at}


def _slowed_by(sys: Path) -> list[str] | None:
    """Cooling devices that slow this machine down now; None where there are none that could."""
    states = {
        _text(device / "type").strip(): _number(device / "cur_state")
        for device in sys.glob("class/thermal/cooling_device*")
    }
    able = {name: state for name, state in states.items() if state is not None and _SLOWING.fullmatch(name)}
    return sorted(name for name, state in able.items() if state > 0) if able else None


def _hwmon(sys: Path, name: str) -> Iterator[Path]:
    return (node for node in sorted(sys.glob("class/hwmon/*")) if _text(node / "name").strip() == name)


def _power_events(sys: Path) -> dict[str, int]:
    """How often the power monitor has slowed the chip down since it was started, by cause."""
    counts = {
        what: _number(node / f"{counter}_event_cnt")
        for node in _hwmon(sys, "soctherm_oc")
        for counter, what in _OVER_CURRENT.items()
    }
    return {what: int(count) for what, count in counts.items() if count is not None}


def _rails(sys: Path) -> dict[str, dict[str, Any]]:
    """Volts, amperes and watts of each rail that has a name, and whether its current is over a limit now."""
    found = {}
    for monitor in _hwmon(sys, "ina3221"):
        for label in sorted(monitor.glob("in*_label")):
            number, name = label.name.removeprefix("in").removesuffix("_label"), _text(label).strip()
            millivolts, milliamperes = _number(monitor / f"in{number}_input"), _number(monitor / f"curr{number}_input")
            if name in ("", "NC") or millivolts is None or milliamperes is None:
                continue  # channel 7, the sum of others, has no current of its own
            alarms = [_number(monitor / f"curr{number}_{kind}_alarm") for kind in ("max", "crit")]
            found[name] = {
                "volts": millivolts / 1e3,
                "amperes": milliamperes / 1e3,
                "watts": round(millivolts * milliamperes / 1e6, 3),
            } | ({} if alarms == [None, None] else {"over_current": any(alarms)})
    return found


def _slots(variables: Path) -> dict[str, Any]:
    """The system's own two slots: whether both are armed, which one was booted, and which can be booted."""
    armed, booted = _variable(variables, "RootfsRedundancyLevel"), _variable(variables, "BootChainOsCurrent")
    if booted is None:  # the firmware's slot, to which the system's is tied
        booted = _variable(variables, "BootChainFwCurrent")
    states = {slot: _variable(variables, f"RootfsStatusSlot{slot}") for slot in "AB"}
    facts = {
        "armed": None if armed is None else armed > 0,
        "booted": None if booted is None else "AB"[booted & 1],
        "bootable": {slot: state != _UNBOOTABLE for slot, state in states.items() if state is not None} or None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _variable(folder: Path, name: str) -> int | None:
    """A number in a UEFI variable, which follows four bytes of attributes."""
    try:
        content = (folder / f"{name}-{_NVIDIA_GUID}").read_bytes()
    except OSError:
        return None
    return int.from_bytes(content[4:], "little") if len(content) > 4 else None  # noqa: PLR2004 - see above


def _storage(sys: Path) -> list[dict[str, Any]] | None:
    """Each disk with what it tells of its health; NVMe's own figures (SMART) need rights that a service lacks."""
    found = []
    for disk in sorted(sys.glob("block/*")):
        if not _DISKS.fullmatch(disk.name):
            continue
        sectors, reserve = _number(disk / "size"), _number(disk / "device/pre_eol_info")
        steps = re.findall(r"0x[0-9a-fA-F]+", _text(disk / "device/life_time"))
        heat = next((_number(node) for node in sorted(disk.glob("device/hwmon*/temp1_input"))), None)
        facts = {
            "disk": disk.name,
            "model": _text(disk / "device/model").strip() or _text(disk / "device/name").strip() or None,
            "size_bytes": None if sectors is None else int(sectors) * _SECTOR_BYTES,
            "read_only": None if (ro := _number(disk / "ro")) is None else bool(ro),
            "state": _text(disk / "device/state").strip() or None,
            # Step 0 stands for "not told".
            "life_used_percent": max((int(step, 16) * _EMMC_STEP_PERCENT for step in steps), default=0) or None,
            "reserve": None if reserve is None else _EMMC_RESERVE.get(int(reserve)),
            "celsius": None if heat is None else heat / 1000,
        }
        found.append({name: fact for name, fact in facts.items() if fact is not None})
    return found or None


def _text(path: Path) -> str:
    """Content of a file; empty where there is none, or its sensor is asleep."""
    return _read(str(path))


def _number(path: Path) -> float | None:
    try:
        return float(int(_text(path), 0))
    except ValueError:
        return None
