"""A client for cameras and scripts in Python: ask with a picture, follow a camera, pass results on.

    from appliance.client import Client, publisher

    client = Client("http://127.0.0.1:8080")
    print(client.predict("ppocr-v4", Path("receipt.jpg").read_bytes()))
    with publisher("127.0.0.1:1883", "line-3/read") as publish:
        for frame_HWC, answer in client.follow("ppocr-v4", cv2.VideoCapture(0), source="line-3"):
            publish(answer)

Answers are the daemon's predict documents (docs/http.md). Only `follow` needs OpenCV, only `publisher` a broker.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx

from models.errors import ApplianceError, BadInput, CallerError, ModelError, Unavailable
from models.spec import Array

_SERVER_FAULT, _NOT_NOW = 500, (429, 503, 504, 507)
_RETRY_S = 1.0
_CONNECT_S = 5.0
_MOST_QUEUED = 100


class Capture(Protocol):
    """What `follow` needs of a cv2.VideoCapture."""

    def read(self) -> tuple[bool, Array]:
        """Whether there is a frame, and the frame (uint8 BGR, [H, W, C])."""


class Client:
    """Talks to one daemon; may be used from several threads."""

    def __init__(self, url: str, *, token: str = "", authority: Path | None = None, timeout_s: float = 30.0) -> None:
        """`token` is one of `appliance token create`, `authority` the PEM file that vouches for its certificate."""
        self._http = httpx.Client(
            base_url=url,
            timeout=timeout_s,
            trust_env=False,  # a proxy that the environment names knows nothing of this machine's loopback
            headers={"authorization": f"Bearer {token}"} if token else {},
            verify=ssl.create_default_context(cafile=str(authority)) if authority else True,
        )

    def predict(
        self,
        model: str,
        picture: bytes,
        *,
        source: str = "",
        deadline_ms: float | None = None,
        escalate: bool = False,
    ) -> dict[str, Any]:
        """The predict document of one JPEG or PNG.

        Of pictures from one `source` that wait, the daemon keeps the latest. Where the answer is doubtful, `escalate`
        waits for what upstream says, which is its `second_opinion`. Raises CallerError for a request that
        will never do, Unavailable (with `retry_after_s`) for one that may do later, ModelError when the model failed.
        """
        query = {"source": source, "deadline_ms": deadline_ms, "escalate": "wait" if escalate else None}
        params = {key: value for key, value in query.items() if value}
        try:
            answer = self._http.post(f"/v1/models/{model}/predict", content=picture, params=params)
        except httpx.HTTPError as error:
            msg = f"the daemon does not answer at {self._http.base_url} ({error}): start it with `appliance run`"
            raise Unavailable(msg, _RETRY_S) from error
        if answer.is_success:
            document: dict[str, Any] = answer.json()
            return document
        reason = f"{_reason(answer)} (HTTP {answer.status_code})"
        if answer.status_code in _NOT_NOW:
            raise Unavailable(reason, float(answer.headers.get("retry-after", _RETRY_S)))
        raise ModelError(reason) if answer.status_code >= _SERVER_FAULT else CallerError(reason)

    def follow(
        self, model: str, capture: Capture, *, source: str = "camera", quality: int = 90
    ) -> Iterator[tuple[Array, dict[str, Any]]]:
        """Each answered frame with its answer, until `capture` ends; the latest frame always goes first.

        A thread reads frames as they come and keeps one: whatever came while an answer was waited for is dropped, so
        answers never lag behind the camera. While the daemon is not there or has no time, frames are dropped too; it is
        asked again after the time that it names, or after a second. When `capture` ends without one answer, BadInput
        (it gave no frame) or the last Unavailable is raised.
        Frames travel as JPEG of `quality`. `capture` belongs to this iterator until it ends; what it raises is raised.
        """
        import cv2  # noqa: PLC0415 - cameras that send files need none

        missing: ApplianceError | None = BadInput(
            "the capture gives no frame: check that its file, address or number is there and can be opened"
        )
        latest = _Latest(capture)
        try:
            while (frame_HWC := latest.take()) is not None:
                _done, encoded = cv2.imencode(".jpg", frame_HWC, [cv2.IMWRITE_JPEG_QUALITY, quality])
                try:
                    answer = self.predict(model, encoded.tobytes(), source=source)
                except Unavailable as error:
                    missing = missing and error
                    time.sleep(error.retry_after_s)
                    continue
                missing = None
                yield frame_HWC, answer
            if missing:
                raise missing
        finally:
            latest.stop()

    def close(self) -> None:
        """Give the connection back."""
        self._http.close()


class _Latest:
    """The newest frame of a capture, read in a thread of its own."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._changed = capture, threading.Condition()
        self._frame: Array | None = None
        self._ended = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="frames", daemon=True)
        self._thread.start()

    def take(self) -> Array | None:
        """The newest frame that was not taken yet, waited for; None after the last. Raises what the capture raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._frame is not None)
            frame, self._frame = self._frame, None
            if frame is None and self._error:
                raise self._error
            return frame

    def stop(self) -> None:
        """Read no more."""
        self._ended = True
        self._thread.join()

    def _read(self) -> None:
        there = True
        try:
            while there and not self._ended:
                there, frame = self._capture.read()
                with self._changed:
                    self._frame = frame if there else self._frame
                    self._changed.notify()
        except Exception as error:  # whoever takes is told
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()


@contextmanager
def publisher(broker: str, topic: str, *, username: str = "", password: str = "") -> Iterator[Callable[..., None]]:
    """A function that publishes an answer as JSON on `topic` of the MQTT 5 broker at `broker` (HOST:PORT), QoS 1.

    While the broker is away the first 100 answers wait and others are dropped; it is reconnected to by itself.
    """
    import paho.mqtt.client as paho  # noqa: PLC0415 - only who publishes needs it
    from paho.mqtt.enums import CallbackAPIVersion  # noqa: PLC0415

    host, _, port = broker.rpartition(":")
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.max_queued_messages_set(_MOST_QUEUED)
    if username:
        client.username_pw_set(username, password)
    connected = threading.Event()
    client.on_connect = lambda *_facts: connected.set()
    client.connect_async(host, int(port))
    client.loop_start()
    connected.wait(_CONNECT_S)
    last: list[paho.MQTTMessageInfo] = []

    def publish(answer: Mapping[str, Any]) -> None:
        last[:] = [client.publish(topic, json.dumps(answer, ensure_ascii=False).encode(), qos=1)]

    try:
        yield publish
    finally:
        for message in last:
            with suppress(ValueError, RuntimeError):  # it was never taken, or waits for a broker that is away
                message.wait_for_publish(_CONNECT_S)
        client.disconnect()
        client.loop_stop()


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
