"""The modules cuda.bindings.driver and pycuda.driver over the driver in ordinary memory, as strict as they are.

cuda-bindings: results are returned behind a code, constants must be members of enumerations, nothing of ctypes is taken
for a number. pycuda: nothing works in a thread without a context on pycuda's own stack, memory is freed once.
"""
# ruff: noqa: ANN401, SLF001  (whatever the libraries take; byref has no other face)

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from doubles.cuda import StandInCuda

CUresult = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_STAND_IN": 700})
CUdevice_attribute = enum.IntEnum("CUdevice_attribute", {"MULTIPROCESSORS": 16, "MAJOR": 75, "MINOR": 76})
CUfunction_attribute = enum.IntEnum("CUfunction_attribute", {"MAX_DYNAMIC_SHARED_SIZE_BYTES": 8})
_RESULTS: dict[str, tuple[type[Any], ...]] = {
    "cuDeviceGet": (ctypes.c_int,),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p,),
    "cuDeviceGetAttribute": (ctypes.c_int,),
    "cuDriverGetVersion": (ctypes.c_int,),
    "cuModuleLoadData": (ctypes.c_void_p,),
    "cuModuleGetFunction": (ctypes.c_void_p,),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (ctypes.c_int,),
    "cuMemAlloc": (ctypes.c_uint64,),
    "cuStreamCreate": (ctypes.c_void_p,),
    "cuGetErrorName": (ctypes.c_char_p,),
}
"""Function -> what it returns behind its code; the others return nothing more."""
_VERSIONED = ("cuMemAlloc", "cuMemFree", "cuMemsetD8", "cuMemcpyHtoD", "cuDevicePrimaryCtxRelease", "cuStreamDestroy")


class StandInBindings(ModuleType):
    """The module cuda.bindings.driver."""

    CUresult, CUdevice_attribute, CUfunction_attribute = CUresult, CUdevice_attribute, CUfunction_attribute

    def __init__(self, cuda: StandInCuda) -> None:
        super().__init__("cuda.bindings.driver")
        self._cuda = cuda
        self.parameters = 4
        """Of every kernel; the real one reads that from the cubin."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.endswith("_v2"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Give results room where C wants it: before the arguments, but for an error's name."""
        wanted = {"cuDeviceGetAttribute": CUdevice_attribute, "cuFuncSetAttribute": CUfunction_attribute}.get(name)
        assert all(isinstance(one, (int, bytes)) for one in arguments), f"{name} was given {arguments}"
        assert wanted is None or any(isinstance(one, wanted) for one in arguments)
        results = [kind() for kind in _RESULTS.get(name, ())]
        places = [ctypes.byref(one) for one in results]
        given = [*arguments, *places] if name == "cuGetErrorName" else [*places, *arguments]
        if name.startswith("cuLaunch"):
            given[9] = (ctypes.c_void_p * self.parameters).from_address(given[9])
        code = getattr(self._cuda, name + "_v2" * (name in _VERSIONED))(*given)
        return CUresult(code), *(one.value or 0 for one in results)


class Error(Exception):
    """Root of pycuda's errors."""


class StandInPycuda(ModuleType):
    """The module pycuda.driver."""

    Error = Error

    def __init__(self, cuda: StandInCuda) -> None:
        super().__init__("pycuda.driver")
        self._cuda = cuda
        self._stacks = threading.local()
        self.Context = Context
        Context._module = self

    def init(self) -> None:
        """Nothing to do."""

    def Device(self, _ordinal: int) -> Device:  # noqa: N802
        return Device()

    def Stream(self, _flags: int = 0) -> Stream:  # noqa: N802
        return Stream(self._current())

    def mem_alloc(self, size_bytes: int) -> DeviceAllocation:
        return DeviceAllocation(self._current(), size_bytes)

    def memset_d8(self, dest: int, data: int, size: int) -> None:
        self._current().cuMemsetD8_v2(dest, data, size)

    def memcpy_htod(self, dest: int, src: bytes) -> None:
        self._current().cuMemcpyHtoD_v2(dest, src, len(src))

    def _stack(self) -> list[Any]:
        found: list[Any] = self._stacks.__dict__.setdefault("stack", [])
        return found

    def _current(self) -> StandInCuda:
        if not self._stack():
            msg = "explicit_context_dependent failed: invalid device context - no currently active context?"
            raise Error(msg)
        return self._cuda


class Device:
    """The only one."""

    def retain_primary_context(self) -> Context:
        return Context()


class Context:
    """The primary one."""

    _module: StandInPycuda

    def push(self) -> None:
        self._module._stack().append(self)

    @staticmethod
    def pop() -> None:
        Context._module._stack().pop()

    def detach(self) -> None:
        """Give it back."""

    @staticmethod
    def get_current() -> Context | None:
        stack = Context._module._stack()
        return stack[-1] if stack else None

    @staticmethod
    def synchronize() -> None:
        Context._module._current()


class DeviceAllocation:
    """Memory that is freed once."""

    def __init__(self, cuda: StandInCuda, size_bytes: int) -> None:
        pointer = ctypes.c_uint64()
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), size_bytes):
            raise Error("cuMemAlloc failed: out of memory")
        self._cuda, self._pointer = cuda, pointer.value

    def __int__(self) -> int:
        return self._pointer

    def free(self) -> None:
        assert self._cuda.cuMemFree_v2(self._pointer) == 0, "freed twice"


class Stream:
    """One that it made itself; it has no other."""

    def __init__(self, cuda: StandInCuda) -> None:
        handle = ctypes.c_void_p()
        cuda.cuStreamCreate(ctypes.byref(handle), 0)
        self.handle = handle.value
