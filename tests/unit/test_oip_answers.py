"""Open Inference Protocol answers and documents about models: what clients read.

Beside test_oip.py, which is about requests, so that neither file grows past 400 lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from appliance.adapters import about, oip
from appliance.service import ModelInfo
from models.errors import BadInput, ModelError
from models.spec import Array, ModelSpec, Tensor, TensorSpec

pytestmark = pytest.mark.unit

HEAD = {"model_name": "m", "model_version": "1"}


def tensor(name: str, array: Array) -> Tensor:
    """An output."""
    return Tensor.from_array(name, array)


def answer(asked: oip.Request, *tensors: Tensor) -> tuple[dict[str, Any], bytes]:
    """A rendered answer as its document and what follows."""
    parts, length = oip.render(asked, HEAD, tensors)
    content = b"".join(parts)
    length = len(content) if length is None else length
    return orjson.loads(content[:length]), content[length:]


@pytest.mark.parametrize(
    ("array", "datatype", "data"),
    [
        (np.float32([[0.1, -2]]), "FP32", [0.1, -2.0]),
        (np.array([2**64 - 1], np.uint64), "UINT64", [2**64 - 1]),
        (np.array([True, False]), "BOOL", [True, False]),
        (np.array([b"a", "ü".encode()], np.object_), "BYTES", ["a", "ü"]),
        (np.zeros((0, 3), np.float32), "FP32", []),
    ],
)
def test_an_output_in_json_carries_its_type_shape_and_flat_values(array: Array, datatype: str, data: list[Any]) -> None:
    document, tail = answer(oip.Request([]), tensor("y", array))
    assert document == {
        **HEAD,
        "outputs": [{"name": "y", "datatype": datatype, "shape": list(array.shape), "data": data}],
    }
    assert tail == b""


def test_the_id_of_a_request_is_echoed_even_when_it_is_empty_text() -> None:
    assert answer(oip.Request([], id="a ü"))[0]["id"] == "a ü"
    assert answer(oip.Request([], id=""))[0]["id"] == ""
    assert "id" not in answer(oip.Request([]))[0]


@pytest.mark.parametrize(
    ("asked", "in_binary"),
    [
        (oip.Request([]), []),
        (oip.Request([], binary_default=True), ["y", "z"]),
        (oip.Request([], binary={"y": True}), ["y"]),
        (oip.Request([], binary={"y": False}, binary_default=True), ["z"]),
    ],
)
def test_an_output_is_binary_when_it_or_else_everything_was_asked_so(asked: oip.Request, in_binary: list[str]) -> None:
    values = {"y": np.float32([1, 2]), "z": np.int8([3])}
    document, tail = answer(asked, *(tensor(name, array) for name, array in values.items()))
    sizes = {output["name"]: output.get("parameters", {}).get("binary_data_size") for output in document["outputs"]}
    assert sizes == {name: array.nbytes if name in in_binary else None for name, array in values.items()}
    assert tail == b"".join(values[name].tobytes() for name in in_binary)
    assert [output["name"] for output in document["outputs"] if "data" not in output] == in_binary


def test_how_an_output_was_asked_for_reaches_the_answer() -> None:
    body = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}],
    }
    asked = oip.parse(orjson.dumps(body), None, ModelSpec((), ()))
    document, tail = answer(asked, tensor("y", np.int8([1])), tensor("z", np.int8([2])))
    assert document["outputs"][0]["data"] == [1]
    assert tail == b"\x02"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_json_cannot_carry_is_the_models_fault_and_travels_in_binary(value: float) -> None:
    output = tensor("y", np.float32([1, value]))
    with pytest.raises(ModelError, match=r"output 'y' holds NaN or infinite values, .* ask for binary data"):
        answer(oip.Request([]), output)
    assert answer(oip.Request([], binary_default=True), output)[1] == bytes(output.data)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.float16([1]), "output 'y': FP16 has no JSON form, ask for it as binary data"),
        (np.array([b"\xff"], np.object_), "output 'y' is not text: ask for it as binary data"),
    ],
)
def test_an_output_without_a_json_form_says_to_ask_for_binary(array: Array, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        answer(oip.Request([]), tensor("y", array))
    assert sentence in str(caught.value)
    assert answer(oip.Request([], binary_default=True), tensor("y", array))[1] == bytes(tensor("y", array).data)


def test_metadata_names_the_versions_the_platform_and_every_tensor() -> None:
    spec = ModelSpec((TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "BYTES", (-1,)),))
    assert about.metadata(ModelInfo("m", "1.2", "onnx_onnxv1", spec, ready=True, reason="")) == {
        "name": "m",
        "versions": ["1.2"],
        "platform": "onnx_onnxv1",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "BYTES", "shape": [-1]}],
    }


@pytest.mark.parametrize(
    ("body", "answered"), [(b"", False), (b"{}", False), (b'{"ready":true}', True), (b'{"ready":false}', False)]
)
def test_a_repository_index_shows_ready_models_only_when_asked(body: bytes, answered: bool) -> None:
    assert about.only_ready(body) is answered


def test_a_repository_index_request_that_is_no_json_is_refused() -> None:
    with pytest.raises(BadInput, match="the request is not JSON"):
        about.only_ready(b"ready")
