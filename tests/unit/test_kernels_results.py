"""The committed figures are those of the kernels as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kernels
from kernels.bench import TOLD
from kernels.plan import source_digest

pytestmark = pytest.mark.unit
RESULTS = sorted((Path(kernels.__file__).parent / "results").glob("*.json"))
NECK_BYTES = 120 * 2 + 2 * (2 * 2 * 2 * 16 * 2)
"""Of a token: the output; K and V of two heads in two blocks, written and put back to rest (docs/kernels.md)."""
HEAD_BYTES = 52 * 3 * 4 + 52 * 3 * 16 + 32
"""Of a token: three words of 52 programs, put back two rows at a time; and the answer. In sectors of 32 bytes."""
FLOORS = {("neck", 1): 3.0, ("neck", 8): 4.0, ("neck", 32): 4.0, ("head", 1): 1.5, ("head", 8): 2.2, ("head", 32): 4.5}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_rows_were_measured_on_this_version_of_the_kernel(path: Path) -> None:
    found = json.loads(path.read_bytes())
    digests = {row.get("source_digest", found.get("source_digest")) for row in found["rows"]}
    assert digests == {source_digest()}, "measure again: python -m kernels.bench --json FILE"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_row_of_the_benchmark_names_what_it_was_measured_with(path: Path) -> None:
    found = json.loads(path.read_bytes())
    if "how" not in found:  # written by other means, which that tells
        assert all(set(TOLD) <= set(row) for row in found["rows"])
        assert all({"triton", "assembler"} <= set(row["versions"]) for row in found["rows"])


def test_the_recogniser_reads_the_same_text_with_the_kernels() -> None:
    rows = json.loads(next(path for path in RESULTS if path.stem == "h200-recogniser").read_bytes())["rows"]
    for row in rows:
        assert row["lines"] == 435
        assert row["same"] >= 0.99
        assert abs(row["cer"] - row["graph_cer"]) <= 0.001


def test_the_v6_neck_is_three_times_as_fast_as_its_compiled_spelling() -> None:
    rows = json.loads(next(path for path in RESULTS if path.stem == "h200-v6-t40").read_bytes())["rows"]
    for batch in (1, 8, 32):
        here = {row["implementation"]: row["us"] for row in rows if (row["op"], row["batch"]) == ("neck", batch)}
        assert here["torch compile gemm"] / here["ours"] >= 3


@pytest.mark.parametrize("path", [path for path in RESULTS if path.stem.startswith("h200-t40")], ids=lambda p: p.stem)
def test_no_factor_is_below_its_line(path: Path) -> None:
    rows = json.loads(path.read_bytes())["rows"]
    for (op, batch), floor in FLOORS.items():
        here = [row for row in rows if (row["op"], row["batch"]) == (op, batch)]
        ours = next(row["us"] for row in here if row["implementation"] == "ours")
        compiled = min(row["us"] for row in here if row["implementation"].startswith("torch compile"))
        assert compiled / ours >= floor


def test_dram_traffic_of_a_large_batch_is_close_to_compulsory() -> None:
    path = next(path for path in RESULTS if path.stem == "h200-bytes")
    large = [row for row in json.loads(path.read_bytes())["rows"] if "compulsory_bytes" in row]
    moved = {
        row["implementation"]: (row["dram_read_bytes"] + row["dram_write_bytes"]) / row["compulsory_bytes"]
        for row in large
    }
    assert moved["ours"] <= 1.2
    assert moved["torch eager sdpa"] > 1.5, "else the comparison does not discriminate"


def test_an_operator_is_one_launch_that_stores_little_beyond_its_output_and_its_stated_scratch() -> None:
    path = next(path for path in RESULTS if path.stem == "h200-bytes")
    rows = [row for row in json.loads(path.read_bytes())["rows"] if "compulsory_bytes" not in row]
    for row in rows:
        tokens = row["batch"] * row["steps"]
        stated_bytes = tokens * (NECK_BYTES if row["op"] == "neck" else HEAD_BYTES)
        assert row["stored_bytes"] <= 1.4 * stated_bytes
    assert {row["kernels"] for row in rows} == {1}
