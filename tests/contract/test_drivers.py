"""Whatever calls the driver, the kernels get the same: memory, streams of anyone, launches, errors with a code."""

from __future__ import annotations

import ctypes
import json
import sys
import threading

import pytest
from doubles.cuda import StandInCuda
from doubles.drivers import StandInBindings, StandInPycuda

from kernels.backends import BACKENDS, Backend, open_driver
from kernels.launch import Driver
from models.errors import ApplianceError, ConfigError, ModelError

pytestmark = pytest.mark.contract
KERNELS = {"k.cubin": b"\x7fELF", "k.json": json.dumps({"entry": "k", "warps": 4, "shared_bytes": 10}).encode()}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """A driver, with both libraries over it."""
    cuda = StandInCuda()
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: cuda if name == "libcuda.so.1" else load(name, *rest))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", StandInBindings(cuda))
    monkeypatch.setitem(sys.modules, "pycuda.driver", StandInPycuda(cuda))
    for package in ("cuda", "cuda.bindings", "pycuda"):
        monkeypatch.setitem(sys.modules, package, type(sys)(package))
    return cuda


@pytest.fixture(params=BACKENDS)
def driver(cuda: StandInCuda, request: pytest.FixtureRequest) -> Driver:
    """The driver by way of each."""
    del cuda
    return open_driver(request.param)


def foreign_stream(cuda: StandInCuda) -> int:
    """A stream that somebody else made."""
    handle = ctypes.c_void_p()
    cuda.cuStreamCreate(ctypes.byref(handle), 0)
    return handle.value or 0


def test_the_device_is_described(driver: Driver) -> None:
    assert (driver.arch, driver.multiprocessors, driver.version) == ("sm_87", 16, 12060)


def test_memory_holds_what_was_uploaded_and_rests_at_minus_one(driver: Driver, cuda: StandInCuda) -> None:
    data, rest = driver.upload(b"abcd"), driver.allocate(8)
    assert (ctypes.string_at(data, 4), ctypes.string_at(rest, 8)) == (b"abcd", b"\xff" * 8)
    driver.free(data)
    driver.free(rest)
    assert cuda.allocated_bytes() == 0


@pytest.mark.parametrize("together", [False, True])
def test_a_kernel_runs_on_a_stream_of_somebody_else_with_its_arguments_in_order(
    driver: Driver, cuda: StandInCuda, together: bool
) -> None:
    memory, stream = driver.allocate(64), foreign_stream(cuda)
    driver.load(KERNELS, "k").launch((3, 2), [memory], [7], stream, together=together)
    assert cuda.launches == [], "it is queued, not run"
    driver.call("cuStreamSynchronize", ctypes.c_void_p(stream))
    ((entry, on, grid, words),) = cuda.launches
    assert (entry, on, grid, words[0], words[1] & 0xFFFFFFFF) == ("k", stream, (3, 2), memory, 7)


def test_a_stream_of_its_own_is_one_of_the_drivers(driver: Driver, cuda: StandInCuda) -> None:
    assert driver.stream() in cuda.streams


def test_another_thread_works_after_it_has_entered(driver: Driver) -> None:
    found: list[object] = []

    def work() -> None:
        driver.enter()
        memory = driver.upload(b"x")
        found.append(ctypes.string_at(memory, 1))
        driver.free(memory)
        found.append(sys.modules["pycuda.driver"]._stack())  # type: ignore[attr-defined] # noqa: SLF001 - the double's

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [b"x", []], "pycuda ends the process when a thread leaves a context on its stack"


def test_an_error_of_the_driver_has_code_and_name(driver: Driver, cuda: StandInCuda) -> None:
    kernel = driver.load(KERNELS, "k")
    cuda.fail = "cuLaunchKernel"
    with pytest.raises(ModelError, match=r"cuLaunchKernel failed: CUDA error 700 \(CUDA_ERROR_STAND_IN\)"):
        kernel.launch((1, 1), [driver.allocate(16)], [1], foreign_stream(cuda), together=False)


def test_memory_that_is_not_there_is_told_as_an_error_of_ours(driver: Driver, cuda: StandInCuda) -> None:
    with pytest.raises(ApplianceError, match=r"out of memory|CUDA error 2"):
        driver.allocate(cuda.total_bytes + 1)


def test_closing_gives_back_what_is_left(driver: Driver, cuda: StandInCuda) -> None:
    driver.free(driver.allocate(10))
    driver.close()
    assert cuda.allocated_bytes() == 0


@pytest.mark.parametrize(("backend", "name"), [("pycuda", "pycuda.driver"), ("cuda-bindings", "cuda.bindings.driver")])
def test_without_the_package_the_refusal_names_the_backend_that_needs_none(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch, backend: Backend, name: str
) -> None:
    del cuda
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"{backend} cannot be loaded .* or use the backend ctypes"):
        open_driver(backend)
