"""What waits for the broker is there after a restart, is written seldom, and a bad disk stops nothing."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.processes import eventually

from appliance.adapters.spool import Spool
from appliance.core.clock import RELEASED_AT
from appliance.core.outbox import Kind, Rules

pytestmark = pytest.mark.unit

NOW = RELEASED_AT + 1e6
WIDE = 2**16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.db"


def opened(path: Path, rules: Rules = Rules()) -> closing[Spool]:  # noqa: B008 - frozen
    return closing(Spool(path, rules))


def put(spool: Spool, payload: bytes, kind: Kind = Kind.RESULT, safe: threading.Event | None = None) -> None:
    spool.put(kind, "t", payload, at=NOW, correlation=b"\x00", when_safe=safe.set if safe else lambda: None)


def waiting(spool: Spool) -> list[bytes]:
    """What a broker would get, without getting it."""
    payloads = [one.payload for one in spool.take(1e9, WIDE)]
    spool.disconnected()
    return payloads


def test_what_waited_waits_after_a_restart_with_all_that_belongs_to_it(path: Path) -> None:
    with opened(path) as spool:
        put(spool, b"figures", Kind.TELEMETRY)
        put(spool, b"\x00\xff" * 1000)
    with opened(path) as spool:
        first, second = spool.take(0.0, WIDE)
        assert (first.payload, first.kind, first.correlation, first.at) == (
            b"\x00\xff" * 1000,
            Kind.RESULT,
            b"\x00",
            NOW,
        )
        assert second.payload == b"figures"
        put(spool, b"new")
        assert second.number != first.number < spool.take(0.0, WIDE)[0].number


def test_what_the_broker_has_acknowledged_is_gone_after_a_restart(path: Path) -> None:
    with opened(path) as spool:
        for payload in (b"1", b"2", b"3"):
            put(spool, payload)
    with opened(path) as spool:
        spool.settled(spool.take(0.0, WIDE)[1].number)
    with opened(path) as spool:
        assert waiting(spool) == [b"1", b"3"]


def test_with_a_broker_that_answers_the_disk_is_left_alone(path: Path) -> None:
    with opened(path) as spool:
        eventually(lambda: spool.status()["commits"] == 1, "the number of this start is written", 20)
        for second in range(100):
            put(spool, b"figures", Kind.TELEMETRY)
            for one in spool.take(float(second), WIDE):
                spool.settled(one.number)
        put(spool, b"kept")
        eventually(lambda: spool.status()["commits"] == 2, "what waits is written", 20)
    with opened(path) as spool:
        assert waiting(spool) == [b"kept"]


def test_many_changes_are_one_write(path: Path) -> None:
    written = threading.Event()
    with opened(path) as spool:
        for _ in range(500):
            put(spool, b"x" * 100)
        put(spool, b"last", safe=written)
        assert written.wait(20)
        assert spool.status()["commits"] <= 3


def test_whoever_waits_is_told_when_the_broker_has_it_or_the_disk(path: Path) -> None:
    with opened(path) as spool:
        acknowledged, written = threading.Event(), threading.Event()
        put(spool, b"1", safe=acknowledged)
        spool.settled(spool.take(0.0, WIDE)[0].number)
        assert acknowledged.is_set()
        put(spool, b"2", safe=written)
        assert written.wait(20)


def test_each_start_has_a_higher_number_and_notes_are_kept(path: Path) -> None:
    with opened(path) as spool:
        first = spool.start_number
        spool.take_note("reported", "{}")
    with opened(path) as spool:
        assert spool.start_number > first
        assert spool.note("reported") == "{}"
        assert not spool.note("other")


def test_telemetry_that_is_dropped_for_newer_is_counted_and_not_there_after_a_restart(path: Path) -> None:
    rules = Rules(most_bytes=10_000)
    with opened(path, rules) as spool:
        for number in range(100):
            put(spool, b"%03d" % number + bytes(900), Kind.TELEMETRY)
        assert spool.status()["dropped"] == {"full": 90, "old": 0}
    with opened(path, rules) as spool:
        assert [payload[:3] for payload in waiting(spool)] == [b"%03d" % number for number in range(90, 100)]


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `most_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_memory_does_until_the_end_and_operators_are_told(path: Path) -> None:
    with opened(path) as spool:
        eventually(lambda: spool.status()["commits"] == 1, "it has begun", 20)
        with full_disk(4096):
            put(spool, bytes(100_000))
            eventually(lambda: "in memory only" in (spool.status()["problem"] or ""), "status says so", 20)
            put(spool, b"more")
            assert [len(payload) for payload in waiting(spool)] == [100_000, 4]
    with opened(path) as spool:  # there was room again when it ended
        assert [len(payload) for payload in waiting(spool)] == [100_000, 4]


def test_a_damaged_file_is_set_aside(path: Path) -> None:
    with opened(path) as spool:
        put(spool, bytes(100_000))
    path.write_bytes(b"no database" * 1000)
    with opened(path) as spool:
        assert waiting(spool) == []
        put(spool, b"goes on")
    with opened(path) as spool:
        assert waiting(spool) == [b"goes on"]
    assert path.with_name("spool.db.damaged").exists()


def test_where_no_file_can_be_made_memory_does(path: Path) -> None:
    path.mkdir()
    with opened(path) as spool:
        put(spool, b"1")
        assert waiting(spool) == [b"1"]
        assert "in memory only" in spool.status()["problem"]
