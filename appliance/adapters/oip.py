"""Open Inference Protocol v2 requests and answers: bytes to tensors and back. Pure.

Written from the public specification (inference_rest and Triton's binary tensor extension):
a body is JSON, or JSON of `Inference-Header-Content-Length` bytes followed by the binary tensors
in the order listed; a header length of 0 means the whole body is the one input, raw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import orjson

from models.errors import BadInput, ModelError
from models.spec import DTYPES, ModelSpec, Payload, Tensor, element_count, pack_bytes

HEADER = "inference-header-content-length"
_SCALARS: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""Kind of a numpy dtype -> types of JSON values that it takes."""
MOST_URGENT, LEAST_URGENT = 1, 10
_REMEMBERED_BYTES = 1024
"""A client sends the same JSON before its tensors time after time: so much of it is read only once."""
_LENGTH_DIGITS = 12
"""Of a terabyte: nothing has more."""

_NOT_OFFERED = {
    "shared_memory_region": "memory shared with clients is not offered: send the tensor in the request",
    "classification": "classification is not offered: take the tensor and sort it",
    "sequence_id": "sequences are not offered: every request stands for itself",
}
"""Parameters of extensions that would change the answer: refused, because without them it would be another."""


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class Request:
    """A parsed request body."""

    tensors: list[Tensor]
    id: str | None = None
    outputs: tuple[str, ...] | None = None
    """Names asked for; None is all."""
    binary: Mapping[str, bool] | None = None
    """Output name -> whether it is wanted in binary; names that are missing follow `binary_default`."""
    binary_default: bool = False
    priority: int | None = None
    timeout_us: int | None = None

    def wants_binary(self, output: str) -> bool:
        """Whether that output is to be sent in binary."""
        return self.binary.get(output, self.binary_default) if self.binary else self.binary_default


def parse(body: bytes, header_length: str | None, spec: ModelSpec) -> Request:
    """Read a request body. `spec` is needed only for raw bodies. Raises BadInput."""
    if header_length is None:
        return _filled(_parse(body), memoryview(b""))
    if not header_length.isascii() or not header_length.isdigit() or len(header_length) > _LENGTH_DIGITS:
        msg = f"{HEADER} is {header_length[:40]!r}: it must be the number of bytes of the JSON part"
        raise BadInput(msg)
    length = int(header_length)
    if length > len(body):
        msg = f"{HEADER} is {length}, but the body has only {len(body)} bytes"
        raise BadInput(msg)
    if length == 0:
        return _parse_raw(body, spec)
    read = _parse_again if length <= _REMEMBERED_BYTES else _parse
    return _filled(read(body[:length]), memoryview(body)[length:])


def json_bytes(body: bytes, header_length: str | None) -> int:
    """How many bytes of `body` are JSON to be read, at most."""
    if header_length and header_length.isascii() and header_length.isdigit():
        return min(len(body), int(header_length[:_LENGTH_DIGITS]))
    return len(body)


def render(
    request: Request, head: Mapping[str, Any], tensors: Sequence[Tensor]
) -> tuple[Sequence[Payload], int | None]:
    """A response body in parts, and the length of its JSON part when binary tensors follow (else None).

    Raises BadInput for outputs that JSON cannot carry by type, ModelError for values it cannot carry.
    """
    outputs: list[dict[str, Any]] = []
    tail: list[Payload] = []
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if request.wants_binary(tensor.name):
            output["parameters"] = {"binary_data_size": tensor.size_bytes}
            tail.append(tensor.data)
        else:
            output["data"] = _plain(tensor)
        outputs.append(output)
    if request.id is not None:
        head = {**head, "id": request.id}
    content = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return ([content, *tail], len(content)) if tail else ([content], None)


def json_object(content: bytes) -> dict[str, Any]:
    """The JSON object of a body; raises BadInput."""
    try:
        data = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        msg = f"the request is not JSON: {error}"
        raise BadInput(msg) from error
    if not isinstance(data, dict):
        raise BadInput("the request must be a JSON object")
    return data


@dataclass(frozen=True, slots=True)
class _Head:
    """The JSON of a request; `sizes` are those of the binary tensors by their place in `request`, without data yet."""

    request: Request
    sizes: Mapping[int, int]


def _filled(head: _Head, tail: memoryview) -> Request:
    """The request of `head` with its binary tensors, which are views of `tail`."""
    tensors = list(head.request.tensors)
    for place, size in head.sizes.items():
        tensor = tensors[place]
        if size > len(tail):
            msg = f"input {tensor.name!r}: binary_data_size is {size}, but {len(tail)} bytes of binary data are left"
            raise BadInput(msg)
        tensors[place] = Tensor(tensor.name, tensor.datatype, tensor.shape, tail[:size])
        tail = tail[size:]
    if len(tail):
        msg = f"{len(tail)} bytes follow the last binary tensor: binary_data_size values do not add up"
        raise BadInput(msg)
    one = head.request
    return Request(tensors, one.id, one.outputs, one.binary, one.binary_default, one.priority, one.timeout_us)


def _parse(content: bytes) -> _Head:
    data = json_object(content)
    inputs = _objects(data, "inputs")
    if not inputs:
        raise BadInput("the request has no `inputs`")
    tensors: list[Tensor] = []
    sizes: dict[int, int] = {}
    for place, item in enumerate(inputs):
        tensor, size = _input(item)
        tensors.append(tensor)
        if size is not None:
            sizes[place] = size
    parameters = parameters_of(data)
    wanted = _objects(data, "outputs") if data.get("outputs") is not None else None
    names = None if not wanted else tuple(_field(item, "name", str) for item in wanted)
    if names and len(set(names)) != len(names):
        raise BadInput("an output is asked for twice")
    for item in (data, *inputs, *(wanted or ())):
        _refuse_not_offered(parameters_of(item))
    flags = {item["name"]: flag(parameters_of(item), "binary_data") for item in wanted or ()}
    priority = _number(parameters, "priority")
    if priority and priority > LEAST_URGENT:
        msg = f"parameter `priority` is {priority}: it must be {MOST_URGENT} (most urgent) to {LEAST_URGENT}, or 0"
        raise BadInput(msg)
    request = Request(
        tensors=tensors,
        id=None if data.get("id") is None else _field(data, "id", str),
        outputs=names,
        binary={name: flag for name, flag in flags.items() if flag is not None},
        binary_default=flag(parameters, "binary_data_output") or False,
        priority=priority,
        timeout_us=_number(parameters, "timeout"),
    )
    return _Head(request, sizes)


_parse_again = lru_cache(maxsize=256)(_parse)
"""What it returns is shared by the requests of several clients: to be read only."""


def _parse_raw(body: bytes, spec: ModelSpec) -> Request:
    if len(spec.inputs) != 1:
        msg = f"a raw body ({HEADER}: 0) needs a model with one input, this one has {len(spec.inputs)}"
        raise BadInput(msg)
    want = spec.inputs[0]
    if want.datatype == "BYTES":
        return Request([Tensor(want.name, "BYTES", (1,), pack_bytes([body]))], binary_default=True)
    if want.shape.count(-1) > 1:
        msg = f"a raw body cannot say which shape {list(want.shape)} has: at most one size may be variable"
        raise BadInput(msg)
    item_bytes = np.dtype(DTYPES[want.datatype]).itemsize * math.prod(size for size in want.shape if size != -1)
    count, rest = divmod(len(body), item_bytes) if item_bytes else (0, len(body))
    if rest:
        msg = f"the raw body has {len(body)} bytes, no multiple of the {item_bytes} that {list(want.shape)} needs"
        raise BadInput(msg)
    shape = tuple(count if size == -1 else size for size in want.shape)
    return Request([Tensor(want.name, want.datatype, shape, body)], binary_default=True)


def _input(item: dict[str, Any]) -> tuple[Tensor, int | None]:
    """An input, and its size when its data follows the JSON."""
    name, datatype = _field(item, "name", str), _field(item, "datatype", str)
    shape = _field(item, "shape", list)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
        msg = f"input {name!r}: `shape` must be a list of whole numbers"
        raise BadInput(msg)
    element_count(name, shape)
    size = _number(parameters_of(item), "binary_data_size")
    if size is None:
        return Tensor(name, datatype, tuple(shape), _payload(name, datatype, shape, item.get("data"))), None
    if "data" in item:
        msg = f"input {name!r} has both `data` and `binary_data_size`: send one of them"
        raise BadInput(msg)
    return Tensor(name, datatype, tuple(shape), b""), size


def _payload(name: str, datatype: str, shape: Sequence[int], data: object) -> bytes:
    """Elements given as JSON, flat or nested, in their wire form."""
    if not isinstance(data, list):
        msg = f"input {name!r} has no `data` list and no binary_data_size"
        raise BadInput(msg)
    if datatype == "BYTES":
        return pack_bytes(_texts(name, data))
    dtype = DTYPES.get(datatype)
    if dtype is None:
        msg = f"input {name!r} has unknown datatype {datatype!r}; known: {', '.join(DTYPES)}, BYTES"
        raise BadInput(msg)
    if datatype == "FP16":
        msg = f"input {name!r}: FP16 has no JSON form, send it as binary data"
        raise BadInput(msg)
    kind = np.dtype(dtype)
    if not _scalar_types(data) <= _SCALARS[kind.kind]:
        msg = f"input {name!r}: `data` holds values that are no {kind.name}"
        raise BadInput(msg)
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(data, kind)
    except OverflowError as error:
        limits = np.iinfo(kind)
        msg = f"input {name!r}: `data` holds values outside {limits.min} .. {limits.max}"
        raise BadInput(msg) from error
    except ValueError as error:
        msg = f"input {name!r}: `data` is ragged"
        raise BadInput(msg) from error
    empty = array.size == math.prod(shape) == 0  # nested lists cannot show what follows a size of 0
    if list(array.shape) != list(shape) and array.shape != (math.prod(shape),) and not empty:
        msg = f"input {name!r}: `data` has shape {list(array.shape)}, `shape` says {list(shape)}"
        raise BadInput(msg)
    return array.tobytes()


def _scalar_types(data: list[Any]) -> set[type]:
    """Types of the values in nested lists; numpy would take `true` among whole numbers for a 1."""
    level = data
    while (types := set(map(type, level))) == {list}:
        level = list(chain.from_iterable(level))
    return types - {list}


def _texts(name: str, data: list[Any]) -> list[bytes]:
    found: list[bytes] = []
    stack: list[Any] = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, str):
            found.append(item.encode())
        else:
            msg = f"input {name!r}: `data` of datatype BYTES must hold strings"
            raise BadInput(msg)
    return found


def _plain(tensor: Tensor) -> Any:  # noqa: ANN401 - a numpy array or a list, both of which orjson writes
    array = tensor.to_array().reshape(-1)
    if tensor.datatype == "BYTES":
        try:
            return [element.decode() for element in array]
        except UnicodeDecodeError as error:
            msg = f"output {tensor.name!r} is not text: ask for it as binary data"
            raise BadInput(msg) from error
    if tensor.datatype == "FP16":
        msg = f"output {tensor.name!r}: FP16 has no JSON form, ask for it as binary data"
        raise BadInput(msg)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        msg = f"output {tensor.name!r} holds NaN or infinite values, which JSON cannot carry: ask for binary data"
        raise ModelError(msg)
    return np.ascontiguousarray(array)


def _objects(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = _field(data, key, list)
    if not all(isinstance(item, dict) for item in items):
        msg = f"`{key}` must be a list of objects"
        raise BadInput(msg)
    return items  # type: ignore[no-any-return] # just checked


def _field(data: dict[str, Any], key: str, kind: type) -> Any:  # noqa: ANN401 - of type `kind`
    value = data.get(key)
    if not isinstance(value, kind):
        msg = f"`{key}` is missing or is no {'text' if kind is str else kind.__name__}"
        raise BadInput(msg)
    return value


def parameters_of(data: dict[str, Any]) -> dict[str, Any]:
    """The `parameters` of a document, a tensor or an output; raises BadInput."""
    parameters = data.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise BadInput("`parameters` must be an object")
    return parameters


def _refuse_not_offered(parameters: dict[str, Any]) -> None:
    for key, sentence in _NOT_OFFERED.items():
        if parameters.get(key):
            raise BadInput(sentence)


def flag(parameters: dict[str, Any], key: str) -> bool | None:
    """A truth value among parameters, None when it is not given; raises BadInput."""
    value = parameters.get(key)
    if value is not None and not isinstance(value, bool):
        msg = f"parameter `{key}` must be true or false"
        raise BadInput(msg)
    return value


def _number(parameters: dict[str, Any], key: str) -> int | None:
    value = parameters.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = f"parameter `{key}` must be a whole number of 0 or more"
        raise BadInput(msg)
    return value
