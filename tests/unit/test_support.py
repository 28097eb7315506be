"""A support bundle: what is taken out of it."""

from __future__ import annotations

import json

import httpx
import pytest

from appliance import support

pytestmark = pytest.mark.unit


def test_no_part_of_a_support_bundle_tells_the_password_in_an_address() -> None:
    told = {"device_id": "d", "update": {"problem": "https://me:hunter2@updates.example/ does not answer"}}
    with httpx.Client(
        base_url="http://daemon", transport=httpx.MockTransport(lambda _request: httpx.Response(200, json=told))
    ) as http:
        parts, _left_out = support.collect(http, None)
    for name in ("status.json", "deployments.json", "statistics.json", "recorder.json"):
        assert json.loads(parts[name])["update"]["problem"] == "https://updates.example/ does not answer"


@pytest.mark.parametrize("lines", [b"", b'{"event": "serving"}\n'], ids=["empty", "one line"])
def test_a_journal_without_a_line_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch, lines: bytes) -> None:
    monkeypatch.setattr(support, "_JOURNAL", ("printf", "%s", lines.decode()))
    with httpx.Client(
        base_url="http://daemon", transport=httpx.MockTransport(lambda _request: httpx.Response(404))
    ) as http:
        parts, left_out = support.collect(http, None)
    assert parts.get("journal.jsonl", b"") == lines
    assert ("no line of the unit" in left_out.get("journal.jsonl", "")) == (not lines)
