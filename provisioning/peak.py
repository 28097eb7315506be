"""Measures the memory that one graph needs, in a process of its own: `python -m provisioning.peak FOLDER`.

FOLDER holds graph.onnx and inputs.npz. Prints the largest resident set, in bytes, while the graph is opened and run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from appliance.runtime import choose
from models.errors import WorkshopError
from models.folder import pack_arrays, unpack_arrays
from models.spec import Array
from provisioning.steps import RUNTIME

_RUNS = 3


def peak_bytes(graph: bytes, inputs: Mapping[str, Array]) -> int:
    """Largest resident set of a new process that opens `graph` and runs it on `inputs`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "graph.onnx").write_bytes(graph)
        Path(folder, "inputs.npz").write_bytes(pack_arrays(inputs))
        command = [sys.executable, "-m", "provisioning.peak", folder]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if ended.returncode:
        reason = ended.stderr.strip().split("\n")[-1]
        msg = f"the process that measures memory failed ({reason or ended.returncode}): make memory free and try again"
        raise WorkshopError(msg)
    return int(ended.stdout)


def _main(folder: Path) -> None:
    inputs = unpack_arrays((folder / "inputs.npz").read_bytes())
    session = choose(RUNTIME).open((folder / "graph.onnx").read_bytes(), threads=1)
    for _ in range(_RUNS):
        session.run(inputs)
    # Not getrusage: its peak includes that of whoever started this process.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
