"""What the kernels should take on an Orin, from what they took on an H200: a prediction, to be checked on a device.

What was measured is the code that an Orin would run: the PTX of sm_87, which the H200's driver compiled anew.

For an operator (neck, head), a batch and a T the largest of three times:

    chain       the H200's time at batch 1, in cycles of its clock, at the module's clock, once for each wave
                of programs over the multiprocessors
    arithmetic  FLOPs / (dense FP16 rate of the module x the largest share of its own rate that the H200 reached)
    memory      compulsory bytes / bandwidth of the module

Assumptions. A program takes as many cycles on both: an Orin has fewer bytes in flight and a longer way to memory, so
this is hopeful; one program fits a multiprocessor at a time. The share reached when the H200 is full holds on Orin:
there it is a share of wgmma's rate, an instruction that code for sm_87 has not, so this is careful. Clocks are those
of the highest power mode and are held; nothing else uses the memory. Rates follow from 2,048 dense FP16 FLOP a
multiprocessor and cycle. Launches cost nothing: under a CUDA graph an empty one was 2 us on the H200.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.plan import tiles_of
from kernels.reference import Form, Neck

RESULTS = Path(__file__).parent / "results"
_FLOP_PER_CYCLE = 2048
_MHZ = 1e6


@dataclass(frozen=True, slots=True)
class Module:
    """A Jetson module, by its data sheet."""

    name: str
    multiprocessors: int
    clock_hz: float
    bytes_per_s: float

    @property
    def flop_per_s(self) -> float:
        """Dense FP16."""
        return self.multiprocessors * _FLOP_PER_CYCLE * self.clock_hz


MODULES = (
    Module("Orin Nano 8GB Super", 8, 1020 * _MHZ, 102e9),
    Module("Orin NX 16GB", 8, 918 * _MHZ, 102e9),
    Module("AGX Orin 32GB", 14, 930 * _MHZ, 204.8e9),
    Module("AGX Orin 64GB", 16, 1300 * _MHZ, 204.8e9),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time of one call, and which of the three it is."""

    op: str
    batch: int
    steps: int
    us: float
    bound: str


def predict(module: Module, measured: Mapping[str, Any]) -> list[Prediction]:
    """Every call of `measured`, which is what `kernels.bench --json` writes, on `module`."""
    there = measured["environment"]
    clock_hz = there["max_clock_mhz"] * _MHZ
    rows = [row for row in measured["rows"] if row["implementation"] == "ours"]
    share = {op: max(_share(row, there["machine"]) for row in rows if row["op"] == op) for op in ("neck", "head")}
    alone_us = {(row["op"], row["steps"]): row["us"] for row in rows if row["batch"] == 1}
    predictions = []
    for row in rows:
        times = {
            "chain": alone_us[row["op"], row["steps"]] * clock_hz / module.clock_hz * _waves(module, row),
            "arithmetic": row["flops"] / (module.flop_per_s * share[row["op"]]) * 1e6,
            "memory": row["bytes"] / module.bytes_per_s * 1e6,
        }
        bound = max(times, key=lambda which: times[which])
        predictions.append(Prediction(row["op"], row["batch"], row["steps"], times[bound], bound))
    return predictions


def _share(row: Mapping[str, Any], machine: Mapping[str, float]) -> float:
    """Of the machine's rate that a row reached."""
    share: float = row["flops"] / (row["us"] * 1e-6) / machine["flop_per_s"]
    return share


def _waves(module: Module, row: Mapping[str, Any]) -> int:
    """How often the multiprocessors are filled; the head is cut to what there is."""
    if row["op"] == "head":
        return 1
    form: Form = "v6" if row["form"] == "v6" else "v4"
    programs: int = row["batch"] * tiles_of(Neck(form, row["kv_heads"]), row["steps"])
    return math.ceil(programs / module.multiprocessors)


def committed() -> dict[str, Any]:
    """What the published predictions are made of; the H200's own rate was measured with the other kernels."""
    measured, rate = (json.loads((RESULTS / f"h200-{name}.json").read_bytes()) for name in ("sm87-ptx", "t40"))
    measured["environment"]["machine"] = rate["environment"]["machine"]
    return dict(measured)


def table(measured: Mapping[str, Any]) -> str:
    """Markdown: neck and head together in ms for each module, batch and T, and what bounds the neck."""
    by_module = {module: predict(module, measured) for module in MODULES}
    calls = sorted({(one.steps, one.batch) for ones in by_module.values() for one in ones})
    lines = ["| predicted ms | " + " | ".join(f"T {steps}, batch {batch}" for steps, batch in calls) + " |"]
    lines.append("|---" * (len(calls) + 1) + "|")
    for module, ones in by_module.items():
        cells = []
        for steps, batch in calls:
            here = {one.op: one for one in ones if (one.steps, one.batch) == (steps, batch)}
            total_ms = sum(one.us for one in here.values()) / 1e3
            cells.append(f"{total_ms:.2f} ({here['neck'].bound})")
        lines.append(f"| {module.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
