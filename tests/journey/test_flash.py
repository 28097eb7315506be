"""Flashing as a workshop does it: the real command, stand-ins for tools and boards, and what is left behind.

More than 400 lines, because all of them work in one workshop.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.boards import plant
from support.daemon import Daemon
from support.flashing import AUTOSUSPEND, BOOTED, BSP, EXPORTS, NANO, NX, RELEASE, Bench, Calls
from support.processes import eventually, free_port
from support.tiny import scale_bundle
from support.workshop import PROVISION

from appliance.callhome import CallHome
from models import schema
from models.callhome import TICKET
from models.folder import BundleFolder
from provisioning.flash import home
from provisioning.flash.home import Exam, Expected, Home
from provisioning.flash.run import read_state
from provisioning.keys import Keys

pytestmark = pytest.mark.journey

WITHIN_S = 60


class Workshop(Bench):
    """A bench with the command `provision flash` on it."""

    def __init__(self, folder: Path) -> None:
        """Make the key that signs the inventory."""
        super().__init__(folder)
        self.runs = folder / "run"
        self.inventory = folder / "inventory.jsonl"
        Keys([folder / "keys"], lambda: b"secret").create("workshop")
        self.port = free_port()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [str(PROVISION), "flash", *arguments]
        return subprocess.Popen(
            command, env=self.environment(), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def flash(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=WITHIN_S)
        assert "Traceback" not in err
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def plan(self, *more: str) -> Path:
        """A plan in a file, of one board on NVMe."""
        file = self.folder / "plan.json"
        given = ("--board", "jetson-orin-nano-devkit", "--bsp", str(self.bsp), "--sysroot", str(self.sysroot))
        ended = self.flash("plan", *given, "--out", str(file), *more)
        assert ended.returncode == 0, ended.stderr
        return file

    def running(self, plan: Path, *more: str, wait_s: int = 30) -> tuple[str, ...]:
        """Arguments of a run."""
        where = f"127.0.0.1:{self.port}"
        return (
            "run", str(plan), "--run", str(self.runs), "--bundle", str(self.bundle), "--listen", where,
            "--call-home", f"http://{where}/", "--sysroot", str(self.sysroot), "--wait-s", str(wait_s),
            "--inventory", str(self.inventory), "--key", "workshop", "--keys", str(self.folder / "keys"), *more,
        )  # fmt: skip

    def wait_unlocked(self) -> None:
        """Return when no run has the BSP folder, nor the guard of one that was killed."""
        with (self.bsp / ".appliance-flash.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

    def outcomes(self) -> dict[str, str]:
        """By port, what became of each board."""
        return {one.port: one.failure or one.state for one in read_state(self.runs).boards}

    def records(self) -> list[dict[str, Any]]:
        """The inventory, signatures checked."""
        public = str(self.folder / "keys" / "workshop.pub.json")
        ended = self.flash(
            "status", "--inventory", str(self.inventory), "--public", public, "--sysroot", str(self.sysroot), "--json"
        )
        assert ended.returncode == 0, ended.stderr
        return list(json.loads(ended.stdout)["inventory"])

    def assert_host_closed(self) -> None:
        """Nothing that a run has opened on the host is open."""
        assert (self.sysroot / "etc/exports").read_text() == EXPORTS
        assert sorted(file.name for file in (self.sysroot / "etc/udev/rules.d").iterdir()) == ["70-mine.rules"]
        assert (self.sysroot / "sys/module/usbcore/parameters/autosuspend").read_text() == AUTOSUSPEND


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """A workshop without boards."""
    return Workshop(tmp_path)


def test_a_plan_is_printed_for_people_and_for_programs(workshop: Workshop) -> None:
    given = ("--board", "jetson-orin-nano-devkit", "--storage", "nvme", "--bsp", str(BSP))
    shown = workshop.flash("plan", *given, "--json")
    assert shown.returncode == 0, shown.stderr
    made = json.loads(shown.stdout)
    flash = next(step["argv"] for step in made["steps"] if step["name"] == "flash")
    assert " ".join(flash) == (
        "sudo ./tools/kernel_flash/l4t_initrd_flash.sh --flash-only --network usb0 jetson-orin-nano-devkit internal"
    )
    assert (made["release"], made["wish"]["module"]) == (RELEASE, "orin-nano-devkit")
    people = workshop.flash("plan", *given)
    assert " ".join(flash) in people.stdout
    assert not (BSP / "calls.jsonl").exists()


def test_a_folder_that_is_no_bsp_is_one_sentence_and_exit_code_1(workshop: Workshop) -> None:
    ended = workshop.flash("plan", "--board", "jetson-orin-nano-devkit", "--bsp", str(workshop.folder), "--json")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "is no BSP folder" in line
    assert ended.stdout == ""


@pytest.mark.long
def test_five_boards_are_flashed_at_once_and_a_bad_one_stops_none_and_goes_on_alone(workshop: Workshop) -> None:
    ports = ["1-1", "1-2", "1-3", "1-4", "1-8.4"]
    for port in ports:
        workshop.plug(port, outcome="no_boot" if port == "1-3" else "written")
    plan = workshop.plan("--boards", "5")
    with Calls(workshop) as calls:
        ended = workshop.flash(*workshop.running(plan))
        assert ended.returncode == 1
        assert "1 of 5 boards are not good" in ended.stderr
        assert "1-3: the board took the flashing system and never came up" in ended.stderr
        assert "behind a hub" in ended.stderr
        assert workshop.outcomes() == {port: "no_boot" if port == "1-3" else "good" for port in ports}
        assert calls.replies.keys() == set(ports) - {"1-3"}
        images = workshop.calls()[0]
        assert images["argv"][:3] == ["--no-flash", "--massflash", "5"]
        assert images["env"] == {"BOARDID": "3767", "BOARDSKU": "0005", "FAB": "000", "BOARDREV": "", "ROOTFS_AB": "1"}
        workshop.assert_host_closed()

        workshop.plug("1-3")
        again = workshop.flash(*workshop.running(plan))
    assert again.returncode == 0, again.stderr
    assert set(workshop.outcomes().values()) == {"good"}
    assert [call["argv"][0] for call in workshop.calls()] == ["--no-flash", "--flash-only", "--flash-only"]
    verdicts = [(record["port"], record["verdict"]) for record in workshop.records()]
    assert sorted(verdicts) == sorted([*((port, "good") for port in ports), ("1-3", "no_boot")])
    for record in workshop.records():
        if record["verdict"] == "good":
            assert record["serial"] == workshop.told["serials"][record["port"]]
            assert (record["l4t"], record["module"]) == (RELEASE, "orin-nano-devkit")


def test_secrets_stay_out_of_logs_and_logins_are_by_key_only(workshop: Workshop) -> None:
    workshop.plug("1-1")
    with Calls(workshop) as calls:
        ended = workshop.flash(*workshop.running(workshop.plan()))
    assert ended.returncode == 0, ended.stderr
    password = (workshop.bsp / "password-given").read_text().strip()
    nonce = workshop.ticket().nonce
    kept = "".join(file.read_text() for file in (workshop.runs / "logs").iterdir())
    assert "called with -u maintainer -p ***" in kept
    for secret in (password, nonce):
        assert len(secret) > 20
        assert secret not in kept + ended.stdout + ended.stderr + (workshop.runs / "plan.json").read_text()
    assert f"--prefix {workshop.bsp}/rootfs --lock maintainer" in (workshop.folder / "usermod.log").read_text()
    assert (workshop.bsp / "rootfs" / TICKET).stat().st_mode & 0o777 == 0o600
    assert (workshop.runs / "ticket.json").stat().st_mode & 0o777 == 0o600
    assert calls.replies["1-1"].authorized_key.startswith("ssh-ed25519 ")


@pytest.mark.long
def test_every_way_to_fail_is_told_with_its_remedy_and_its_log_and_is_kept(workshop: Workshop) -> None:
    outcomes = [
        "bad_layout", "network_mode", "no_boot", "no_ssh", "no_board_info", "usb_write", "no_nfs", "disk_full",
        "qspi_not_written", "unknown", "not_started",
    ]  # fmt: skip
    ports = {f"1-{number}": outcome for number, outcome in enumerate(outcomes, 1)}
    for port, outcome in ports.items():
        workshop.plug(port, outcome="written" if outcome == "not_started" else outcome)
    workshop.say(no_log="1-11")
    ended = workshop.flash(*workshop.running(workshop.plan("--boards", "11"), wait_s=3))
    assert ended.returncode == 1
    assert workshop.outcomes() == ports
    assert {record["port"]: record["verdict"] for record in workshop.records()} == ports
    for port in ports:
        assert f"{port}: " in ended.stderr
        assert (workshop.runs / "logs" / f"{port}.log").exists()
    workshop.assert_host_closed()


@pytest.mark.parametrize("outcome", ["no_board_info", "unknown"])
@pytest.mark.long
def test_a_single_board_is_judged_by_the_exit_code_too(outcome: str, workshop: Workshop) -> None:
    workshop.plug("1-1", outcome=outcome)
    assert workshop.flash(*workshop.running(workshop.plan())).returncode == 1
    assert workshop.outcomes() == {"1-1": outcome}


@pytest.mark.long
def test_a_board_that_was_written_and_does_not_come_home_rightly_is_not_good(workshop: Workshop) -> None:
    lies: dict[str, dict[str, Any] | None] = {
        "wrong_release": {"l4t": "36.4.0"},
        "not_armed": {"slots": {"armed": False}},
        "no_answer": {"answer": None},
        "wrong_answer": {"answer": {"outputs": []}},
        "old_system": None,
        "still_in_recovery": None,
    }
    ports = {f"1-{number}": name for number, name in enumerate(lies, 1)}
    for port, name in ports.items():
        workshop.plug(port, outcome=name if name == "still_in_recovery" else "written")
    with Calls(workshop, {port: lies[name] for port, name in ports.items()}):
        ended = workshop.flash(*workshop.running(workshop.plan("--boards", "6"), wait_s=8))
    assert ended.returncode == 1
    assert workshop.outcomes() == ports


@pytest.mark.parametrize("again", ["verify", "run"])
@pytest.mark.long
def test_boards_may_be_written_now_and_verified_later(again: str, workshop: Workshop) -> None:
    workshop.plug("1-1")
    arguments = workshop.running(workshop.plan())
    ended = workshop.flash(*arguments, "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert workshop.outcomes() == {"1-1": "written"}
    verify = (
        "verify", str(workshop.runs), "--bundle", str(workshop.bundle), "--listen", f"127.0.0.1:{workshop.port}",
        "--sysroot", str(workshop.sysroot), "--wait-s", "30",
    )  # fmt: skip
    with Calls(workshop):
        later = workshop.flash(*(verify if again == "verify" else arguments))
    assert later.returncode == 0, later.stderr
    assert workshop.outcomes() == {"1-1": "good"}
    assert len(workshop.calls()) == 2
    assert workshop.flash("status", str(workshop.runs), "--sysroot", str(workshop.sysroot)).stdout.count("good") == 1


def test_images_with_the_appliance_in_them_can_be_made_without_a_board(workshop: Workshop) -> None:
    overlay = workshop.folder / "image.tar"
    with tarfile.open(overlay, "w") as archive:
        archive.add(workshop.sysroot / "proc/version", "etc/appliance/config.toml")
    ended = workshop.flash(*workshop.running(workshop.plan("--images-only", "--overlay", str(overlay))))
    assert ended.returncode == 0, ended.stderr
    assert [call["argv"][0] for call in workshop.calls()] == ["--no-flash"]
    assert (workshop.bsp / "rootfs/etc/appliance/config.toml").exists()


@pytest.mark.long
def test_what_stands_against_a_run_is_said_before_anything_is_touched(workshop: Workshop) -> None:
    plan = workshop.plan()
    for plugged, said in ((None, "none is on USB"), (BOOTED, "1-1 is booted"), (NX, "1-1 is orin-nx-16gb")):
        if plugged:
            workshop.plug("1-1", plugged)
        ended = workshop.flash(*workshop.running(plan))
        assert ended.returncode == 1
        assert said in ended.stderr
    (workshop.folder / "bin" / "exportfs").unlink()
    workshop.plug("1-1", NANO)
    if shutil.which("exportfs") is None:
        assert "nfs-kernel-server" in workshop.flash(*workshop.running(plan)).stderr
    assert workshop.calls() == []


@pytest.mark.long
def test_images_that_cannot_be_made_are_one_sentence_with_the_log(workshop: Workshop) -> None:
    workshop.plug("1-1")
    workshop.say(images="disk_full")
    ended = workshop.flash(*workshop.running(workshop.plan()))
    assert ended.returncode == 1
    assert "the host's disk is full" in ended.stderr
    assert str(workshop.runs / "logs" / "images.log") in ended.stderr
    assert workshop.state("1-1") == NANO


@pytest.fixture
def hanging(workshop: Workshop) -> Iterator[subprocess.Popen[str]]:
    """A run whose tool hangs in the middle of a board, with the host open."""
    workshop.plug("1-1", outcome="hang")
    with workshop.start(*workshop.running(workshop.plan())) as process:
        eventually((workshop.bsp / "hanging").exists, "the tool hangs", WITHIN_S)
        assert (workshop.sysroot / "etc/exports").read_text() != EXPORTS
        yield process
        process.kill()
        process.communicate()


def _has_ended(workshop: Workshop) -> bool:
    """Whether the tool that hung runs no more; nobody may have asked yet how it ended."""
    try:
        stat = Path(f"/proc/{(workshop.bsp / 'hanging').read_text()}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def _is_gone(workshop: Workshop) -> bool:
    """Whether the tool that hung has ended."""
    try:
        os.kill(int((workshop.bsp / "hanging").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        signal.SIGKILL,
    ],
)
def test_a_run_that_is_stopped_or_killed_leaves_nothing_open_and_goes_on(
    number: signal.Signals, hanging: subprocess.Popen[str], workshop: Workshop
) -> None:
    hanging.send_signal(number)
    hanging.wait(WITHIN_S)
    workshop.wait_unlocked()
    assert _has_ended(workshop), "no other run gets the folder before"
    eventually(lambda: (workshop.sysroot / "etc/exports").read_text() == EXPORTS, "the export is closed", WITHIN_S)
    eventually(lambda: _is_gone(workshop), "the tool has ended", WITHIN_S)
    eventually((workshop.folder / "exportfs.log").exists, "the NFS server knows it", WITHIN_S)
    workshop.assert_host_closed()
    if number is not signal.SIGKILL:
        assert hanging.returncode == 1
    workshop.plug("1-1")
    with Calls(workshop):
        again = workshop.flash(*workshop.running(workshop.folder / "plan.json"))
    assert again.returncode == 0, again.stderr
    assert [call["argv"][0] for call in workshop.calls()] == ["--no-flash", "--flash-only", "--flash-only"]


@pytest.mark.long
@pytest.mark.parametrize("call", [1, 3, 5, 6], ids=["user", "overlay", "images", "flash"])
def test_a_run_that_is_killed_at_any_of_its_commands_goes_on_to_a_good_board(call: int, workshop: Workshop) -> None:
    overlay = workshop.folder / "image.tar"
    with tarfile.open(overlay, "w") as archive:
        archive.add(workshop.sysroot / "proc/version", "etc/appliance/config.toml")
    plan = workshop.plan("--overlay", str(overlay))
    counted = f"echo . >> {workshop.folder}/count"
    killed = f'if [ "$(wc -l < {workshop.folder}/count)" = {call} ]; then kill -9 $PPID; fi'
    workshop.tool("sudo", f'{counted}; {killed}; exec env "$@"')
    workshop.plug("1-1")
    assert workshop.flash(*workshop.running(plan)).returncode == -signal.SIGKILL
    workshop.wait_unlocked()
    workshop.plug("1-1")
    with Calls(workshop):
        again = workshop.flash(*workshop.running(plan))
    assert again.returncode == 0, again.stderr
    assert workshop.outcomes() == {"1-1": "good"}
    assert [record["verdict"] for record in workshop.records()][-1] == "good"
    assert "--lock maintainer" in (workshop.folder / "usermod.log").read_text()
    workshop.assert_host_closed()


@pytest.mark.long
def test_a_bsp_folder_serves_one_run_at_a_time(hanging: subprocess.Popen[str], workshop: Workshop) -> None:
    assert hanging.poll() is None
    other = [argument.replace(str(workshop.runs), f"{workshop.runs}-2") for argument in workshop.running(
        workshop.folder / "plan.json"
    )]  # fmt: skip
    ended = workshop.flash(*other)
    assert ended.returncode == 1
    assert "another run uses" in ended.stderr


@pytest.mark.long
def test_a_run_after_that_of_another_plan_makes_its_own_images_again(workshop: Workshop) -> None:
    plan = workshop.plan()
    for runs in ("run", "run-2", "run"):
        workshop.plug("1-1", outcome="no_boot")
        workshop.runs = workshop.folder / runs
        workshop.flash(*workshop.running(plan))
        assert workshop.ticket().run == read_state(workshop.runs).run
    assert [call["argv"][0] for call in workshop.calls()] == ["--no-flash", "--flash-only"] * 3


def test_a_board_calls_home_with_the_answer_of_its_own_daemon_and_lets_the_workshop_in(tmp_path: Path) -> None:
    bundle = scale_bundle(tmp_path / "bundle", 2)
    exam = Exam(BundleFolder(bundle))
    board = plant(tmp_path / "board", "agx-orin", RELEASE)
    (board / "etc/appliance").mkdir()
    authorized = board / "etc/ssh/authorized_keys.d/maintainer"
    authorized.parent.mkdir(parents=True)
    authorized.write_text("ssh-ed25519 AAAA ann\n")
    port = free_port()
    ticket = home.new_ticket("run", ("http://127.0.0.1:1/", f"http://127.0.0.1:{port}/"), "maintainer", exam)
    (board / TICKET).write_text(json.dumps(schema.dump(ticket)))
    workshop = Home(ticket, Expected(RELEASE, armed=True, exam=exam), tmp_path / "keys")
    with Daemon(tmp_path / "daemon", "--bundle", str(bundle)) as daemon, home.listening(workshop, "127.0.0.1", port):
        assert CallHome(board, daemon.url, wait=threading.Event().wait).run() == 0
    heard, failure = workshop.heard()["1421621012345"]
    assert failure is None
    assert heard.model == "NVIDIA Jetson AGX Orin Developer Kit"
    ann, ours = authorized.read_text().splitlines()
    assert ann == "ssh-ed25519 AAAA ann"
    assert ours == (tmp_path / "keys" / "1421621012345.key.pub").read_text()
    assert not (board / TICKET).exists()


def test_a_device_without_a_ticket_has_nothing_to_call(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CallHome(tmp_path)
    ended = subprocess.run([sys.executable, "-m", "appliance.callhome"], timeout=WITHIN_S, check=False)
    assert ended.returncode == 0
