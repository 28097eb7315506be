"""The AsyncAPI document says what the code does: topics, orders and answers."""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.service import MemoryService

from appliance.adapters import mqtt
from appliance.adapters.telemetry import Telemetry
from appliance.core import deployment
from appliance.core.command import LONGEST_ID, Command, CommandResult
from appliance.service import Outcome
from models.orders import COMMANDS, PAYLOAD_TYPE

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
DOCUMENT: dict[str, Any] = json.loads((ROOT / "docs" / "asyncapi.json").read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_its_topics_are_those_that_the_daemon_uses() -> None:
    source = ast.parse(Path(mqtt.__file__ or "").read_text())
    used = {
        "".join(str(part.value) if isinstance(part, ast.Constant) else "{model}" for part in text.values[1:])
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


@pytest.mark.parametrize("name", ["telemetry", "deployment", "state"])
def test_a_schema_asks_for_nothing_that_it_does_not_describe(name: str) -> None:
    schema = SCHEMAS[name]
    assert set(schema["required"]) <= set(schema["properties"])


def test_telemetry_has_the_keys_that_it_says() -> None:
    document = Telemetry(MemoryService()).document(1.0, 2)  # type: ignore[arg-type] # its double
    assert set(document) == set(SCHEMAS["telemetry"]["properties"])
    model = SCHEMAS["telemetry"]["properties"]["models"]["items"]
    assert set(document["models"][0]) == set(model["properties"])


def test_telemetry_counts_requests_by_the_name_that_a_bundle_is_listed_under(monkeypatch: pytest.MonkeyPatch) -> None:
    service = MemoryService()
    telemetry = Telemetry(service)  # type: ignore[arg-type] # its double
    bundle = SimpleNamespace(name="reader")
    monkeypatch.setattr(service, "serving", {"reader.det": bundle, "reader": bundle}.__getitem__)
    for observer in service.observers:
        observer(Outcome("reader.det", "1.0", 0.02))
        observer(Outcome("reader", "1.0", 0.02))
    told = {model["name"]: model["requests"] for model in telemetry.document(1.0, 2)["models"]}
    assert told["reader"] == 2


def test_a_report_of_a_deployment_has_the_keys_that_it_says() -> None:
    document = deployment.document(deployment.Deployment(1, "a", "1", "d", "p", 0.0))
    assert set(document) == set(SCHEMAS["deployment"]["properties"])


def test_every_topic_that_a_device_speaks_on_says_whether_it_is_retained() -> None:
    spoken = {name for name in DOCUMENT["channels"] if name != "cmd"}
    retained = {
        operation["channel"]["$ref"].rpartition("/")[2]: operation["bindings"]["mqtt"]["retain"]
        for operation in DOCUMENT["operations"].values()
        if operation["action"] == "send"
    }
    assert set(retained) == spoken - {"result"}  # that one is the reply to an order
    assert {name for name, kept in retained.items() if kept} == {"availability", "state"}
