"""Tensors as they are named on the wire, and the specification of a model's inputs and outputs.

Datatype names are those of the Open Inference Protocol ("FP32", "INT64", "BYTES", ...).
A tensor's payload is its elements in row-major order, little-endian, without padding;
an element of BYTES is a uint32 length followed by that many bytes. This is the protocol's
binary form, so a payload travels from an HTTP body to a worker without being touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from models.errors import BadInput

Array: TypeAlias = npt.NDArray[Any]
Payload: TypeAlias = "bytes | bytearray | memoryview"

DTYPES: Mapping[str, npt.DTypeLike] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
"""Datatype name -> numpy dtype, for every type with elements of fixed size (all but BYTES)."""

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 4
_MOST_DIMENSIONS = 64  # numpy's own limit
_MOST_ELEMENTS = 2**40


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: a variable dimension is -1; `layout` names the axes, e.g. "NCHW", N being a batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The tensors that go into a graph and come out of it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def rows_are_apart(self) -> bool:
        """Whether requests may be joined along the first axis: every tensor says that it is N, of any size.

        A variable first axis alone does not say so: a graph may add its rows up.
        """
        tensors = (*self.inputs, *self.outputs)
        return bool(tensors) and all(one.layout[:1] == "N" and one.shape[:1] == (-1,) for one in tensors)


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class Tensor:
    """A tensor in its wire form. `data` is borrowed: it may lie in a request body or shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Payload

    @property
    def size_bytes(self) -> int:
        """Length of `data`."""
        return memoryview(self.data).nbytes

    @classmethod
    def from_array(cls, name: str, array: Array) -> Tensor:
        """Wrap a numpy array (object arrays hold `bytes`); contiguous arrays are not copied."""
        if array.dtype == np.object_:
            return cls(name, "BYTES", array.shape, pack_bytes(array.reshape(-1).tolist()))
        datatype = _NAMES.get(array.dtype)
        if datatype is None:
            msg = f"tensor {name!r} has dtype {array.dtype}, which has no datatype name"
            raise BadInput(msg)
        flat = np.ascontiguousarray(array).reshape(-1)
        return cls(name, datatype, array.shape, flat.view(np.uint8).data)

    def to_array(self) -> Array:
        """Return a numpy array of `shape`; fixed-size types are views of `data`, never copies.

        Raises BadInput when datatype, shape and payload length do not agree.
        """
        count = element_count(self.name, self.shape)
        if self.datatype == "BYTES":
            elements = unpack_bytes(self.name, self.data, count)
            array = np.empty(count, dtype=np.object_)
            array[:] = elements
            return array.reshape(self.shape)
        dtype = DTYPES.get(self.datatype)
        if dtype is None:
            msg = f"tensor {self.name!r} has unknown datatype {self.datatype!r}; known: {', '.join(DTYPES)}, BYTES"
            raise BadInput(msg)
        have_bytes = self.size_bytes
        need_bytes = count * np.dtype(dtype).itemsize
        if have_bytes != need_bytes:
            msg = (
                f"tensor {self.name!r} carries {have_bytes} bytes, "
                f"but {self.datatype} {list(self.shape)} needs {need_bytes}"
            )
            raise BadInput(msg)
        view: Array = np.ndarray(self.shape, dtype, self.data)
        return view


def element_count(name: str, shape: Sequence[int]) -> int:
    """Number of elements of `shape`; raises BadInput for negative or absurd dimensions."""
    if min(shape, default=0) < 0:
        msg = f"tensor {name!r} has shape {list(shape)}: every dimension must be 0 or more"
        raise BadInput(msg)
    count = math.prod(shape)
    # Zeros are left out here: numpy refuses [0, 2**63] as well, although it has no elements.
    if len(shape) > _MOST_DIMENSIONS or (count or math.prod(filter(None, shape))) > _MOST_ELEMENTS:
        msg = f"tensor {name!r} has shape {str(list(shape))[:80]}: more than any request can carry"
        raise BadInput(msg)
    return count


def pack_bytes(elements: Sequence[bytes]) -> bytes:
    """Payload of a BYTES tensor."""
    return b"".join(len(element).to_bytes(_LENGTH_BYTES, "little") + element for element in elements)


def unpack_bytes(name: str, payload: Payload, count: int) -> list[bytes]:
    """Elements of a BYTES payload; raises BadInput unless it holds exactly `count` elements."""
    view = memoryview(payload).cast("B")
    elements: list[bytes] = []
    at = 0
    while at < len(view):
        end = at + _LENGTH_BYTES
        length = int.from_bytes(view[at:end], "little")
        if end + length > len(view):
            msg = f"tensor {name!r}: element {len(elements)} of the BYTES payload is cut short"
            raise BadInput(msg)
        elements.append(bytes(view[end : end + length]))
        at = end + length
    if len(elements) != count:
        msg = f"tensor {name!r} holds {len(elements)} BYTES elements, but its shape says {count}"
        raise BadInput(msg)
    return elements


def check_request(spec: ModelSpec, inputs: Sequence[Tensor], outputs: Sequence[str] | None) -> None:
    """Raise BadInput with one sentence when `inputs` are not what `spec` takes, or `outputs` not what it gives."""
    if outputs:
        given = {tensor.name for tensor in spec.outputs}
        for name in outputs:
            if name not in given:
                msg = f"there is no output {name!r}; this model gives {', '.join(sorted(given))}"
                raise BadInput(msg)
    by_name = {tensor.name: tensor for tensor in inputs}
    if len(by_name) != len(inputs):
        msg = f"an input is given twice: {sorted(tensor.name for tensor in inputs)}"
        raise BadInput(msg)
    wanted = {tensor.name for tensor in spec.inputs}
    if by_name.keys() != wanted:
        msg = f"inputs are {sorted(by_name)}, but this model takes {sorted(wanted)}"
        raise BadInput(msg)
    for want in spec.inputs:
        have = by_name[want.name]
        if have.datatype != want.datatype:
            msg = f"input {want.name!r} has datatype {have.datatype}, but this model takes {want.datatype}"
            raise BadInput(msg)
        fits = len(have.shape) == len(want.shape) and all(
            size >= 0 and limit in {-1, size} for size, limit in zip(have.shape, want.shape, strict=True)
        )
        if not fits:
            msg = (
                f"input {want.name!r} has shape {list(have.shape)}, "
                f"but this model takes {list(want.shape)} (-1 is any size)"
            )
            raise BadInput(msg)
