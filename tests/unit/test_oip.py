"""Open Inference Protocol requests: what is understood, and one helpful sentence for everything else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from appliance.adapters import oip
from models.errors import BadInput
from models.spec import ModelSpec, Tensor, TensorSpec, pack_bytes

pytestmark = pytest.mark.unit

NOTHING = ModelSpec((), ())


def one(name: str = "x", datatype: str = "FP32", shape: Any = (2,), **rest: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """One input of a request."""
    return {"name": name, "datatype": datatype, "shape": list(shape) if isinstance(shape, tuple) else shape, **rest}


def request(*inputs: object, **rest: object) -> dict[str, Any]:
    """A request document."""
    return {"inputs": list(inputs), **rest}


def parse(document: object, tail: bytes = b"", spec: ModelSpec = NOTHING) -> oip.Request:
    """Parse a document followed by binary data."""
    head = json.dumps(document).encode()
    return oip.parse(head + tail, str(len(head)) if tail else None, spec)


def only(parsed: oip.Request) -> Tensor:
    """The single tensor of a request."""
    (tensor,) = parsed.tensors
    return tensor


def binary(size: object) -> dict[str, Any]:
    """The parameters of a binary input."""
    return {"parameters": {"binary_data_size": size}}


# Values


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]], ids=["flat", "nested"])
@pytest.mark.parametrize("datatype", ["INT8", "UINT64", "FP32", "FP64"])
def test_numbers_may_be_flat_or_nested(datatype: str, data: list[Any]) -> None:
    tensor = only(parse(request(one(datatype=datatype, shape=(2, 2), data=data))))
    assert tensor.to_array().tolist() == [[1, 2], [3, 4]]
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, (2, 2))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("UINT8", [0, 255]),
        ("FP64", [1e-300, -1.5]),
        ("FP32", [0.1, 3]),
    ],
)
def test_the_whole_range_of_a_type_is_taken_exactly(datatype: str, values: list[Any]) -> None:
    array = only(parse(request(one(datatype=datatype, data=values)))).to_array()
    assert array.tolist() == np.array(values, array.dtype).tolist()


def test_an_empty_tensor_needs_no_data_and_a_scalar_one_value() -> None:
    for data in ([], [[]]):
        assert only(parse(request(one(shape=(1, 0, 3), data=data)))).to_array().shape == (1, 0, 3)
    assert only(parse(request(one(shape=(), data=[7])))).to_array() == 7


@pytest.mark.parametrize("data", [["a", "ü", "", "d"], [["a", "ü"], ["", "d"]]], ids=["flat", "nested"])
def test_texts_may_be_flat_or_nested_and_keep_their_order(data: list[Any]) -> None:
    tensor = only(parse(request(one(datatype="BYTES", shape=(2, 2), data=data))))
    assert tensor.to_array().reshape(-1).tolist() == [b"a", "ü".encode(), b"", b"d"]


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (one(data=[[1, 2], [3]]), "input 'x': `data` is ragged"),
        (one(data=[1, [2]]), "input 'x': `data` is ragged"),
        (one(data=[1, 2, 3]), "input 'x': `data` has shape [3], `shape` says [2]"),
        (one(shape=(2, 2), data=[[1, 2, 3, 4]]), "`data` has shape [1, 4], `shape` says [2, 2]"),
        (one(data=[]), "`data` has shape [0], `shape` says [2]"),
        (one(data=["1", "2"]), "input 'x': `data` holds values that are no float32"),
        (one(data=["1", 2]), "values that are no float32"),
        (one(data=[None, 2]), "values that are no float32"),
        (one(data=[{}, 2]), "values that are no float32"),
        (one(data=[True, False]), "values that are no float32"),
        (one(datatype="INT32", data=[True, False]), "values that are no int32"),
        (one(datatype="INT32", data=[True, 2]), "values that are no int32"),
        (one(datatype="INT32", data=[1.0, 2]), "values that are no int32"),
        (one(datatype="BOOL", data=[0, 1]), "values that are no bool"),
        (one(datatype="UINT8", data=[0, 256]), "input 'x': `data` holds values outside 0 .. 255"),
        (one(datatype="UINT8", data=[0, -1]), "values outside 0 .. 255"),
        (one(datatype="INT64", data=[0, 2**63]), "values outside -9223372036854775808 .. 9223372036854775807"),
        (one(datatype="FP16", data=[1, 2]), "input 'x': FP16 has no JSON form, send it as binary data"),
        (one(datatype="FP8", data=[1, 2]), "input 'x' has unknown datatype 'FP8'; known: BOOL, "),
        (one(datatype="BYTES", data=["a", 1]), "`data` of datatype BYTES must hold strings"),
        (one(datatype="BYTES", data=["a", None]), "`data` of datatype BYTES must hold strings"),
        (one(data="12"), "input 'x' has no `data` list and no binary_data_size"),
        (one(), "input 'x' has no `data` list and no binary_data_size"),
    ],
)
def test_values_that_cannot_be_the_tensor_are_refused_by_its_name(item: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(request(item))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ([2**40, 2**40], "more than any request can carry"),
        ([0, 2**63], "more than any request can carry"),
        ([1] * 65, "more than any request can carry"),
        ([-1, 2], "input"),
        ([-1, 2], "every dimension must be 0 or more"),
        ([True, 2], "`shape` must be a list of whole numbers"),
        ([2.0], "`shape` must be a list of whole numbers"),
        ([10**30], "`shape` must be a list of whole numbers"),
        (["2"], "`shape` must be a list of whole numbers"),
        (2, "`shape` is missing or is no list"),
        (None, "`shape` is missing or is no list"),
    ],
)
def test_a_shape_that_nothing_could_have_is_refused_before_memory_is_asked_for(shape: object, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(request(one(shape=shape, data=[1, 2])))
    assert sentence in str(caught.value).replace("tensor", "input")


# The document


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "the request must be a JSON object"),
        ("text", "the request must be a JSON object"),
        ({}, "`inputs` is missing or is no list"),
        ({"inputs": {}}, "`inputs` is missing or is no list"),
        ({"inputs": []}, "the request has no `inputs`"),
        ({"inputs": [1]}, "`inputs` must be a list of objects"),
        (request({"datatype": "FP32", "shape": [1], "data": [1]}), "`name` is missing or is no text"),
        (request(one(name=7, data=[1, 2])), "`name` is missing or is no text"),
        (request({"name": "x", "shape": [1], "data": [1]}), "`datatype` is missing or is no text"),
        (request(one(data=[1, 2]), id=5), "`id` is missing or is no text"),
        (request(one(data=[1, 2]), parameters=[1]), "`parameters` must be an object"),
        (request(one(data=[1, 2], parameters=7)), "`parameters` must be an object"),
        (request(one(data=[1, 2]), outputs={}), "`outputs` is missing or is no list"),
        (request(one(data=[1, 2]), outputs=["y"]), "`outputs` must be a list of objects"),
        (request(one(data=[1, 2]), outputs=[{}]), "`name` is missing or is no text"),
        (request(one(data=[1, 2]), outputs=[{"name": "y"}, {"name": "y"}]), "an output is asked for twice"),
        (request(one(data=[1, 2]), parameters={"priority": -1}), "parameter `priority` must be a whole number"),
        (request(one(data=[1, 2]), parameters={"priority": True}), "parameter `priority` must be a whole number"),
        (request(one(data=[1, 2]), parameters={"timeout": 1.5}), "parameter `timeout` must be a whole number"),
        (request(one(data=[1, 2]), parameters={"timeout": "9"}), "parameter `timeout` must be a whole number"),
        (
            request(one(data=[1, 2]), parameters={"binary_data_output": "no"}),
            "`binary_data_output` must be true or false",
        ),
        (
            request(one(data=[1, 2]), outputs=[{"name": "y", "parameters": {"binary_data": 0}}]),
            "parameter `binary_data` must be true or false",
        ),
    ],
)
def test_a_document_of_another_form_is_refused_by_the_field(document: object, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(document)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"NaN",
        b'{"inputs": [{"name": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"1" * 5000,
    ],
    ids=["empty", "cut", "not-utf8", "nan", "half-pair", "open-brackets", "brackets", "endless-number"],
)
def test_what_is_no_json_is_refused_however_deep_or_long_it_is(body: bytes) -> None:
    with pytest.raises(BadInput, match="the request is not JSON"):
        oip.parse(body, None, NOTHING)


def nested(datatype: str, value: str) -> bytes:
    """A request whose one value lies almost as deep as the parser allows."""
    data = "[" * 1000 + value + "]" * 1000
    return f'{{"inputs": [{{"name": "x", "datatype": "{datatype}", "shape": [1], "data": {data}}}]}}'.encode()


def test_data_as_deep_as_the_parser_allows_is_refused_or_flattened_without_a_crash() -> None:
    assert only(oip.parse(nested("BYTES", '"a"'), None, NOTHING)).to_array().tolist() == [b"a"]
    with pytest.raises(BadInput, match="input 'x'"):
        oip.parse(nested("FP32", "1"), None, NOTHING)


def test_inputs_stand_in_the_order_given_even_when_a_name_comes_twice() -> None:
    parsed = parse(request(one(data=[1, 2]), one("z", data=[3, 4]), one(data=[5, 6])))
    assert [tensor.name for tensor in parsed.tensors] == ["x", "z", "x"]


def test_what_is_not_said_is_left_to_the_defaults() -> None:
    parsed = parse(request(one(data=[1, 2])))
    assert (parsed.id, parsed.outputs, parsed.binary_default) == (None, None, False)
    assert (parsed.priority, parsed.timeout_us) == (None, None)


def test_id_priority_timeout_and_outputs_are_understood() -> None:
    parameters = {"priority": 3, "timeout": 1500, "binary_data_output": True}
    outputs = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}]
    parsed = parse(request(one(data=[1, 2]), id="42", parameters=parameters, outputs=outputs))
    assert (parsed.id, parsed.priority, parsed.timeout_us) == ("42", 3, 1500)
    assert (parsed.outputs, parsed.binary_default) == (("y", "z"), True)


@pytest.mark.parametrize("outputs", [None, []])
def test_asking_for_no_output_in_particular_is_asking_for_all(outputs: object) -> None:
    assert parse(request(one(data=[1, 2]), outputs=outputs)).outputs is None


# The binary extension


def test_binary_tensors_are_views_of_the_body_in_the_order_listed() -> None:
    first, second = np.float32([1, 2]).tobytes(), pack_bytes([b"abc"])
    document = request(
        one(**binary(8)),
        one("s", "BYTES", (1,), **binary(7)),
        one("z", "INT8", (1,), data=[5]),
        one("e", "FP16", (0,), **binary(0)),
    )
    x, s, z, e = parse(document, first + second).tensors
    assert x.to_array().tolist() == [1, 2]
    assert s.to_array().tolist() == [b"abc"]
    assert z.to_array().tolist() == [5]
    assert e.to_array().tolist() == []
    assert isinstance(x.data, memoryview)


def test_half_floats_travel_in_binary() -> None:
    tensor = only(parse(request(one(datatype="FP16", **binary(4))), np.float16([0.5, -2]).tobytes()))
    assert tensor.to_array().tolist() == [0.5, -2]


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (one(**binary(12)), "input 'x': binary_data_size is 12, but 8 bytes of binary data are left"),
        (one(**binary(4)), "4 bytes follow the last binary tensor: binary_data_size values do not add up"),
        (one(**binary(-8)), "parameter `binary_data_size` must be a whole number of 0 or more"),
        (one(**binary("8")), "parameter `binary_data_size` must be a whole number"),
        (one(**binary(True)), "parameter `binary_data_size` must be a whole number"),
        (one(**binary(2**70)), "parameter `binary_data_size` must be a whole number"),
        (one(**binary(8), data=[1, 2]), "input 'x' has both `data` and `binary_data_size`: send one of them"),
        (one(data=[1, 2]), "8 bytes follow the last binary tensor"),
    ],
)
def test_binary_sizes_that_do_not_add_up_are_refused_with_the_figures(item: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(request(item), bytes(8))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("99", "is 99, but the body has only 2 bytes"),
        ("-1", "is '-1': it must be the number of bytes of the JSON part"),
        ("two", "is 'two': it must be the number of bytes"),
        ("", "is '': it must be the number of bytes"),
        ("1.5", "it must be the number of bytes"),
        ("²", "it must be the number of bytes"),
        ("٢", "it must be the number of bytes"),
        (" 2", "it must be the number of bytes"),
        ("9" * 5000, "it must be the number of bytes"),
    ],
)
def test_a_header_length_that_cannot_be_is_refused_shortly(header: str, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        oip.parse(b"{}", header, NOTHING)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_header_length_that_cuts_the_json_is_refused() -> None:
    with pytest.raises(BadInput, match="the request is not JSON"):
        oip.parse(json.dumps(request(one(data=[1, 2]))).encode(), "10", NOTHING)


# Raw bodies


def taking(*inputs: TensorSpec) -> ModelSpec:
    """A model with these inputs."""
    return ModelSpec(inputs, ())


@pytest.mark.parametrize(
    ("spec", "body", "shape"),
    [
        (TensorSpec("x", "FP32", (2, 2)), bytes(16), (2, 2)),
        (TensorSpec("x", "FP32", (-1, 2)), bytes(24), (3, 2)),
        (TensorSpec("x", "UINT8", (-1,)), b"", (0,)),
    ],
)
def test_a_raw_body_is_the_one_input_and_tells_its_one_variable_size(
    spec: TensorSpec, body: bytes, shape: tuple[int, ...]
) -> None:
    parsed = oip.parse(body, "0", taking(spec))
    assert only(parsed).shape == shape
    assert only(parsed).to_array().shape == shape
    assert parsed.binary_default


def test_a_raw_body_for_a_model_that_takes_pictures_is_one_picture() -> None:
    parsed = oip.parse(b"\xff\xd8jpeg", "0", taking(TensorSpec("image", "BYTES", (-1,))))
    assert only(parsed).to_array().tolist() == [b"\xff\xd8jpeg"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            taking(TensorSpec("x", "FP32", (2,)), TensorSpec("z", "FP32", (2,))),
            "needs a model with one input, this one has 2",
        ),
        (NOTHING, "needs a model with one input, this one has 0"),
        (taking(TensorSpec("x", "FP32", (-1, -1))), "cannot say which shape [-1, -1] has"),
        (taking(TensorSpec("x", "FP32", (-1, 3))), "has 8 bytes, no multiple of the 12 that [-1, 3] needs"),
        (taking(TensorSpec("x", "FP32", (-1, 0))), "has 8 bytes, no multiple of the 0 that [-1, 0] needs"),
    ],
)
def test_a_raw_body_that_cannot_be_the_input_is_refused(spec: ModelSpec, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        oip.parse(bytes(8), "0", spec)
    assert sentence in str(caught.value)


def test_a_raw_body_of_the_wrong_fixed_size_is_refused_when_it_is_used() -> None:
    with pytest.raises(BadInput, match="carries 8 bytes, but FP32"):
        only(oip.parse(bytes(8), "0", taking(TensorSpec("x", "FP32", (1,))))).to_array()
