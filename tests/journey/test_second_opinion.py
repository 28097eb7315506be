"""A doubtful picture goes from a camera to a device, upstream, to a larger model, and its better answer back."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny
from support.broker import Listener, Mosquitto, needs_mosquitto
from support.daemon import Daemon, StartDaemon
from support.processes import eventually, free_port

pytestmark = [pytest.mark.journey, pytest.mark.long, needs_mosquitto]


def test_a_camera_that_waits_gets_the_better_answer_and_the_server_counts_who_agrees(
    start_daemon: StartDaemon, broker: Mosquitto, tmp_path: Path
) -> None:
    broker.start()
    doubtful = tiny.guess_bundle(tmp_path / "guess", 0.55, 0.45)
    (tmp_path / "larger").mkdir()
    larger = tiny.guess_bundle(tmp_path / "larger" / "guess", 0.05, 0.95)
    port = free_port()
    home = start_daemon(
        *("--role", "upstream", "--bundle", str(larger), "--http", f"127.0.0.1:{port}"),
        folder="home",
        APPLIANCE_OPINIONS__URL=f"http://127.0.0.1:{port}",
        APPLIANCE_FLEET__EXCHANGE_S="1",
    )
    home.wait_serving(30).wait_ready()
    made = home.http.post(
        "/v1/fleet/tokens",
        json={"name": "dock-7", "role": "device", "device_id": "dock-7"},
        headers=home.authorized("admin"),
    )
    token = tmp_path / "token"
    token.write_text(made.raise_for_status().json()["token"])
    device = start_daemon(
        *("--bundle", str(doubtful), "--mqtt", broker.address),
        folder="device",
        APPLIANCE_DEVICE_ID="dock-7",
        APPLIANCE_UPSTREAM__URL=home.url,
        APPLIANCE_UPSTREAM__TOKEN_FILE=str(token),
        APPLIANCE_UPSTREAM__INTERVAL_S="1",
        APPLIANCE_SECOND_OPINION__MODELS='["guess"]',
        APPLIANCE_SECOND_OPINION__PICTURES="whole",
        APPLIANCE_SECOND_OPINION__WAIT_S="60",
    )
    device.wait_serving(30).wait_ready()
    with Listener(broker.port) as listener:
        _ask(device, home, listener)


def _ask(device: Daemon, home: Daemon, listener: Listener) -> None:
    picture = tiny.jpeg(64, 48)
    at_once = device.http.post("/v1/models/guess/predict?source=gate-3", content=picture).json()
    assert [one["label"] for one in at_once["classes"]] == ["0", "1"]
    assert "second_opinion" not in at_once
    told = listener.wait_for("appliance/dock-7/results/guess", 60, second_opinion=True).document
    assert ([one["label"] for one in told["classes"]], told["source"], told["agrees"]) == (["1", "0"], "gate-3", False)
    waited = device.http.post("/v1/models/guess/predict?escalate=wait", content=picture).json()
    opinion = waited["second_opinion"]
    assert [one["label"] for one in waited["classes"]] == ["0", "1"]
    assert ([one["label"] for one in opinion["classes"]], opinion["agrees"], opinion["by"]) == (
        ["1", "0"],
        False,
        "guess 1.0.0",
    )

    def agreement() -> dict[str, object]:
        answer = home.http.get("/v1/fleet/agreement", headers=home.authorized("admin"))
        return next(iter(answer.raise_for_status().json()["agreement"]), {})

    eventually(lambda: agreement().get("opinions") == 2, "both were read again", 60)
    assert (agreement()["model"], agreement()["version"], agreement()["agreement"]) == ("guess", "1.0.0", 0.0)
    counts = device.status()["second_opinion"]
    assert (counts["asked"], counts["agreed"]) == (2, 0)
