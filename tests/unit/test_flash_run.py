"""What a run does with its folder, the root file system and the tools, where that goes wrong."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest
from support.flashing import Bench

from models.errors import ConfigError
from models.folder import BundleFolder
from provisioning.flash import plan as plans
from provisioning.flash import rootfs, tool
from provisioning.flash.boards import attached
from provisioning.flash.facts import read_bsp
from provisioning.flash.home import Exam
from provisioning.flash.plan import Wish
from provisioning.flash.run import Run

pytestmark = pytest.mark.unit

URL = "http://192.168.1.2:8099/"


def full(_line: str) -> None:
    """A log on a full disk."""
    raise OSError(28, "No space left on device")


def test_a_tool_whose_words_cannot_be_kept_still_comes_to_its_end(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"print('x' * 2**20); open({str(done)!r}, 'w')"  # more than a pipe holds
    with pytest.raises(OSError, match="No space left"):
        tool.call(
            [sys.executable, "-c", f"print('first', flush=True); {code}"], tmp_path, full, lambda _: None, lambda: None
        )
    assert done.exists()


class Workshop(Bench):
    """A bench with the plan for one board."""

    def __init__(self, folder: Path) -> None:
        """Plan it."""
        super().__init__(folder)
        wish = Wish("jetson-orin-nano-devkit", "orin-nano-devkit", ab=False, data_gib=0, one_step=True)
        self._plan, self._exam = plans.make(wish, read_bsp(self.bsp)), Exam(BundleFolder(self.bundle))

    def run(self, *urls: str) -> Run:
        """Begin the run, or go on with it."""
        return Run(self.folder / "run", self._plan, urls=urls, exam=self._exam)


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
    (root / "run").symlink_to(host)
    first = tmp_path / "first.tar"
    rootfs.make_way(tmp_path, first, archive(first, key, "run/resolv.conf"))
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
