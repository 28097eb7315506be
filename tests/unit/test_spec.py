"""Tensors in their wire form, and the check of a request against what a model takes."""

from __future__ import annotations

import numpy as np
import pytest

from models.errors import BadInput
from models.spec import (
    DTYPES,
    ModelSpec,
    Tensor,
    TensorSpec,
    check_request,
    element_count,
    pack_bytes,
    unpack_bytes,
)

pytestmark = pytest.mark.unit

PAIR = ModelSpec(
    inputs=(TensorSpec("image", "FP32", (-1, 3, -1)), TensorSpec("scale", "INT64", (1,))),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
)
IMAGE = Tensor("image", "FP32", (2, 3, 4), bytes(96))
SCALE = Tensor("scale", "INT64", (1,), bytes(8))


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_fixed_size_type_comes_back_with_its_values_and_name(datatype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(DTYPES[datatype])
    tensor = Tensor.from_array("t", array)
    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    back = tensor.to_array()
    assert back.dtype == array.dtype
    assert (back == array).all()


def test_a_payload_is_little_endian_and_row_major() -> None:
    column_major = np.asfortranarray([[1, 2], [3, 4]], dtype=np.uint16)
    assert bytes(Tensor.from_array("t", column_major).data) == bytes([1, 0, 2, 0, 3, 0, 4, 0])


def test_a_contiguous_array_is_wrapped_without_a_copy() -> None:
    array = np.zeros(4, np.float32)
    back = Tensor.from_array("t", array).to_array()
    assert np.shares_memory(array, back)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1, 1)])
def test_scalars_and_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    assert Tensor.from_array("t", np.ones(shape, np.float32)).to_array().shape == shape


@pytest.mark.parametrize("shape", [(), (0,), (2, 2)])
def test_bytes_tensors_keep_elements_of_any_content_and_length(shape: tuple[int, ...]) -> None:
    elements = [b"", b"\x00\xff", "ü".encode(), b"x" * 300][: int(np.prod(shape))]
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    tensor = Tensor.from_array("t", array.reshape(shape))
    assert tensor.datatype == "BYTES"
    assert tensor.to_array().shape == shape
    assert tensor.to_array().reshape(-1).tolist() == elements


@pytest.mark.parametrize("dtype", ["complex64", "U3", "datetime64[s]", ">f4"])
def test_an_array_that_has_no_wire_form_is_refused_by_its_dtype(dtype: str) -> None:
    with pytest.raises(BadInput, match="has no datatype name"):
        Tensor.from_array("t", np.zeros(2, dtype))


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (Tensor("t", "FP32", (2,), bytes(7)), "carries 7 bytes, but FP32 [2] needs 8"),
        (Tensor("t", "FP33", (2,), bytes(8)), "unknown datatype 'FP33'; known: BOOL, "),
        (Tensor("t", "FP32", (2, -1), b""), "every dimension must be 0 or more"),
        (Tensor("t", "FP32", (2**40, 2**40), b""), "more than any request can carry"),
        (Tensor("t", "FP32", (0, 2**63), b""), "more than any request can carry"),
        (Tensor("t", "FP32", (1,) * 65, bytes(4)), "more than any request can carry"),
        (Tensor("t", "BYTES", (2,), pack_bytes([b"a"])), "holds 1 BYTES elements, but its shape says 2"),
        (Tensor("t", "BYTES", (1,), b"\x05\x00\x00\x00abc"), "element 0 of the BYTES payload is cut short"),
        (Tensor("t", "BYTES", (1,), b"\x05\x00"), "element 0 of the BYTES payload is cut short"),
        (Tensor("t", "BYTES", (1,), b"\xff\xff\xff\xff"), "element 0 of the BYTES payload is cut short"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused_with_the_figures(tensor: Tensor, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        tensor.to_array()
    assert sentence in str(caught.value)
    assert "'t'" in str(caught.value)


def test_an_absurd_shape_is_refused_in_a_short_sentence() -> None:
    with pytest.raises(BadInput) as caught:
        element_count("t", [1] * 100_000)
    assert len(str(caught.value)) < 300


def test_the_largest_dimension_that_memory_could_address_is_still_counted() -> None:
    assert element_count("t", [2**20, 2**20]) == 2**40
    assert element_count("t", [2**40, 0]) == 0


def test_bytes_elements_may_come_from_any_kind_of_buffer() -> None:
    payload = pack_bytes([b"a", b"bc"])
    for buffer in (payload, bytearray(payload), memoryview(payload), np.frombuffer(payload, np.uint8).data):
        assert unpack_bytes("t", buffer, 2) == [b"a", b"bc"]


def test_inputs_that_fit_are_accepted_in_any_order() -> None:
    check_request(PAIR, [IMAGE, SCALE], None)
    check_request(PAIR, [SCALE, IMAGE], None)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([IMAGE], "inputs are ['image'], but this model takes ['image', 'scale']"),
        ([IMAGE, SCALE, Tensor("z", "FP32", (1,), bytes(4))], "inputs are ['image', 'scale', 'z']"),
        ([IMAGE, SCALE, IMAGE], "an input is given twice"),
        ([IMAGE, Tensor("scale", "INT32", (1,), bytes(4))], "has datatype INT32, but this model takes INT64"),
        ([IMAGE, Tensor("scale", "INT64", (2,), bytes(16))], "has shape [2], but this model takes [1]"),
        ([IMAGE, Tensor("scale", "INT64", (), bytes(8))], "has shape [], but this model takes [1]"),
        ([Tensor("image", "FP32", (2, 4, 4), bytes(128)), SCALE], "this model takes [-1, 3, -1] (-1 is any size)"),
        ([Tensor("image", "FP32", (-1, 3, 4), b""), SCALE], "has shape [-1, 3, 4]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_what_is_given_and_what_is_wanted(
    inputs: list[Tensor], sentence: str
) -> None:
    with pytest.raises(BadInput) as caught:
        check_request(PAIR, inputs, None)
    assert sentence in str(caught.value)
