"""Fleet orders: which are taken, which are refused before anything happens, and that one id has one answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest

from appliance.core.command import LONGEST_ID, Command, CommandResult, read
from appliance.service import Service
from models.orders import COMMANDS

pytestmark = pytest.mark.unit

NOW = 1_000_000.0
KNOWN = ", ".join(COMMANDS)


def order(payload: bytes | dict[str, Any], *, retained: bool = False) -> Command | CommandResult:
    """What device `d1` makes of a payload."""
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return read(content, device_id="d1", now=NOW, retained=retained)


def test_an_order_needs_only_an_id_and_a_command() -> None:
    assert order({"id": "a", "command": "status"}) == Command("a", "status")


def test_everything_an_order_says_is_kept() -> None:
    said = {
        "id": "a",
        "command": "status",
        "device_id": "d1",
        "issued_at": NOW - 1,
        "expires_at": NOW + 1,
        "author": "ann",
        "sequence": 7,
    }
    assert order(said) == Command(**said)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"device_id": "d2"}, "this order is for 'd2', this device is 'd1'"),
        ({"device_id": "x" * 101}, f"this order is for '{'x' * 100}'..., this device is 'd1'"),
        ({"group": "gates"}, "this order is for group 'gates': this device belongs to no group yet"),
        ({"group": "gates", "device_id": "d1"}, "this order is for group 'gates': this device belongs to no group yet"),
        ({"expires_at": NOW}, "the order expired at 1970-01-12T13:46:40Z"),
        ({"expires_at": NOW - 90.5}, "the order expired at 1970-01-12T13:45:09Z"),
        ({"expires_at": -1e300}, "the order expired at a time before 1970"),
        ({"args": {"deep": [1]}}, "order 'status' takes no args: leave them out"),
        ({"command": "reboot!"}, f"there is no order 'reboot!'; known: {KNOWN}"),
        (
            {"command": "r" * 5000},
            f"there is no order '{'r' * 100}'...; known: {KNOWN}",
        ),
        ({"command": ""}, f"there is no order ''; known: {KNOWN}"),
    ],
)
def test_an_order_that_may_not_run_is_refused_under_its_id(said: dict[str, Any], reason: str) -> None:
    assert order({"id": "a", "command": "status", **said}) == CommandResult("a", "refused", reason)


def test_a_retained_order_is_refused_because_the_broker_would_repeat_it() -> None:
    answer = order({"id": "a", "command": "status"}, retained=True)
    assert answer == CommandResult("a", "refused", "retained orders are refused: publish it without the retain flag")


@pytest.mark.parametrize("order_id", ["", "x" * (LONGEST_ID + 1)])
def test_an_order_without_a_usable_id_is_refused(order_id: str) -> None:
    answer = order({"id": order_id, "command": "status"})
    assert answer == CommandResult("", "refused", "an order needs an id of 1 to 128 characters")


def test_the_longest_id_is_taken() -> None:
    assert isinstance(order({"id": "x" * LONGEST_ID, "command": "status"}), Command)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"command": "status"}',
        b'{"id": 5, "command": "status"}',
        b'{"id": "\\ud800", "command": "status"}',
        b'{"id": "a", "command": "status", "expires_at": NaN}',
        b'{"id": "a", "command": "status", "expires_at": Infinity}',
        b'{"id": "a", "command": "status", "expires_at": 1' + b"0" * 400 + b"}",
        b'{"id": "a", "command": "status", "issued_at": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda payload: payload[:60].decode(errors="replace"),
)
def test_what_is_no_order_is_refused_with_an_answer_that_can_be_sent(payload: bytes) -> None:
    answer = order(payload)
    assert isinstance(answer, CommandResult)
    assert (answer.id, answer.status) == ("", "refused")
    assert answer.reason.startswith("not an order: ")
    assert len(orjson.dumps(answer)) < 1000


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "command is missing"),
        ({"command": 5}, "command must be str"),
        ({"command": "status", "args": []}, "args must be a table"),
        ({"command": "status", "sequence": 1.5}, "sequence must be int"),
        ({"command": "status", "expires_at": "soon"}, "expires_at must be float"),
        ({"command": "status", "k" * 200_000: 1}, "unknown key 'kkk"),
    ],
    ids=["no command", "command", "args", "sequence", "expires_at", "unknown"],
)
def test_an_order_with_a_wrong_field_is_refused_under_its_id_by_which_its_sender_knows_it(
    said: dict[str, Any], reason: str
) -> None:
    answer = order({"id": "a", **said})
    assert isinstance(answer, CommandResult)
    assert (answer.id, answer.status) == ("a", "refused")
    assert answer.reason.startswith("not an order: ")
    assert reason in answer.reason
    assert len(orjson.dumps(answer)) < 1000


def test_a_typing_error_in_an_order_is_answered_with_the_nearest_key() -> None:
    answer = order({"id": "a", "command": "status", "expire_at": 5})
    assert isinstance(answer, CommandResult)
    assert "did you mean 'expires_at'?" in answer.reason


def test_one_id_has_one_answer_and_another_id_its_own() -> None:
    calls = iter(range(100))
    service = Service([], device_id="d1", facts=lambda: {"call": next(calls)})
    first = asyncio.run(service.execute(Command("a", "status")))
    assert first.status == "done"
    assert first.result["device_id"] == "d1"
    assert asyncio.run(service.execute(Command("a", "status"))) is first
    assert asyncio.run(service.execute(Command("b", "status"))).result["call"] == first.result["call"] + 1
