"""Which machine this is, and which precision it serves: neither may change with the weather."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np
import pytest

from appliance.runtime import machine as module
from appliance.runtime.machine import cpu_name, l4t, machine, time_in_turn
from appliance.runtime.machine import module as module_name
from models.measurements import Measurements, fastest, known_on
from models.spec import Array, ModelSpec

pytestmark = pytest.mark.unit

EPYC = "AMD EPYC 7R13 Processor"
X86 = (
    f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: {EPYC}\nstepping\t: 1\ncpu MHz\t\t: 2650.0\n"
    "flags\t\t: fpu avx2\n\nprocessor\t: 1\nmodel name\t: second\nflags\t\t: fpu\n"
)
RASPBERRY = "processor\t: 0\nCPU part\t: 0xd08\n\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4: rev 1.1\n"
ORIN = "processor\t: 0\nBogoMIPS\t: 62.50\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n"


@pytest.mark.parametrize(("cpuinfo", "name"), [(X86, EPYC), (RASPBERRY, "Raspberry Pi 4: rev 1.1")])
def test_the_processor_is_called_what_the_kernel_calls_it(cpuinfo: str, name: str) -> None:
    assert cpu_name(cpuinfo) == machine(cpuinfo)["cpu"] == name


@pytest.mark.parametrize("cpuinfo", [ORIN, "", "garbage"])
def test_a_processor_without_a_name_goes_by_its_architecture(cpuinfo: str) -> None:
    assert cpu_name(cpuinfo) == platform.machine()


@pytest.mark.parametrize(
    ("cpuinfo", "old", "new"),
    [
        (X86, "stepping\t: 1", "stepping\t: 2"),
        (X86, "model\t\t: 1", "model\t\t: 17"),
        (X86, "fpu avx2", "fpu avx2 avx512_vnni"),
        (ORIN, "0xd42", "0xd4b"),
        (ORIN, "fp asimd", "fp asimd i8mm"),
    ],
)
def test_two_processors_of_one_name_are_two_machines(cpuinfo: str, old: str, new: str) -> None:
    other = cpuinfo.replace(old, new)
    assert cpu_name(other) == cpu_name(cpuinfo)
    assert machine(other) != machine(cpuinfo)


def test_a_clock_that_changes_by_itself_does_not_make_another_machine() -> None:
    assert machine(X86.replace("2650.0", "3400.1")) == machine(X86)


def test_this_machine_is_the_same_each_time_and_names_the_version_of_its_runtime() -> None:
    assert machine() == machine()
    assert machine()["onnxruntime"] == version("onnxruntime")


def test_what_one_runtime_took_says_nothing_about_another() -> None:
    assert machine(runtime="tensorrt") != machine()
    assert machine(runtime="tensorrt") != machine(runtime="tensorrt-rtx")


@pytest.mark.parametrize(
    ("release", "known"),
    [
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan 8\n", "36.4.3"),
        ("# R39 (release), REVISION: 2.0, GCID: 1\n", "39.2.0"),
        ("something else", ""),
        ("", ""),
    ],
)
def test_the_system_of_a_jetson_is_known_by_its_release_and_empty_elsewhere(release: str, known: str) -> None:
    assert l4t(release) == known


def test_the_module_is_called_what_the_device_tree_calls_it() -> None:
    model = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0"
    assert module_name(model) == model[:-1]
    assert module_name("") == ""


@pytest.mark.parametrize(
    ("latency_ms", "served"),
    [
        ({"fp32": 10.0, "int8": 9.5}, "fp32"),
        ({"int8": 9.1, "fp32": 10.0}, "fp32"),
        ({"fp32": 10.0, "int8": 9.0}, "int8"),
        ({"fp32": 10.0, "int8": 20.0}, "fp32"),
        ({"int8": 20.0}, "int8"),
        ({"int8": 2.0, "fp16": 1.0}, "fp16"),
    ],
)
def test_float_is_served_unless_another_precision_is_a_tenth_faster(latency_ms: dict[str, float], served: str) -> None:
    assert fastest(latency_ms) == served


def test_what_was_measured_here_goes_before_what_the_bundle_brought_and_elsewhere_counts_for_nothing() -> None:
    here, kept, brought = machine(), {"rec": {"fp32": 1.0}}, {"rec": {"fp32": 2.0}}
    elsewhere = {**here, "onnxruntime": "0.1"}
    assert known_on(here, Measurements(here, kept), Measurements(here, brought)) == kept
    assert known_on(here, None, Measurements(here, brought)) == brought
    assert known_on(here, Measurements(elsewhere, kept), Measurements(here, brought)) == brought
    assert known_on(here, Measurements(elsewhere, kept), None) == {}


class Clock:
    """Stands in for `time` and for sessions that take time."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.now = 0.0
        self.ran: list[str] = []

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """A session whose runs take `seconds`, one after the other."""

    spec = ModelSpec((), ())

    def __init__(self, clock: Clock, name: str, seconds: Sequence[float]) -> None:
        """Run on `clock`."""
        self._clock, self._name, self._seconds = clock, name, iter(seconds)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:  # noqa: ARG002
        self._clock.ran.append(self._name)
        self._clock.now += next(self._seconds)
        return {}

    def close(self) -> None:
        """Nothing is held."""


def test_sessions_are_timed_in_turn_and_a_neighbour_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    sessions = {"a": Timed(clock, "a", [9, 0.5, 0.25, 4]), "b": Timed(clock, "b", [9, 0.5, 8, 0.5])}
    assert time_in_turn(sessions, {"x": np.zeros(1)}, 3) == {"a": 250.0, "b": 500.0}
    assert clock.ran == ["a", "b"] * 4


def test_timing_ends_after_the_round_in_which_its_limit_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    sessions = {name: Timed(clock, name, [0.1] * 9) for name in "ab"}
    time_in_turn(sessions, {}, 8, limit_s=0.5)
    assert clock.ran == ["a", "b"] * 3
