"""The client for cameras, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from appliance import client_cli
from appliance.client import Client
from models.errors import ApplianceError, BadInput, Unavailable

pytestmark = pytest.mark.unit


class Film:
    """A file with that many frames; one that cannot be opened has none."""

    def __init__(self, frames: int) -> None:
        self.frames = frames

    def read(self) -> tuple[bool, Any]:
        """The next frame."""
        self.frames -= 1
        return self.frames >= 0, np.zeros((8, 8, 3), np.uint8)


class Unplugged:
    """A camera whose driver raises."""

    def read(self) -> tuple[bool, Any]:
        """No frame."""
        raise OSError("the camera was unplugged")


@pytest.mark.timeout(30)
def test_a_camera_that_fails_ends_the_following_with_what_it_said() -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(OSError, match="unplugged"):
        next(client.follow("m", Unplugged()))
    client.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("frames", "error", "reason"),
    [(0, BadInput, "the capture gives no frame: check"), (1, Unavailable, "the daemon does not answer at http://127")],
)
def test_a_film_of_which_nothing_was_answered_ends_with_the_reason(
    frames: int, error: type[ApplianceError], reason: str
) -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(error, match=reason):
        next(client.follow("m", Film(frames)))
    client.close()


# What the commands say

OPINION = {"by": "ppocr-v4-large 1.0.0", "agrees": False, "lines": [{"text": "EXIT", "confidence": 0.99, "box": []}]}
ANSWER = {
    "model": "m",
    "version": "1",
    "runtime": "onnxruntime-cpu",
    "precision": "int8",
    "trust": "signed",
    "lines": [{"text": "EX1T", "confidence": 0.4, "box": [[1, 2], [3, 2], [3, 4], [1, 4]]}],
    "timing_ms": {"total": 12.0},
}


@pytest.mark.parametrize(
    ("opinion", "said"),
    [
        (OPINION, "second opinion: ppocr-v4-large 1.0.0 says: EXIT"),
        ({**OPINION, "agrees": True}, "second opinion: ppocr-v4-large 1.0.0 agrees: EXIT"),
        ({"reason": "none came within 10 s"}, "second opinion: none (none came within 10 s)"),
        (None, ""),
    ],
)
def test_who_wants_to_wait_for_a_second_opinion_says_so_and_is_shown_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opinion: object, said: str
) -> None:
    asked: list[Any] = []

    def ask(*_request: object, params: object, **_more: object) -> dict[str, Any]:
        asked.append(params)
        return ANSWER | ({"second_opinion": opinion} if params else {})

    monkeypatch.setattr(client_cli, "ask", ask)
    (tmp_path / "x.jpg").write_bytes(b"")
    shown = [
        CliRunner()
        .invoke(client_cli.app, ["infer", "m", str(tmp_path / "x.jpg"), *more], catch_exceptions=False)
        .stdout
        for more in ((), ("--escalate",))
    ]
    assert asked == [{}, {"escalate": "wait"}]
    assert ("second opinion" in shown[0], said in shown[1], "second opinion" in shown[1]) == (False, True, bool(said))


def test_a_client_asks_for_a_second_opinion_where_it_is_told_to() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        return httpx.Response(200, json=ANSWER)

    client = Client("http://127.0.0.1:1")
    client._http = httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(answer))  # noqa: SLF001
    client.predict("m", b"", source="gate", escalate=True)
    client.predict("m", b"")
    assert asked == ["source=gate&escalate=wait", ""]
    client.close()


@pytest.mark.parametrize(
    ("ready", "loaded", "said"),
    [(True, True, "d: ready, up"), (True, False, "d: ready, nothing loaded, up"), (False, False, "d: not ready, up")],
)
def test_the_status_does_not_call_a_daemon_ready_that_has_nothing_loaded_without_saying_so(
    monkeypatch: pytest.MonkeyPatch, ready: bool, loaded: bool, said: str
) -> None:
    model = {"name": "m", "version": "1", "ready": loaded, "runtime": "", "precision": {}, "trust": "signed"}
    status = {
        "device_id": "d",
        "ready": ready,
        "uptime_s": 1.0,
        "appliance": "1",
        "models": [model | {"reason": "" if loaded else "an operator has unloaded it"}],
        "workers": [{"state": "stopped", "pid": None, "restarts": 0}],
        "profile": {"name": "cpu", "because": "it is one"},
        "memory": {"leased_bytes": 0, "budget_bytes": 1, "step": "normal"},
        "clock": {"synced": True},
        **dict.fromkeys(("mqtt", "sync", "update")),
        "recent_faults": [],
    }
    monkeypatch.setattr(client_cli, "ask", lambda *_request: status)
    ended = CliRunner().invoke(client_cli.app, ["status"], catch_exceptions=False)
    assert (ended.exit_code, said in ended.stdout) == (0, True), ended.stdout
