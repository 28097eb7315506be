"""The power is cut after any operation on files of a whole update and of its rollback; and 200 real kills.

A real daemon is recorded below its process (`recorder.c`). For each moment every disk that the cut may leave is built,
and the device is switched on with it. It must serve the old or the new bundle, proven; know what it had promised to
know; fetch nothing again that had come; and come to an end by itself.

Past 400 lines because all of it is asked of one recording, and judged by one list of promises.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, StartDaemon, binary_floats
from support.device import Recovered, recover
from support.disk import Disk, Event, Image, events, lay_down, name_of, needs_compiler, recorder, sites
from support.mirror import Mirror
from support.processes import eventually, new_mark

from appliance.adapters.journal import Journal
from models.folder import BundleFolder

pytestmark = [pytest.mark.journey, pytest.mark.long, pytest.mark.timeout(600)]

X = np.full((2, 5), 3, np.float32)
ENDS = {"good", "refused", "undone"}
DAEMONS = int(os.environ.get("POWER_CUT_DAEMONS", "100"))
KILLS = int(os.environ.get("POWER_CUT_KILLS", "200"))
SEED = 6
AFTER_THE_FIRST, AFTER_EACH = 40, 12
"""Events after a sync that is left out at which the power is cut; and after each at which something is promised."""
NOT_NEEDED = {
    "write_file for write_measurements": "what is lost is measured again",
    "write_file for keep_overhead_bytes": "what is lost is measured again",
    "_linked for fetch": "only where no blob has to be fetched, whose sync would do for its folder",
    "fetch for fetch: /state": "the journal is in that folder, and its commits sync it; the client should not know",
}
"""Syncs of ours without which no cut of this recording does harm, and why they are there."""


@dataclass(frozen=True)
class Promised:
    """What a device must know after a cut at some moment."""

    name: str = ""
    journals: frozenset[str] = frozenset()
    """One of these; none means that nothing was promised."""
    accepted: tuple[int, int] = (0, 0)
    fetched: frozenset[str] = frozenset()


@dataclass
class Recording:
    """What a daemon did to its disk, and what it takes to switch on a device with that disk."""

    events: Sequence[Event]
    published: Path
    url: str
    root: Path
    given: Path
    digests: tuple[str, str]
    """Of the old and the new bundle."""
    settings: Mapping[str, str]
    """Of a daemon, in its environment."""


class Matrix:
    """Devices that were switched on after cuts, each disk once."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self.recording, self._folder = recording, folder
        self.sites = sites(recording.events)
        self.promised = list(_promises(recording.events))
        self.images: dict[bytes, Image] = {}
        """Of the recording as it is, without any sync left out."""
        self.recovered: dict[bytes, Recovered] = {}

    def cut(self, *, without: str = "", first_fault: bool = False) -> list[str]:
        """Cut everywhere; what was wrong. A sync at the site `without` has no effect; then it is cut around those."""
        disk, found, left = Disk(), list[str](), 0 if without else len(self.sites)
        missing, known = not without, None
        for number, (event, site, promised) in enumerate(
            zip(self.recording.events, self.sites, self.promised, strict=True)
        ):
            ignored = bool(without) and site == without
            disk.do(event, ignore_sync=ignored)
            if ignored:
                missing, left = True, AFTER_EACH if missing else AFTER_THE_FIRST
            news, known = promised is not known, promised
            if not missing or not (news or (event.kind != "X" and left > 0)):
                continue
            left -= 1
            for image in disk.after_cut():
                key = name_of(image)
                if key not in self.recovered:
                    self.recovered[key] = self._switch_on(image)
                if not without:
                    self.images[key] = image
                wrong = _wrong(self.recovered[key], promised, self.recording.digests)
                found += [f"after event {number} ({event.kind} {event.text}): {one}" for one in wrong]
                if found and first_fault:
                    return found
        return found

    def _switch_on(self, image: Image) -> Recovered:
        where = lay_down(image, self._folder / "disk")
        try:
            ours = self.recording
            return recover(where / "state", ours.given, ours.url, ours.root, ours.published)
        finally:
            shutil.rmtree(where)


def _promises(recorded: Sequence[Event]) -> Iterator[Promised]:
    """What was promised after each event."""
    coming = [event.text.removeprefix("written ") for event in recorded if event.text.startswith("written ")]
    promised = Promised()
    for event in recorded:
        word, _space, what = event.text.partition(" ") if event.kind == "X" else ("", "", "")
        if word == "writing":
            promised = replace(promised, journals=promised.journals | {coming[0]})
        elif word == "written":
            promised = replace(promised, journals=frozenset([coming.pop(0)]))
        elif word == "named":
            promised = replace(promised, name=what)
        elif word == "accepted":
            timestamp, root = map(int, what.split())
            promised = replace(promised, accepted=(timestamp, root))
        elif word == "fetched":
            promised = replace(promised, fetched=promised.fetched | {f"{what}.zst"})
        yield promised


def _wrong(found: Recovered, promised: Promised, digests: tuple[str, str]) -> Iterator[str]:
    old, new = digests
    if found.fault:
        yield found.fault
        return
    if found.first != (found.wanted or old):
        yield f"it served {found.first[:8]}, not what the journal says is whole"
    if found.torn:
        yield f"files of {', '.join(found.torn)} are not whole"
    if found.last not in digests or set(found.steps) - ENDS:
        yield f"it ended with {found.last[:8]}, {', '.join(found.steps)}"
    if found.steps and found.last != (new if found.steps[0] == "good" else old):
        yield f"it ended with {found.last[:8]} after {found.steps[0]}"
    if promised.name not in ("", found.name):
        yield f"its name was {promised.name} and is {found.name}"
    if promised.journals and found.journal not in promised.journals:
        yield "its journal is not what was written"
    if any(knows < knew for knows, knew in zip(found.accepted, promised.accepted, strict=True)):
        yield f"it had accepted timestamp and root {promised.accepted} and knows of {found.accepted}"
    if again := found.asked & promised.fetched:
        yield f"{len(again)} blobs were fetched twice"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """A recording of a whole update and of its rollback by order."""
    folder = tmp_path_factory.mktemp("recorded")
    old = tiny.scale_bundle(folder / "v1", 1, null=True)
    noise = random.Random(SEED)  # noqa: S311 - not for secrets
    new = tiny.scale_bundle(folder / "v2", 2, null=True, **{f"filler{i}": noise.random() for i in range(3000)})
    with Mirror(folder / "published") as mirror, tempfile.TemporaryDirectory(dir=_memory()) as quick:
        mirror.add(new)
        log = _record(folder, mirror, old)
        digests = (BundleFolder(old).manifest.digest, BundleFolder(new).manifest.digest)
        recorded = events(log, folder / "disk")
        recording = Recording(recorded, mirror.folder, mirror.url, mirror.root, old, digests, following(mirror))
        yield Matrix(recording, Path(quick))


def _memory() -> str | None:
    """A folder in memory, where there is one: syncs take time on a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - below it the name is random


def _record(folder: Path, mirror: Mirror, bundle: Path) -> Path:
    """Let a daemon find the new version, take it, and go back by order; the log of the recorder."""
    program, disk, log = folder / "recorded", folder / "disk", folder / "log"
    disk.mkdir()
    tests = Path(__file__).parent.parent
    program.write_text(f'#!/bin/sh\ncd {tests} && exec {sys.executable} -m support.recorded "$@"\n')
    program.chmod(0o755)
    env = {
        "LD_PRELOAD": str(recorder(folder)),
        "RECORD_ROOT": str(disk),
        "RECORD_LOG": str(log),
        **following(mirror),
    }
    with Daemon(
        folder / "daemon", "--bundle", str(bundle), "--state-dir", str(disk / "state"), env=env, command=program
    ) as daemon:
        daemon.state_dir = disk / "state"
        eventually(lambda: _step(daemon) == "good", "the new version serves", 60)
        mirror.repository.rotate_key("snapshot", "snapshot-1")  # there is a second root by then, too
        assert _order(daemon, "rollback")["status"] == "done"
        eventually(lambda: _step(daemon) == "undone", "the version before serves", 60)
        eventually(lambda: not daemon.status()["update"]["looking"], "it has looked again", 60)
    return log


def following(mirror: Mirror) -> dict[str, str]:
    return {
        "APPLIANCE_RUNTIME": "null",
        "APPLIANCE_CLOCK__ASSUME_SYNCED": "true",
        "APPLIANCE_UPDATE__URL": mirror.url,
        "APPLIANCE_UPDATE__ROOT": str(mirror.root),
        "APPLIANCE_UPDATE__TRIAL_S": "0",
        "APPLIANCE_UPDATE__SHADOW_REQUESTS": "0",
        "APPLIANCE_UPDATE__LATENCY_RATIO": "100",
        "APPLIANCE_UPDATE__RESERVE_BYTES": "0",
    }


def _order(daemon: Daemon, command: str) -> dict[str, Any]:
    document = {"id": new_mark(), "command": command, "args": {}}
    answer = daemon.http.post("/v1/commands", json=document, headers=daemon.authorized("admin"))
    return dict(answer.raise_for_status().json())


def _step(daemon: Daemon) -> str:
    found = daemon.http.get("/v1/deployments").raise_for_status().json()["deployments"]
    return str(found[0]["step"]) if found else ""


@needs_compiler
def test_a_power_cut_at_any_moment_leaves_a_device_that_serves_and_comes_to_an_end(
    matrix: Matrix, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    wrong = matrix.cut()
    assert not wrong, "\n".join(wrong[:20])
    served = Counter(found.first == matrix.recording.digests[1] for found in matrix.recovered.values())
    ended = Counter(found.steps[:1] for found in matrix.recovered.values())
    spent_s = time.monotonic() - began
    with capsys.disabled():
        print(
            f"\npower cuts: {sum(event.kind != 'X' for event in matrix.recording.events)} operations, "
            f"{len(matrix.recovered)} different disks rebuilt and switched on in {spent_s:.0f} s "
            f"({1e3 * spent_s / len(matrix.recovered):.0f} ms each); {served[False]} served the old version at once, "
            f"{served[True]} the new one; all ended well: {dict(ended)}"
        )
    assert served[True] > 10
    assert served[False] > 10


@needs_compiler
def test_the_matrix_finds_every_sync_of_ours_that_is_missing(
    matrix: Matrix, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        site: (matrix.cut(without=site, first_fault=True) or [""])[0] for site in dict.fromkeys(matrix.sites) if site
    }
    with capsys.disabled():
        print("\nsyncs whose absence a power cut shows:")
        for site, fault in found.items():
            print(f"  {site:80} {fault.partition(': ')[2] or 'never'}")
    never = {site for site, fault in found.items() if not fault}
    explained = {site: known for site in never for known in NOT_NEEDED if f"{site}:".startswith(f"{known}:")}
    assert not never - set(explained)
    assert set(explained.values()) == set(NOT_NEEDED), "one is guarded by now"


@needs_compiler
def test_whole_daemons_start_after_power_cuts_and_come_to_an_end(
    matrix: Matrix, tmp_path: Path, start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    if not matrix.images:  # this test runs alone
        matrix.cut()
    drawn = random.Random(SEED).sample(sorted(matrix.images), min(DAEMONS, len(matrix.images)))  # noqa: S311 - likewise
    ours, began = matrix.recording, time.monotonic()

    def switch_on(number: int) -> str:
        disk = lay_down(matrix.images[drawn[number]], tmp_path / f"disk-{number}")
        daemon = start_daemon(
            "--bundle", str(ours.given), "--state-dir", str(disk / "state"), folder=f"daemon-{number}", **ours.settings
        )
        daemon.wait_serving(30).wait_ready()
        model = daemon.model("scale")
        assert model["digest"] in ours.digests
        assert binary_floats(daemon.infer("scale.g", X))[0, 0] == X[0, 0] * float(model["version"].partition(".")[0])
        eventually(lambda: _step(daemon) in ENDS and not daemon.status()["update"]["looking"], "it has ended", 60)
        ended = _step(daemon)
        assert daemon.model("scale")["digest"] == ours.digests[ended == "good"]
        daemon.close()
        return f"{model['version']}, then {ended}"

    with ThreadPoolExecutor(2) as pool:
        ends = Counter(pool.map(switch_on, range(len(drawn))))
    with capsys.disabled():
        print(
            f"\n{len(drawn)} of {len(matrix.images)} disks, drawn with seed {SEED}, started as whole daemons in "
            f"{time.monotonic() - began:.0f} s; they served: {dict(ends)}"
        )


def test_an_updater_that_is_killed_at_random_times_goes_on_to_the_old_or_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # where the server of forks finds what follows
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["support.device", "pytest"])
    old, new = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    digests = (BundleFolder(old).manifest.digest, BundleFolder(new).manifest.digest)
    chance, began = random.Random(SEED), time.monotonic()  # noqa: S311 - not for secrets
    kills, devices, whole_s = Counter[str](), 0, 0.0
    with Mirror(tmp_path / "published") as mirror, tempfile.TemporaryDirectory(dir=_memory()) as quick:
        mirror.add(new)

        def run(state: Path, for_s: float | None) -> bool:
            """Switch a device on and kill it after a while; whether it was still at work."""
            process = processes.Process(target=recover, args=(state, old, mirror.url, mirror.root))
            process.start()
            process.join(for_s)
            at_work = process.is_alive()
            process.kill()
            process.join()
            return at_work

        for _ in range(2):  # the first one starts the server of forks, too
            started = time.monotonic()
            run(Path(quick) / "whole", None)
            whole_s = time.monotonic() - started
            shutil.rmtree(Path(quick) / "whole")
        while kills.total() < KILLS:
            state = Path(quick) / f"device-{devices}"
            for _ in range(chance.randint(1, 4)):
                if run(state, chance.uniform(0.0, whole_s)):
                    kills[_at(state)] += 1
            found = recover(state, old, mirror.url, mirror.root, mirror.folder)
            assert not list(_wrong(found, Promised(), digests)), found
            devices += 1
            shutil.rmtree(state)
    with capsys.disabled():
        print(
            f"\n{kills.total()} kills of {devices} devices at random times of an update that takes {whole_s:.2f} s, in "
            f"{time.monotonic() - began:.0f} s, seed {SEED}; killed at {dict(kills)}"
        )


def _at(state: Path) -> str:
    """The step at which a device was killed."""
    if not (state / "journal.db").exists():
        return "nothing"
    with closing(Journal(state / "journal.db")) as journal:
        deployments = journal.read().deployments
    return deployments[-1].step if deployments else "nothing"


@needs_compiler
def test_a_full_disk_stops_updates_and_nothing_else_and_they_go_on_when_there_is_room(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    full, disk = tmp_path / "full", tmp_path / "disk"
    disk.mkdir()
    with Mirror(tmp_path / "published") as mirror:
        mirror.add(one)
        own = {"LD_PRELOAD": str(recorder(tmp_path)), "RECORD_ROOT": str(disk), "RECORD_FULL": str(full)}

        def start() -> Daemon:
            arguments = "--bundle", str(one), "--state-dir", str(disk / "state")
            daemon = start_daemon(*arguments, **own, **following(mirror)).wait_serving().wait_ready()
            daemon.state_dir = disk / "state"
            return daemon

        def problem(daemon: Daemon, part: str) -> None:
            eventually(lambda: part in (daemon.status()["update"]["problem"] or ""), f"it says {part}", 30)
            assert binary_floats(daemon.infer("scale.g", X))[0, 0] == 3

        daemon = start()
        eventually(lambda: daemon.status()["update"]["looked_s_ago"] is not None, "it has looked")
        daemon.token("admin")
        full.touch()
        mirror.add(two)
        refused = _order(daemon, "update")
        assert refused["status"] == "failed"
        assert "disk is full" in refused["reason"]
        assert binary_floats(daemon.infer("scale.g", X))[0, 0] == 3
        daemon.stop()
        daemon = start()
        problem(daemon, "No space left on device")
        full.unlink()
        mirror.stalled = "/blobs/"
        _order(daemon, "update")
        eventually(lambda: any("/blobs/" in path for path, _range in mirror.asked), "it fetches", 30)
        full.touch()
        mirror.mended.set()
        problem(daemon, "the journal cannot be written")
        assert _step(daemon) == "fetch"
        full.unlink()
        eventually(lambda: _step(daemon) == "good", "it has gone on", 60)
        assert binary_floats(daemon.infer("scale.g", X))[0, 0] == 6
        daemon.stop()
