"""Loads a compiled kernel and launches it on any stream of the process: the CUDA driver API through ctypes.

libcuda.so.1 is on every machine that has a driver, so no package must be built or found for the launch (decision 5);
`kernels.backends` puts pycuda or cuda-bindings in its place where a program has those anyway.
Memory and streams may come from anyone who works in the primary context: PyTorch, pycuda, TensorRT.
Nothing allocates, copies or synchronizes between `Kernel` and `launch`, so launches can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kernels.pack import Packed, pack_head, pack_neck
from kernels.plan import (
    head_variants,
    neck_scratch,
    neck_variants,
    phase_programs,
    plan_head,
    plan_neck,
)
from kernels.reference import WIDTH, Neck, Weights
from models.errors import BadInput, BundleError, ModelError
from models.spec import Array

_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...
NON_BLOCKING = 1  # CU_STREAMNON_BLOCKING
_WARP = 32

Kernels: TypeAlias = Mapping[str, bytes]
"""Compiled kernels by file name, as kernels.compile writes them: NAME.cubin, NAME.ptx and NAME.json."""
KINDS = ("cubin", "ptx", "json")


def read_kernels(folder: Path) -> Kernels:
    """What kernels.compile wrote into `folder`; raises BundleError when it cannot be read."""
    try:
        files = (path for kind in KINDS for path in sorted(folder.glob(f"*.*.{kind}")))
        return {path.name: path.read_bytes() for path in files if not path.name.startswith("limits.")}
    except OSError as error:
        msg = f"{folder} cannot be read ({error.strerror}); compile the kernels with python -m kernels.compile"
        raise BundleError(msg) from error


def pack_neck_for(arch: str, spec: Neck, weights: Weights) -> dict[int, Packed]:
    """Programs a tile -> weights as the variants of `arch` read them."""
    tunings = {variant.split: variant.tuning for variant in neck_variants(arch, spec)}
    return {split: pack_neck(spec, weights, split, tuning.mlp, tuning.back) for split, tuning in tunings.items()}


def pack_head_for(arch: str, w_CK: Array, b_K: Array) -> Array:
    """Weights of the head as the variants of `arch` read them."""
    return pack_head(w_CK, b_K, next(head_variants(arch)).chunk)


def libcuda() -> Any:  # noqa: ANN401 (a library has whatever functions it has)
    """The driver's own library; raises ModelError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        msg = f"no CUDA driver on this machine ({error}); the kernels need one"
        raise ModelError(msg) from error


class Driver:
    """The driver of device `ordinal`, in its primary context, which is retained until `close`.

    `library` has the functions of the driver API under their C names and with C's arguments; by default `libcuda`.
    """

    def __init__(self, ordinal: int = 0, library: Any = None) -> None:  # noqa: ANN401 (see libcuda)
        self._cuda = library or libcuda()
        self.call("cuInit", 0)
        self.device = self._int("cuDeviceGet", ordinal)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.device)
        self.enter()
        self.multiprocessors, major, minor = (
            self._int("cuDeviceGetAttribute", attribute, self.device)
            for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR)
        )
        self.arch = f"sm_{major}{minor}"
        self.version = self._int("cuDriverGetVersion")

    def enter(self) -> None:
        """Make the primary context current in this thread; once in every thread that launches."""
        self.call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Give the primary context back."""
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    def kernel(self, images: Sequence[bytes], entry: str, warps: int, shared_bytes: int) -> Kernel:
        """Load the first of `images` (a cubin, its PTX) that this driver takes, and prepare its entry."""
        *cubins, last = images
        for image in cubins:
            with contextlib.suppress(ModelError):  # one of another driver: there is still the PTX
                return self._kernel(image, entry, warps, shared_bytes)
        return self._kernel(last, entry, warps, shared_bytes)

    def _kernel(self, image: bytes, entry: str, warps: int, shared_bytes: int) -> Kernel:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image + b"\0")  # PTX is text that must end
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        self.call("cuFuncSetAttribute", function, _SHARED_BYTES, shared_bytes)
        per_sm = self._int(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", function, warps * _WARP, ctypes.c_size_t(shared_bytes)
        )
        return Kernel(self, module, function, warps * _WARP, shared_bytes, per_sm * self.multiprocessors)

    def load(self, kernels: Kernels, name: str) -> Kernel:
        """The kernel of that name; raises BundleError when it is not among `kernels`."""
        try:
            metadata = json.loads(kernels[f"{name}.json"])
            images = [kernels[f"{name}.cubin"], *filter(None, [kernels.get(f"{name}.ptx")])]
            entry, warps, shared = metadata["entry"], metadata["warps"], metadata["shared_bytes"]
        except (ValueError, KeyError) as error:
            msg = f"no compiled kernel {name} ({error}); compile for {self.arch}"
            raise BundleError(msg) from error
        return self.kernel(images, entry, warps, shared)

    def allocate(self, size_bytes: int, fill: int = 0xFF) -> int:
        """Device memory with every byte `fill`; the caller frees it."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(fill), ctypes.c_size_t(size_bytes))
        self.call("cuCtxSynchronize")
        return pointer.value

    def upload(self, data: bytes) -> int:
        """Device memory with these bytes; the caller frees it."""
        pointer = self.allocate(len(data))
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))
        return pointer

    def free(self, pointer: int) -> None:
        """Free what `allocate` or `upload` returned."""
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def stream(self) -> int:
        """The handle of a new stream, which lives as long as the process."""
        handle = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
        return handle.value or 0

    def _int(self, name: str, *arguments: Any) -> int:  # noqa: ANN401 (ctypes converts)
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 (ctypes converts)
        """Any function of the driver API; its error becomes a `ModelError` with code and name."""
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            msg = f"{name} failed: CUDA error {code} ({(text.value or b'unknown').decode()})"
            raise ModelError(msg)


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry that is ready to launch. `resident` is how many of its programs the device can run at once."""

    driver: Driver
    module: ctypes.c_void_p
    function: ctypes.c_void_p
    threads: int
    shared_bytes: int
    resident: int

    def launch(
        self, grid: tuple[int, int], pointers: Sequence[int], numbers: Sequence[int], stream: int, *, together: bool
    ) -> None:
        """Launch on `stream` (a CUstream handle): pointers, then 32-bit numbers, in the kernel's own order.

        `together`: programs wait for each other, so all must be resident; refused when they cannot be.
        """
        if together and grid[0] * grid[1] > self.resident:
            msg = f"{grid[0] * grid[1]} programs that wait for each other; {self.resident} fit on this device"
            raise BadInput(msg)
        for pointer in pointers:
            if pointer % 16:
                msg = f"device pointer {pointer:#x} is not aligned to the 16 bytes that the kernel assumes"
                raise BadInput(msg)
        # Two more pointers end the list: Triton's own scratch, which these kernels do not use.
        values = (
            [ctypes.c_uint64(p) for p in pointers] + [ctypes.c_int32(n) for n in numbers] + [ctypes.c_uint64(0)] * 2
        )
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        shape = (*grid, 1, self.threads, 1, 1, self.shared_bytes, ctypes.c_void_p(stream), parameters)
        if together:
            self.driver.call("cuLaunchCooperativeKernel", self.function, *shape)
        else:
            self.driver.call("cuLaunchKernel", self.function, *shape, None)


class NeckRunner:
    """The neck with its weights on the device. Belongs to one stream at a time, as its scratch does.

    `one_launch=False` keeps to the form in three launches, in which no program waits for another.
    """

    def __init__(
        self, driver: Driver, kernels: Kernels, spec: Neck, packed: Mapping[int, Packed], *, one_launch: bool = True
    ) -> None:
        """Load the variants whose weights are `packed` (see `pack_neck_for`), and take memory on the device."""
        self.spec, self._driver = spec, driver
        self._variants = {(v.split, v.long, v.phase): v for v in neck_variants(driver.arch, spec) if v.split in packed}
        self._kernels = {key: driver.load(kernels, v.name) for key, v in self._variants.items()}
        self._owned: list[int] = []
        self._weights = {split: (self._own(one.w), self._own(one.b)) for split, one in packed.items()}
        splits_here = sorted(self._weights)
        self._resident = {
            split: min(self._kernels[split, long, -1].resident for long in (False, True)) if one_launch else 0
            for split in splits_here
        }
        most = phase_programs(max(self._resident.values()))
        self._phase_programs = most
        # The waiting form needs its scratch at rest, so the phases, which leave their state behind, have their own.
        sizes = [neck_scratch(spec, split, 1, most) for split in splits_here]
        self._scratch = [self._own_rest(max(getattr(s, part) for s in sizes)) for part in ("slots", "kv", "count")]
        state = neck_scratch(spec, 2, 1, most)
        self._state = [self._own_rest(size) for size in (state.slots, sizes[0].kv, state.count)]

    def __call__(self, x: int, out: int, batch: int, steps: int, stream: int) -> int:
        """Enqueue x [batch, steps, C] FP16 -> out [batch, steps, 120] FP16 (device pointers); returns the launches."""
        plan = plan_neck(self.spec, batch, steps, self._resident, self._driver.multiprocessors)
        w, b = self._weights[plan.split]
        launches = 0
        for first in range(0, batch, plan.images):
            images = min(plan.images, batch - first)
            read, write = x + first * steps * self.spec.channels * 2, out + first * steps * WIDTH * 2
            for phase in plan.phases:
                scratch = self._scratch if phase < 0 else self._state
                kernel = self._kernels[plan.split, plan.long and phase != 0, phase]
                grid = plan.tiles * plan.split, images
                kernel.launch(grid, (read, w, b, write, *scratch), (steps,), stream, together=phase < 0)
                launches += 1
        return launches

    def close(self) -> None:
        """Free what is on the device."""
        while self._owned:
            self._driver.free(self._owned.pop())

    def _own(self, data: Array) -> int:
        self._owned.append(self._driver.upload(data.tobytes()))
        return self._owned[-1]

    def _own_rest(self, size_bytes: int) -> int:
        self._owned.append(self._driver.allocate(max(16, size_bytes)))
        return self._owned[-1]


class HeadRunner:
    """The CTC head with its weights on the device. Belongs to one stream at a time, as its scratch does."""

    def __init__(
        self, driver: Driver, kernels: Kernels, packed: Array, *, max_rows: int, one_launch: bool = True
    ) -> None:
        """Load the variants, and take memory on the device for weights (see `pack_head_for`) and `max_rows` tokens."""
        self._driver, self._max_rows = driver, max_rows
        self._variants = {(v.form, v.slots): v for v in head_variants(driver.arch)}
        self._kernels = {key: driver.load(kernels, v.name) for key, v in self._variants.items()}
        any_variant = self._variants["whole", 64]
        self._chunks = packed.size // (128 * any_variant.chunk)
        exchanges = [kernel.resident for (form, _), kernel in self._kernels.items() if form == "exchange"]
        self._resident = min(exchanges) if one_launch else 0
        tiles = -(-max_rows // any_variant.rows)
        share_bytes = min(tiles, 2 * driver.multiprocessors) * 3 * 64 * any_variant.rows * 4
        self._w = driver.upload(packed.tobytes())
        # At rest for the exchange; the two-launch form, which leaves its shares behind, has its own.
        self._shares = {form: driver.allocate(share_bytes) for form in ("exchange", "share")}

    def __call__(self, x: int, best: int, probability: int, rows: int, stream: int) -> int:
        """Enqueue x [rows, 120] FP16 -> best [rows] int64, probability [rows] FP32; how many launches it took."""
        if rows > self._max_rows:
            msg = f"{rows} tokens; this head was made for {self._max_rows}"
            raise BadInput(msg)
        plan = plan_head(rows, self._chunks, self._resident, self._driver.multiprocessors)
        kernel = self._kernels[plan.form, plan.slots]
        shares = self._shares.get(plan.form, self._shares["share"])
        pointers = (x, self._w, best, probability, shares)
        kernel.launch(
            (plan.programs, plan.tiles), pointers, (rows, self._chunks), stream, together=plan.form == "exchange"
        )
        if plan.form != "share":
            return 1
        merge = self._variants["merge", 64]
        grid = merge.rows // merge.own, plan.tiles
        self._kernels["merge", 64].launch(grid, pointers[2:], (rows, plan.programs), stream, together=False)
        return 2

    def close(self) -> None:
        """Free what is on the device."""
        for pointer in (self._w, *self._shares.values()):
            self._driver.free(pointer)
