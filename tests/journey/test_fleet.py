"""docs/fleet.md as an operator follows it, word by word: only ports, and where files are, are those of this test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.broker import Mosquitto, needs_mosquitto
from support.daemon import Daemon
from support.documents import blocks
from support.processes import clean_environment, end_marked, eventually, free_port, listens, new_mark
from typing_extensions import Self

pytestmark = [pytest.mark.journey, pytest.mark.long, pytest.mark.timeout(240), needs_mosquitto]

DEVICE = "press-7"


class Desk:
    """Where the operator sits: a folder, and a shell that has the appliance's commands."""

    def __init__(self, folder: Path, here: dict[str, str]) -> None:
        """`here` says by what words of the document are replaced."""
        self.folder, self._here = folder, here
        self._exports, self._mark = "", new_mark()
        self._shells: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        end_marked(self._mark)
        for shell in self._shells:
            shell.communicate()

    def words(self, text: str) -> str:
        """What the document says, for this test's ports and folder."""
        return re.sub("|".join(map(re.escape, self._here)), lambda word: self._here[word[0]], text)

    def start(self, block: str) -> subprocess.Popen[str]:
        """Type a block of the document, in a shell that knows what those before have exported."""
        typed, self._exports = self._exports, "".join(re.findall(r"^export .*\n", block, re.MULTILINE)) + self._exports
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        shell = subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail\n{typed}{self.words(block)}"],
            cwd=self.folder,
            env=clean_environment(self._mark) | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._shells.append(shell)
        return shell

    def type(self, block: str) -> list[Any]:
        """Type a block and wait for its end; what it prints line by line, as JSON where it is."""
        shell = self.start(block)
        printed, complained = shell.communicate(timeout=120)
        assert shell.returncode == 0, f"{block}\n{printed}\n{complained}"
        return [json.loads(line) if line.startswith("{") else line for line in printed.splitlines()]


@pytest.fixture
def desk(tmp_path: Path, broker: Mosquitto) -> Iterator[Desk]:
    """An operator with a bundle and a broker."""
    here = {
        "1883": str(broker.start().port),
        "8090": str(free_port()),
        "/etc/appliance": str(tmp_path),
        "ppocr-v4": "scale",
    }
    tiny.scale_bundle(tmp_path / "scale", 1, null=True)
    with Desk(tmp_path, here) as found:
        yield found


def test_an_operator_who_follows_the_document_commands_a_device(desk: Desk) -> None:
    prepare, serve, ask, look, order, publish = blocks("fleet.md", "sh")
    desk.type(prepare)
    config = desk.folder / "device.toml"
    config.write_text(desk.words(blocks("fleet.md", "toml")[0]))
    desk.start(serve)
    eventually(lambda: listens(int(desk.words("8090"))), "the repository is served", 60)
    arguments = ["--config", str(config), "--bundle", str(desk.folder / "scale")]
    env = {
        "APPLIANCE_RUNTIME": "null",
        "APPLIANCE_CLOCK__ASSUME_SYNCED": "true",
        "APPLIANCE_REBOOT_COMMAND": '["sleep", "20"]',
    }
    with Daemon(desk.folder / "daemon", *arguments, env=env) as daemon:
        eventually(lambda: daemon.status()["update"]["looked_s_ago"] is not None, "it knows who may order", 60)
        eventually(lambda: daemon.status()["mqtt"]["connected"], "it is connected", 30)
        (status,) = desk.type(ask)
        assert (status["id"], status["status"], status["result"]["device_id"]) == ("ask-1", "done", DEVICE)
        availability, state = desk.type(look)
        assert (availability, state["device_id"], state["ready"]) == ("online", DEVICE, True)
        answers = desk.type(order)
        assert [answer["status"] for answer in answers] == ["done"] * 6, answers
        assert answers[3]["result"]["configured"] == {"update.window": "22:00-04:30", "mqtt.telemetry_s": 30}
        assert answers[4]["result"]["status"]["device_id"] == DEVICE
        (again,) = desk.type(publish)
        assert again == answers[-1]

    daemon = Daemon(desk.folder / "daemon", *arguments, env=env)
    try:
        daemon.wait_serving().wait_ready()
        asked = desk.start(f"{order.partition('order unload')[0]}order reboot")
        eventually(lambda: daemon.log("order_taken"), "it has taken the order", 30)
        daemon.kill()
    finally:
        daemon.close()
    with Daemon(desk.folder / "daemon", *arguments, env=env):
        answer = json.loads(asked.communicate(timeout=60)[0])  # the broker has brought the order again by itself
    assert answer["status"] == "unknown"
    assert "begun before the daemon was started anew" in answer["reason"]
