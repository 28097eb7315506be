"""Whatever the OpenAPI document allows, and what it forbids, is answered as the document says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from doubles.asgi import door
from doubles.service import MemoryService
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.daemon import Daemon, StartDaemon
from typing_extensions import Self

from appliance.adapters.access import Rules
from appliance.adapters.tokens import Role, TokenFile

pytestmark = pytest.mark.property

CHECKED = [content_type_conformance, response_schema_conformance, status_code_conformance]
EXAMPLES = 12
"""For each path and verb."""


class Documented:
    """Every path and verb of a document, asked by an admin."""

    def __init__(self, document: BaseSchema, headers: Mapping[str, str], models: Sequence[str]) -> None:
        self.headers, self.models = dict(headers), models
        self.operations: list[APIOperation[Any, Any, Any, Any]] = [
            result.ok() for result in document.get_all_operations()
        ]
        self.statuses: Counter[int] = Counter()

    @classmethod
    def of_double(cls, folder: Path) -> Self:
        """Of a fresh application before a service that keeps everything in memory."""
        tokens = TokenFile(folder)
        headers = {"authorization": f"Bearer {tokens.create('anybody', Role.ADMIN)}"}
        app = door(MemoryService(), Rules(anonymous=False), tokens)
        return cls(schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers), headers, ["echo", "reader"])


@pytest.fixture
def documented(tmp_path: Path) -> Documented:
    return Documented.of_double(tmp_path)


def test_every_request_that_the_document_allows_is_answered_as_it_says(documented: Documented) -> None:
    assert len(documented.operations) >= 20
    for operation in documented.operations:
        _answers_as_documented(documented, operation.as_strategy(GenerationMode.POSITIVE))
    assert documented.statuses[200] > 50
    assert not {401, 403, 500} & set(documented.statuses)


def test_every_request_that_the_document_forbids_is_answered_as_it_says(documented: Documented) -> None:
    for operation in documented.operations:
        if operation.body or operation.query:
            _answers_as_documented(documented, operation.as_strategy(GenerationMode.NEGATIVE))
    assert documented.statuses[400] > 20
    assert not {401, 403, 500} & set(documented.statuses)


NOT_ASKED = {
    "/v1/commands": "an order may be to start the machine anew",
    "/v1/events": "its answer has no end",
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_running_daemon_answers_whatever_its_document_allows_and_forbids_as_it_says(tiny_daemon: Daemon) -> None:
    statuses = _answers(tiny_daemon, "/openapi.json", ["linear", "text", "pair", "blank"])
    assert min(statuses[200], statuses[400]) > 20
    assert {worker["restarts"] for worker in tiny_daemon.status()["workers"]} == {0}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_running_home_of_a_fleet_answers_whatever_its_document_allows_and_forbids_as_it_says(
    start_daemon: StartDaemon,
) -> None:
    home = start_daemon("--role", "upstream").wait_serving()
    statuses = _answers(home, "/v1/fleet/openapi.json", [])
    assert min(statuses[200], statuses[400]) > 20
    home.stop()


def _answers(daemon: Daemon, document: str, models: Sequence[str]) -> Counter[int]:
    """How often a daemon has answered with what status; none of it was another than documented."""
    headers = daemon.authorized("admin")
    found = schemathesis.openapi.from_url(f"{daemon.url}{document}", headers=headers)
    documented = Documented(found, headers, models)
    for operation in documented.operations:
        if operation.path not in NOT_ASKED:
            for mode in GenerationMode:
                if mode is GenerationMode.POSITIVE or operation.body or operation.query:
                    _answers_as_documented(documented, operation.as_strategy(mode))
    assert 500 not in documented.statuses
    assert daemon.http.get("/v2/health/live").json() == {"live": True}
    return documented.statuses


def _answers_as_documented(documented: Documented, cases: st.SearchStrategy[Case]) -> None:
    """Check some cases; models are those that are there, or of any name."""
    known = st.sampled_from([*documented.models, ""])

    @given(cases, known)
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def ask(case: Case, name: str) -> None:
        if name and "model" in case.path_parameters:
            case.path_parameters["model"] = name  # chance would hardly hit upon it
        if name and "version" in case.path_parameters:
            case.path_parameters["version"] = "1.0"
        response = case.call(headers=documented.headers)
        documented.statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKED)

    ask()
