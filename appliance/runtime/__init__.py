"""The hardware seam: what opens a graph here and runs it.

`Runtime` and `Session` are protocols with two full implementations: `null` (no model, for tests and for
trying the daemon) and `onnx` (onnxruntime). One is chosen by name at start; after that it is an object.
Both pass the contract suite in tests/contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, get_args

from models.errors import ConfigError
from models.spec import Array, ModelSpec

RuntimeName: TypeAlias = Literal["onnxruntime-cpu", "null"]


class Session(Protocol):
    """One graph, open. `run` may be called from several threads at once."""

    spec: ModelSpec

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Compute `outputs` (all when None). The arrays returned belong to the caller.

        Raises BadInput when the graph refuses these inputs, ModelError when it fails on them.
        """

    def close(self) -> None:
        """Give back what the session holds; a closed session may not run."""


class Runtime(Protocol):
    """A way to run graphs on this machine."""

    name: str
    """Its `RuntimeName`, which every answer carries."""

    def open(self, graph: bytes, *, threads: int) -> Session:
        """Open a graph from its bytes; raises BundleError when it cannot be loaded."""


def choose(name: str) -> Runtime:
    """The runtime of that name; only its own libraries are imported. Raises ConfigError for unknown names."""
    if name == "onnxruntime-cpu":
        from appliance.runtime.onnx import OnnxRuntime  # noqa: PLC0415 - a worker loads one runtime only

        return OnnxRuntime()
    if name == "null":
        from appliance.runtime.null import NullRuntime  # noqa: PLC0415 - a worker loads one runtime only

        return NullRuntime()
    msg = f"there is no runtime {name!r}; known: {', '.join(get_args(RuntimeName))}"
    raise ConfigError(msg)
