"""The Triton kernels' mathematics against the reference, on the CPU, in Triton's interpreter.

A neck may be off by no more than the same operator computed in FP16 by numpy, with the same weights and input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install '.[kernels]')"),
]
ROOT = Path(__file__).parents[2]
CASES: list[dict[str, Any]] = [
    *({"op": "neck", "form": "v4", "kv_heads": kv, "batch": b, "steps": t} for kv, b, t in (
        (2, 1, 1), (2, 2, 7), (8, 1, 13), (1, 1, 14), (4, 1, 15), (2, 1, 28), (8, 1, 40), (2, 2, 40), (1, 1, 56),
        (2, 1, 64), (2, 1, 65), (4, 1, 129),
    )),
    *({"op": "neck", "form": "v6", "kv_heads": kv, "batch": b, "steps": t} for kv, b, t in (
        (8, 1, 1), (2, 2, 9), (1, 1, 11), (4, 1, 40), (2, 1, 67),
    )),
    *({"op": "neck", "form": form, "kv_heads": 2, "batch": 3, "steps": 10, "whole": True} for form in ("v4", "v6")),
    {"op": "neck", "form": "v4", "kv_heads": 2, "batch": 2, "steps": 20, "extreme": True},
    {"op": "head", "rows": 1, "classes": 97, "programs": 1, "form": "whole"},
    {"op": "head", "rows": 65, "classes": 6625, "programs": 1, "form": "whole", "large": True},
    {"op": "head", "rows": 40, "classes": 1000, "programs": 7, "form": "share"},
    {"op": "head", "rows": 129, "classes": 6625, "programs": 33, "form": "share", "large": True},
    {"op": "head", "rows": 70, "classes": 500, "programs": 1, "form": "exchange"},
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    given = "".join(json.dumps(case) + "\n" for case in CASES)
    command = [sys.executable, str(ROOT / "tests/support/interpreted.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(str(v) for v in CASES[n].values()))
def test_kernel_computes_the_reference(results: list[dict[str, Any]], number: int) -> None:
    result = results[number]
    assert result["error"] < result["limit"], f"every element written, and right: {result}"
    assert result.get("slack", 0) < 2e-3, f"the class is as good as the best: {result}"
    assert result["at_rest"], "scratch is left as it was found"
