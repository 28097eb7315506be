"""What a device and its upstream say to each other: one round trip, `POST /v1/sync`. Pure.

The body is the JSON of a `Batch`, compressed with zstd, and the answer that of an `Answer`; a refusal is a `Refusal`.
Who sends is shown by a device token (`Authorization: Bearer`) or by the device's certificate, never by the body alone.

    200  the items named in `received` are committed
    400  no batch, and never one          409  this device id is known with another key
    401, 403  who asks is not known       413  too much at once: `most_bytes` says how much is not
    429, 503  later, after Retry-After

A device repeats an item until it is received, and the server a command or an opinion until it is acknowledged. So all
of them may come twice, and in another order: (device_id, incarnation, number) makes an item one, and its id a command
or an opinion. The two ends are updated at different times: a reader passes over top-level keys that it does not know.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeVar

from models import schema
from models.schema import SchemaError

T = TypeVar("T")
Ranges = tuple[tuple[int, ...], ...]

PATH = "/v1/sync"
KINDS = ("deployment", "alarm", "command_result", "telemetry", "sample")
"""Of items; the first is sent first. Telemetry and samples may be given up where there is no room, the others never."""
MOST_BYTES = 4 * 2**20
"""Of a batch before compression, unless the server says less."""
MOST_ITEMS = 256
"""In a batch."""
ROW_BYTES = 64 * 1024
"""Of the JSON of a state, and of each payload but a sample's; that one is bounded by its batch."""
LONGEST_ID = 128
_LONGEST_TEXT = 1000
"""Characters that are left of a text where there is no room for it."""
URGENT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a device has to tell."""

    number: int
    """Grows with each, from 1; unique in an incarnation."""
    kind: str
    """One of `KINDS`."""
    at: float
    """When it was made, in Unix seconds by the device's clock, which may have been wrong."""
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Acks:
    """What came from the server and took its effect: it need not be repeated."""

    commands: tuple[str, ...] = ()
    """Ids of `Ordered`."""
    opinions: tuple[str, ...] = ()
    """Their sample ids."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a device sends."""

    batch_id: str
    """The same only where the same batch is sent again."""
    device_id: str
    incarnation: str
    """Random, made once a state directory: a board that was flashed anew under its old name counts from 1 again."""
    sent_at: float
    """Unix seconds by the device's clock."""
    clock_synced: bool = False
    etag: str = ""
    """Of the desired state that the device holds; empty for none."""
    state: Mapping[str, Any] | None = None
    """Reported state, as on MQTT's /state; None where it is the one that was acknowledged last."""
    items: tuple[Item, ...] = ()
    acks: Acks = field(default_factory=Acks)
    exchange: int = 0
    """Of the last answer since the device's start, 0 for none; by it the server knows a batch that was held back on its
    way, and that it was itself restored from a copy older than that answer."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What a device should be like."""

    etag: str
    pins: Mapping[str, str] = field(default_factory=dict)
    """Model -> version. Signatures alone decide whether it may be installed, and a pin of the device's own wins."""
    paused: bool = False
    """Begin no deployment."""
    labels: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order for this device."""

    id: str
    """The order's own; under it the device acknowledges also what it cannot open."""
    envelope: Mapping[str, Any]
    """Signed (DSSE)."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a larger model says of a sample."""

    sample_id: str
    model: str
    """That of the device's answer."""
    version: str
    """Of the device's answer."""
    source: str = ""
    at: float = 0.0
    """As the sample says."""
    by: str = ""
    """Who reads it again: model and version."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """The predict document, corrected; places are those of the device's picture. Empty where there is none."""
    agrees: bool = True
    """Whether both say the same."""
    reason: str = ""
    """Why there is none; empty where there is one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says to a batch, after its commit."""

    received: Ranges = ()
    """First and last number of what need not be sent again."""
    wait_s: float = 0.0
    """Send the next batch no sooner, what is urgent after `URGENT_SHARE` of it; the server's way to say how fast."""
    most_bytes: int = MOST_BYTES
    """Of the next batch before compression."""
    desired: Desired | None = None
    """None where the device holds it already."""
    commands: tuple[Ordered, ...] = ()
    opinions: tuple[Opinion, ...] = ()
    exchange: int = 0
    """To be sent with the next batch."""
    send_state: bool = False
    """The server lacks the state that was acknowledged last: it belongs into the next batch, unchanged or not."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a batch was not taken."""

    error: str
    most_bytes: int = 0
    """With 413: how much may come at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """One picture of a sample."""

    picture: str
    """JPEG in base64."""
    answer: Mapping[str, Any]
    """What the device said of it: a predict document whose places are pixels of this picture."""
    whole: bool = False
    """Whether it is the picture that the device was sent, with all that it found; otherwise only what is doubtful."""
    left: int = 0
    top: int = 0
    """Where this picture lies in the one that the device was sent, in pixels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Payload of an item of kind `sample`: a second opinion is asked for."""

    sample_id: str
    """Unique in the fleet."""
    model: str
    version: str
    digest: str = ""
    """Of the bundle."""
    source: str = ""
    """Camera."""
    at: float = 0.0
    keep_s: float = 0.0
    """The server keeps the pictures no longer than this; 0: no longer than it needs to answer."""
    parts: tuple[Part, ...] = ()


def batch(data: object) -> Batch:
    """What a device sent, from plain data, each part as far as a row holds it; raises SchemaError, RecursionError."""
    read: Batch = _read(Batch, data)
    for name in ("batch_id", "device_id", "incarnation"):
        _check(name, getattr(read, name), lambda value: 0 < len(value) <= LONGEST_ID, f"1 to {LONGEST_ID} characters")
    _check("items", read.items, lambda items: len(items) <= MOST_ITEMS, f"at most {MOST_ITEMS}")
    for i, item in enumerate(read.items):
        _check(f"items[{i}].number", item.number, lambda value: 0 < value < 2**63, "above 0 and below 2^63")
        _check(f"items[{i}].kind", item.kind, KINDS.__contains__, f"one of {', '.join(KINDS)}")
    # A device of a version before does not shorten: if it were refused, it would never be heard again.
    items = tuple(
        item if item.kind == "sample" else replace(item, payload=row(f"items[{i}].payload", item.payload))
        for i, item in enumerate(read.items)
    )
    return replace(read, items=items, state=None if read.state is None else row("state", read.state))


def row(name: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """As much of a payload or a state as a row may hold; raises SchemaError where that is nothing, RecursionError."""
    short = shortened(content)
    if short is None:
        msg = f"{name} must be at most {ROW_BYTES} bytes, and nothing of it can be cut: send fewer keys"
        raise SchemaError(msg)
    return short


def shortened(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As much of a payload or a state as a row may hold; None where even that is too much.

    The largest of its parts are left empty, or are cut where they are texts, and are named as `shortened`.
    """
    if _size_bytes(content) <= ROW_BYTES:
        return content
    short, cut = dict(content), list[str]()
    short["shortened"] = cut
    over_bytes = _size_bytes(short) - ROW_BYTES
    parts = {key: _size_bytes(value) for key, value in content.items() if isinstance(value, str | list | tuple | dict)}
    for key in sorted(parts, key=parts.__getitem__, reverse=True):
        if over_bytes <= 0:
            break
        value = content[key]
        short[key] = {} if isinstance(value, dict) else value[: _LONGEST_TEXT if isinstance(value, str) else 0]
        cut.append(key)
        over_bytes += _size_bytes(short[key]) + len(",") + _size_bytes(key) - parts[key]
    return short if _size_bytes(short) <= ROW_BYTES else None


def answer(data: object) -> Answer:
    """What the server said, from plain data; raises SchemaError."""
    read: Answer = _read(Answer, data)
    for i, span in enumerate(read.received):
        _check(f"received[{i}]", span, _is_range, "two numbers, the first not above the last")
    _check("received", read.received, lambda spans: list(spans) == sorted(spans), "ranges in order")
    _check("wait_s", read.wait_s, lambda value: value >= 0, "0 or more")
    _check("most_bytes", read.most_bytes, lambda value: value > 0, "above 0")
    return read


def ranges(numbers: Iterable[int]) -> Ranges:
    """Numbers in any order, repeated or not, as first and last of each run without a gap."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return tuple(spans)


def within(spans: Ranges, number: int) -> bool:
    """Whether a number is in one of the ranges, which are in order, as `ranges` makes them."""
    at = bisect.bisect(spans, number, key=itemgetter(0)) - 1
    return at >= 0 and number <= spans[at][1]


def _size_bytes(content: object) -> int:
    return len(json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=str).encode())


def _is_range(span: tuple[int, ...]) -> bool:
    return len(span) == len(("first", "last")) and span[0] <= span[1]


def _read(kind: Any, data: object) -> Any:  # noqa: ANN401 - Batch or Answer
    if isinstance(data, dict):
        known = {one.name for one in dataclasses.fields(kind)}
        data = {key: value for key, value in data.items() if key in known}
    return schema.load(kind, data)


def _check(name: str, value: T, holds: Callable[[T], bool], rule: str) -> None:
    if not holds(value):
        msg = f"{name} must be {rule}, not {str(value)[:60]!r}"
        raise SchemaError(msg)
