"""The AsyncAPI document says what the code does: topics, orders and answers."""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from appliance.adapters import mqtt
from appliance.core.command import COMMANDS, LONGEST_ID, Command, CommandResult
from models.orders import PAYLOAD_TYPE

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
DOCUMENT: dict[str, Any] = json.loads((ROOT / "docs" / "asyncapi.json").read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_its_topics_are_those_that_the_daemon_uses() -> None:
    source = ast.parse(Path(mqtt.__file__ or "").read_text())
    used = {
        "".join(str(part.value) for part in text.values[1:] if isinstance(part, ast.Constant))
        for text in ast.walk(source)
        if isinstance(text, ast.JoinedStr) and ast.unparse(text).startswith("f'{self._prefix}/")
    }
    said = {channel["address"].removeprefix("appliance/{device_id}") for channel in DOCUMENT["channels"].values()}
    assert said == used - {"/"}  # that one begins a topic that is put together


def test_its_order_has_the_fields_and_commands_of_the_code() -> None:
    order = SCHEMAS["order"]
    assert set(order["properties"]) == {field.name for field in fields(Command)}
    assert order["properties"]["command"]["enum"] == list(COMMANDS)
    assert order["properties"]["id"]["maxLength"] == LONGEST_ID
    assert SCHEMAS["envelope"]["properties"]["payloadType"]["const"] == PAYLOAD_TYPE


def test_its_answer_has_the_fields_of_the_code() -> None:
    assert set(SCHEMAS["result"]["properties"]) == {field.name for field in fields(CommandResult)}


def test_everything_that_it_refers_to_is_in_it() -> None:
    def check(node: object) -> None:
        if isinstance(node, dict):
            target: Any = DOCUMENT
            for part in str(node.get("$ref", "#")).split("/")[1:]:
                target = target[part]
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(DOCUMENT)
