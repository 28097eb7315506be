"""Whatever is lost, repeated and held back between a device and its upstream: each report counts once, none is lost."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from support.reporting import Reporter, running

from appliance.upstream import tables as t
from appliance.upstream.database import Database
from appliance.upstream.fleet import Fleet
from appliance.upstream.ingest import Ingest, _merged
from models.sync import Answer, Batch

pytestmark = pytest.mark.property

EVENTS = st.lists(
    st.sampled_from(["tell", "tell", "report", "lost before", "lost after", "again", "new version", "flashed anew"]),
    max_size=25,
)


class Line:
    """Between one device and its upstream; it remembers every batch, and sends an old one again when it is told to."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest, self.sent, self.fate = ingest, list[Batch](), "report"

    def send(self, batch: Batch) -> Answer:
        if self.fate == "lost before":
            raise ConnectionError
        self.sent.append(batch)
        answer = self._ingest.exchange(batch.device_id, batch, 1000)
        if self.fate == "lost after":
            raise ConnectionError
        return answer

    def again(self, which: int) -> None:
        if self.sent:
            old = self.sent[which % len(self.sent)]
            self._ingest.exchange(old.device_id, old, 1000)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path_factory.mktemp('fleet') / 'upstream.db'}")
    yield opened
    opened.close()


names = (f"d{i}" for i in itertools.count())


@settings(max_examples=40)
@given(events=EVENTS, which=st.lists(st.integers(0, 30), min_size=25, max_size=25))
def test_each_report_counts_once_and_the_state_is_the_newest(
    database: Database, events: Sequence[str], which: Sequence[int]
) -> None:
    fleet = Fleet(database, lambda: 1.8e9, 180.0)
    line, name = Line(Ingest(database, lambda: 1.8e9, lambda: 1.0)), next(names)
    device, told, lives = Reporter(name, line.send), 0, 1
    for event, number in zip(events, which, strict=False):
        if event == "tell":
            told += 1
            device.tell("alarm", number=told)
        elif event == "again":
            line.again(number)
        elif event == "new version":
            device.state = running(str(number))
        elif event == "flashed anew":
            lives += 1
            state, device = device.state, Reporter(name, line.send, f"life-{lives}")
            device.state = state
        else:
            line.fate = event
            with contextlib.suppress(ConnectionError):
                device.report()
            line.fate = "report"
    device.report()
    if device.report().send_state:
        device.report()
    with database.reading() as tx:
        rows = tx.execute(select(t.items.c.payload).where(t.items.c.device_id == name)).scalars()
        counted = Counter(row["number"] for row in rows)
    sent = {item.payload["number"] for batch in line.sent for item in batch.items}
    assert set(counted.values()) <= {1}
    assert set(counted) == sent
    assert not device.waiting
    shown = fleet.device(name)
    assert shown["versions"] == {"m": {key: device.state["models"][0][key] for key in ("version", "digest")}}
    assert shown["incarnation"] == f"life-{lives}"


@given(batches=st.lists(st.lists(st.integers(1, 40), max_size=8), max_size=8))
def test_ranges_hold_exactly_the_numbers_that_were_taken(batches: list[list[int]]) -> None:
    spans: list[list[int]] = []
    for numbers in batches:
        spans = _merged(spans, numbers)
    held = [number for first, last in spans for number in range(first, last + 1)]
    assert held == sorted({number for numbers in batches for number in numbers})
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(spans))
