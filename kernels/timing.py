"""Times a call by replays of a CUDA graph, through the driver API alone, so that it runs where PyTorch is not.

A graph holds `calls` calls behind each other, so what is timed is the device and not the way to it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kernels.launch import Driver
from models.spec import Array

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ROUNDS = 7
_REPLAYS = 200
_WARM_S = 0.3


class Bench:
    """A stream of our own on the driver's context, with arrays to and from the device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()

    def download(self, pointer: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A copy of device memory, after all work on the stream."""
        self.wait()
        array = np.empty(shape, dtype)
        size = ctypes.c_size_t(array.nbytes)
        self.driver.call("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(pointer), size)
        return array

    def wait(self) -> None:
        """Until the stream is idle."""
        self.driver.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def time_us(self, call: Callable[[int], object], calls: int = 1) -> float:
        """Median over rounds of the time of one call, in microseconds."""
        stream, driver = ctypes.c_void_p(self.stream), self.driver
        call(self.stream)
        self.wait()
        graph, replay = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuStreamBeginCapture_v2", stream, _RELAXED)
        for _ in range(calls):
            call(self.stream)
        driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        driver.call("cuGraphInstantiateWithFlags", ctypes.byref(replay), graph, ctypes.c_ulonglong(0))
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            driver.call("cuEventCreate", ctypes.byref(event), 0)
        # An idle GPU needs a while to raise its clocks: the first shape came out a seventh slower without this.
        start_s = time.monotonic()
        while time.monotonic() - start_s < _WARM_S:
            driver.call("cuGraphLaunch", replay, stream)
            self.wait()
        times = []
        for _ in range(_ROUNDS):
            driver.call("cuEventRecord", events[0], stream)
            for _ in range(_REPLAYS):
                driver.call("cuGraphLaunch", replay, stream)
            driver.call("cuEventRecord", events[1], stream)
            driver.call("cuEventSynchronize", events[1])
            milliseconds = ctypes.c_float()
            driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
            times.append(milliseconds.value * 1e3 / _REPLAYS / calls)
        for event in events:
            driver.call("cuEventDestroy_v2", event)
        driver.call("cuGraphExecDestroy", replay)
        driver.call("cuGraphDestroy", graph)
        return statistics.median(times)
