"""`appliance fleet` before it asks anybody: what it refuses, and what it shows before a rollout."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from click.testing import Result
from support import tiny
from support.daemon import APPLIANCE
from support.processes import clean_environment, free_port
from typer.testing import CliRunner

from appliance.client_cli import app
from models.folder import BundleFolder
from models.measurements import Answering, Parity

pytestmark = pytest.mark.unit

START = ("fleet", "campaign", "start", "scale", "2.0.0")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nothing answers: what gets there has passed everything before."""
    monkeypatch.setenv("APPLIANCE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("COLUMNS", "200")


def appliance(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def measured(path: Path) -> Path:
    """Version 2.0.0 of a bundle, with a parity report."""
    folder = BundleFolder(tiny.scale_bundle(path, 2, null=True))
    manifest = folder.manifest
    ours = Answering(manifest.name, manifest.version, manifest.digest, "int8", 2)
    theirs = Answering(manifest.name, manifest.version, manifest.digest, "fp32")
    folder.keep_parity(Parity(ours, theirs, "exact match", -0.4, "435 lines", "onnxruntime-cpu", {}))
    return path


@pytest.mark.usefixtures("nobody")
def test_the_parity_report_and_the_waves_are_shown_before_the_upstream_is_asked(tmp_path: Path) -> None:
    bundle = measured(tmp_path / "bundle")
    shown = appliance(*START, "--canary", "group:canary", "--wave", "label:hall=2", "--bundle", str(bundle), "--yes")
    assert shown.exit_code == 1  # nobody answers
    assert "scale 2.0.0: INT8, 2 KV heads on the device against float upstream: -0.4 points" in shown.stderr
    assert "waves: group canary (canary), then label hall=2" in shown.stderr
    assert "the daemon does not answer" in shown.stderr


@pytest.mark.usefixtures("nobody")
def test_a_rollout_without_a_report_says_so_and_one_with_the_report_of_another_bundle_is_refused(
    tmp_path: Path,
) -> None:
    assert "no parity report is shown" in appliance(*START, "--yes").stderr
    unmeasured = tiny.scale_bundle(tmp_path / "unmeasured", 2, null=True)
    assert "`provision parity" in appliance(*START, "--bundle", str(unmeasured), "--yes").stderr
    other = tiny.scale_bundle(tmp_path / "other", 3, null=True)
    refused = appliance(*START, "--bundle", str(other), "--yes")
    assert refused.exit_code == 1
    assert "holds scale 3.0.0, not scale 2.0.0" in refused.stderr


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (START, "give --yes"),
        ((*START, "--canary", "some"), "write 5%, group:NAME or label:KEY=VALUE"),
        ((*START, "--wave", "120%"), "write 5%, group:NAME or label:KEY=VALUE"),
        ((*START, "--wave", "label:hall"), "write 5%, group:NAME or label:KEY=VALUE"),
        (("fleet", "campaign", "status", "--wait"), "give its id"),
        (("fleet", "command", "order.json"), "one of --device, --group and --label"),
        (("fleet", "device", "press-1", "--label", "hall"), "write KEY=VALUE"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_sentence(arguments: tuple[str, ...], why: str) -> None:
    refused = appliance(*arguments)
    assert refused.exit_code == 2
    assert why in refused.stderr.replace("\n", " ").replace("│", "")


def test_on_a_terminal_a_rollout_is_asked_about_and_no_ends_it(tmp_path: Path) -> None:
    bundle = measured(tmp_path / "bundle")
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"n\n")
        ended = subprocess.run(
            [APPLIANCE, *START, "--bundle", bundle, "--url", f"http://127.0.0.1:{free_port()}"],
            env=clean_environment(),
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert ended.returncode == 1
    assert "-0.4 points" in ended.stderr
    assert "Roll it out?" in ended.stderr
    assert "not started" in ended.stderr
    assert "does not answer" not in ended.stderr
