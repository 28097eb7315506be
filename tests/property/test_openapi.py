"""Whatever the OpenAPI document allows, and what it forbids, is answered as the document says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from doubles.asgi import door
from doubles.service import MemoryService
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from appliance.adapters.access import Rules
from appliance.adapters.tokens import Role, TokenFile

pytestmark = pytest.mark.property

CHECKED = [content_type_conformance, response_schema_conformance, status_code_conformance]
EXAMPLES = 12
"""For each path and verb."""


class Documented:
    """Every path and verb of the document of a fresh application, asked by an admin."""

    def __init__(self, folder: Path) -> None:
        tokens = TokenFile(folder)
        self.headers = {"authorization": f"Bearer {tokens.create('anybody', Role.ADMIN)}"}
        app = door(MemoryService(), Rules(anonymous=False), tokens)
        document = schemathesis.openapi.from_asgi("/openapi.json", app, headers=self.headers)
        self.operations: list[APIOperation[Any, Any, Any, Any]] = [
            result.ok() for result in document.get_all_operations()
        ]
        self.statuses: Counter[int] = Counter()


@pytest.fixture
def documented(tmp_path: Path) -> Documented:
    return Documented(tmp_path)


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


def _answers_as_documented(documented: Documented, cases: st.SearchStrategy[Case]) -> None:
    """Check some cases; models are `echo` and `reader`, or of any name."""
    known = st.sampled_from(["echo", "reader", ""])

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
