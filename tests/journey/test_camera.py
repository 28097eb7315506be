"""The client for cameras: a real video, a real daemon, results through a real broker, and daemons that refuse."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from support import tiny
from support.broker import Listener, Mosquitto, needs_mosquitto
from support.daemon import Daemon
from support.processes import eventually, free_port

from appliance.client import Client, publisher
from models.errors import CallerError, ModelError, Unavailable

pytestmark = pytest.mark.journey

FRAMES = 40
Connect = Callable[[str], Client]


class Video:
    """A video file of OpenCV whose frame `i` is grey of value 6 i, and which knows when it has ended."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "video.avi")
        writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"MJPG"), 25.0, (64, 48))
        for number in range(FRAMES):
            writer.write(np.full((48, 64, 3), 6 * number, np.uint8))
        writer.release()
        self._capture, self.ended = cv2.VideoCapture(path), threading.Event()

    def read(self) -> tuple[bool, Any]:
        """The next frame."""
        there, frame = self._capture.read()
        if not there:
            self.ended.set()
        return there, frame


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients, which end with the test."""
    made: list[Client] = []

    def of(url: str) -> Client:
        made.append(Client(url))
        return made[-1]

    yield of
    for client in made:
        client.close()


class Held(Video):
    """The same, but what follows the first frame comes only once it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go, self._begun = threading.Event(), False

    def read(self) -> tuple[bool, Any]:
        """The next frame."""
        if self._begun:
            self.go.wait(20)
        self._begun = True
        return super().read()


def number_of(frame: npt.NDArray[np.uint8]) -> int:
    """Which frame of the video this is."""
    return round(float(frame.mean()) / 6)


def test_a_camera_is_answered_with_its_latest_frame_and_never_lags_behind(
    tiny_daemon: Daemon, tmp_path: Path, connect: Connect
) -> None:
    video, client = Held(tmp_path), connect(tiny_daemon.url)
    following = client.follow("blank", video, source="door")
    first, answer = next(following)
    assert (answer["model"], answer["lines"]) == ("blank", [])
    video.go.set()
    assert video.ended.wait(20)  # whoever is slow with an answer finds the newest frame, and no other
    (last, _), *more = following
    assert (number_of(first), number_of(last)) == (0, FRAMES - 1)
    assert more == []


def test_a_camera_that_is_left_before_its_end_is_not_read_any_more(
    tiny_daemon: Daemon, tmp_path: Path, connect: Connect
) -> None:
    following = connect(tiny_daemon.url).follow("blank", Video(tmp_path))
    next(following)
    following.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "frames"]


@needs_mosquitto
def test_answers_go_on_over_mqtt(tiny_daemon: Daemon, broker: Mosquitto, connect: Connect) -> None:
    broker.start()
    answer = connect(tiny_daemon.url).predict("blank", tiny.jpeg(64, 48))
    with Listener(broker.port) as listener:
        with publisher(broker.address, "door/read") as publish:
            publish(answer)
        heard = listener.wait_for("door/read", 20.0, model="blank")
    assert heard.document == answer


def test_a_request_that_will_never_do_says_why(tiny_daemon: Daemon, connect: Connect) -> None:
    client = connect(tiny_daemon.url)
    with pytest.raises(CallerError, match=r"neither a JPEG nor a PNG.*\(HTTP 400\)"):
        client.predict("blank", b"no picture")
    with pytest.raises(CallerError, match="there is no model 'none'"):
        client.predict("none", tiny.jpeg(8, 8))


@contextmanager
def answering(*answers: tuple[int, dict[str, Any]]) -> Iterator[tuple[str, list[int]]]:
    """The address of a daemon's stand-in that gives these answers in turn, the last for ever, and what it was sent."""
    left, sent = list(answers), []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(len(self.rfile.read(int(self.headers["content-length"]))))
            status, document = left.pop(0) if len(left) > 1 else left[0]
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("retry-after", "0")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_parts: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()


def test_whoever_asks_learns_whether_a_retry_may_help(connect: Connect) -> None:
    with answering((503, {"error": "loading"}), (429, {}), (500, {"error": "the model failed"})) as (url, _):
        client = connect(url)
        with pytest.raises(Unavailable, match=r"loading \(HTTP 503\)") as refused:
            client.predict("m", b"x")
        assert refused.value.retry_after_s == 0
        with pytest.raises(Unavailable):
            client.predict("m", b"x")
        with pytest.raises(ModelError, match="the model failed"):
            client.predict("m", b"x")
    with pytest.raises(Unavailable, match=r"does not answer at .* start it with `appliance run`"):
        connect(f"http://127.0.0.1:{free_port()}").predict("m", b"x")


class Patient(Video):
    """The same, but the next frame comes only when the one before was sent."""

    def __init__(self, folder: Path, sent: list[int]) -> None:
        super().__init__(folder)
        self._sent, self._given = sent, 0

    def read(self) -> tuple[bool, Any]:
        """The next frame."""
        eventually(lambda: len(self._sent) >= self._given, "the frame before was sent", 20.0)
        self._given += 1
        return super().read()


def test_a_daemon_without_time_costs_frames_and_not_the_camera(tmp_path: Path, connect: Connect) -> None:
    busy, fine = (503, {"error": "busy"}), (200, {"lines": []})
    with answering(busy, busy, fine) as (url, sent):
        answered = list(connect(url).follow("m", Patient(tmp_path, sent)))
    assert [number_of(frame) for frame, _ in answered] == list(range(2, FRAMES))
