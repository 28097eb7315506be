"""The journal: what was written is there after a cut, and what cannot be read stops no daemon."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from appliance.adapters.journal import Facts, Journal, Known
from appliance.core import deployment as rules
from appliance.core.deployment import Deployment, Event, Slot, Step
from appliance.ledger import Ledger, resumed
from models.errors import ConfigError

pytestmark = pytest.mark.unit

NOW = 1_800_000_000.0
DEPLOYMENT = Deployment(7, "scale", "2.0.0", "new", "old", started_at=NOW)
SLOT = Slot("new", "scale", "2.0.0", "bad", 7)
FACTS = Facts(NOW, {"worse": "reads 0 as O"})


def test_what_was_written_is_read_by_the_next_daemon(tmp_path: Path) -> None:
    judged = rules.after(rules.begin(DEPLOYMENT, NOW), Event.PASSED, NOW, figures={"ms": 1.5})
    with closing(Journal(tmp_path / "journal.db")) as journal:
        assert journal.read() == Known()
        asyncio.run(journal.record(deployments=[judged], slots=[SLOT], facts=FACTS))
    with closing(Journal(tmp_path / "journal.db")) as journal:
        assert journal.read() == Known((judged,), (SLOT,), FACTS)


def test_a_write_that_fails_in_the_middle_leaves_nothing_of_it(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.db")) as journal:
        with pytest.raises(OSError, match="the journal cannot be written"):
            journal.write([DEPLOYMENT, Deployment({}, "", "", "", "", 0.0)], [SLOT], FACTS)  # type: ignore[arg-type]
        assert journal.read() == Known()


def test_a_damaged_journal_is_set_aside_and_the_device_starts(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"no database, whatever its name says" * 100)
    with closing(Journal(path)) as journal:
        assert journal.read() == Known()
    assert (tmp_path / "journal.db.damaged").read_bytes().startswith(b"no database")


def test_a_damaged_index_is_made_anew_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(Journal(path)) as journal:
        journal.write([DEPLOYMENT], [SLOT], FACTS)
        asked = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_slots_1'"
        (page,) = journal._database.execute(asked).fetchone()  # noqa: SLF001
        (page_bytes,) = journal._database.execute("PRAGMA page_size").fetchone()  # noqa: SLF001
    content = bytearray(path.read_bytes())
    at = content.index(SLOT.digest.encode(), (page - 1) * page_bytes, page * page_bytes)
    content[at] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        with closing(Journal(path)) as journal:
            assert journal.read() == Known((DEPLOYMENT,), (SLOT,), FACTS)
    assert list(tmp_path.iterdir()) == [path]


def test_a_journal_that_cannot_be_made_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"journal\.db cannot be used .* --state-dir"):
        Journal(tmp_path / "missing" / "journal.db")


def test_an_entry_of_another_version_is_left_out_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(Journal(path)) as journal:
        journal.write([DEPLOYMENT], [], None)
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO deployments VALUES (8, '{\"number\": 8}')")
    database.close()
    with closing(Journal(path)) as journal:
        assert journal.read().deployments == (DEPLOYMENT,)


def test_the_last_hundred_deployments_are_remembered_and_those_that_brought_what_may_serve(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.db")) as journal:
        journal.write(
            [Deployment(0, "scale", "0", "c", "d", started_at=NOW)], [Slot("c", "scale", "0", "good", 0)], None
        )
        many = [Deployment(number, "scale", "1", "a", "b", started_at=NOW) for number in range(1, 121)]
        journal.write(many, [], None)
        assert [one.id for one in journal.read().deployments] == [0, *range(21, 121)]


def test_every_commit_is_synced(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.db")) as journal:
        asked = "PRAGMA synchronous", "PRAGMA journal_mode"
        assert [journal._database.execute(one).fetchone()[0] for one in asked] == [3, "delete"]  # noqa: SLF001


def test_a_daemon_that_starts_writes_down_where_it_goes_on(tmp_path: Path) -> None:
    begun = rules.begin(DEPLOYMENT, NOW)
    for _ in range(5):
        begun = rules.begin(rules.after(begun, Event.PASSED, NOW), NOW)
    assert begun.at is Step.PROVE
    with closing(Journal(tmp_path / "journal.db")) as journal:
        journal.write([begun], [SLOT], None)
        known = resumed(journal, NOW)
        assert known == journal.read()
        assert known.deployments[0].at is Step.VERIFY
        assert known.slots[0].state == "bad"


def test_a_device_with_a_disk_that_takes_nothing_starts_with_what_it_knew(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(Journal(path)) as journal:
        journal.write([rules.begin(DEPLOYMENT, NOW)], [SLOT], FACTS)
    with closing(Journal(path)) as journal:
        journal._database.execute("PRAGMA query_only = ON")  # noqa: SLF001 - as root a file's mode stops nobody
        known = resumed(journal, NOW)
        assert (known.deployments[0].begun, known.slots, known.facts) == (False, (SLOT,), FACTS)
        with pytest.raises(OSError, match="readonly"):
            journal.write([DEPLOYMENT], [], None)


def test_nothing_stands_where_it_is_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill_the_disk_and_make_room() -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            ledger = Ledger(journal, Known())
            monkeypatch.setattr("appliance.ledger._RETRY_S", 0.01)
            full = True

            async def record(**_what: object) -> None:
                if full:
                    raise OSError(28, "No space left on device")

            monkeypatch.setattr(journal, "record", record)
            noting = asyncio.ensure_future(ledger.note(DEPLOYMENT))
            await asyncio.sleep(0.03)
            assert ledger.active is None
            assert "No space left" in ledger.problem
            full = False
            await noting
            assert ledger.active == DEPLOYMENT

    asyncio.run(fill_the_disk_and_make_room())
