"""A larger model reads doubtful pictures again: what is taken of it, and what happens when it cannot."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from appliance.adapters import oip
from appliance.core.opinion import corrected
from appliance.service import PICTURES
from appliance.settings import Opinions as Settings
from appliance.upstream.opinions import Opinions
from models.errors import Unavailable
from models.spec import Tensor, pack_bytes
from models.sync import Opinion, Part, Sample

pytestmark = pytest.mark.unit


def line(text: str, left: float, top: float, confidence: float = 0.9) -> dict[str, Any]:
    """A line of 60 by 20 pixels."""
    box = [[left, top], [left + 60, top], [left + 60, top + 20], [left, top + 20]]
    return {"text": text, "confidence": confidence, "box": box}


def test_of_a_crop_the_line_in_its_place_is_taken_and_put_back_where_it_was() -> None:
    part = Part("", {"lines": [line("1O.5O", 10, 10, 0.6)]}, left=190, top=140)
    seen = {"lines": [line("a neighbour", 10, -12), line("10.50", 12, 9), line("another", 75, 10)]}
    document, agrees = corrected([part], [seen])
    assert document == {"lines": [line("10.50", 202, 149)]}
    assert not agrees


def test_two_that_read_the_same_agree_however_they_space_it() -> None:
    part = Part("", {"lines": [line("TOTAL  12", 0, 0)]})
    assert corrected([part], [{"lines": [line("TOTAL 12", 1, 1)]}])[1]


def test_where_the_larger_model_finds_nothing_there_is_nothing_and_they_do_not_agree() -> None:
    part = Part("", {"lines": [line("ghost", 0, 0)]})
    assert corrected([part], [{"lines": [line("elsewhere", 200, 200)]}]) == ({"lines": []}, False)


def test_of_a_whole_picture_all_is_taken() -> None:
    part = Part("", {"lines": [line("one", 0, 0)]}, whole=True)
    seen = {"lines": [line("one", 0, 0), line("missed before", 0, 50)]}
    assert corrected([part], [seen]) == (seen, False)


def test_of_classes_the_likeliest_counts() -> None:
    part = Part("", {"classes": [{"label": "cat", "confidence": 0.4}, {"label": "dog", "confidence": 0.3}]}, whole=True)
    seen = {"classes": [{"label": "cat", "confidence": 0.9}]}
    assert corrected([part], [seen]) == (seen, True)


class Queue:
    """Samples in the order in which they came, and what was answered."""

    def __init__(self, *samples: Sample) -> None:
        self.samples, self.opinions = list(samples), list[Opinion]()

    def waiting(self, most: int) -> list[Sample]:
        taken, self.samples = self.samples[:most], self.samples[most:]
        return taken

    def answered(self, opinion: Opinion) -> None:
        self.opinions.append(opinion)


class Model:
    """A server of the protocol that reads with this appliance's own parser; `status` refuses."""

    def __init__(self) -> None:
        self.status, self.paths, self.pictures = 200, list[str](), list[list[bytes]]()
        self.headers: dict[str, str] = {}
        self.read: Callable[[bytes], Any] = lambda _picture: {"lines": [line("10.50", 10, 10)]}
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                model.answer(self)

            def log_message(self, *_said: Any) -> None:  # noqa: ANN401 - its base decides
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.paths.append(request.path)
        self.headers = {key.lower(): value for key, value in request.headers.items()}
        body = request.rfile.read(int(self.headers["content-length"]))
        content = b'{"error": "not now"}'
        if self.status == 200:
            parsed = oip.parse(body, self.headers["inference-header-content-length"], PICTURES)
            self.pictures.append([bytes(one) for one in parsed.tensors[0].to_array()])
            texts = [orjson.dumps(self.read(picture)) for picture in self.pictures[-1]]
            result = Tensor("result", "BYTES", (len(texts),), pack_bytes(texts))
            parts, length = oip.render(parsed, {"model_name": "large", "model_version": "7"}, [result])
            assert length is None
            content = b"".join(bytes(part) for part in parts)
        request.send_response(self.status)
        request.send_header("content-length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


@pytest.fixture
def model() -> Iterator[Model]:
    served = Model()
    threading.Thread(target=served.server.serve_forever, args=(0.05,), daemon=True).start()
    yield served
    served.server.shutdown()
    served.server.server_close()


def sample(name: str = "s-1", *pictures: bytes) -> Sample:
    parts = tuple(
        Part(base64.b64encode(picture).decode(), {"lines": [line("1O.5O", 10, 10, 0.6)]}, left=100, top=200)
        for picture in pictures or (b"jpeg",)
    )
    return Sample(name, "reader", "1.0", source="gate-3", at=1.8e9, parts=parts)


def test_pictures_are_read_again_by_the_protocol_and_the_opinion_is_kept(model: Model) -> None:
    queue = Queue(sample("s-1", b"one", b"two"))
    Opinions(queue, Settings(url=f"{model.url}/", models={"reader": "reader-large"})).work()  # type: ignore[arg-type] # its double
    (opinion,) = queue.opinions
    assert model.paths == ["/v2/models/reader-large/infer"]
    assert model.pictures == [[b"one", b"two"]]
    assert opinion == Opinion(
        "s-1",
        "reader",
        "1.0",
        source="gate-3",
        at=1.8e9,
        by="large 7",
        result={"lines": [line("10.50", 110, 210)] * 2},
        agrees=False,
    )


def test_a_model_that_has_no_time_now_is_asked_again_later_and_nobody_is_told_no(model: Model) -> None:
    queue = Queue(sample())
    now = [0.0]
    opinions = Opinions(queue, Settings(url=model.url), lambda: now[0])  # type: ignore[arg-type] # its double
    for status in (503, 429, 500, 404, 403):
        model.status = status
        queue.samples = [sample()]
        with pytest.raises(Unavailable, match=f"answers with {status}"):
            opinions.work()
        opinions.work()  # it has some rest first
        now[0] += 21
    assert (queue.opinions, len(model.paths)) == ([], 5)
    model.status = 200
    queue.samples = [sample()]
    opinions.work()
    assert len(queue.opinions) == 1


def test_a_server_that_is_not_there_is_said_by_its_address() -> None:
    opinions = Opinions(Queue(sample()), Settings(url="http://127.0.0.1:9"))  # type: ignore[arg-type] # its double
    with pytest.raises(Unavailable, match=r"http://127.0.0.1:9/v2/models/reader/infer does not answer"):
        opinions.work()


def test_a_token_file_of_two_lines_costs_no_sample_and_its_content_is_told_to_nobody(
    model: Model, tmp_path: Path
) -> None:
    file, queue = tmp_path / "token", Queue(sample())
    file.write_text("secret\nsecond")
    with capture_logs() as logged, pytest.raises(Unavailable, match="holds no token of one line") as refused:
        Opinions(queue, Settings(url=model.url, token_file=file)).work()  # type: ignore[arg-type] # its double
    assert (queue.opinions, model.paths) == ([], [])
    assert "secret" not in f"{refused.value}{logged}"


@pytest.mark.parametrize("fault", ["refused", "nonsense", "no picture"])
def test_a_sample_that_can_never_be_read_is_answered_with_the_reason(model: Model, fault: str) -> None:
    asked = sample()
    if fault == "refused":
        model.status = 400
    elif fault == "nonsense":
        model.read = lambda _picture: ["what?"]
    else:
        asked = Sample("s-1", "reader", "1.0", parts=(Part("not base64!", {"lines": []}),))
    queue = Queue(asked, sample("s-2"))
    Opinions(queue, Settings(url=model.url)).work()  # type: ignore[arg-type] # its double
    assert [opinion.sample_id for opinion in queue.opinions] == ["s-1", "s-2"]
    assert "reader cannot read it again" in queue.opinions[0].reason
