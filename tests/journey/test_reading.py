"""The first real product: a picture of text goes in by HTTP, what is written on it comes out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tritonclient.http as triton
from support.daemon import Daemon, appliance, assert_refused
from support.processes import eventually

from models.tasks.text import edit_distance, normalise, source_of

pytestmark = [pytest.mark.journey, pytest.mark.long, pytest.mark.timeout(1200)]

PAGES = Path(__file__).parent.parent / "data" / "ocr" / "pages"
PREDICT = "/v1/models/ppocr-v4/predict"
FLOORS = {"sroie": 0.85, "icdar2015": 0.4}
"""Share of the labelled lines that must be read, by source. Over its 8 receipts and 8 street photos the
data's README gives 0.954 and 0.641 for a newer model; of the two pages here this one reads 0.911 and 0.4."""


@dataclass(frozen=True)
class Page:
    """A labelled picture."""

    path: Path
    width: int
    height: int
    texts: tuple[str, ...]

    @property
    def content(self) -> bytes:
        """The file."""
        return self.path.read_bytes()


def pages() -> list[Page]:
    """All labelled pictures of the test data."""
    labels = PAGES / "labels.jsonl"
    if not labels.is_file():
        return []
    documents = [json.loads(line) for line in labels.read_text().splitlines()]
    return [
        Page(
            PAGES / document["file"],
            document["width"],
            document["height"],
            tuple(line["text"] for line in document["lines"] if not line["ignore"]),
        )
        for document in documents
    ]


def receipt() -> Page:
    """The page with the most text."""
    return max(pages(), key=lambda page: len(page.texts))


def assert_read(page: Page, lines: Sequence[str]) -> None:
    """Enough of the labelled texts of two or more characters are among `lines`, as the data's README counts them.

    A text is found whole inside a line, or as a line that differs in at most a fifth of its characters.
    """
    source = source_of(page.path.name)
    read = [normalise(line, source) for line in lines]
    wanted = [text for text in (normalise(text, source) for text in page.texts) if len(text) > 1]
    found = [
        text for text in wanted if any(text in line or edit_distance(text, line) <= 0.2 * len(text) for line in read)
    ]
    assert len(found) / len(wanted) >= FLOORS[source], f"missing {sorted(set(wanted) - set(found))} in {lines}"


def texts(answer: dict[str, Any]) -> list[str]:
    """What an answer says was read, line by line."""
    return [line["text"] for line in answer["lines"]]


@pytest.fixture(scope="module")
def reader(reading_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A ready daemon that serves the real bundle."""
    with Daemon(tmp_path_factory.mktemp("reader"), "--bundle", str(reading_bundle)) as daemon:
        yield daemon


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path.name)
def test_the_text_of_a_page_is_read(reader: Daemon, page: Page) -> None:
    response = reader.http.post(PREDICT, content=page.content, headers={"content-type": "image/jpeg"})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["model"] == "ppocr-v4"
    assert answer["version"]
    assert answer["runtime"] == "onnxruntime-cpu"
    assert answer["degraded"] is None
    assert {"queue", "decode", "inference", "processing", "total"} <= set(answer["timing_ms"])
    for line in answer["lines"]:
        assert 0 <= line["confidence"] <= 1
        assert np.shape(line["box"]) == (4, 2)
        assert (np.array(line["box"]) >= 0).all()
        assert (np.array(line["box"]) <= (page.width, page.height)).all()
    assert_read(page, texts(answer))


def test_the_same_picture_gets_the_same_answer_every_time(reader: Daemon) -> None:
    page = receipt()
    answers = [reader.later("POST", PREDICT, content=page.content) for _ in range(4)]
    lines = [answer.result(60).json()["lines"] for answer in answers]
    assert lines[0]
    assert lines == lines[:1] * 4


def test_the_client_prints_the_text(reader: Daemon) -> None:
    page = receipt()
    shown = appliance("infer", "ppocr-v4", str(page.path), "--url", reader.url)
    assert shown.returncode == 0, shown.stderr
    read = texts(reader.http.post(PREDICT, content=page.content).json())
    assert_read(page, read)
    assert [text for text in read if text not in shown.stdout] == []


def test_a_worker_that_dies_over_a_picture_costs_that_one_answer_and_nothing_else(reader: Daemon) -> None:
    page = receipt()
    restarts = reader.worker()["restarts"]
    asked = reader.later("POST", PREDICT, content=page.content)
    eventually(lambda: reader.running_and_waiting("ppocr-v4") == (1, 0), "the picture is being read")
    os.kill(reader.worker_pid(), signal.SIGKILL)
    assert_refused(asked.result(2), 503)
    again = reader.http.post(PREDICT, content=page.content)
    assert again.status_code == 200, again.text
    assert_read(page, texts(again.json()))
    assert reader.worker()["restarts"] == restarts + 1
    reader.wait_ready()


def test_the_stock_client_reads_pictures_as_tensors(reader: Daemon) -> None:
    page = receipt()
    image = triton.InferInput("image", [2], "BYTES")
    image.set_data_from_numpy(np.array([page.content, page.content], np.object_))
    with triton.InferenceServerClient(reader.url.removeprefix("http://"), network_timeout=120) as client:
        first, second = (json.loads(text) for text in client.infer("ppocr-v4", [image]).as_numpy("result"))
    assert_read(page, texts(first))
    assert first["lines"] == second["lines"]
    predicted = reader.http.post(PREDICT, content=page.content).json()
    assert first["lines"] == predicted["lines"]


def test_the_graphs_of_the_bundle_answer_raw_tensors(reader: Daemon) -> None:
    page = receipt()
    pixels = cv2.imdecode(np.frombuffer(page.content, np.uint8), cv2.IMREAD_COLOR)
    line = cv2.resize(pixels, (320, 48)).astype(np.float32).transpose(2, 0, 1)[None] / 127.5 - 1
    with triton.InferenceServerClient(reader.url.removeprefix("http://"), network_timeout=120) as client:
        assert client.is_model_ready("ppocr-v4.rec")
        (spec,) = client.get_model_metadata("ppocr-v4.rec")["inputs"]
        outputs = client.get_model_metadata("ppocr-v4.rec")["outputs"]
        tensor = triton.InferInput(spec["name"], list(line.shape), spec["datatype"])
        tensor.set_data_from_numpy(np.ascontiguousarray(line))
        answer = client.infer("ppocr-v4.rec", [tensor])
        for output in outputs:
            array = answer.as_numpy(output["name"])
            assert array is not None
            assert array.shape[0] == 1
            assert np.isfinite(array.astype(np.float64)).all()


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_a_page_that_arrives_in_part_is_refused_and_the_next_one_read(reader: Daemon, cut: float) -> None:
    page = receipt()
    part = page.content[: int(len(page.content) * cut)]
    assert "cut short" in assert_refused(reader.http.post(PREDICT, content=part), 400)
    assert_read(page, texts(reader.http.post(PREDICT, content=page.content).json()))
