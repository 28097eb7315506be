"""Measures the memory that graphs need, in a process of its own: `python -m provisioning.peak FOLDER`.

FOLDER holds pairs NAME.onnx and NAME.npz with its inputs. Prints bytes as JSON: the largest resident set while all are
opened and run, what was there before the first of them, and what is left when nothing runs.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.runtime import choose
from models.errors import WorkshopError
from models.folder import pack_arrays, unpack_arrays
from models.measurements import Memory
from models.spec import Array
from provisioning.steps import RUNTIME

_RUNS = 3
_RUN_LIMIT_BYTES = 2**40
"""None in effect: with any limit the graphs share one arena, as they do where they are served."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of one process."""

    before: int
    """With the runtime, without a graph."""
    peak: int
    rest: int
    """With all graphs open, while none runs."""


def peak_bytes(graph: bytes, inputs: Mapping[str, Array]) -> int:
    """Largest resident set of a new process that opens `graph` and runs it on `inputs`."""
    return _measured({"graph": (graph, inputs)}).peak


def memory_of(graphs: Mapping[str, tuple[bytes, Mapping[str, Array]]]) -> Memory:
    """What one process takes for these graphs, each with inputs to run it on; advice for a first load elsewhere."""
    found = _measured(graphs)
    weights_bytes = max(found.rest - found.before, 0)
    return Memory(weights_bytes, max(found.peak - found.before, weights_bytes))


def _measured(graphs: Mapping[str, tuple[bytes, Mapping[str, Array]]]) -> Resident:
    with tempfile.TemporaryDirectory() as folder:
        for name, (content, inputs) in graphs.items():
            Path(folder, f"{name}.onnx").write_bytes(content)
            Path(folder, f"{name}.npz").write_bytes(pack_arrays(inputs))
        command = [sys.executable, "-m", "provisioning.peak", folder]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if ended.returncode:
        reason = ended.stderr.strip().split("\n")[-1]
        msg = f"the process that measures memory failed ({reason or ended.returncode}): make memory free and try again"
        raise WorkshopError(msg)
    return Resident(**json.loads(ended.stdout))


def _status(key: str) -> int:
    # Not getrusage: its peak includes that of whoever started this process.
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024


def _main(folder: Path) -> None:
    runtime = choose(RUNTIME, run_limit_bytes=_RUN_LIMIT_BYTES)
    before = _status("VmRSS:")
    sessions = []
    for path in sorted(folder.glob("*.onnx")):
        inputs = unpack_arrays(path.with_suffix(".npz").read_bytes())
        session = runtime.open(path.read_bytes(), threads=1)
        sessions.append(session)
        for _ in range(_RUNS):
            session.run(inputs)
    peak = _status("VmHWM:")
    runtime.release()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
    print(json.dumps({"before": before, "peak": peak, "rest": _status("VmRSS:")}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
