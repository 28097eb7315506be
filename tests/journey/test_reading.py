"""The first real product: a picture of text goes in by HTTP, what is written on it comes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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

from models.folder import BundleFolder
from models.tasks import lines as lines_task
from models.tasks.text import edit_distance, exact_and_cer, normalise, source_of
from provisioning import data

pytestmark = [pytest.mark.journey, pytest.mark.long, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "tests" / "data" / "ocr" / "pages"
DEVELOPER_SET = ROOT.parent / "shared" / "data" / "ocr"
needs_developer_set = pytest.mark.skipif(
    not DEVELOPER_SET.is_dir(), reason="the larger set of labelled pages (../shared/data/ocr) is not on this machine"
)
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
    boxes: tuple[tuple[int, ...], ...]

    @property
    def content(self) -> bytes:
        """The file."""
        return self.path.read_bytes()


def pages(folder: Path = PAGES, split: str = "gate") -> list[Page]:
    """The labelled pictures of a folder that are in `split`; all of them if it is empty."""
    splits = dict(row.split("\t") for row in (PAGES.parent / "splits.tsv").read_text().splitlines())
    documents = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    return [
        Page(
            folder / document["file"],
            document["width"],
            document["height"],
            tuple(line["text"] for line in document["lines"] if not line["ignore"]),
            tuple(tuple(line["box"]) for line in document["lines"] if not line["ignore"]),
        )
        for document in documents
        if split in {"", splits[document["source"]]}
    ]


def receipt() -> Page:
    """The page with the most text."""
    return max(pages(), key=lambda page: len(page.texts))


def found(page: Page, lines: Sequence[str]) -> dict[str, bool]:
    """Each labelled text of two or more characters, and whether it is among `lines`, as the data's README counts.

    A text is found whole inside a line, or as a line that differs in at most a fifth of its characters.
    """
    source = source_of(page.path.name)
    read = [normalise(line, source) for line in lines]
    wanted = [text for text in (normalise(text, source) for text in page.texts) if len(text) > 1]
    return {
        f"{i} {text}": any(text in line or edit_distance(text, line) <= 0.2 * len(text) for line in read)
        for i, text in enumerate(wanted)
    }


def assert_read(page: Page, lines: Sequence[str]) -> None:
    """Enough of the labelled texts are among `lines`."""
    wanted = found(page, lines)
    missing = [text for text, is_there in wanted.items() if not is_there]
    assert 1 - len(missing) / len(wanted) >= FLOORS[source_of(page.path.name)], f"missing {missing} in {lines}"


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


@needs_developer_set
def test_nine_of_ten_labelled_lines_of_receipts_are_found(reader: Daemon) -> None:
    receipts = [page for page in pages(DEVELOPER_SET / "pages", "") if source_of(page.path.name) == "sroie"]
    assert len(receipts) == 8
    answers = [reader.http.post(PREDICT, content=page.content).json() for page in receipts]
    counted = [
        is_there
        for page, answer in zip(receipts, answers, strict=True)
        for is_there in found(page, texts(answer)).values()
    ]
    assert sum(counted) / len(counted) >= 0.9


def test_boxes_lie_on_their_text_and_lines_come_in_reading_order(reader: Daemon) -> None:
    page = receipt()
    lines = reader.http.post(PREDICT, content=page.content).json()["lines"]
    at = []
    for text, label in zip(page.texts, page.boxes, strict=True):
        for i, line in enumerate(lines):
            if len(text) > 5 and normalise(text, "sroie") == normalise(line["text"], "sroie"):
                have = np.array(line["box"])
                want = np.array(label).reshape(4, 2)
                assert abs(have.mean(axis=0) - want.mean(axis=0)).max() < 15, text
                at.append((want[0, 1], i))
    assert len(at) > 8
    assert [i for _, i in sorted(at)] == sorted(i for _, i in at)


def test_the_served_recogniser_reads_within_a_point_of_the_original(reader: Daemon, reading_bundle: Path) -> None:
    provision = Path(sys.executable).with_name("provision")
    verified = subprocess.run([provision, "verify", reading_bundle, "--json"], capture_output=True, check=True)
    original = json.loads(verified.stdout)["original"]
    lines = data.load(PAGES.parent, "gate").lines
    labels = BundleFolder(reading_bundle).read_labels()
    pairs = []
    with triton.InferenceServerClient(reader.url.removeprefix("http://"), network_timeout=120) as client:
        for line in lines:
            x = lines_task.prepare(line.picture)
            tensor = triton.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            answer = client.infer("ppocr-v4.rec", [tensor])
            read, _ = lines_task.decode(answer.as_numpy("index")[0], answer.as_numpy("probability")[0], labels)
            source = source_of(line.file)
            pairs.append((normalise(line.text, source), normalise(read, source)))
    exact, _ = exact_and_cer(pairs)
    assert original["lines"] == len(lines) == 128
    assert exact >= original["exact"] - 0.01


def test_requests_that_the_bundle_cannot_answer_say_why(reader: Daemon) -> None:
    page = receipt()
    assert "raw tensors" in assert_refused(
        reader.http.post("/v1/models/ppocr-v4.rec/predict", content=page.content), 400
    )
    image = {"name": "image", "datatype": "BYTES", "shape": [17], "data": ["x"] * 17}
    many = reader.http.post("/v2/models/ppocr-v4/infer", json={"inputs": [image]})
    assert "16 or fewer" in assert_refused(many, 413)
    one = image | {"shape": [1], "data": ["x"]}
    other = reader.http.post("/v2/models/ppocr-v4/infer", json={"inputs": [one], "outputs": [{"name": "boxes"}]})
    assert "there is no output 'boxes'" in assert_refused(other, 400)


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
