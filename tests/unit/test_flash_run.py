"""What a run does with its folder, the root file system and the tools, where that goes wrong."""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.flashing import EXPORTS, Bench, Calls
from support.processes import children, eventually, free_port

from models.callhome import Ticket
from models.errors import ConfigError, WorkshopError
from models.folder import BundleFolder
from provisioning.flash import plan as plans
from provisioning.flash import rootfs, tool
from provisioning.flash.boards import attached
from provisioning.flash.exports import clean, guarded
from provisioning.flash.facts import read_bsp, read_package
from provisioning.flash.home import Exam, new_ticket
from provisioning.flash.plan import Wish
from provisioning.flash.run import Run, hand_over

pytestmark = pytest.mark.unit

URL = "http://192.168.1.2:8099/"


def full(_line: str) -> None:
    """A log on a full disk."""
    raise OSError(28, "No space left on device")


def test_a_tool_whose_words_cannot_be_kept_still_comes_to_its_end_which_is_told(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"print('x' * 2**20); open({str(done)!r}, 'w')"  # more than a pipe holds
    ended = tool.call(
        [sys.executable, "-c", f"print('first', flush=True); {code}"], tmp_path, full, lambda _: None, lambda: None
    )
    assert done.exists()
    assert (ended.code, len(ended.said)) == (0, len("first\n") + 2**20 + 1)
    assert "No space left" in str(ended.lost)


class Workshop(Bench):
    """A bench with the plan for some boards."""

    def __init__(self, folder: Path, boards: int = 1) -> None:
        """Plan it."""
        super().__init__(folder)
        wish = Wish("jetson-orin-nano-devkit", "orin-nano-devkit", ab=False, data_gib=0, one_step=boards == 1)
        self.plan = plans.make(replace(wish, boards=boards), read_bsp(self.bsp))
        self.exam = Exam(BundleFolder(self.bundle))
        self.kept: list[dict[str, Any]] = []
        """Records for the inventory."""
        self.port = free_port()
        """Where boards call."""

    def run(self, *urls: str) -> Run:
        """Begin the run, or go on with it."""
        return Run(self.folder / "run", self.plan, urls=urls, exam=self.exam, keep=self.kept.append)

    def write(self, *, ready: int | None = None) -> Run:
        """Write to the boards that are there, or the first few of them."""
        run = self.run(f"http://127.0.0.1:{self.port}/")
        run.write(self.sysroot, lambda _: None, lambda: attached(self.sysroot)[:ready])
        return run

    def outcomes(self) -> dict[str, str]:
        """By port, what became of each board."""
        return {one.port: one.failure or one.state for one in self.run().state.boards}

    @contextlib.contextmanager
    def holding(self, lock: Path) -> Iterator[None]:
        """Somebody else has this lock."""
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def test_a_second_board_at_the_port_of_one_that_is_written_does_not_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = Workshop(tmp_path)
    monkeypatch.setenv("PATH", workshop.path)
    for _board in range(2):
        workshop.plug("1-1")
        workshop.run(URL).write(workshop.sysroot, lambda _: None, lambda: attached(workshop.sysroot))
    boards = workshop.run().state.boards
    assert [(one.port, one.state, one.attempts) for one in boards] == [("1-1", "written", 1)] * 2


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Everything that is touched."""
    made = Bench(tmp_path)
    monkeypatch.setenv("PATH", made.path)
    return made


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A workshop with two boards."""
    workshop = Workshop(tmp_path, boards=2)
    monkeypatch.setenv("PATH", workshop.path)
    for port in ("1-1", "1-2"):
        workshop.plug(port)
    return workshop


def test_a_board_that_leaves_usb_while_it_is_written_is_told_as_that_and_stops_no_other(pair: Workshop) -> None:
    pair.plug("1-2", outcome="unplugged")
    pair.write()
    assert pair.outcomes() == {"1-1": "written", "1-2": "unplugged"}
    assert [(record["port"], record["verdict"]) for record in pair.kept] == [("1-2", "unplugged")]


@pytest.mark.long
def test_a_board_that_comes_when_the_others_are_about_to_be_written_is_accounted_for(pair: Workshop) -> None:
    pair.write(ready=1)
    assert pair.outcomes() == {"1-1": "written", "1-2": "written"}


def test_a_board_that_a_killed_run_was_writing_has_failed_when_the_run_goes_on(pair: Workshop) -> None:
    pair.write()
    file = pair.folder / "run/run.json"
    file.write_text(file.read_text().replace('"written"', '"flashing"', 1))
    pair.run().verify(("127.0.0.1", 0), pair.sysroot, 0.0, lambda _: None)
    assert pair.outcomes() == {"1-1": "interrupted", "1-2": "old_system"}
    assert [record["verdict"] for record in pair.kept] == ["interrupted", "old_system"]


def test_the_record_of_a_board_is_kept_when_its_last_word_is_spoken_not_when_all_have_come(pair: Workshop) -> None:
    run = pair.write()

    def stopped(text: str) -> None:
        if text == "1-1: good":
            raise KeyboardInterrupt

    with Calls(pair, {"1-2": None}), pytest.raises(KeyboardInterrupt):
        run.verify(("127.0.0.1", pair.port), pair.sysroot, 60, stopped)
    assert [(record["port"], record["verdict"]) for record in pair.kept] == [("1-1", "good")]
    assert pair.outcomes() == {"1-1": "good", "1-2": "written"}


@pytest.mark.long
def test_a_second_board_with_the_serial_number_of_a_good_one_is_not_taken_for_it(pair: Workshop) -> None:
    pair.say(serials={"1-1": "0000", "1-2": "0000"})
    run, later = pair.write(), threading.Timer(1, _thread.interrupt_main)
    with Calls(pair, {"1-2": None}), contextlib.suppress(KeyboardInterrupt):
        run.verify(("127.0.0.1", pair.port), pair.sysroot, 60, lambda _: later.start())
    later.cancel()
    assert sorted(pair.outcomes().values()) == ["good", "written"]


def test_boards_that_were_written_are_so_also_when_the_disk_is_too_full_for_their_logs(pair: Workshop) -> None:
    logs = pair.folder / "run/logs"
    for port in ("1-1", "1-2"):
        (logs / f"{port}.log").mkdir(parents=True)  # nothing can be written there
    pair.write()
    assert pair.outcomes() == {"1-1": "written", "1-2": "written"}


def test_a_record_that_cannot_be_kept_takes_nothing_from_the_boards_that_were_written(pair: Workshop) -> None:
    def lost(_record: dict[str, Any]) -> None:
        full("")

    pair.plug("1-1", outcome="no_boot")
    run = Run(pair.folder / "run", pair.plan, urls=(URL,), exam=pair.exam, keep=lost)
    with pytest.raises(OSError, match="No space left"):
        run.write(pair.sysroot, lambda _: None, lambda: attached(pair.sysroot))
    assert pair.outcomes()["1-2"] == "written"


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        ("run/.appliance-flash.lock", "another command uses the run"),
        ("Linux_for_Tegra/.appliance-flash.lock", "another run uses .*Linux_for_Tegra"),
        ("host/run/appliance-flash.lock", "another run writes boards from this host"),
    ],
)
def test_two_runs_do_not_meet_in_a_folder_a_bsp_or_on_the_boards_of_a_host(
    lock: str, said: str, pair: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioning.flash.run._PATIENCE_S", 0.0)
    with pair.holding(pair.folder / lock), pytest.raises(ConfigError, match=said):
        pair.write()
    assert pair.calls() == []


def test_what_a_power_cut_of_the_host_has_left_open_is_closed_before_the_next_run_opens_anything(
    bench: Bench,
) -> None:
    exports, rule = bench.sysroot / "etc/exports", bench.sysroot / "etc/udev/rules.d/99-l4t-host.rules"
    left = b"# Entry added by NVIDIA initrd flash tool 12\n/srv/bsp *(rw,no_root_squash)\n/m\xfcsli *(ro)\n"
    exports.write_bytes(EXPORTS.encode() + left)
    rule.symlink_to(bench.folder / "gone")
    with guarded(bench.sysroot):
        assert exports.read_bytes() == EXPORTS.encode() + b"/m\xfcsli *(ro)\n"
        assert not rule.is_symlink()
        exports.write_bytes(EXPORTS.encode() + left)
    assert exports.read_bytes() == EXPORTS.encode() + b"/m\xfcsli *(ro)\n"


def test_exports_that_cannot_be_rewritten_keep_those_of_others_and_that_is_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = f"{EXPORTS}# Entry added by NVIDIA initrd flash tool\n/srv/bsp *(rw)\n"
    bench.host("etc/exports", left)
    monkeypatch.setattr("models.folder.write_file", lambda *_: full(""))
    clean(bench.sysroot)
    assert (bench.sysroot / "etc/exports").read_text() == left
    assert "No space left on device): delete the lines" in capsys.readouterr().err


def test_a_guard_that_somebody_has_killed_is_missed_and_its_work_is_done(bench: Bench) -> None:
    before = children()
    with guarded(bench.sysroot) as watch:
        bench.host("etc/exports", f"{EXPORTS}# Entry added by NVIDIA initrd flash tool\n/srv/bsp *(rw)\n")
        (guard,) = children() - before
        os.kill(guard, signal.SIGKILL)
        eventually(lambda: _refuses(watch), "it is missed", 20)
    assert (bench.sysroot / "etc/exports").read_text() == EXPORTS


def _refuses(watch: Callable[[int], None]) -> bool:
    try:
        watch(0)
    except WorkshopError as error:
        return "guard that closes this host again has ended" in str(error)
    return False


def test_two_that_begin_the_same_run_at_once_give_its_boards_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop, begun = Workshop(tmp_path), list[Run]()
    monkeypatch.setattr("provisioning.flash.run.new_ticket", _at_leisure(new_ticket))
    both = [threading.Thread(target=lambda: begun.append(workshop.run(URL))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(begun) == 2
    assert begun[0].ticket == begun[1].ticket


def _at_leisure(make: Callable[..., Ticket]) -> Callable[..., Ticket]:
    """Time for somebody else to do the same."""

    def made(*arguments: Any) -> Ticket:  # noqa: ANN401 - those of `make`
        time.sleep(0.5)
        return make(*arguments)

    return made


def test_a_run_goes_on_only_where_its_boards_call(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    for urls in ((URL,), (URL,), ()):
        assert workshop.run(*urls).ticket.urls == (URL,)
    with pytest.raises(ConfigError, match=f"boards call {URL}: give that with --call-home"):
        workshop.run("http://192.168.1.3:8099/")


def archive(file: Path, *paths: str) -> str:
    with tarfile.open(file, "w") as made:
        for path in paths:
            made.addfile(tarfile.TarInfo(path), io.BytesIO())
    return hashlib.sha256(file.read_bytes()).hexdigest()


def laid(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def test_what_the_overlay_of_an_earlier_run_brought_is_gone_and_nothing_else(tmp_path: Path) -> None:
    root, key, host = tmp_path / "rootfs", "etc/ssh/authorized_keys.d/maintainer", tmp_path / "host"
    laid(root, key, "etc/passwd", "opt/appliance/new")
    laid(host, "resolv.conf")
    first = tmp_path / "first.tar"
    rootfs.make_way(tmp_path, first, archive(first, key, "run/resolv.conf"))
    (root / "run").symlink_to(host)
    second = tmp_path / "second.tar"
    rootfs.make_way(tmp_path, second, archive(second, "opt/appliance/new"))
    assert not (root / key).exists()
    assert (root / "etc/passwd").exists()
    assert (root / "opt/appliance/new").exists()
    assert (host / "resolv.conf").exists(), "it is this machine's"
    rootfs.take_back(tmp_path)
    assert not (root / "opt/appliance/new").exists()


def test_an_overlay_that_is_not_the_planned_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "image.tar"
    planned = archive(file, "etc/one")
    archive(file, "etc/two")
    with pytest.raises(ConfigError, match="is not the overlay that was planned"):
        rootfs.make_way(tmp_path, file, planned)


def test_an_overlay_that_a_link_would_lead_to_this_host_is_refused(tmp_path: Path) -> None:
    laid(tmp_path / "host", "passwd")
    laid(tmp_path / "rootfs", "etc/hostname")
    (tmp_path / "rootfs/var").symlink_to(tmp_path / "host")
    file = tmp_path / "image.tar"
    planned = archive(file, "etc/one", "var/passwd")
    with pytest.raises(ConfigError, match=r"brings var/passwd, which a link .* leads to this host"):
        rootfs.make_way(tmp_path, file, planned)


def test_an_overlay_with_the_state_of_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rootfs").mkdir()
    file = tmp_path / "image.tar"
    planned = archive(file, "etc/one", "./var/lib/appliance/keys/device.key")
    with pytest.raises(ConfigError, match="the state of one device"):
        rootfs.make_way(tmp_path, file, planned)


def test_an_overlay_or_a_note_that_was_torn_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "image.tar"
    archive(file, *(f"etc/{number}" for number in range(99)))
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ConfigError, match="is no whole archive"):
        rootfs.make_way(tmp_path, file, hashlib.sha256(file.read_bytes()).hexdigest())
    (tmp_path / ".appliance-flash-overlay.json").write_text('["etc/one"')
    with pytest.raises(ConfigError, match="cannot be read"):
        rootfs.take_back(tmp_path)


@pytest.mark.long
def test_a_package_is_written_on_a_factorys_host_and_its_boards_are_known_by_the_number_in_its_images(
    bench: Bench,
) -> None:
    tmp_path = bench.folder
    wish = Wish("jetson-orin-nano-devkit", "orin-nano-devkit", ab=False, data_gib=0, boards=2, images_only=True)
    exam, port, workshop = Exam(BundleFolder(bench.bundle)), free_port(), tmp_path / "workshop"
    images = Run(workshop, plans.make(wish, read_bsp(bench.bsp)), urls=(f"http://127.0.0.1:{port}/",), exam=exam)
    images.write(bench.sysroot, lambda _: None, list)
    factory, package = tmp_path / "factory", tmp_path / "mfi_jetson-orin-nano-devkit"
    with pytest.raises(ConfigError, match="is no package"):
        hand_over(workshop, package, factory)
    shutil.copytree(bench.bsp, package)
    for gone in ("rootfs", "initrdlog"):
        shutil.rmtree(package / gone, ignore_errors=True)
    plan = hand_over(workshop, package, factory)
    for board in ("1-1", "1-2"):
        bench.plug(board)
    (package / "stand-in.json").write_text((bench.bsp / "stand-in.json").read_text())
    run = Run(factory, plan, urls=(), exam=exam)
    run.write(bench.sysroot, lambda _: None, lambda: attached(bench.sysroot))
    with Calls(bench):
        run.verify(("127.0.0.1", port), bench.sysroot, 60, lambda _: None)
    assert [one.state for one in run.state.boards] == ["good", "good"]
    plans.check(plan, read_package(package, plan.release))
    with pytest.raises(ConfigError, match="has a run already"):
        hand_over(workshop, package, factory)


def test_a_run_that_made_no_package_has_none_to_hand_over(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    workshop.run(URL)
    with pytest.raises(ConfigError, match="made no package"):
        hand_over(tmp_path / "run", tmp_path, tmp_path / "factory")
