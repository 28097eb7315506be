"""How much memory runs may take: a limit holds whatever is asked, and what was taken is given back.

Each runtime is tried in a process of its own, because a limit holds for a whole process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.contract

MIB = 2**20
LIMIT_BYTES = 64 * MIB

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from appliance.gauge import Gauge, trim
from appliance.runtime import choose
from models.errors import InsufficientMemory

name, small, large, limit_bytes = sys.argv[1], *map(Path, sys.argv[2:4]), int(sys.argv[4])
if name == "onnxruntime-cuda":
    sys.path.append(sys.argv[5])
    from appliance.runtime import onnx
    from doubles import cuda_provider
    onnx.ort = cuda_provider.CudaOnnxRuntime()
runtime = choose(name, run_limit_bytes=limit_bytes)
small, large = (runtime.open(path.read_bytes(), threads=1) for path in (small, large))
gauge = Gauge()
x = np.ones((1, 1), np.float32)
small.run({"x": x})
before = gauge.resident_bytes()
gauge.reset()
small.run({"x": x})
peak = gauge.peak_bytes() - before
refused = 0
for _ in range(3):
    try:
        large.run({"x": x})
    except InsufficientMemory:
        refused += 1
highest = gauge.peak_bytes() - before
right = bool((small.run({"x": x})["y"] == 1).all())
runtime.release()
trim()
print(json.dumps({"peak": peak, "refused": refused, "highest": highest, "right": right,
                  "left": gauge.resident_bytes() - before}))
"""


def widened(path: Path, width: int) -> Path:
    """`y` [1, 1] is the mean of `x` [1, 1] written `width` times over, twice."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["wide"]),
        helper.make_node("Add", ["wide", "wide"], ["twice"]),
        helper.make_node("Sub", ["twice", "wide"], ["once"]),
        helper.make_node("ReduceMean", ["once"], ["y"], axes=[1], keepdims=1),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in ("x", "y")]
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [1, width])
    graph = helper.make_graph(nodes, "widened", ends[:1], ends[1:], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def graphs(folder: Path, runtime: str) -> tuple[Path, Path]:
    """One that takes some memory to run, and one that takes far more than the limit."""
    small, large = folder / "small", folder / "large"
    if runtime == "null":
        small.write_text(json.dumps({"run_bytes": 16 * MIB}))
        large.write_text(json.dumps({"run_bytes": 512 * MIB}))
        return small, large
    return widened(small, 2 * MIB), widened(large, (32 if runtime == "openvino" else 128) * MIB)


def tried(folder: Path, runtime: str) -> dict[str, int]:
    """What the script saw of `runtime`."""
    paths = [str(path) for path in graphs(folder, runtime)]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, runtime, *paths, str(LIMIT_BYTES), str(Path(__file__).parent.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seen: dict[str, int] = json.loads(run.stdout)
    return seen


@pytest.mark.parametrize("runtime", ["onnxruntime-cpu", "onnxruntime-cuda", "null"])
def test_a_run_over_the_limit_is_refused_and_the_next_one_within_it_answers(tmp_path: Path, runtime: str) -> None:
    seen = tried(tmp_path, runtime)
    assert seen["refused"] == 3
    assert seen["right"]
    assert seen["highest"] < LIMIT_BYTES + 16 * MIB
    assert seen["left"] < 8 * MIB


@pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="OpenVINO has no wheel for this machine")
def test_openvino_knows_no_limit_and_gives_back_what_runs_took(tmp_path: Path) -> None:
    seen = tried(tmp_path, "openvino")
    assert (seen["refused"], seen["right"]) == (0, True)
    assert seen["highest"] > LIMIT_BYTES
    assert seen["left"] < 8 * MIB
