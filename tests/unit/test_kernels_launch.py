"""kernels.launch against a driver that records: what is refused, and how a call is cut into launches."""
# ruff: noqa: ANN401, SLF001  (ctypes passes anything, and what byref holds has no public name)

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.launch import Driver, HeadRunner, Kernels, NeckRunner, pack_head_for, pack_neck_for, read_kernels
from kernels.plan import head_variants, neck_variants
from kernels.reference import Neck
from models.errors import BadInput, BundleError, ModelError

pytestmark = pytest.mark.unit
SPEC = Neck("v4", 2)
ATTRIBUTES = {16: 132, 75: 9, 76: 0}


class RecordingCuda:
    """Stands in for libcuda: an Hopper of 132 multiprocessors that computes nothing and remembers its launches."""

    def __init__(self, per_sm: int = 2) -> None:
        self.per_sm, self.fail, self.next = per_sm, "", 1 << 20
        self.launches: list[tuple[str, tuple[int, int], list[int]]] = []
        self.live: set[int] = set()
        self.loaded: list[bytes] = []
        self.refused: bytes | None = None
        """How an image starts that this driver does not take."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fail:
                return 700
            handler = getattr(type(self), f"on_{name}", None)
            return int((handler and handler(self, *arguments)) or 0)

        return call

    def cuGetErrorName(self, _: int, text: Any) -> None:  # noqa: N802 (the driver's)
        text._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"

    def on_cuDeviceGetAttribute(self, value: Any, attribute: int, _: Any) -> None:  # noqa: N802
        value._obj.value = ATTRIBUTES[attribute]

    def on_cuOccupancyMaxActiveBlocksPerMultiprocessor(self, value: Any, *_: Any) -> None:  # noqa: N802
        value._obj.value = self.per_sm

    def on_cuMemAlloc_v2(self, pointer: Any, size: Any) -> None:  # noqa: N802
        pointer._obj.value = self.next
        self.live.add(self.next)
        self.next += (size.value + 255) // 256 * 256

    def on_cuMemFree_v2(self, pointer: Any) -> None:  # noqa: N802
        self.live.remove(pointer.value)

    def on_cuModuleLoadData(self, _: Any, image: bytes) -> int:  # noqa: N802
        self.loaded.append(image)
        return 209 if self.refused is not None and image.startswith(self.refused) else 0

    def record(self, how: str, *arguments: Any) -> None:
        parameters = arguments[9]
        words = [ctypes.cast(p, ctypes.POINTER(ctypes.c_int32))[0] for p in parameters]
        self.launches.append((how, (arguments[1], arguments[2]), words))

    def on_cuLaunchCooperativeKernel(self, *arguments: Any) -> None:  # noqa: N802
        self.record("together", *arguments)

    def on_cuLaunchKernel(self, *arguments: Any) -> None:  # noqa: N802
        self.record("alone", *arguments)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordingCuda:
    fake = RecordingCuda()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for variant in (*neck_variants("sm_90", SPEC), *head_variants("sm_90")):
        (tmp_path / f"{variant.name}.cubin").write_bytes(b"\x7fELF")
        (tmp_path / f"{variant.name}.ptx").write_text(".version 8.5")
        (tmp_path / f"{variant.name}.json").write_text(json.dumps({"entry": "e", "warps": 4, "shared_bytes": 100}))
    (tmp_path / "limits.sm_90.json").write_text("[]")
    return tmp_path


@pytest.fixture
def kernels(folder: Path) -> Kernels:
    return read_kernels(folder)


PACKED = pack_neck_for(
    "sm_90", SPEC, {name: np.zeros(shape, np.float16) for name, shape in SPEC.shapes().items()}
)  # fmt: skip


@pytest.fixture
def neck(cuda: RecordingCuda, kernels: Kernels) -> NeckRunner:
    del cuda
    return NeckRunner(Driver(), kernels, SPEC, PACKED)


def test_a_small_batch_is_one_launch_with_split_channels(neck: NeckRunner, cuda: RecordingCuda) -> None:
    assert neck(1 << 24, 1 << 25, 8, 40, 0) == 1
    how, grid, words = cuda.launches[0]
    assert (how, grid) == ("together", (6, 8))
    assert words[7] == 40


def test_a_large_batch_is_cut_to_what_is_resident_and_covers_every_line(neck: NeckRunner, cuda: RecordingCuda) -> None:
    assert neck(1 << 24, 1 << 25, 200, 40, 0) == 3
    assert [grid for _, grid, _ in cuda.launches] == [(3, 88), (3, 88), (3, 24)]
    reads = [words[0] - (1 << 24) for _, _, words in cuda.launches]
    writes = [words[3] - (1 << 25) for _, _, words in cuda.launches]
    assert reads == [0, 88 * 40 * 480 * 2, 176 * 40 * 480 * 2]
    assert writes == [0, 88 * 40 * 120 * 2, 176 * 40 * 120 * 2]


def test_where_nothing_may_wait_there_are_three_launches(cuda: RecordingCuda, kernels: Kernels) -> None:
    neck = NeckRunner(Driver(), kernels, SPEC, PACKED, one_launch=False)
    assert neck(1 << 24, 1 << 25, 2, 100, 0) == 3
    assert {how for how, _, _ in cuda.launches} == {"alone"}


def test_nothing_is_allocated_by_a_call_and_all_is_freed_after(neck: NeckRunner, cuda: RecordingCuda) -> None:
    before = cuda.next
    neck(1 << 24, 1 << 25, 3, 512, 0)
    assert cuda.next == before
    neck.close()
    assert not cuda.live


def test_arguments_are_refused_before_the_launch(neck: NeckRunner, cuda: RecordingCuda) -> None:
    with pytest.raises(BadInput, match="16 bytes"):
        neck((1 << 24) + 2, 1 << 25, 1, 40, 0)
    with pytest.raises(BadInput, match="513 tokens"):
        neck(1 << 24, 1 << 25, 1, 513, 0)
    with pytest.raises(BadInput, match="0 lines"):
        neck(1 << 24, 1 << 25, 0, 40, 0)
    kernel = next(iter(neck._kernels.values()))
    with pytest.raises(BadInput, match="264 fit"):
        kernel.launch((300, 1), [], [], 0, together=True)
    assert cuda.launches == []


def test_errors_carry_code_and_name(neck: NeckRunner, cuda: RecordingCuda) -> None:
    cuda.fail = "cuLaunchCooperativeKernel"
    with pytest.raises(ModelError, match=r"CUDA error 700 \(CUDA_ERROR_ILLEGAL_ADDRESS\)"):
        neck(1 << 24, 1 << 25, 1, 40, 0)


def test_a_missing_kernel_and_a_missing_driver_are_told(
    cuda: RecordingCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cuda
    with pytest.raises(BundleError, match="no compiled kernel ctc-"):
        HeadRunner(Driver(), read_kernels(tmp_path), np.zeros(128 * 128), max_rows=64)

    def absent(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(ModelError, match="no CUDA driver"):
        Driver()


@pytest.mark.parametrize(
    ("rows", "launches"), [(40, [("together", (52, 1))]), (1280, [("together", (13, 20))]), (3000, 2), (40000, 1)]
)
def test_the_head_is_cut_by_rows(cuda: RecordingCuda, kernels: Kernels, rows: int, launches: object) -> None:
    packed = pack_head_for("sm_90", np.zeros((120, 6625)), np.zeros(6625))
    head = HeadRunner(Driver(), kernels, packed, max_rows=40000)
    count = head(1 << 24, 1 << 25, 1 << 26, rows, 0)
    found = [(how, grid) for how, grid, _ in cuda.launches]
    assert count == len(found)
    assert (len(found) if isinstance(launches, int) else found) == launches
    with pytest.raises(BadInput, match="40001 tokens"):
        head(1 << 24, 1 << 25, 1 << 26, 40001, 0)
    head.close()
    assert not cuda.live


def test_where_a_cubin_is_refused_its_ptx_is_loaded(cuda: RecordingCuda, kernels: Kernels) -> None:
    cuda.refused = b"\x7fELF"
    NeckRunner(Driver(), kernels, SPEC, PACKED)
    assert {image for image in cuda.loaded if not image.startswith(cuda.refused)} == {b".version 8.5\0"}
    cuda.refused = b""
    with pytest.raises(ModelError, match="cuModuleLoadData failed"):
        NeckRunner(Driver(), kernels, SPEC, PACKED)
