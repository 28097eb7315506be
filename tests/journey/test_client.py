"""The client commands, as somebody at a terminal or a script uses them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import tiny
from support.daemon import Daemon, StartDaemon, appliance
from support.processes import eventually, free_port
from typer.main import get_command

from appliance import __version__
from appliance.client_cli import app

pytestmark = pytest.mark.journey

COMMANDS = sorted(vars(get_command(app))["commands"])


class Reader(BaseHTTPRequestHandler):
    """A daemon's stand-in that has read what looks like the markup of a terminal library."""

    texts = ("[bold]", "[/]", ":warning:", "[A-7]", "x" * 300)

    def do_POST(self) -> None:
        """Answer any picture."""
        self.rfile.read(int(self.headers["content-length"]))
        lines = [{"text": text, "confidence": 1.0, "box": [[0, 0]] * 4} for text in self.texts]
        answer = {
            "model": "m",
            "version": "1",
            "runtime": "r",
            "precision": "fp32",
            "trust": "t",
            "timing_ms": {"total": 1},
            "lines": lines,
        }
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_parts: object) -> None:
        """Say nothing."""


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A picture file without text."""
    path = tmp_path / "noise.png"
    path.write_bytes(tiny.picture(64, 48))
    return path


def failed(*arguments: str) -> str:
    """Run a command that must fail with status 1; the one sentence it prints."""
    ended = appliance(*arguments)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    return line


def test_status_shows_every_model_with_its_state(tiny_daemon: Daemon) -> None:
    shown = appliance("status", "--url", tiny_daemon.url)
    assert shown.returncode == 0, shown.stderr
    first, *rows = shown.stdout.splitlines()
    assert tiny_daemon.status()["device_id"] in first
    assert "ready" in first
    for model in tiny_daemon.status()["models"]:
        (row,) = (row.split() for row in rows if row.split()[0] == model["name"])
        assert row[1:4] == [model["version"], "ready", "onnxruntime-cpu"]


def test_status_as_json_is_the_daemons_own_document(tiny_daemon: Daemon) -> None:
    shown = appliance("status", "--json", "--url", tiny_daemon.url)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document.keys() == tiny_daemon.status().keys()
    assert document["models"] == tiny_daemon.status()["models"]


def test_the_address_may_come_from_the_environment(tiny_daemon: Daemon) -> None:
    shown = appliance("status", "--json", env={"APPLIANCE_URL": tiny_daemon.url})
    assert json.loads(shown.stdout)["device_id"] == tiny_daemon.status()["device_id"]


def test_an_address_needs_no_scheme(tiny_daemon: Daemon) -> None:
    shown = appliance("status", "--json", "--url", tiny_daemon.url.removeprefix("http://"))
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["device_id"] == tiny_daemon.status()["device_id"]


def test_the_version_is_told() -> None:
    shown = appliance("--version")
    assert (shown.returncode, shown.stdout) == (0, f"appliance {__version__}\n")


def test_status_tells_why_a_model_is_not_ready_on_a_line_of_its_own(start_daemon: StartDaemon, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no model")
    daemon = start_daemon("--onnx", f"broken={broken}", APPLIANCE_RUNTIME="null").wait_serving()
    eventually(lambda: "null graph" in (daemon.model("broken")["reason"] or ""), "the reason is known")
    first, _head, *lines = appliance("status", "--url", daemon.url).stdout.splitlines()
    assert "not ready" in first
    (row,) = (line for line in lines if line.split()[:2] == ["broken", "1"])
    assert "null graph" not in row
    (reason,) = (line for line in lines if line.startswith("broken: "))
    assert "not a null graph" in reason


def test_status_of_a_daemon_without_models_says_how_to_give_one(start_daemon: StartDaemon) -> None:
    daemon = start_daemon().wait_serving()
    assert "no models: give one with `appliance run --bundle FOLDER`" in appliance("status", "--url", daemon.url).stdout


def test_infer_shows_what_the_model_answers_and_what_computed_it(tiny_daemon: Daemon, picture: Path) -> None:
    shown = appliance("infer", "blank", str(picture), "--url", tiny_daemon.url)
    assert shown.returncode == 0, shown.stderr
    assert "no text found" in shown.stdout
    assert "blank 1.0.0 by onnxruntime-cpu (det fp32)" in shown.stdout
    assert "unverified-local" in shown.stdout


def test_what_was_read_is_printed_as_it_was_read(picture: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Reader) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            shown = appliance("infer", "m", str(picture), "--url", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
    assert shown.returncode == 0, shown.stderr
    assert [text for text in Reader.texts if text not in shown.stdout] == []


def test_infer_as_json_is_the_daemons_own_document(tiny_daemon: Daemon, picture: Path) -> None:
    shown = appliance("infer", "blank", str(picture), "--json", "--url", tiny_daemon.url)
    assert shown.returncode == 0, shown.stderr
    assert {"model", "version", "runtime", "degraded", "lines", "timing_ms"} <= set(json.loads(shown.stdout))


def test_a_refusal_of_the_daemon_is_shown_in_one_sentence(tiny_daemon: Daemon, picture: Path, tmp_path: Path) -> None:
    assert "there is no model 'none'" in failed("infer", "none", str(picture), "--url", tiny_daemon.url)
    text = tmp_path / "text.jpg"
    text.write_text("no picture")
    assert "neither a JPEG nor a PNG" in failed("infer", "blank", str(text), "--url", tiny_daemon.url)
    assert "HTTP 404" in failed("infer", "../../v1/status", str(picture), "--url", tiny_daemon.url)


def test_a_model_of_tensors_says_that_it_takes_no_pictures(tiny_daemon: Daemon, picture: Path) -> None:
    assert "tensors" in failed("infer", "linear", str(picture), "--url", tiny_daemon.url)


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["infer", "blank", "PICTURE"]])
def test_without_a_daemon_a_command_says_how_to_start_one(picture: Path, arguments: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    line = failed(*(str(picture) if part == "PICTURE" else part for part in arguments), "--url", url)
    assert url in line
    assert "appliance run" in line


@pytest.mark.parametrize("url", ["no address", "http://", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    assert url in failed("status", "--url", url)


@pytest.mark.parametrize(
    "arguments", [["stauts"], ["infer"], ["infer", "blank", "no-such-file.jpg"], ["status", "--colour"]]
)
def test_wrong_usage_ends_with_status_2(arguments: list[str]) -> None:
    ended = appliance(*arguments)
    assert ended.returncode == 2
    assert ended.stderr
    assert "Traceback" not in ended.stderr


def test_there_are_the_commands_that_this_file_tries() -> None:
    assert COMMANDS == [
        "bench",
        "doctor",
        "enroll",
        "fleet",
        "infer",
        "models",
        "rollback",
        "run",
        "status",
        "support-bundle",
        "token",
        "update",
    ]
    shown = appliance("--help").stdout
    assert all(command in shown for command in COMMANDS)
    assert "Exit codes" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(command: str) -> None:
    shown = appliance(command, "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"Example: appliance {command}" in shown.stdout
