"""Which machine this is, as far as the time that a graph takes depends on it, and how that time is measured."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import re
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from appliance.runtime import Session
from models.spec import Array

_NAMES = ("model name", "Model")
_MARKS = ("cpu family", "model", "stepping", "CPU implementer", "CPU variant", "CPU part", "CPU revision")
_FEATURES = ("flags", "Features")


def machine(cpuinfo: str | None = None, runtime: str = "onnxruntime-cpu") -> dict[str, str]:
    """What must be the same for measurements to be comparable: the processor, and the runtime's version.

    Of one that runs on no CPU its name: what a CPU took says nothing about the time that a GPU takes.

    One name covers several processors, and a virtual machine may hide some of a processor's instructions:
    so what the kernel numbers (x86 and ARM each in its way) counts, and a digest of the instructions it lists.
    """
    facts = _cpuinfo(cpuinfo)
    found = {"cpu": cpu_name(cpuinfo)} | {mark: facts[mark] for mark in _MARKS if mark in facts}
    for key in _FEATURES:
        if key in facts:
            found["features"] = hashlib.sha256(facts[key].encode()).hexdigest()[:12]
    return found | _software(runtime)


def _software(runtime: str) -> dict[str, str]:
    # onnxruntime's package for CUDA stands in the place of the other, and computes on the CPU as well
    for package in {"onnxruntime-cpu": ("onnxruntime", "onnxruntime-gpu"), "openvino": ("openvino",)}.get(runtime, ()):
        with contextlib.suppress(PackageNotFoundError):
            return {package.removesuffix("-gpu"): version(package)}
    return {"runtime": runtime}


def cpu_name(cpuinfo: str | None = None) -> str:
    """Name of the processor; that of its architecture when the kernel tells none."""
    facts = _cpuinfo(cpuinfo)
    return next((facts[name] for name in _NAMES if name in facts), platform.machine())


def l4t(release: str | None = None) -> str:
    """Version of Jetson's system, "36.4.3", from /etc/nv_tegra_release or the text given instead; empty elsewhere."""
    found = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", _text(Path("/etc/nv_tegra_release"), release))
    return f"{found[1]}.{found[2]}" if found else ""


def module(model: str | None = None) -> str:
    """Name of the module or board, from the device tree or the text given instead; empty on machines without one."""
    return _text(Path("/proc/device-tree/model"), model).rstrip("\0\n")


def _text(path: Path, given: str | None) -> str:
    if given is not None:
        return given
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpuinfo(cpuinfo: str | None) -> dict[str, str]:
    """What /proc/cpuinfo, or the text given instead, says first under each key."""
    facts: dict[str, str] = {}
    for line in _text(Path("/proc/cpuinfo"), cpuinfo).splitlines():
        key, colon, value = line.partition(":")
        if colon:
            facts.setdefault(key.strip(), value.strip())
    return facts


def time_in_turn(
    sessions: Mapping[str, Session], inputs: Mapping[str, Array], runs: int, limit_s: float = math.inf
) -> dict[str, float]:
    """Milliseconds of the fastest of `runs` runs of each session, after one that is not counted.

    They take turns, so that all meet the same neighbours, and the fastest run is the one that neighbours
    disturbed least. No new round starts after `limit_s`, but there is always one.
    """
    end_at = time.perf_counter() + limit_s
    for session in sessions.values():
        session.run(inputs)
    best_s = dict.fromkeys(sessions, math.inf)
    for _ in range(runs):
        for name, session in sessions.items():
            started_at = time.perf_counter()
            session.run(inputs)
            best_s[name] = min(best_s[name], time.perf_counter() - started_at)
        if time.perf_counter() >= end_at:
            break
    return {name: round(seconds * 1e3, 3) for name, seconds in best_s.items()}
