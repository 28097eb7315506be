"""The way back of a daemon that does not start: what is on trial goes, what proved good stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import rollback
from appliance.adapters.journal import Journal, Known
from appliance.adapters.store import JOURNAL, Store
from appliance.core import deployment as rules
from appliance.core.deployment import Deployment, Event, Slot, Step
from models.errors import ConfigError

pytestmark = pytest.mark.unit

NOW = 1_800_000_000.0


def brought(number: int, until: Step) -> tuple[Deployment, Slot]:
    """Deployment `number` of version `number`, at the step `until`, and its slot."""
    one = Deployment(number, "scale", f"{number}.0.0", f"digest-{number}", f"digest-{number - 1}", started_at=NOW)
    while one.at is not until:
        one = rules.after(rules.begin(one, NOW), Event.PASSED, NOW)
    slot = rules.slot_of(one)
    assert slot
    return one, slot


def keep(state_dir: Path, *known: tuple[Deployment, Slot]) -> None:
    with contextlib.closing(Journal(state_dir / JOURNAL)) as journal:
        journal.write([one for one, _slot in known], [slot for _one, slot in known], None)


def known(state_dir: Path) -> Known:
    with contextlib.closing(Journal(state_dir / JOURNAL)) as journal:
        return journal.read()


def served(state_dir: Path) -> str:
    slot = rules.to_serve(known(state_dir).slots, "scale")
    return slot.version if slot else "as it was given"


def test_a_version_on_trial_goes_back_to_the_one_that_proved_good(tmp_path: Path) -> None:
    keep(tmp_path, brought(1, Step.GOOD), brought(2, Step.TRIAL))
    assert served(tmp_path) == "2.0.0"
    command = [sys.executable, "-m", "appliance.rollback", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("scale 2.0.0 was taken back")
    assert served(tmp_path) == "1.0.0"
    after = known(tmp_path).deployments[-1]
    assert (after.at, after.failed_step) == (Step.BACK, "trial"), "the daemon ends it, and does not try it again"
    assert rules.condemned([replace(after, step=Step.UNDONE.value)], after.digest)


def test_what_proved_good_stays_whatever_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    keep(tmp_path, brought(1, Step.GOOD), brought(2, Step.GOOD))
    before = known(tmp_path)
    assert rollback.take_back(tmp_path, NOW) == []
    assert known(tmp_path) == before


def test_a_device_without_updates_has_nothing_to_take_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollback.main(["--state-dir", str(tmp_path / "never-used")]) == 0
    assert "no version is on trial" in capsys.readouterr().out
    assert not (tmp_path / "never-used").exists()


def test_nothing_is_taken_back_under_a_daemon_that_runs(tmp_path: Path) -> None:
    keep(tmp_path, brought(1, Step.TRIAL))
    with contextlib.closing(Store(tmp_path)), pytest.raises(ConfigError, match="another daemon uses"):
        rollback.take_back(tmp_path, NOW)
    assert served(tmp_path) == "1.0.0"
