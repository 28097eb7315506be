"""What a device and its upstream say to each other is read back as written, or refused by what is wrong with it."""

import json
from dataclasses import replace

import pytest

from models import schema, sync
from models.schema import SchemaError
from models.sync import Acks, Answer, Batch, Desired, Item, Opinion, Ordered, Part, Sample

pytestmark = pytest.mark.unit

BATCH = Batch(
    batch_id="b-1",
    device_id="dock-7",
    incarnation="i-1",
    sent_at=1.8e9,
    clock_synced=True,
    etag="e-1",
    state={"ready": True},
    items=(Item(1, "alarm", 1.8e9, {"text": "hot"}), Item(2, "telemetry", 1.8e9, {"uptime_s": 3})),
    acks=Acks(commands=("c-1",), opinions=("s-1",)),
)
ANSWER = Answer(
    received=((1, 2), (5, 5)),
    wait_s=2.5,
    most_bytes=1000,
    desired=Desired("e-2", {"m": "2"}, paused=True, labels={"site": "north"}, groups=("docks",)),
    commands=(Ordered("c-2", {"payloadType": "x", "payload": "", "signatures": []}),),
    opinions=(Opinion("s-2", "m", "1", by="m-large 1", result={"lines": []}, agrees=False),),
)


def over_the_wire(value: object) -> dict[str, object]:
    document: dict[str, object] = json.loads(json.dumps(schema.dump(value)))
    return document


def test_a_batch_and_an_answer_are_read_back_as_they_were_written() -> None:
    assert sync.batch(over_the_wire(BATCH)) == BATCH
    assert sync.answer(over_the_wire(ANSWER)) == ANSWER
    assert sync.answer({}) == Answer()


def test_a_sample_is_read_back_as_it_was_written() -> None:
    sample = Sample("s-1", "m", "1", "d", "cam-1", 1.8e9, 3600.0, (Part("/9j/", {"lines": []}, left=3, top=4),))
    assert schema.load(Sample, over_the_wire(sample)) == sample


def test_keys_of_a_newer_version_are_passed_over() -> None:
    assert sync.batch({**over_the_wire(BATCH), "mood": "fair"}) == BATCH
    assert sync.answer({**over_the_wire(ANSWER), "weather": {"rain": True}}) == ANSWER


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch_id": ""}, "batch_id must be 1 to 128 characters"),
        ({"incarnation": "x" * 129}, "incarnation must be 1 to 128 characters"),
        ({"device_id": 7}, "device_id must be str"),
        ({"items": [{"number": 0, "kind": "alarm", "at": 0, "payload": {}}]}, r"items\[0\].number must be above 0"),
        ({"items": [{"number": 1, "kind": "gossip", "at": 0, "payload": {}}]}, r"items\[0\].kind must be one of"),
        ({"items": [{"number": 1, "kind": "alarm", "at": 0}]}, r"items\[0\].payload is missing"),
        (
            {"items": [{"number": 1, "kind": "alarm", "at": 0, "payload": "text"}]},
            r"items\[0\].payload must be a table",
        ),
        ({"acks": {"commands": "c-1"}}, "acks.commands must be a list"),
    ],
)
def test_what_is_no_batch_is_refused_by_the_name_of_what_is_wrong(change: dict[str, object], why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        sync.batch({**over_the_wire(BATCH), **change})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"received": [[1]]}, r"received\[0\] must be two numbers"),
        ({"received": [[1, 2], [4, 3]]}, r"received\[1\] must be two numbers"),
        ({"wait_s": -1}, "wait_s must be 0 or more"),
        ({"most_bytes": 0}, "most_bytes must be above 0"),
        ({"desired": {"pins": {}}}, "desired.etag is missing"),
        ({"commands": [{"id": "c"}]}, r"commands\[0\].envelope is missing"),
    ],
)
def test_what_is_no_answer_is_refused_by_the_name_of_what_is_wrong(change: dict[str, object], why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        sync.answer({**over_the_wire(ANSWER), **change})


def test_a_picture_may_be_larger_than_a_row_and_nothing_else() -> None:
    large = {"text": "x" * sync.ROW_BYTES}
    sync.batch(over_the_wire(replace(BATCH, items=(Item(1, "sample", 1.0, large),))))
    wide = {str(n): n for n in range(20_000)}
    for kind in sync.KINDS[:-1]:
        (item,) = sync.batch(over_the_wire(replace(BATCH, items=(Item(1, kind, 1.0, large),)))).items
        assert item.payload == {"text": "x" * 1000, "shortened": ["text"]}
        with pytest.raises(SchemaError, match=r"items\[0\].payload must be at most 65536 bytes"):
            sync.batch(over_the_wire(replace(BATCH, items=(Item(1, kind, 1.0, wide),))))


def test_what_is_too_large_loses_its_largest_parts_and_says_which() -> None:
    result = {"id": "o-1", "status": "done", "reason": "y" * 5000, "result": {"log": ["x" * 70_000]}}
    assert sync.shortened(result) == {**result, "result": {}, "shortened": ["result"]}
    short = sync.shortened({"alarm": "worker_fault", "text": "é" * 40_000, "lines": ["z"] * 20_000})
    assert short == {"alarm": "worker_fault", "text": "é" * 1000, "lines": [], "shortened": ["text", "lines"]}
    assert sync.shortened({str(n): n for n in range(20_000)}) is None


def test_numbers_become_ranges_whatever_their_order() -> None:
    spans = sync.ranges([5, 1, 2, 3, 2, 9])
    assert spans == ((1, 3), (5, 5), (9, 9))
    assert [number for number in range(11) if sync.within(spans, number)] == [1, 2, 3, 5, 9]
    assert sync.ranges([]) == ()
