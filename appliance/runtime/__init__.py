"""The hardware seam: what opens a graph here and runs it.

`Runtime` and `Session` are protocols with four full implementations: `null` (no model, for tests and for trying
the daemon), `onnx` (onnxruntime), `openvino` and `tensorrt` (TensorRT, or TensorRT-RTX where a profile asks for it).
One is chosen by name at start; after that it is an object. All pass the contract suite in tests/contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

from models.errors import ConfigError
from models.spec import Array, ModelSpec

RuntimeName: TypeAlias = Literal["onnxruntime-cpu", "onnxruntime-cuda", "openvino", "tensorrt", "tensorrt-rtx", "null"]


class Session(Protocol):
    """One graph, open. `run` may be called from several threads at once."""

    spec: ModelSpec

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Compute `outputs` (all when None). The arrays returned belong to the caller.

        Raises BadInput when the graph refuses these inputs, InsufficientMemory when it would need more than the
        runtime may take, ModelError when it fails on them.
        """

    def close(self) -> None:
        """Give back what the session holds; a closed session may not run."""


class Runtime(Protocol):
    """A way to run graphs on this machine."""

    name: str
    """Its `RuntimeName`, which every answer carries."""
    opens_at_once: bool
    """Whether `open` may be called from several threads at once; a GPU's context belongs to the thread that made it."""

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> Session:
        """Open a graph from its bytes; raises BundleError when it cannot be loaded.

        With `few_shapes` memory may be planned, and more of it taken, for each shape that comes.
        """

    def release(self) -> None:
        """Give back what earlier runs have left allocated for later ones; may be called while sessions run."""


class WorkerRuntime(Runtime, Protocol):
    """A runtime as workers have it, which open the same graphs time after time."""

    def open_again(self, graph: str, *, threads: int, few_shapes: bool = True) -> Session | None:
        """Open what the graph of that sha256 was made into before; None where that must be done anew, with `open`."""


def choose(
    name: str,
    *,
    engines: Sequence[Path] = (),
    run_limit_bytes: int = 0,
    prepared: Path | None = None,
    gpu_memory_bytes: int = 0,
    gpu_only: bool = False,
    concurrency: int = 1,
) -> WorkerRuntime:
    """The runtime of that name; only its own libraries are imported.

    `engines` are the folders with the plans of a bundle, for a runtime that runs compiled ones; in `prepared` one that
    optimises graphs for the CPU as it opens them keeps what it made. With a limit, all runs of all sessions together
    may take that much memory beside the weights; those of TensorRT and OpenVINO have none. `gpu_memory_bytes` is a
    second limit for onnxruntime-cuda, which with `gpu_only` refuses graphs that need the CPU. openvino computes
    `concurrency` runs of a graph at once.
    Raises ConfigError for unknown names and missing libraries.
    """
    if name == "onnxruntime-cpu":
        from appliance.runtime.onnx import OnnxRuntime  # noqa: PLC0415 - a worker loads one runtime only

        return OnnxRuntime(run_limit_bytes, prepared)
    if name == "onnxruntime-cuda":
        from appliance.runtime.onnx import OnnxCudaRuntime  # noqa: PLC0415 - a worker loads one runtime only

        limits = [limit for limit in (run_limit_bytes, gpu_memory_bytes) if limit]
        return OnnxCudaRuntime(min(limits, default=0), gpu_only=gpu_only)
    if name == "openvino":
        from appliance.runtime.openvino import OpenVinoRuntime  # noqa: PLC0415 - a worker loads one runtime only

        return OpenVinoRuntime(concurrency, prepared)
    if name in {"tensorrt", "tensorrt-rtx"}:
        from appliance.runtime.tensorrt import TensorRtRuntime  # noqa: PLC0415 - a worker loads one runtime only

        return TensorRtRuntime(name, *engines)
    if name == "null":
        from appliance.runtime.null import NullRuntime  # noqa: PLC0415 - a worker loads one runtime only

        return NullRuntime(run_limit_bytes)
    msg = f"there is no runtime {name!r}; known: {', '.join(get_args(RuntimeName))}"
    raise ConfigError(msg)
