"""onnxruntime behind the seam. The only file of the daemon that imports onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from models.errors import BadInput, BundleError, InsufficientMemory, ModelError
from models.spec import Array, ModelSpec, TensorSpec

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


_NO_MEMORY = ("is smaller than requested bytes of", "Failed to allocate memory", "bad allocation")
"""What onnxruntime says when an arena is full, or the machine."""
_IDENTITY = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201695a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a020801"
    "42040a001011"
)
"""A graph whose output `y` is its input `x`, FP32 [1]: the smallest thing to run."""
_DOUBLING = 0
"""Arena extension in powers of two. Measured on the detector: 376 MB at most, against 463 MB with exact requests."""


class OnnxRuntime:
    """onnxruntime on the CPU.

    With a limit, all sessions share one arena of that size, weights aside: what one graph has freed serves the next,
    a run that would need more fails instead of the machine, and `release` gives the whole of it back. Without an
    arena at all the detector took 1.2 to 1.4 times as long, most of it in page faults.
    """

    name = "onnxruntime-cpu"
    opens_at_once = True

    def __init__(self, run_limit_bytes: int = 0) -> None:
        """Share one arena of `run_limit_bytes` (0: each session has its own, without a limit)."""
        self._shared = run_limit_bytes > 0
        if self._shared:
            info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            ort.create_and_register_allocator(info, ort.OrtArenaCfg(run_limit_bytes, _DOUBLING, -1, -1))
            self._smallest = ort.InferenceSession(_IDENTITY, self._options(1), providers=["CPUExecutionProvider"])
            self._shrink = ort.RunOptions()
            self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> OnnxSession:
        """Open a graph; one intra-op thread makes results repeatable to the bit on one machine."""
        try:
            session = ort.InferenceSession(
                graph, self._options(threads, few_shapes), providers=["CPUExecutionProvider"]
            )
            return OnnxSession(session)
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            msg = f"onnxruntime cannot load this graph: {_first_line(error)}"
            raise BundleError(msg) from error

    def release(self) -> None:
        """See `Runtime.release`; an arena is only ever shrunk at the end of a run."""
        if self._shared:
            self._smallest.run(None, {"x": np.zeros(1, np.float32)}, self._shrink)

    def _options(self, threads: int, few_shapes: bool = True) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # its errors are raised as well; printed, they would tear the daemon's log
        # One planned block a shape instead of many small ones, which two runs at a time would take from each other: a
        # tenth less CPU for the recogniser. For the detector, which sees pictures of any size, a quarter more memory
        # and no gain.
        options.enable_mem_pattern = few_shapes
        # Spinning threads would steal the core that decodes the next picture.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Q/DQ as it is written. Where a convolution ends in the next one's Q, fused integer kernels add in 16 bits,
        # which overflow on processors without VNNI; and weights kept as integers would be widened anew in every run.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        if self._shared:
            options.add_session_config_entry("session.use_env_allocators", "1")
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        return options


class OnnxSession:
    """One graph in onnxruntime; thread-safe, because onnxruntime's own `run` is."""

    def __init__(self, session: ort.InferenceSession) -> None:
        """Describe `session`; raises BundleError for inputs that are no plain tensors."""
        # It keeps the file's bytes to open itself again with other providers, which nobody does here.
        vars(session).pop("_model_bytes", None)
        self._session: ort.InferenceSession | None = session
        self.spec = ModelSpec(
            inputs=tuple(_tensor_spec(node) for node in session.get_inputs()),
            outputs=tuple(_tensor_spec(node) for node in session.get_outputs()),
        )

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """See `Session.run`."""
        if self._session is None:
            msg = "the session is closed"
            raise ModelError(msg)
        missing = sorted({tensor.name for tensor in self.spec.inputs} - set(inputs))
        if missing:
            msg = f"the model needs {', '.join(missing)} as well"
            raise BadInput(msg)
        names = list(outputs) if outputs is not None else [tensor.name for tensor in self.spec.outputs]
        if not names:
            return {}  # to onnxruntime an empty list means all of them
        feeds = {name: _texts(name, array) if array.dtype == np.object_ else array for name, array in inputs.items()}
        try:
            values = self._session.run(names, feeds)
        except Exception as error:
            message = _first_line(error)
            if "INVALID_ARGUMENT" in message:
                msg = f"the model refuses these inputs: {message}"
                raise BadInput(msg) from error
            if any(phrase in message for phrase in _NO_MEMORY):
                msg = "this request would take more memory than the model may use: send fewer or smaller inputs at once"
                raise InsufficientMemory(msg) from error
            msg = f"the model failed: {message}"
            raise ModelError(msg) from error
        return {
            name: _encoded(array) if array.dtype == np.object_ else array
            for name, array in zip(names, values, strict=True)
        }

    def close(self) -> None:
        """See `Session.close`."""
        self._session = None


def _texts(name: str, array: Array) -> Array:
    """Strings of a BYTES tensor, which are UTF-8; given `bytes`, onnxruntime would compute on their Python spelling."""
    try:
        return _elements(array, [element.decode() for element in array.reshape(-1)])
    except (AttributeError, UnicodeDecodeError) as error:
        msg = f"input {name!r} holds elements that are no UTF-8 text"
        raise BadInput(msg) from error


def _encoded(array: Array) -> Array:
    return _elements(array, [element.encode() for element in array.reshape(-1)])


def _elements(like: Array, elements: Sequence[object]) -> Array:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(like.shape)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:400]


def _tensor_spec(node: ort.NodeArg) -> TensorSpec:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        msg = f"tensor {node.name!r} has type {node.type}, which cannot travel over the protocol"
        raise BundleError(msg)
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return TensorSpec(node.name, datatype, shape)
