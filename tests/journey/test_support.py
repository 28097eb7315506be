"""`appliance doctor`, `appliance support-bundle` and what every command keeps to: JSON, colours, completion, quiet."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, StartDaemon, appliance
from support.processes import free_port

pytestmark = pytest.mark.journey

HIDDEN = "hunter2-never-shown"
NOWHERE = {"APPLIANCE_URL": f"http://127.0.0.1:{free_port()}"}


def test_the_doctor_needs_no_daemon_and_says_what_each_check_found(tmp_path: Path) -> None:
    shown = appliance("doctor", "--json", "--state-dir", str(tmp_path), env=NOWHERE)
    document = json.loads(shown.stdout)
    verdicts = {check["name"]: check["verdict"] for check in document["checks"]}
    assert (verdicts["python"], verdicts["libraries"], verdicts["rights"]) == ("ok", "ok", "ok")
    assert (verdicts["daemon"], verdicts["broker"], verdicts["jetpack"]) == ("skip", "skip", "skip")
    assert document["passed"] == ("fail" not in verdicts.values())
    assert shown.returncode == (0 if document["passed"] else 1)
    assert shown.stderr == ""


@pytest.mark.long
def test_a_check_that_fails_ends_the_doctor_with_status_1_and_its_remedy(tiny_daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[mqtt]\nhost = "127.0.0.1"\nport = {free_port()}\n')
    command = ["doctor", "--config", str(tmp_path / "config.toml"), "--state-dir", str(tmp_path)]
    shown = appliance(*command, "--url", tiny_daemon.url)
    assert shown.returncode == 1, shown.stdout
    broker = next(line for line in shown.stdout.splitlines() if line.split()[:2] == ["fail", "broker"])
    assert "does not answer" in broker
    assert "-> check mqtt.host" in shown.stdout
    assert any(line.split()[:3] == ["ok", "daemon", "ready"] for line in shown.stdout.splitlines())


@pytest.mark.long
def test_settings_that_cannot_be_read_are_a_finding_of_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[http]\nprot = 1\n")
    command = ["doctor", "--json", "--config", str(tmp_path / "config.toml"), "--state-dir", str(tmp_path)]
    first = json.loads(appliance(*command, env=NOWHERE).stdout)["checks"][0]
    assert (first["name"], first["verdict"]) == ("settings", "fail")
    assert "did you mean http.port" in first["reason"]


@pytest.mark.long
def test_a_support_bundle_holds_what_a_stranger_needs_and_no_secret(start_daemon: StartDaemon, tmp_path: Path) -> None:
    model = tiny.null_model(tmp_path / "null.json")
    daemon = start_daemon("--onnx", f"null={model}", APPLIANCE_RUNTIME="null").wait_serving().wait_ready()
    token = daemon.token("admin")
    daemon.infer("null", np.ones((1, 2), np.float32))
    config = tmp_path / "config.toml"
    config.write_text(
        f'[mqtt]\nhost = "127.0.0.1"\nport = {free_port()}\nusername = "press"\npassword = "{HIDDEN}"\n'
        '[update]\nurl = "http://127.0.0.1:1/"\nroot = "root.json"\n'
    )
    out = tmp_path / "case.tar.gz"
    options = ["--out", str(out), "--config", str(config), "--state-dir", str(daemon.state_dir), "--url", daemon.url]
    shown = appliance("support-bundle", "--json", *options)
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    with tarfile.open(out) as file:
        parts = {entry.name.removeprefix("support/"): file.extractfile(entry) for entry in file.getmembers()}
        contents = {name: part.read() for name, part in parts.items() if part}
    assert sorted(told["parts"]) == sorted(contents.keys() - {"left_out.json"})
    wanted = {"status.json", "deployments.json", "metrics.txt", "settings.json", "checks.json", "host.txt"}
    assert wanted <= contents.keys()
    assert json.loads(contents["status.json"])["device_id"] == daemon.status()["device_id"]
    settings = json.loads(contents["settings.json"])
    assert (settings["mqtt"]["username"], settings["mqtt"]["password"]) == ("press", "(removed)")
    assert settings["update"]["url"] == "http://127.0.0.1:1/"
    assert b"nv_inference_request_success" in contents["metrics.txt"]
    told_secrets = [
        name for name, content in contents.items() if HIDDEN.encode() in content or token.encode() in content
    ]
    assert told_secrets == []
    assert out.stat().st_mode & 0o077 == 0
    daemon.stop()


@pytest.mark.long
def test_a_support_bundle_without_a_daemon_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "case.tar.gz"
    shown = appliance("support-bundle", "--out", str(out), "--state-dir", str(tmp_path), env=NOWHERE)
    assert shown.returncode == 0, shown.stderr
    assert "left out: status.json" in shown.stdout
    assert shown.stdout.startswith("the settings are those of this shell")
    assert "checks.json" in shown.stdout
    assert appliance("support-bundle", "--out", "/none/case.tar.gz", env=NOWHERE).returncode == 1


def test_models_are_listed_with_their_states(tiny_daemon: Daemon) -> None:
    shown = appliance("models", "--json", "--url", tiny_daemon.url)
    assert {(one["name"], one["state"]) for one in json.loads(shown.stdout)} >= {
        ("blank", "READY"),
        ("blank.det", "READY"),
    }
    assert ["linear", "1", "ready"] in [
        line.split() for line in appliance("models", "--url", tiny_daemon.url).stdout.splitlines()
    ]
    refused = appliance("models", "--unload", "linear", "--url", tiny_daemon.url)
    assert (refused.returncode, "appliance token create" in refused.stderr) == (1, True)


def test_infer_writes_a_copy_of_the_picture_where_it_is_told_to(tiny_daemon: Daemon, tmp_path: Path) -> None:
    picture = tmp_path / "noise.png"
    picture.write_bytes(tiny.picture(64, 48))
    out = tmp_path / "found.jpg"
    shown = appliance("infer", "blank", str(picture), "--out", str(out), "--url", tiny_daemon.url)
    assert shown.returncode == 0, shown.stderr
    assert cv2.imread(str(out)).shape == (48, 64, 3)
    same = appliance("infer", "blank", str(picture), "--out", str(picture), "--url", tiny_daemon.url)
    assert (same.returncode, "the picture itself" in same.stderr) == (2, True)
    wrong = appliance("infer", "blank", str(picture), "--out", str(tmp_path / "found.txt"), "--url", tiny_daemon.url)
    assert (wrong.returncode, "use .png or .jpg" in wrong.stderr) == (1, True)


def test_a_token_says_where_it_counts_and_that_it_is_revoked(tmp_path: Path) -> None:
    where = ["--state-dir", str(tmp_path)]
    made = appliance("token", "create", "gate", "--role", "infer", *where)
    assert made.stdout.startswith("gate.")
    assert str(tmp_path) in made.stderr
    revoked = appliance("token", "revoke", "gate", *where)
    assert (revoked.returncode, revoked.stdout) == (0, "gate is revoked\n")
    document = json.loads(appliance("token", "create", "gate", "--role", "admin", "--json", *where).stdout)
    assert (document["name"], document["role"]) == ("gate", "admin")
    assert json.loads(appliance("token", "revoke", "gate", "--json", *where).stdout)["revoked"] is True


def test_the_status_of_a_usual_device_fits_one_screen(tiny_daemon: Daemon) -> None:
    lines = appliance("status", "--url", tiny_daemon.url).stdout.splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("memory: ") and "leased" in line for line in lines)


@pytest.mark.parametrize("command", [["status"], ["models"], ["doctor"], ["--help"]])
def test_nothing_is_coloured_where_nobody_looks_or_colours_are_not_wanted(
    tiny_daemon: Daemon, command: list[str]
) -> None:
    shown = appliance(*command, env={"APPLIANCE_URL": tiny_daemon.url, "FORCE_COLOR": "", "TERM": "xterm-256color"})
    assert "\x1b[3" not in shown.stdout + shown.stderr


def test_a_shell_completes_commands() -> None:
    asked = {"_APPLIANCE_COMPLETE": "complete_bash", "COMP_WORDS": "appliance su", "COMP_CWORD": "1"}
    assert appliance(env=asked).stdout.split() == ["support-bundle"]
