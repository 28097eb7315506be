"""The first boot, with stand-ins for the system's tools: each step once, and after any cut the rest."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.firstboot import HELD, MODULES, PLAN, UNIT, FirstBoot

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ALL = {
    "grow": True,
    "fill": True,
    "power_mode": 2,
    "enroll": ["--url", "https://fleet.example.com"],
    "token": "/etc/appliance/enroll.token",
    "lock": True,
}
HELD_FILES = ((f"{HELD}/journal.db", "who may order"), (f"{HELD}/slots/one/manifest.json", "{}"))
TOOLS = ("findmnt", "sfdisk", "partx", "resize2fs", "chown", "nvpmodel", "runuser", "chown", "passwd")
STAND_IN = """#!/bin/sh
echo "$(basename $0) $*${APPLIANCE_ENROLMENT_TOKEN:+ with $APPLIANCE_ENROLMENT_TOKEN}" >> $BOARD/calls
if [ "$(wc -l < $BOARD/calls)" = "${CUT_AT:-0}" ]; then kill -9 $PPID; fi
case "$(basename $0) $*" in
  findmnt*) echo /dev/nvme0n1p15;;
  "nvpmodel -q") printf 'NV Power Mode: 15W\\n%s\\n' "$(cat $BOARD/mode)";;
  *"enroll --state-dir /var/lib/appliance") [ -e $BOARD/enrolled ] || exit 1;;
  *"enroll"*)
    case "$*" in *"${FAILING:-nothing at all}"*) echo "no route to fleet.example.com" >&2; exit 1;; esac
    touch $BOARD/enrolled;;
  "nvpmodel -m"*) echo $2 > $BOARD/mode;;
esac
"""


class Board:
    """A root file system, its tools and its calls."""

    def __init__(self, folder: Path, **plan: Any) -> None:  # noqa: ANN401 - JSON
        self.root, self.folder = folder / "root", folder
        (folder / "bin").mkdir()
        for tool in TOOLS:
            (folder / "bin" / tool).write_text(STAND_IN)
            (folder / "bin" / tool).chmod(0o755)
        (folder / "mode").write_text("0\n")
        disk = self.root / "sys/devices/nvme0n1/nvme0n1p15"
        disk.mkdir(parents=True)
        (disk / "partition").write_text("15\n")
        (self.root / "sys/class/block").mkdir(parents=True)
        (self.root / "sys/class/block/nvme0n1p15").symlink_to(disk)
        (self.root / "var/lib/appliance").mkdir(parents=True)
        for path, text in ((PLAN, json.dumps(plan)), (UNIT, ""), *HELD_FILES, ("etc/appliance/enroll.token", "secret")):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

    def boot(self, **env: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "BOARD": str(self.folder)}
        command = [sys.executable, "-m", "appliance.firstboot", "--root", str(self.root)]
        return subprocess.run(command, env=os.environ | own | env, capture_output=True, text=True, check=False)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def done(self) -> bool:
        return not any((self.root / path).exists() for path in (PLAN, UNIT, "etc/appliance/enroll.token"))


def test_a_first_boot_grows_fills_sets_the_mode_enrols_locks_and_removes_itself(tmp_path: Path) -> None:
    board = Board(tmp_path, **ALL)
    done = board.boot()
    assert (done.returncode, done.stderr) == (0, "")
    assert board.done
    bins = Path(sys.executable).parent
    state = board.root / "var/lib/appliance"
    enrol = f"runuser -u appliance -- {bins}/appliance enroll --state-dir /var/lib/appliance"
    assert board.calls == [
        "findmnt -nro SOURCE --target /var/lib/appliance",
        "sfdisk --no-reread --no-tell-kernel -N 15 /dev/nvme0n1",
        "partx --update --nr 15 /dev/nvme0n1",
        "resize2fs /dev/nvme0n1p15",
        f"chown -R appliance:appliance {state}/.journal.db.new",
        f"chown -R appliance:appliance {state}/.slots.new",
        "nvpmodel -q",
        "nvpmodel -m 2",
        enrol,
        f"{enrol} --url https://fleet.example.com with secret",
        "passwd --lock root",
    ]


@pytest.mark.long
@pytest.mark.parametrize("cut_at", range(1, 12))
def test_cut_anywhere_the_next_boot_does_the_rest_and_nothing_that_was_done(tmp_path: Path, cut_at: int) -> None:
    board = Board(tmp_path, **ALL)
    assert board.boot(CUT_AT=str(cut_at)).returncode == -9
    assert not board.done
    before = board.calls
    assert board.boot().returncode == 0
    assert board.done
    after = board.calls[len(before) :]
    grow = ("findmnt", "sfdisk", "partx", "resize2fs")
    steps = [grow, ("chown",), ("nvpmodel",), ("enroll",), ("passwd",)]
    at = next(number for number, words in enumerate(steps) if any(word in before[-1] for word in words))
    repeated = {number for number, words in enumerate(steps) if any(word in call for word in words for call in after)}
    assert repeated == set(range(at, len(steps)))
    state = board.root / "var/lib/appliance"
    assert sorted(path.name for path in state.iterdir()) == ["journal.db", "slots"]
    assert (state / "slots/one/manifest.json").read_text() == "{}"


def test_what_a_device_has_learned_is_not_replaced_by_what_its_image_held(tmp_path: Path) -> None:
    board = Board(tmp_path, fill=True)
    (board.root / "var/lib/appliance/journal.db").write_text("its own")
    assert board.boot().returncode == 0
    assert (board.root / "var/lib/appliance/journal.db").read_text() == "its own"
    assert (board.root / "var/lib/appliance/slots/one/manifest.json").is_file()


def test_a_fleet_that_cannot_be_reached_leaves_the_secret_for_the_next_try(
    tmp_path: Path,
) -> None:
    board = Board(tmp_path, **ALL)
    done = board.boot(FAILING="enroll")
    assert done.returncode == 1
    assert "enrolling failed: runuser -u appliance ended with 1: no route to fleet.example.com" in done.stderr
    assert (board.root / "etc/appliance/enroll.token").exists()
    assert board.boot().returncode == 0
    assert board.done


def test_an_enrolment_that_was_cut_before_it_was_struck_is_not_tried_with_a_used_token(tmp_path: Path) -> None:
    board = Board(tmp_path, enroll=ALL["enroll"], token=ALL["token"])
    (tmp_path / "enrolled").touch()
    assert board.boot().returncode == 0
    assert len(board.calls) == 1
    assert board.done


def test_a_device_that_has_no_token_yet_says_where_it_is_to_be_put(tmp_path: Path) -> None:
    board = Board(tmp_path, enroll=ALL["enroll"], token=ALL["token"])
    (board.root / "etc/appliance/enroll.token").unlink()
    done = board.boot()
    assert done.returncode == 1
    assert "there is no token in /etc/appliance/enroll.token" in done.stderr


def test_a_board_in_the_wanted_mode_is_left_as_it_is(tmp_path: Path) -> None:
    board = Board(tmp_path, power_mode=0)
    assert board.boot().returncode == 0
    assert board.calls == ["nvpmodel -q"]


def imported_when_needed(source: Path) -> set[str]:
    """Modules that functions of `source` import: of ours, and for signatures."""
    functions = [one for one in ast.walk(ast.parse(source.read_text())) if isinstance(one, ast.FunctionDef)]
    nodes = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
    names = {name for node in nodes for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names))}
    files = {name: ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names if name}
    return {name for name, file in files.items() if file.exists() or name in {"securesystemslib.dsse", "tuf.ngclient"}}


def test_the_first_boot_also_compiles_what_the_daemon_imports_only_when_it_needs_it() -> None:
    """Its user cannot keep what it compiles, so it would compile that again at every start."""
    told = "import sys, json; print(json.dumps({n: getattr(m, '__file__', None) for n, m in sys.modules.items()}))"
    done = subprocess.run([sys.executable, "-c", f"import {MODULES}; {told}"], capture_output=True, check=True)
    compiled: dict[str, str | None] = json.loads(done.stdout)
    ours = [Path(file) for name, file in compiled.items() if file and name.startswith(("appliance.", "models."))]
    wanted = set().union(*(imported_when_needed(file) for file in (ROOT / "appliance/cli.py", *ours)))
    assert len(wanted) > 10
    not_of_a_device = {
        "appliance.client_cli",
        "appliance.runtime.null",
        "appliance.runtime.openvino",
        "appliance.upstream.home",
    }
    assert wanted - compiled.keys() == not_of_a_device


def test_a_damaged_plan_is_one_sentence(tmp_path: Path) -> None:
    board = Board(tmp_path, grwo=True)
    done = board.boot()
    assert done.returncode == 1
    assert "did you mean 'grow'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_that_cannot_be_struck_because_the_disk_is_full_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    board = Board(tmp_path, fill=True)
    for path, _text in HELD_FILES:
        (board.root / path).unlink()
    shutil.rmtree(board.root / HELD / "slots")
    monkeypatch.setattr("appliance.firstboot.write_file", full)
    assert FirstBoot(board.root).run() == 1
    assert "filling the state folder failed: [Errno 28] No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert FirstBoot(board.root).run() == 0
    assert not (board.root / PLAN).exists()
