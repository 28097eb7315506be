"""A CUDA driver in ordinary memory: allocations, streams that do nothing until they are waited for, captured graphs.

It stands in for libcuda behind `kernels.launch.Driver` and is as strict as the real one where that matters here:
work is queued and runs when the stream is synchronized, a captured run does not run, what is freed must have been
allocated, and a stream whose capture was broken off says so.
"""
# ruff: noqa: ANN401, SLF001, N802  (ctypes passes anything; the driver's names say what they do)

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

Work = Callable[[], None]
ATTRIBUTES = {16: 16, 75: 8, 76: 7}
CAPTURE_INVALIDATED = 901


def number(value: Any) -> int:
    """The number in whatever ctypes would have passed."""
    return int(getattr(value, "value", value) or 0)


class StandInCuda:
    """An Orin of `total_bytes`."""

    def __init__(self, total_bytes: int = 8 << 30) -> None:
        self.total_bytes = total_bytes
        self.fail = ""
        """Name of a function that fails."""
        self.launched_graphs = 0
        self.memory: dict[int, Any] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.streams: dict[int, list[Work]] = {}
        self.broken: set[int] = set()
        self.launches: list[tuple[str, int, tuple[int, int], list[int]]] = []
        """Of kernels that have run: entry, stream, grid, and every argument as 64 bits."""
        self._entries: dict[int, str] = {}
        self._captures: dict[int, list[Work]] = {}
        self._handles = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        """Every function of the driver that nothing here depends on succeeds."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.fail:
                return 700
            handler = getattr(type(self), f"on_{name}", None)
            return int((handler and handler(self, *arguments)) or 0)

        return call

    def enqueue(self, stream: int, work: Work) -> None:
        """Put `work` on a stream, or into the graph that is being captured there."""
        self._captures.get(stream, self.streams[stream]).append(work)

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captures

    def allocated_bytes(self) -> int:
        return sum(len(buffer) for buffer in self.memory.values())

    def on_cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 12060

    def on_cuDeviceGetAttribute(self, value: Any, attribute: int, _: Any) -> None:
        value._obj.value = ATTRIBUTES[attribute]

    def on_cuDeviceGetName(self, name: Any, _length: int, _device: Any) -> None:
        name.value = b"Orin (stand-in)"

    def on_cuGetErrorName(self, _: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_STAND_IN"

    def on_cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free._obj.value = self.total_bytes - self.allocated_bytes()
        total._obj.value = self.total_bytes

    def on_cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        if number(size) == 0 or self.allocated_bytes() + number(size) > self.total_bytes:
            return 2
        buffer = (ctypes.c_ubyte * number(size))()
        self.memory[ctypes.addressof(buffer)] = buffer
        pointer._obj.value = ctypes.addressof(buffer)
        return 0

    def on_cuMemFree_v2(self, pointer: Any) -> int:
        return 0 if self.memory.pop(number(pointer), None) is not None else 1

    def on_cuMemsetD8_v2(self, pointer: Any, value: Any, size: Any) -> None:
        ctypes.memset(number(pointer), number(value), number(size))

    def on_cuMemcpyHtoD_v2(self, target: Any, source: bytes, size: Any) -> None:
        ctypes.memmove(number(target), source, number(size))

    def on_cuModuleLoadData(self, module: Any, _image: bytes) -> None:
        module._obj.value = next(self._handles)

    def on_cuModuleGetFunction(self, function: Any, _module: Any, entry: bytes) -> None:
        function._obj.value = next(self._handles)
        self._entries[function._obj.value] = entry.decode()

    def on_cuOccupancyMaxActiveBlocksPerMultiprocessor(self, count: Any, *_: Any) -> None:
        count._obj.value = 1

    def on_cuLaunchKernel(self, function: Any, *shape: Any) -> int:
        """Queue a launch; its arguments are read now, as the real one does."""
        *_, stream, parameters, _extra = shape
        return self._launch(function, shape, stream, parameters)

    def on_cuLaunchCooperativeKernel(self, function: Any, *shape: Any) -> int:
        *_, stream, parameters = shape
        return self._launch(function, shape, stream, parameters)

    def _launch(self, function: Any, shape: Sequence[Any], stream: Any, parameters: Any) -> int:
        words = [ctypes.c_uint64.from_address(address).value for address in parameters]
        launch = self._entries[number(function)], number(stream), (shape[0], shape[1]), words
        self.enqueue(number(stream), lambda: self.launches.append(launch))
        return 0

    def on_cuStreamCreate(self, stream: Any, _flags: int) -> None:
        stream._obj.value = next(self._handles)
        self.streams[stream._obj.value] = []

    def on_cuStreamDestroy_v2(self, stream: Any) -> None:
        del self.streams[number(stream)]

    def on_cuStreamSynchronize(self, stream: Any) -> int:
        if number(stream) in self._captures:
            self.broken.add(number(stream))
            return 900
        queue = self.streams[number(stream)]
        while queue:
            queue.pop(0)()
        return 0

    def on_cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        self._copy(target, source, size, stream)

    def on_cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        self._copy(target, source, size, stream)

    def _copy(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        to, start, count = number(target), number(source), number(size)
        self.enqueue(number(stream), lambda: ctypes.memmove(to, start, count) and None)

    def on_cuStreamBeginCapture_v2(self, stream: Any, _mode: int) -> None:
        self._captures[number(stream)] = []

    def on_cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        work = self._captures.pop(number(stream))
        if number(stream) in self.broken:
            self.broken.remove(number(stream))
            return CAPTURE_INVALIDATED
        graph._obj.value = self._keep(work)
        return 0

    def on_cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, _flags: Any) -> None:
        executable._obj.value = self._keep(self.graphs[number(graph)])

    def on_cuGraphDestroy(self, graph: Any) -> None:
        del self.graphs[number(graph)]

    def on_cuGraphExecDestroy(self, executable: Any) -> None:
        del self.graphs[number(executable)]

    def on_cuGraphLaunch(self, executable: Any, stream: Any) -> None:
        self.launched_graphs += 1
        for work in self.graphs[number(executable)]:
            self.enqueue(number(stream), work)

    def _keep(self, work: list[Work]) -> int:
        handle = next(self._handles)
        self.graphs[handle] = work
        return handle
