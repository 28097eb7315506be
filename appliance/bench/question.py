"""What a benchmark or a drill asks a model: made from the model's own metadata, compared with an earlier answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from models.answers import said
from models.errors import ApplianceError
from models.spec import DTYPES, Array, Tensor

USUAL_SIZES = (320, 224, 32, 640, 1, 8)
"""Of a variable dimension: those of usual lines and pictures first."""
_HEADER = "inference-header-content-length"
_MOST_ELEMENTS = 2**20
_WIDTH, _HEIGHT, _MARGIN = 960, 540, 40
_TEXTS = (
    "INVOICE 2024-0117",
    "Number of parcels 12",
    "Net weight 348.50 kg",
    "Carrier Northern Freight",
    "Delivery before noon",
    "Storage cool and dry",
    "Subtotal 1,204.00",
    "Total due 1,432.76",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the Open Inference Protocol in binary; its answer is asked for likewise."""

    path: str
    content: bytes
    headers: Mapping[str, str]
    inputs: Mapping[str, Array]

    @classmethod
    def of(cls, model: str, inputs: Mapping[str, Array]) -> Question:
        """The request that brings `inputs` to `model`."""
        content, headers = binary_request(inputs)
        return cls(f"/v2/models/{model}/infer", content, headers, inputs)

    def __str__(self) -> str:
        """Its tensors, in words."""
        if any(array.dtype == np.object_ for array in self.inputs.values()):
            return f"a picture of {len(_TEXTS)} lines, {_WIDTH} x {_HEIGHT}" if "image" in self.inputs else "texts"
        return ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in self.inputs.items())

    def wire(self, host: str, headers: Mapping[str, str]) -> bytes:
        """The whole request as HTTP/1.1 sends it, with further `headers`."""
        lines = {"Host": host, **headers, **self.headers, "Content-Length": str(len(self.content))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.content

    def ask(self, client: httpx.Client) -> dict[str, Array]:
        """The answer's tensors by name; raises ApplianceError for any status but 200."""
        response = client.post(self.path, content=self.content, headers=dict(self.headers))
        if response.status_code != httpx.codes.OK:
            msg = f"{self.path} answered {response.text[:200]} (HTTP {response.status_code})"
            raise ApplianceError(msg)
        return binary_answer(response)


def find(client: httpx.Client, model: str) -> Question:
    """A question that `model` answers; raises ApplianceError when it answers none of ours."""
    metadata = client.get(f"/v2/models/{model}")
    if metadata.is_error:
        raise ApplianceError(metadata.json()["error"])
    inputs = metadata.json()["inputs"]
    refusal = "it has no inputs"
    for arrays in guesses(inputs, USUAL_SIZES, np.random.default_rng(1)):
        question = Question.of(model, {"image": picture_array(page())} if takes_pictures(inputs) else arrays)
        try:
            question.ask(client)
        except ApplianceError as error:
            refusal = str(error)
        else:
            return question
    msg = f"model {model!r} answers no question of ours: {refusal}"
    raise ApplianceError(msg)


def takes_pictures(inputs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a model of these inputs, as its metadata has them, is a bundle that takes encoded pictures."""
    return [(one["name"], one["datatype"]) for one in inputs] == [("image", "BYTES")]


def guesses(
    inputs: Sequence[Mapping[str, Any]], sizes: Sequence[int], chance: np.random.Generator | None = None
) -> Iterator[dict[str, Array]]:
    """Inputs that a model may take, in the few `sizes` that variable dimensions usually have; the first is one row.

    Floats are drawn from `chance`; without it, and for all else, everything is 1.
    """
    for size in sizes:
        shapes = {
            one["name"]: [
                1 if n == -1 and i == 0 and len(one["shape"]) > 1 else size if n == -1 else n
                for i, n in enumerate(one["shape"])
            ]
            for one in inputs
        }
        if sum(map(math.prod, shapes.values())) <= _MOST_ELEMENTS:
            yield {one["name"]: _filled(one["datatype"], shapes[one["name"]], chance) for one in inputs}


def picture_array(*pictures: bytes) -> Array:
    """Encoded pictures as elements of a BYTES tensor [N]."""
    array = np.empty(len(pictures), np.object_)
    array[:] = pictures
    return array


def page(last: str = "") -> bytes:
    """A JPEG of eight printed lines, of which the last may be another."""
    import cv2  # noqa: PLC0415 - 0.2 s that only pictures are worth

    step = (_HEIGHT - 2 * _MARGIN) // len(_TEXTS)
    paper_HWC = np.full((_HEIGHT, _WIDTH, 3), 255, np.uint8)
    for i, text in enumerate((*_TEXTS[:-1], last or _TEXTS[-1])):
        at = (_MARGIN, _MARGIN + step * i + step * 2 // 3)
        cv2.putText(paper_HWC, text, at, cv2.FONT_HERSHEY_SIMPLEX, 1.2, (0, 0, 0), 2, cv2.LINE_AA)
    return bytes(cv2.imencode(".jpg", paper_HWC)[1])


def binary_request(inputs: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an infer request in the binary extension that wants its answer likewise."""
    tensors = [Tensor.from_array(name, array) for name, array in inputs.items()]
    described = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": memoryview(tensor.data).nbytes},
        }
        for tensor in tensors
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    return b"".join((head, *(tensor.data for tensor in tensors))), {_HEADER: str(len(head))}


def binary_answer(response: httpx.Response) -> dict[str, Array]:
    """Tensors of an answer of which every output came in binary."""
    length = int(response.headers[_HEADER])
    outputs, at = {}, length
    for output in json.loads(response.content[:length])["outputs"]:
        end = at + output["parameters"]["binary_data_size"]
        tensor = Tensor(output["name"], output["datatype"], tuple(output["shape"]), response.content[at:end])
        outputs[output["name"]] = tensor.to_array()
        at = end
    return outputs


def difference(have: Mapping[str, Array], want: Mapping[str, Array]) -> float:
    """Largest absolute difference of any number; infinite where a shape, a text or a whole number is another.

    Elements of BYTES tensors may be predict documents: of these the lines count, not the times.
    """
    if have.keys() != want.keys() or any(have[name].shape != want[name].shape for name in want):
        return math.inf
    return max((_apart(have[name], want[name]) for name in want), default=0.0)


def rows(answer: Mapping[str, Array], at: int) -> dict[str, Array]:
    """Row `at` of every tensor, as a batch of one."""
    return {name: array[at : at + 1] for name, array in answer.items()}


def _apart(have: Array, want: Array) -> float:
    if want.dtype == np.object_:
        both = [(_lines(one), _lines(other)) for one, other in zip(have.flat, want.flat, strict=True)]
        if any(texts != others for (texts, _), (others, _) in both):
            return math.inf
        return max((float(np.max(np.abs(a - b), initial=0.0)) for (_, a), (_, b) in both), default=0.0)
    if not np.issubdtype(want.dtype, np.floating):
        return 0.0 if np.array_equal(have, want) else math.inf
    apart = np.abs(have.astype(np.float64) - want)
    return float(np.max(np.where(np.isnan(apart), math.inf, apart), initial=0.0))


def _lines(element: bytes) -> tuple[object, Array]:
    """Texts of a predict document and the confidence of each; anything else is one text."""
    try:
        found = said(json.loads(element))
    except (ValueError, KeyError, TypeError):
        return element, np.empty(0)
    return [text for text, _ in found], np.array([confidence for _, confidence in found])


def _filled(datatype: str, shape: Sequence[int], chance: np.random.Generator | None) -> Array:
    if datatype == "BYTES":
        return np.full(shape, b"1", np.object_)
    if chance is not None and np.issubdtype(DTYPES[datatype], np.floating):
        return chance.normal(size=shape).astype(DTYPES[datatype])
    return np.ones(shape, DTYPES[datatype])
