"""What calls the CUDA driver for `kernels.launch`: libcuda itself, cuda-bindings, or pycuda for memory and streams.

All three work in the primary context, so each can use what the others have made; none creates a context of its own.

cuda-bindings has every function of the driver API, but with results where C has pointers to them: `Bindings` gives it
C's face again. pycuda 2026.1 has no stream for a handle that is not its own (its `Stream` only makes new ones) and no
cooperative launch, by its source: there `PycudaDriver` takes memory and streams from pycuda, and launches through
libcuda.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

from kernels.launch import NON_BLOCKING, Driver
from models.errors import ConfigError, ModelError

Backend: TypeAlias = Literal["ctypes", "cuda-bindings", "pycuda"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_NAMES = {"cuGraphInstantiateWithFlags": "cuGraphInstantiate"}
_ENUMERATIONS = {
    "cuDeviceGetAttribute": (0, "CUdevice_attribute"),
    "cuFuncSetAttribute": (1, "CUfunction_attribute"),
    "cuStreamBeginCapture": (1, "CUstreamCaptureMode"),
    "cuGetErrorName": (0, "CUresult"),
}
"""Function -> which of its arguments, results not counted, cuda-bindings wants as a member of which enumeration."""


def open_driver(backend: Backend = "ctypes", ordinal: int = 0) -> Driver:
    """The driver of device `ordinal` by way of `backend`; raises ConfigError where that is not installed."""
    if backend == "pycuda":
        return PycudaDriver(ordinal)
    return Driver(ordinal, Bindings() if backend == "cuda-bindings" else None)


class Bindings:
    """cuda.bindings.driver under C's names and with C's arguments: results go where `ctypes.byref` points."""

    def __init__(self) -> None:
        self._driver = _module("cuda.bindings.driver", "cuda-bindings")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (as a library's functions)
        """The function of that name; it returns the driver's code."""
        plain = name.removesuffix("_v2")
        function = getattr(self._driver, _NAMES.get(plain, plain))
        place, kind = _ENUMERATIONS.get(plain, (-1, ""))

        def call(*arguments: Any) -> int:  # noqa: ANN401 (ctypes converts)
            results = [_result(one) for one in arguments if _result(one) is not None]
            given = [_plain(one) for one in arguments if _result(one) is None]
            if kind:
                given[place] = getattr(self._driver, kind)(given[place])
            code, *found = function(*given)
            for result, value in zip(results, found, strict=False):
                result.value = value if isinstance(value, (float, bytes)) else int(value)
            return int(code)

        return call


class PycudaDriver(Driver):
    """Memory and streams of pycuda, everything else of libcuda, in the primary context of both.

    pycuda works in what lies on its own stack of contexts, one a thread, and ends the process when a thread ends with
    something on it; so the context lies there during a call and no longer.
    """

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(ordinal)
        self._pycuda = _module("pycuda.driver", "pycuda")
        self._pycuda.init()
        self._shared = self._pycuda.Device(ordinal).retain_primary_context()
        self._allocations: dict[int, Any] = {}
        self._streams: list[Any] = []

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._shared.push()
        try:
            yield
        except self._pycuda.Error as error:
            msg = f"pycuda: {error}"
            raise ModelError(msg) from error
        finally:
            self._shared.pop()

    def close(self) -> None:
        """See `Driver.close`."""
        with self._active():
            self._streams.clear()
            self._allocations.clear()
        self._shared.detach()
        super().close()

    def allocate(self, size_bytes: int, fill: int = 0xFF) -> int:
        """See `Driver.allocate`."""
        with self._active():
            memory = self._pycuda.mem_alloc(size_bytes)
            self._pycuda.memset_d8(int(memory), fill, size_bytes)
            self._pycuda.Context.synchronize()
        self._allocations[int(memory)] = memory
        return int(memory)

    def upload(self, data: bytes) -> int:
        """See `Driver.upload`."""
        pointer = self.allocate(len(data))
        with self._active():
            self._pycuda.memcpy_htod(pointer, data)
        return pointer

    def free(self, pointer: int) -> None:
        """See `Driver.free`."""
        with self._active():
            self._allocations.pop(pointer).free()

    def stream(self) -> int:
        """See `Driver.stream`."""
        with self._active():
            self._streams.append(self._pycuda.Stream(NON_BLOCKING))
        return int(self._streams[-1].handle)


def _module(name: str, package: str) -> Any:  # noqa: ANN401 (both are untyped)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"{package} cannot be loaded ({error}): install it, or use the backend ctypes, which needs no package"
        raise ConfigError(msg) from error


def _result(argument: Any) -> Any:  # noqa: ANN401 (as above)
    """The object of ctypes that the function writes to, if `argument` is there for that: a byref, or a text buffer."""
    is_text = isinstance(argument, ctypes.Array) and argument._type_ is ctypes.c_char
    return argument if is_text else getattr(argument, "_obj", None)


def _plain(argument: Any) -> Any:  # noqa: ANN401 (whatever ctypes takes)
    """What cuda-bindings takes for an argument of ctypes: a number, an address, or bytes."""
    if argument is None:
        return 0
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument)
    return (argument.value or 0) if isinstance(argument, ctypes._SimpleCData) else argument  # noqa: SLF001 (the base)
