"""Protocol documents: values survive, and no bytes whatever do more than be refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from appliance.adapters import oip
from models.errors import BadInput
from models.spec import DTYPES, Array, ModelSpec, Tensor, TensorSpec

pytestmark = pytest.mark.property

SPEC = ModelSpec((TensorSpec("x", "FP32", (-1, 2)),), ())
JSON_TYPES = sorted(set(DTYPES) - {"FP16"})
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def arrays(datatypes: list[str]) -> st.SearchStrategy[Array]:
    """Arrays of any shape with finite values."""

    def of(datatype: str) -> st.SearchStrategy[Array]:
        dtype = np.dtype(DTYPES[datatype])
        finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
        return hnp.arrays(dtype, SHAPES, elements=hnp.from_dtype(dtype, **finite))

    return st.sampled_from(datatypes).flatmap(of)


@st.composite
def texts(draw: st.DrawFn) -> Array:
    """BYTES arrays that hold text."""
    shape = draw(SHAPES)
    array = np.empty(int(np.prod(shape)), np.object_)
    array[:] = [draw(st.text(max_size=8)).encode() for _ in range(array.size)]
    return array.reshape(shape)


def same(one: Array, other: Array) -> bool:
    """Equal in type, shape and every bit that a value has."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()


def back(content: bytes, length: int | None) -> list[Tensor]:
    """An answer read as if it were a request, which has the same form of tensors."""
    head = orjson.loads(content[:length])
    body = orjson.dumps({"inputs": head["outputs"]})
    tail = b"" if length is None else content[length:]
    return oip.parse(body + tail, str(len(body)) if tail else None, SPEC).tensors


@given(st.lists(st.tuples(st.one_of(arrays(JSON_TYPES), texts()), st.booleans()), min_size=1, max_size=4))
def test_tensors_survive_json_and_binary_in_any_mixture(outputs: list[tuple[Array, bool]]) -> None:
    tensors = [Tensor.from_array(f"t{i}", array) for i, (array, _binary) in enumerate(outputs)]
    asked = oip.Request([], binary={f"t{i}": binary for i, (_array, binary) in enumerate(outputs)})
    parts, length = oip.render(asked, {}, tensors)
    content = b"".join(parts)
    if any(binary for _array, binary in outputs) and length == len(content):
        length = None  # every binary tensor was empty
    arrived = [tensor.to_array() for tensor in back(content, length)]
    assert all(same(array, other) for (array, _binary), other in zip(outputs, arrived, strict=True))


@given(arrays(sorted(DTYPES)))
def test_every_type_survives_in_binary(array: Array) -> None:
    item = {"name": "x", "datatype": Tensor.from_array("x", array).datatype, "shape": list(array.shape)}
    head = orjson.dumps({"inputs": [{**item, "parameters": {"binary_data_size": array.nbytes}}]})
    (tensor,) = oip.parse(head + array.tobytes(), str(len(head)), SPEC).tensors
    assert same(tensor.to_array(), array)


@given(arrays(JSON_TYPES))
def test_flat_and_nested_data_are_the_same_tensor(array: Array) -> None:
    item = {"name": "x", "datatype": Tensor.from_array("x", array).datatype, "shape": list(array.shape)}
    nested = array.tolist() if array.ndim else [array.item()]
    for data in (array.reshape(-1).tolist(), nested):
        (tensor,) = oip.parse(json.dumps({"inputs": [{**item, "data": data}]}).encode(), None, SPEC).tensors
        assert same(tensor.to_array(), array)


def read(body: bytes, header: str | None) -> None:
    """Parse and use a body; anything but BadInput is a fault."""
    with contextlib.suppress(BadInput):
        for tensor in oip.parse(body, header, SPEC).tensors:
            tensor.to_array()


@given(st.binary(max_size=200), st.one_of(st.none(), st.text(max_size=6), st.integers(-5, 250).map(str)))
@settings(max_examples=150)
def test_any_bytes_are_understood_or_refused(body: bytes, header: str | None) -> None:
    read(body, header)


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ODD_INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("x") | PLAIN,
        "datatype": st.sampled_from([*DTYPES, "BYTES", "STRING"]) | PLAIN,
        "shape": st.lists(st.integers(-2, 4) | st.sampled_from([2**31, 2**63, 2**64]), max_size=3) | PLAIN,
        "data": st.lists(PLAIN, max_size=4) | PLAIN,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 40) | PLAIN}) | PLAIN,
    },
)
ODD_REQUEST = st.fixed_dictionaries(
    {"inputs": st.lists(ODD_INPUT, max_size=3) | PLAIN},
    optional={"id": PLAIN, "outputs": st.lists(ODD_INPUT, max_size=2) | PLAIN, "parameters": PLAIN},
)


@given(ODD_REQUEST, st.binary(max_size=40))
@settings(max_examples=150)
def test_any_document_is_understood_or_refused(document: object, tail: bytes) -> None:
    head = json.dumps(document).encode()
    read(head + tail, str(len(head)))
