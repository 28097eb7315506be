"""Every server of the sync exchange keeps its promises: the double that devices are tested with, and the real one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest
from doubles.upstream import MemoryUpstream
from sqlalchemy import select
from support.reporting import order

from appliance.upstream import tables as t
from appliance.upstream.database import Database
from appliance.upstream.fleet import Fleet
from appliance.upstream.ingest import Ingest
from appliance.upstream.samples import Samples
from models.sync import Acks, Answer, Batch, Desired, Item, Opinion, Ordered

pytestmark = pytest.mark.contract

DEVICE, NOW = "dock-7", 1.8e9
STATE = {"ready": True, "models": [{"name": "m", "version": "1", "digest": "d"}]}
ORDER = Ordered("c-1", order(DEVICE, "c-1"))


class Server(Protocol):
    """What is asked of each."""

    def exchange(self, batch: Batch) -> Answer:
        """Take a batch in."""

    def told(self) -> list[tuple[str, int, int]]:
        """Incarnation, number and payload's `n` of all that was kept of the device, by these."""

    def order(self) -> None:
        """Have `ORDER` given to the device."""

    def tell(self, opinion: Opinion) -> None:
        """Have an opinion on a sample of the device, which it has sent, told to it."""

    def wish(self) -> Desired:
        """Have the device run version 2 of `m`; what it should be told."""


class Memory:
    """The double."""

    def __init__(self) -> None:
        self._memory = MemoryUpstream()

    def exchange(self, batch: Batch) -> Answer:
        return self._memory.exchange(batch)

    def told(self) -> list[tuple[str, int, int]]:
        return sorted((key[1], key[2], item.payload["n"]) for key, item in self._memory.items.items())

    def order(self) -> None:
        self._memory.order(DEVICE, ORDER)

    def tell(self, opinion: Opinion) -> None:
        self._memory.tell(DEVICE, opinion)

    def wish(self) -> Desired:
        wished = self._memory.desired[DEVICE] = Desired("e-2", {"m": "2"})
        return wished


class Real:
    """The fleet's home, on SQLite; that PostgreSQL does the same is its own contract."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._fleet, self._samples = Fleet(database, lambda: NOW, 180.0), Samples(database, lambda: NOW)
        self._ingest = Ingest(database, lambda: NOW, lambda: 0.0)

    def exchange(self, batch: Batch) -> Answer:
        return self._ingest.exchange(DEVICE, batch, 1_000_000)

    def told(self) -> list[tuple[str, int, int]]:
        with self._database.reading() as tx:
            rows = tx.execute(select(t.items)).all()
        return sorted((row.incarnation, row.number, row.payload["n"]) for row in rows)

    def order(self) -> None:
        self._fleet.command("operator", {"device": DEVICE}, [ORDER.envelope])

    def tell(self, opinion: Opinion) -> None:
        self._samples.answered(opinion)

    def wish(self) -> Desired:
        self._fleet.change("operator", DEVICE, {"pins": {"m": "2"}})
        return Desired("", {"m": "2"})


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of this version's shape, to be copied."""
    path = tmp_path_factory.mktemp("shaped") / "upstream.db"
    Database(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=["double", "real"])
def server(request: pytest.FixtureRequest, shaped: Path, tmp_path: Path) -> Iterator[Server]:
    """Each server, which knows nothing yet."""
    if request.param == "double":
        yield Memory()
        return
    with closing(Database(f"sqlite:///{shutil.copy(shaped, tmp_path)}")) as database:
        yield Real(database)


def items(*numbers: int) -> tuple[Item, ...]:
    return tuple(Item(number, "telemetry", NOW, {"n": number}) for number in numbers)


def batch(name: str, *numbers: int, incarnation: str = "i-1", sent_at: float = NOW, **fields: object) -> Batch:
    return Batch(name, DEVICE, incarnation, sent_at, items=items(*numbers), **{"state": STATE, **fields})  # type: ignore[arg-type]


def test_what_was_committed_is_named_and_kept(server: Server) -> None:
    assert server.exchange(batch("b-1", 1, 2, 5)).received == ((1, 2), (5, 5))
    assert server.told() == [("i-1", 1, 1), ("i-1", 2, 2), ("i-1", 5, 5)]


def test_a_batch_that_comes_again_is_kept_once_and_answered_as_before(server: Server) -> None:
    first, again = server.exchange(batch("b-1", 1, 2)), server.exchange(batch("b-1", 1, 2))
    assert first.received == again.received == ((1, 2),)
    assert len(server.told()) == 2


def test_batches_may_overlap_and_come_in_any_order(server: Server) -> None:
    for name, numbers in (("b-3", (7, 8)), ("b-1", (1, 2, 3)), ("b-2", (3, 4, 7)), ("b-1", (1, 2, 3))):
        answer = server.exchange(batch(name, *numbers))
        assert {number for first, last in answer.received for number in range(first, last + 1)} >= set(numbers)
    assert [number for _incarnation, number, _n in server.told()] == [1, 2, 3, 4, 7, 8]


def test_a_board_that_was_flashed_anew_counts_from_one_again(server: Server) -> None:
    server.exchange(batch("b-1", 1, 2))
    server.exchange(batch("b-2", 1, incarnation="i-2"))
    assert server.told() == [("i-1", 1, 1), ("i-1", 2, 2), ("i-2", 1, 1)]


def test_a_device_that_had_to_start_without_its_disk_is_told_again_once_it_has_it_back(server: Server) -> None:
    server.exchange(batch("b-1", sent_at=NOW))
    server.exchange(batch("b-2", exchange=1, sent_at=NOW + 1))
    server.exchange(batch("b-3", incarnation="i-2", sent_at=NOW + 2))
    server.wish()
    server.order()
    early = server.exchange(batch("b-4", 1, sent_at=NOW + 3))
    assert (early.desired, early.commands, early.exchange) == (None, (), 0)  # its clock is not right yet
    back = server.exchange(batch("b-5", 2, state=None, sent_at=NOW + 4, clock_synced=True))
    assert back.desired
    assert (back.desired.pins, back.commands, back.send_state) == ({"m": "2"}, (ORDER,), True)
    assert server.exchange(batch("b-6", exchange=back.exchange, sent_at=NOW + 5)).desired == back.desired
    assert server.exchange(batch("b-7", incarnation="i-2", sent_at=NOW + 3, clock_synced=True)).desired is None


def test_a_batch_of_an_earlier_life_that_was_held_back_is_told_nothing(server: Server) -> None:
    server.exchange(batch("b-1", sent_at=NOW))
    server.exchange(batch("b-2", incarnation="i-2", sent_at=NOW + 10))
    server.wish()
    assert server.exchange(batch("b-0", sent_at=NOW + 9, clock_synced=True)).desired is None
    assert server.exchange(batch("b-3", exchange=1, sent_at=NOW + 11, clock_synced=True)).desired is None
    assert server.exchange(batch("b-4", incarnation="i-2", exchange=1, sent_at=NOW + 12)).desired


def test_what_is_wished_for_is_told_until_the_device_holds_it(server: Server) -> None:
    server.exchange(batch("b-1"))
    wished = server.wish()
    told = server.exchange(batch("b-2", etag="old")).desired
    assert told
    assert (told.pins, told.paused) == (wished.pins, False)
    assert server.exchange(batch("b-3", etag=told.etag)).desired is None
    assert server.exchange(batch("b-4", etag="")).desired == told


def test_an_order_is_repeated_until_it_is_acknowledged(server: Server) -> None:
    server.exchange(batch("b-1"))
    server.order()
    for name in ("b-2", "b-3"):
        assert server.exchange(batch(name)).commands == (ORDER,)
    assert server.exchange(batch("b-4", acks=Acks(commands=("c-1", "unknown")))).commands == ()
    assert server.exchange(batch("b-5")).commands == ()


def test_an_opinion_is_repeated_until_it_is_acknowledged(server: Server) -> None:
    sample = {"sample_id": "s-1", "model": "m", "version": "1"}
    asked = Item(1, "sample", NOW, sample)
    server.exchange(Batch("b-1", DEVICE, "i-1", NOW, state=STATE, items=(asked,)))
    opinion = Opinion("s-1", "m", "1", by="large 1", result={"lines": []}, agrees=False)
    server.tell(opinion)
    for name in ("b-2", "b-3"):
        assert server.exchange(batch(name)).opinions == (opinion,)
    assert server.exchange(batch("b-4", acks=Acks(opinions=("s-1",)))).opinions == ()


def test_a_server_that_lacks_the_state_asks_for_it(server: Server) -> None:
    assert server.exchange(batch("b-1", state=None)).send_state
    assert not server.exchange(batch("b-2", exchange=1)).send_state
    assert not server.exchange(batch("b-3", state=None, exchange=2)).send_state
