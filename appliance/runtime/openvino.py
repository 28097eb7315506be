"""OpenVINO behind the seam, for x86 hosts. The only file of the daemon that imports it, or onnx, each by its name."""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

import numpy as np

from appliance.runtime.prepared import Prepared, digest
from models.errors import BadInput, BundleError, ConfigError, InsufficientMemory, ModelError
from models.spec import Array, ModelSpec, Tensor, TensorSpec, check_request

_DATATYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
}
"""Type of an element -> datatype on the wire. On the CPU all others lose bits: what is wider is cut to 32 of them."""
_INT32 = np.iinfo(np.int32)
_CONVERTER = "openvino.tools.ovc"
"""Imported with the library where it can be: it loads a client of telemetry, and takes as long as all the rest."""


def _library(name: str) -> Any:  # noqa: ANN401 - the libraries are untyped
    sys.modules.setdefault(_CONVERTER, None)  # type: ignore[arg-type] # what makes an import of it fail
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"{name} cannot be loaded ({error}): install edge-appliance[openvino], or choose another runtime"
        raise ConfigError(msg) from error


def _inlined(graph: bytes) -> bytes:
    """The graph without model-local functions, which OpenVINO does not know.

    onnxruntime inlines them as well, but takes HardSwish apart with them, which cost the recogniser a third.
    """
    model = _library("onnx").load_model_from_string(graph)
    return bytes(_library("onnx.inliner").inline_local_functions(model).SerializeToString())


class OpenVinoRuntime:
    """OpenVINO on the CPU. It knows no limit for the memory of its runs: whoever watches the process must hold it."""

    name = "openvino"
    opens_at_once = True

    def __init__(self, concurrency: int = 1, prepared: Path | None = None) -> None:
        """Let `concurrency` runs of a session compute at once; more of them wait. Raises ConfigError without it.

        What graphs are made into is kept in the folder `prepared`, where one is given.
        """
        self._library, self._concurrency = _library("openvino"), concurrency
        self._prepared = Prepared(prepared, self.name) if prepared else None
        self._core = self._library.Core()
        self._sessions: weakref.WeakSet[OpenVinoSession] = weakref.WeakSet()

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> OpenVinoSession:  # noqa: ARG002
        """Open a graph; it computes in FP32 whatever the processor offers, in one order on one thread."""
        try:
            model = self._core.read_model(_inlined(graph))
            compiled = [self._core.compile_model(model, "CPU", _options(threads)) for _ in range(self._concurrency)]
            session = self._opened(compiled)
        except (BundleError, ConfigError):
            raise
        except Exception as error:  # the library raises RuntimeError for whatever it does not like
            msg = f"openvino cannot load this graph: {_reason(error)}"
            raise BundleError(msg) from error
        if self._prepared:
            with contextlib.suppress(Exception), self._prepared.making(digest(graph)) as path:  # else made again
                path.write_bytes(compiled[0].export_model().getbuffer())
        return session

    def open_again(self, graph: str, *, threads: int, few_shapes: bool = True) -> OpenVinoSession | None:  # noqa: ARG002
        """See `WorkerRuntime.open_again`."""
        made = self._prepared.find(graph) if self._prepared else None
        if made is None:
            return None
        try:
            content, options = made.read_bytes(), _options(threads)
            return self._opened([self._core.import_model(content, "CPU", options) for _ in range(self._concurrency)])
        except Exception:  # it is made again
            return None

    def release(self) -> None:
        """See `Runtime.release`."""
        for session in list(self._sessions):
            session.release()

    def _opened(self, compiled: Sequence[Any]) -> OpenVinoSession:
        session = OpenVinoSession(self._library, compiled)
        self._sessions.add(session)
        return session


class OpenVinoSession:
    """One graph, compiled once for each run that may compute at once; others wait for one of them."""

    def __init__(self, library: Any, compiled: Sequence[Any]) -> None:  # noqa: ANN401 - the library is untyped
        """Describe what was compiled; raises BundleError for tensors that cannot travel or would lose bits."""
        self._library, self._concurrency = library, len(compiled)
        self._idle: LifoQueue[Any] = LifoQueue()
        """Infer requests that compute nothing; None once the session is closed."""
        for one in compiled:
            self._idle.put(one.create_infer_request())
        self.spec = ModelSpec(
            inputs=tuple(_tensor_spec(port) for port in compiled[0].inputs),
            outputs=tuple(_tensor_spec(port) for port in compiled[0].outputs),
        )
        self._outputs = {tensor.name: index for index, tensor in enumerate(self.spec.outputs)}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """See `Session.run`."""
        tensors = [Tensor.from_array(name, array) for name, array in inputs.items()]
        check_request(self.spec, tensors, outputs)
        # It shares memory that it might write to, and holds no reference: `feeds` must outlive the run.
        feeds = {tensor.name: np.require(tensor.to_array(), requirements="W") for tensor in tensors}
        _check_range(feeds)
        request = self._idle.get()
        if request is None:
            self._idle.put(None)
            msg = "the session is closed"
            raise ModelError(msg)
        try:
            for index, tensor in enumerate(self.spec.inputs):
                request.set_input_tensor(index, self._library.Tensor(feeds[tensor.name], shared_memory=True))
            request.start_async()  # `infer` on one thread says nothing of what fails, and answers with no element
            request.wait()
            names = self._outputs if outputs is None else outputs
            return {name: request.get_output_tensor(self._outputs[name]).data.copy() for name in names}
        except Exception as error:
            request = request.get_compiled_model().create_infer_request()  # what failed can be left half done
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                msg = "this request would take more memory than there is: send fewer or smaller inputs at once"
                raise InsufficientMemory(msg) from error
            msg = f"the model failed: {_reason(error)}"
            raise ModelError(msg) from error
        finally:
            self._idle.put(request)

    def release(self) -> None:
        """Give back what earlier runs have left between operators, where none computes."""
        idle = []
        with contextlib.suppress(Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for request in idle:
            if request is not None:
                request.get_compiled_model().release_memory()
            self._idle.put(request)

    def close(self) -> None:
        """See `Session.close`; what still runs ends first."""
        for _ in range(self._concurrency):
            if self._idle.get() is None:
                break
        self._idle.put(None)


def _options(threads: int) -> dict[str, object]:
    return {
        # Two streams of one compiled graph gave wrong answers in INT8, other ones each time (2026.4.1).
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # else BF16 where the processor has it, outside of every tolerance
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # nor is anything quantized that the graph does not say
        # Q/DQ as it is written: on processors without VNNI its integer kernels add in 16 bits, which overflow.
        "LP_TRANSFORMS_MODE": False,
        "ENABLE_CPU_PINNING": False,  # two workers would be pinned to the same cores
    }


def _check_range(feeds: Mapping[str, Array]) -> None:
    for name, array in feeds.items():
        if array.dtype == np.int64 and array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            msg = f"input {name!r} holds numbers over 32 bits, which openvino would cut: choose another runtime"
            raise BadInput(msg)


def _reason(error: Exception) -> str:
    """The last line of what the library says; those before tell where in its source."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))[:400]


def _tensor_spec(port: Any) -> TensorSpec:  # noqa: ANN401 - the library is untyped
    name, kind, shape = port.any_name, port.element_type.to_string(), port.partial_shape
    datatype = _DATATYPES.get(kind)
    if datatype is None or shape.rank.is_dynamic:
        what = "any number of dimensions" if datatype else f"type {kind}"
        msg = f"tensor {name!r} has {what}, which openvino cannot serve without loss: choose another runtime"
        raise BundleError(msg)
    return TensorSpec(name, datatype, tuple(size.get_length() if size.is_static else -1 for size in shape))
