"""onnxruntime behind the seam. The only file of the daemon that imports onnxruntime."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from appliance.runtime.prepared import Prepared, digest
from models.errors import BadInput, BundleError, ConfigError, InsufficientMemory, ModelError
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
_FIRST_BYTES = 256 * 2**20
"""Of the arena, after it was given back: pages that nobody touches cost nothing, and one piece has fewer holes. 140 MB
for the detector, against 156 MB where it grows from 2 MiB."""
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class OnnxRuntime:
    """onnxruntime on the CPU.

    With a limit, all sessions share one arena of that size, weights aside: what one graph has freed serves the next,
    a run that would need more fails instead of the machine, and `release` gives the whole of it back. Without an
    arena at all the detector took 1.2 to 1.4 times as long, most of it in page faults.
    """

    name = "onnxruntime-cpu"
    opens_at_once = True
    _provider, _memory, _arena = _CPU, "Cpu", "cpu:0"
    _first_bytes = _FIRST_BYTES

    def __init__(
        self,
        run_limit_bytes: int = 0,
        prepared: Path | None = None,
        *,
        provider_options: Mapping[str, str] | None = None,
    ) -> None:
        """Share one arena of `run_limit_bytes` (0: each session has its own, without a limit).

        What graphs are made into is kept in the folder `prepared`, where one is given.
        """
        self._prepared = Prepared(prepared, self.name) if prepared else None
        self._shared, self._provider_options = run_limit_bytes > 0, dict(provider_options or {})
        if self._shared:
            info = ort.OrtMemoryInfo(self._memory, ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            first_bytes = min(self._first_bytes, run_limit_bytes // 4)
            arena = ort.OrtArenaCfg(
                {
                    "max_mem": run_limit_bytes,
                    "arena_extend_strategy": _DOUBLING,
                    "initial_growth_chunk_size_bytes": first_bytes or -1,
                }
            )
            ort.create_and_register_allocator_v2(self._provider, info, self._provider_options, arena)
            self._smallest = self._session(_IDENTITY, self._options(1))
            self._shrink = ort.RunOptions()
            self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._arena)

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> OnnxSession:
        """Open a graph; one intra-op thread makes results repeatable to the bit on one machine."""
        try:
            return OnnxSession(self._make(graph, threads, few_shapes))
        except ConfigError:
            raise
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            msg = f"onnxruntime cannot load this graph: {_first_line(error)}"
            raise BundleError(msg) from error

    def release(self) -> None:
        """See `Runtime.release`; an arena is only ever shrunk at the end of a run."""
        if self._shared:
            self._smallest.run(None, {"x": np.zeros(1, np.float32)}, self._shrink)

    def open_again(self, graph: str, *, threads: int, few_shapes: bool = True) -> OnnxSession | None:
        """See `WorkerRuntime.open_again`."""
        made = self._prepared.find(graph) if self._prepared else None
        if made is None:
            return None
        options = self._options(threads, few_shapes)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return OnnxSession(self._session(made, options))
        except Exception:  # it is made again
            return None

    def _make(self, graph: bytes, threads: int, few_shapes: bool) -> ort.InferenceSession:
        if self._prepared:
            options = self._options(threads, few_shapes)
            with contextlib.suppress(Exception), self._prepared.making(digest(graph)) as path:  # shows again below
                options.optimized_model_filepath = str(path)
                return self._session(graph, options)
        return self._session(graph, self._options(threads, few_shapes))

    def _session(self, graph: bytes | Path, options: ort.SessionOptions) -> ort.InferenceSession:
        providers = [(self._provider, self._provider_options)]
        return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)

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


class OnnxCudaRuntime(OnnxRuntime):
    """onnxruntime on the first NVIDIA card that this process sees. Never run on one: see docs/server.md.

    It never takes the CPU for the card in silence: where CUDA cannot be used, it opens nothing. Nodes for which CUDA
    has no kernel run on the CPU unless that was forbidden.
    """

    name = "onnxruntime-cuda"
    opens_at_once = False
    _provider, _memory, _arena = _CUDA, "Cuda", "gpu:0"
    _first_bytes = 0  # there all that is taken is used up

    def __init__(self, run_limit_bytes: int = 0, *, gpu_only: bool = False) -> None:
        """Take at most `run_limit_bytes` of the card (0: no limit); with `gpu_only` no graph may need the CPU.

        Raises ConfigError where this onnxruntime knows no CUDA, or cannot use it here.
        """
        self._gpu_only = gpu_only
        if _CUDA not in ort.get_available_providers():
            raise ConfigError(
                "the installed onnxruntime knows no CUDA: put onnxruntime-gpu in its place, or choose another runtime"
            )
        ort.preload_dlls()  # those of NVIDIA's own wheels are on no search path
        limit = {"gpu_mem_limit": str(run_limit_bytes)} if run_limit_bytes else {}
        # A search by running each way of a convolution would be made anew for every width of a text line; and TF32's
        # ten bits of mantissa are outside the tolerance of golden vectors in FP32.
        told = {"device_id": "0", "cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0", **limit}
        super().__init__(run_limit_bytes, provider_options=told)

    def _session(self, graph: bytes | Path, options: ort.SessionOptions) -> ort.InferenceSession:
        if self._gpu_only:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        session = super()._session(graph, options)
        if _CUDA not in session.get_providers():
            raise ConfigError(
                "onnxruntime-gpu cannot use a card here, and would compute on the CPU: see that driver, CUDA and cuDNN "
                "are those it is made for (appliance doctor), or choose another runtime"
            )
        return session


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
        self._inputs = frozenset(tensor.name for tensor in self.spec.inputs)
        self._outputs = [tensor.name for tensor in self.spec.outputs]

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """See `Session.run`."""
        if self._session is None:
            msg = "the session is closed"
            raise ModelError(msg)
        missing = self._inputs.difference(inputs)
        if missing:
            msg = f"the model needs {', '.join(sorted(missing))} as well"
            raise BadInput(msg)
        names = self._outputs if outputs is None else list(outputs)
        if not names:
            return {}  # to onnxruntime an empty list means all of them
        feeds = {name: _texts(name, array) if array.dtype.kind == "O" else array for name, array in inputs.items()}
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
            name: _encoded(array) if array.dtype.kind == "O" else array
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
