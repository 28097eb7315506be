"""The prediction for an Orin: a pure function of committed rows and of a module's data."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from kernels import bench
from kernels.predict import MODULES, Module, committed, predict, table

pytestmark = pytest.mark.unit
DOCS = Path(__file__).parents[2] / "docs"
NX = next(module for module in MODULES if module.name == "Orin NX 16GB")


def us(module: Module) -> dict[tuple[str, int, int], float]:
    return {(one.op, one.batch, one.steps): one.us for one in predict(module, committed())}


def test_one_short_line_takes_the_cycles_that_it_takes_on_the_h200() -> None:
    row = next(row for row in committed()["rows"] if (row["op"], row["batch"]) == ("neck", 1))
    assert us(NX)["neck", 1, 40] == pytest.approx(row["us"] * 1980 / 918)


def test_a_faster_clock_more_multiprocessors_and_more_bandwidth_never_cost_time() -> None:
    slow = us(NX)
    for better in ({"clock_hz": 2 * NX.clock_hz}, {"multiprocessors": 16}, {"bytes_per_s": 2 * NX.bytes_per_s}):
        assert all(time <= slow[call] for call, time in us(dataclasses.replace(NX, **better)).items())


def test_more_lines_never_take_less_and_every_time_says_what_bounds_it() -> None:
    for module in MODULES:
        found = us(module)
        for op in ("neck", "head"):
            for steps in (40, 80, 160):
                assert found[op, 1, steps] <= found[op, 8, steps] <= found[op, 32, steps]
        assert {one.bound for one in predict(module, committed())} <= {"chain", "arithmetic", "memory"}


def test_the_rates_are_those_of_the_data_sheets() -> None:
    rates = {module.name: round(module.flop_per_s / 1e12, 1) for module in MODULES}
    assert rates == {
        "Orin Nano 8GB Super": 16.7,
        "Orin NX 16GB": 15.0,
        "AGX Orin 32GB": 26.7,
        "AGX Orin 64GB": 42.6,
    }


def test_the_documented_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--predict"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == table(committed())
    assert printed in (DOCS / "kernels.md").read_text(encoding="utf-8")


def test_the_plot_is_drawn_from_the_committed_rows() -> None:
    spec = importlib.util.spec_from_file_location("plot_kernels", DOCS / "plot_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.draw() == (DOCS / "kernels.svg").read_text(encoding="utf-8")
