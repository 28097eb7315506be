"""TensorRT and TensorRT-RTX behind the seam: the only file that imports either, and the only runtime that uses CUDA.

Names are those that TensorRT 10.3 to 11.4 and TensorRT-RTX 1.7 share; a test holds every one of them against a table
taken from their own bindings. Buffers, streams and captured graphs go through `kernels.launch.Driver`.
None of this has run on a GPU yet: docs/engines.md lists what was tried and how.
Past 400 lines because engine, context, buffers and captured graphs share one thread's CUDA state.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from appliance.runtime import machine
from kernels import plugin
from kernels.launch import Driver
from models.engine import PASSPORT, Passport, Shapes, Target
from models.errors import BadInput, BundleError, ConfigError, ModelError
from models.spec import DTYPES, Array, ModelSpec, Tensor, TensorSpec, check_request

_MODULES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
"""Name in the library's DataType -> datatype on the wire."""
_WARNING = 2
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_CAPTURED_RUN = 2
_MOST_SHAPES = 16
"""Sets of input shapes of one graph that stay ready: the oldest gives its buffers back."""
_MIB = 2**20


def installed(backend: str) -> bool:
    """Whether `backend` can probably be imported; nothing is loaded."""
    return any(importlib.util.find_spec(name) for name in _MODULES[backend])


def module(backend: str) -> Any:  # noqa: ANN401 - the libraries are untyped
    """The library of `backend`; raises ConfigError when it cannot be loaded."""
    names = _MODULES[backend]
    name = next((name for name in names if importlib.util.find_spec(name)), names[0])
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"{backend} cannot be loaded ({error}): install it, or choose another runtime"
        raise ConfigError(msg) from error


def logger(trt: Any, hear: Callable[[int, str], None]) -> Any:  # noqa: ANN401 - the libraries are untyped
    """A logger that hands each message to `hear` with its severity: 0 internal error, 1 error, 2 warning, 3 note.

    The libraries keep the first one of a process for ever and ignore the others.
    """

    class Log(trt.ILogger):  # type: ignore[misc] # the libraries are untyped
        """Hands on."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:  # noqa: ANN401 - an enumeration of the library
            hear(int(severity), msg)

    return Log()


def here(backend: str, trt: Any, driver: Driver) -> Target:  # noqa: ANN401 - the libraries are untyped
    """What a plan must be made for to run on this machine."""
    capability = driver.arch.removeprefix("sm_")
    name = ctypes.create_string_buffer(128)
    driver.call("cuDeviceGetName", name, len(name), driver.device)
    return Target(
        backend=backend,
        sm=f"{capability[:-1]}.{capability[-1]}",
        version=str(trt.__version__),
        cuda=f"{driver.version // 1000}.{driver.version % 1000 // 10}",
        l4t=machine.l4t(),
        module=machine.module() or name.value.decode(errors="replace"),
    )


class TensorRtRuntime:
    """Opens the plans that lie in the folders of engines of a bundle."""

    opens_at_once = False

    def __init__(self, backend: str, *engines: Path) -> None:
        """Load the library and the driver; raises ConfigError or ModelError when either is missing."""
        self.name = backend
        self._trt = module(backend)
        self._driver = Driver()
        self._here = here(backend, self._trt, self._driver)
        self._engines = engines
        self._said: deque[str] = deque(maxlen=5)
        self._log = logger(self._trt, self._hear)
        self._runtime = self._trt.Runtime(self._log)
        self._sessions: weakref.WeakSet[TensorRtSession] = weakref.WeakSet()

    def open(
        self,
        graph: bytes,
        *,
        threads: int,  # noqa: ARG002 - the seam's signature
        few_shapes: bool = True,  # noqa: ARG002
    ) -> TensorRtSession:
        """See `Runtime.open`. The plan is the one whose passport names the digest of `graph` and fits this machine."""
        passport, path = self._find(graph)
        try:
            plan = path.read_bytes()
        except OSError as error:
            msg = f"{path} cannot be read ({error.strerror}): compile with `provision compile`"
            raise BundleError(msg) from error
        passport.check_plan(plan)
        self._driver.enter()
        self._check_room(passport.graph, passport.need_bytes)
        plugin.require(self._trt, passport.plugins)
        self._said.clear()
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            msg = f"{self.name} cannot load {path}: {self._reason()}; compile with `provision compile`"
            raise BundleError(msg)
        session = TensorRtSession(self._trt, self._driver, engine, self._reason)
        self._sessions.add(session)
        return session

    def open_again(self, graph: str, *, threads: int, few_shapes: bool = True) -> None:
        """See `WorkerRuntime.open_again`: plans are made before, and found by `open`."""

    def release(self) -> None:
        """Give back the buffers and captured graphs that runs have left for later ones; weights stay."""
        for session in list(self._sessions):
            session.release()

    def need_bytes(self, graph: bytes) -> int:
        """Device memory that `open` will ask for before the first run, told by the passport without opening."""
        return self._find(graph)[0].need_bytes

    def _find(self, graph: bytes) -> tuple[Passport, Path]:
        digest = hashlib.sha256(graph).hexdigest()
        refused = ""
        for path in (one for folder in self._engines for one in sorted(folder.glob(f"*/*{PASSPORT}"))):
            passport = self._fitting(path, digest)
            if isinstance(passport, Passport):
                return passport, path.with_name(path.name.removesuffix(PASSPORT) + ".plan")
            refused = refused or passport
        places = " or ".join(map(str, self._engines))
        where = f" in {places}" if places else ", and a bare ONNX file cannot have one"
        raise BundleError(
            refused or f"there is no engine of graph {digest[:12]}{where}: compile with `provision compile`"
        )

    def _fitting(self, path: Path, digest: str) -> Passport | str:
        """The passport in `path` if it is of that graph and of this machine; why not, if it is of that graph."""
        try:
            passport = Passport.from_bytes(path.read_bytes(), str(path))
            if passport.graph_sha256 != digest:
                return ""
            passport.check(digest, self._here)
        except (BundleError, OSError) as error:
            return str(error)
        return passport

    def _check_room(self, graph: str, need_bytes: int) -> None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if need_bytes > free.value:
            msg = (
                f"engine {graph!r} needs {need_bytes // _MIB} MiB of device memory, "
                f"{free.value // _MIB} MiB are free: unload another model, or compile for smaller shapes"
            )
            raise BundleError(msg)

    def _hear(self, severity: int, text: str) -> None:
        if severity <= _WARNING:
            self._said.append(text)

    def _reason(self) -> str:
        """What the library said last."""
        return "; ".join(self._said) or "it gave no reason"


class TensorRtSession:
    """One engine. Runs take turns: a second context would need its own memory, and a GPU runs one graph at a time."""

    def __init__(self, trt: Any, driver: Driver, engine: Any, reason: Callable[[], str]) -> None:  # noqa: ANN401
        """Describe `engine` and take memory for its activations; raises BundleError for tensors that cannot travel."""
        self._trt, self._engine, self._reason = trt, engine, reason
        self._turn = threading.Lock()
        self._bound: OrderedDict[tuple[tuple[int, ...], ...], _Bound] = OrderedDict()
        specs = [self._tensor_spec(engine.get_tensor_name(i)) for i in range(engine.num_io_tensors)]
        modes = [engine.get_tensor_mode(spec.name) == trt.TensorIOMode.INPUT for spec in specs]
        self.spec = ModelSpec(
            inputs=tuple(spec for spec, is_input in zip(specs, modes, strict=True) if is_input),
            outputs=tuple(spec for spec, is_input in zip(specs, modes, strict=True) if not is_input),
        )
        self._profiles = [
            {
                spec.name: Shapes(*(tuple(shape) for shape in engine.get_tensor_profile_shape(spec.name, profile)))
                for spec in self.spec.inputs
            }
            for profile in range(engine.num_optimization_profiles)
        ]
        self._device = _Device(driver, engine.device_memory_size_v2)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """See `Session.run`."""
        tensors = [Tensor.from_array(name, array) for name, array in inputs.items()]
        check_request(self.spec, tensors, outputs)
        feeds = {tensor.name: tensor.to_array() for tensor in tensors}
        names = [spec.name for spec in self.spec.outputs] if outputs is None else list(outputs)
        with self._turn:
            if self._engine is None:
                msg = "the session is closed"
                raise ModelError(msg)
            self._device.driver.enter()
            return self._bind(feeds).run(feeds, names)

    def close(self) -> None:
        """See `Session.close`."""
        with self._turn:
            if self._engine is None:
                return
            self._device.driver.enter()
            self._unbind()
            self._device.close()
            self._engine = None

    def release(self) -> None:
        """Keep the engine, and forget all shapes."""
        with self._turn:
            if self._engine is not None:
                self._device.driver.enter()
                self._unbind()

    def _unbind(self) -> None:
        while self._bound:
            self._bound.popitem()[1].close()

    def _bind(self, feeds: Mapping[str, Array]) -> _Bound:
        key = tuple(feeds[spec.name].shape for spec in self.spec.inputs)
        if key not in self._bound:
            profile = self._profile({name: array.shape for name, array in feeds.items()})
            while len(self._bound) >= _MOST_SHAPES:
                self._bound.popitem(last=False)[1].close()
            context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                msg = f"the engine gives no context: {self._reason()}"
                raise ModelError(msg)
            self._bound[key] = _Bound(self._device, context, profile, feeds, self.spec.outputs, self._reason)
        self._bound.move_to_end(key)
        return self._bound[key]

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        for i, ranges in enumerate(self._profiles):
            if all(shape in ranges[name] for name, shape in shapes.items()):
                return i
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        taken = " or ".join(
            ", ".join(f"{name} {list(one.least)} to {list(one.most)}" for name, one in ranges.items())
            for ranges in self._profiles
        )
        msg = f"the inputs have shapes {given}, but this engine was compiled for {taken}"
        raise BadInput(msg)

    def _tensor_spec(self, name: str) -> TensorSpec:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in DATATYPES:
            msg = f"tensor {name!r} has type {kind}, which cannot travel over the protocol"
            raise BundleError(msg)
        return TensorSpec(name, DATATYPES[kind], tuple(self._engine.get_tensor_shape(name)))


class _Device:
    """What all sets of shapes of one engine share, since they take turns: a stream, and memory for activations."""

    def __init__(self, driver: Driver, scratch_bytes: int) -> None:
        self.driver = driver
        self.scratch_bytes = scratch_bytes
        self.scratch = driver.allocate(max(scratch_bytes, 1))
        self.stream = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)

    def wait(self) -> None:
        """Until all work of the stream is done."""
        self.driver.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        self.driver.call("cuStreamDestroy_v2", self.stream)
        self.driver.free(self.scratch)


class _Bound:
    """An engine bound to one set of input shapes: a context, buffers, and from the second run on a captured graph.

    The graph holds the context's state and the buffers' addresses, so each set of shapes has its own of both.
    """

    def __init__(
        self,
        device: _Device,
        context: Any,  # noqa: ANN401 - the libraries are untyped
        profile: int,
        feeds: Mapping[str, Array],
        outputs: Sequence[TensorSpec],
        reason: Callable[[], str],
    ) -> None:
        self._device, self._context, self._reason = device, context, reason
        self._buffers: dict[str, int] = {}
        self._graph = ctypes.c_void_p()
        self._runs = 0
        context.set_device_memory(device.scratch, device.scratch_bytes)
        self._must("take the profile", context.set_optimization_profile_async(profile, device.stream.value))
        device.wait()
        for name, array in feeds.items():
            self._must(f"take shape {list(array.shape)} of {name!r}", context.set_input_shape(name, array.shape))
        self._must("tell the shapes of its outputs", not context.infer_shapes())
        self._outputs = {
            spec.name: (tuple(context.get_tensor_shape(spec.name)), np.dtype(DTYPES[spec.datatype])) for spec in outputs
        }
        for name, (shape, _dtype) in self._outputs.items():
            self._must(f"tell the size of {name!r} before it runs", min(shape, default=0) >= 0)
        sizes = {name: array.nbytes for name, array in feeds.items()}
        sizes |= {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in self._outputs.items()}
        try:
            for name, size_bytes in sizes.items():
                self._buffers[name] = device.driver.allocate(max(size_bytes, 1))
                self._must(f"take a buffer for {name!r}", context.set_tensor_address(name, self._buffers[name]))
        except ModelError:
            self.close()
            raise

    def run(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Copy in, compute, copy out, wait. The arrays returned are new."""
        call, stream = self._device.driver.call, self._device.stream
        for name, array in feeds.items():
            if array.nbytes:
                size = ctypes.c_size_t(array.nbytes)
                source = ctypes.c_void_p(array.ctypes.data)
                call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self._buffers[name]), source, size, stream)
        self._compute()
        answers = {name: np.empty(*self._outputs[name]) for name in names}
        for name, array in answers.items():
            if array.nbytes:
                size = ctypes.c_size_t(array.nbytes)
                target = ctypes.c_void_p(array.ctypes.data)
                call("cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(self._buffers[name]), size, stream)
        self._device.wait()
        return answers

    def close(self) -> None:
        """Free what belongs to these shapes."""
        if self._graph.value:
            self._device.driver.call("cuGraphExecDestroy", self._graph)
        self._graph = ctypes.c_void_p()
        self._context = None
        while self._buffers:
            self._device.driver.free(self._buffers.popitem()[1])

    def _compute(self) -> None:
        """The first run is a plain one, which lets the library settle; the second is captured, if it can be."""
        self._runs += 1
        if self._runs == _CAPTURED_RUN:
            self._capture()
        if self._graph.value:
            self._device.driver.call("cuGraphLaunch", self._graph, self._device.stream)
        else:
            self._must("run", self._context.execute_async_v3(self._device.stream.value))

    def _capture(self) -> None:
        """Record one run as a graph. An engine that waits for the device as it runs cannot be: it goes on as before."""
        call, stream, captured = self._device.driver.call, self._device.stream, ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        fine = self._context.execute_async_v3(stream.value)
        with contextlib.suppress(ModelError):  # a capture that was broken off ends with an error, and is over
            call("cuStreamEndCapture", stream, ctypes.byref(captured))
        if not captured.value:
            return
        try:
            if fine:
                call("cuGraphInstantiateWithFlags", ctypes.byref(self._graph), captured, ctypes.c_ulonglong(0))
        finally:
            call("cuGraphDestroy", captured)

    def _must(self, what: str, done: object) -> None:
        if not done:
            msg = f"the engine does not {what}: {self._reason()}"
            raise ModelError(msg)
