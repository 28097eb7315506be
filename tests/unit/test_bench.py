"""The benchmark's own parts: what is asked, how answers are compared, when a line passes, how it is shown."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from appliance.bench.elasticity import Point, Verdict
from appliance.bench.measure import Dimension, Findings, counted
from appliance.bench.question import Question, difference, guesses, page, picture_array
from appliance.bench.report import cells, to_html, to_json
from models.tasks.picture import decode_picture

pytestmark = pytest.mark.unit


def document(text: str, confidence: float, total_ms: float) -> bytes:
    return json.dumps({"lines": [{"text": text, "confidence": confidence}], "timing_ms": {"total": total_ms}}).encode()


def test_a_line_passes_on_its_limit_and_not_beyond_or_without_a_number() -> None:
    assert Verdict("P99", 5.0, 5.0).passed is True
    assert Verdict("P99", 5.1, 5.0).passed is False
    assert Verdict("rate", 200.0, 200.0, at_least=True).passed is True
    assert Verdict("rate", 199.0, 200.0, at_least=True).passed is False
    assert Verdict("P99", math.nan, 5.0).passed is False
    assert Verdict("P99", math.inf, 5.0).passed is False
    assert Verdict("P99", None, 5.0).passed is None


def test_a_run_passes_when_nothing_failed_and_something_was_left_out() -> None:
    good, left_out, bad = Verdict("a", 1.0, 2.0), Verdict("b", None, 2.0), Verdict("c", 3.0, 2.0)
    assert Findings({}, [Dimension("Speed", [good, left_out])]).passed
    assert not Findings({}, [Dimension("Speed", [good]), Dimension("Cost", [left_out, bad])]).passed


def test_a_series_that_time_cut_short_may_fail_but_not_pass() -> None:
    good, bad = Verdict("crashes", 0.0, 0.0, note="854 x 400"), Verdict("crashes", 1.0, 0.0)
    assert counted(good, 1000, 1000).passed is True
    short = counted(good, 854, 1000)
    assert (short.passed, short.note) == (None, "not measured: time was over after 854 of 1,000; 854 x 400")
    assert counted(bad, 854, 1000).passed is False
    assert counted(Verdict("difference", math.nan, 0.0), 854, 1000).passed is False


def test_inputs_are_guessed_from_the_metadata_one_row_first() -> None:
    inputs: list[dict[str, Any]] = [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3, 48, -1]},
        {"name": "n", "datatype": "INT64", "shape": [2]},
    ]
    first, second = guesses(inputs, (320, 32), np.random.default_rng(0))
    assert (first["x"].shape, first["n"].tolist()) == ((1, 3, 48, 320), [1, 1])
    assert second["x"].shape == (1, 3, 48, 32)
    assert first["x"].std() == pytest.approx(1, abs=0.1)
    assert [one["t"].tolist() for one in guesses([{"name": "t", "datatype": "BYTES", "shape": [-1]}], (2,))] == [
        [b"1", b"1"]
    ]


def test_no_guess_is_larger_than_a_request_should_be() -> None:
    huge = [{"name": "x", "datatype": "FP32", "shape": [-1, -1, -1]}]
    assert [one["x"].shape for one in guesses(huge, (2000, 8))] == [(1, 8, 8)]


def test_the_page_that_is_read_is_a_picture_and_each_copy_another() -> None:
    assert decode_picture(page(), 10**6).shape == (540, 960, 3)
    assert page("one") != page("two")


def test_a_request_on_the_wire_says_how_long_it_is() -> None:
    sent = Question.of("m", {"x": np.zeros((1, 4), np.float32)}).wire("here:1", {"Authorization": "Bearer t"})
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: here:1\r\nAuthorization: Bearer t\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body.endswith(bytes(16))


def test_answers_differ_by_their_largest_number_or_without_bound() -> None:
    zeros = {"y": np.zeros((2, 2), np.float32), "i": np.array([1, 2])}
    moved = {"y": np.array([[0, 0.25], [0, -0.5]], np.float32), "i": np.array([1, 2])}
    assert difference(zeros, zeros) == 0
    assert difference(moved, zeros) == 0.5
    assert difference(zeros | {"i": np.array([1, 3])}, zeros) == math.inf
    assert difference({"y": zeros["y"]}, zeros) == math.inf
    assert difference(zeros | {"y": np.zeros((1, 2), np.float32)}, zeros) == math.inf
    assert difference(zeros | {"y": np.full((2, 2), np.nan, np.float32)}, zeros) == math.inf


def test_of_predict_documents_the_lines_count_and_the_times_do_not() -> None:
    def answer(*documents: bytes) -> dict[str, Any]:
        return {"result": picture_array(*documents)}

    first = answer(document("TOTAL", 0.9, 1.0))
    assert difference(answer(document("TOTAL", 0.9, 7.0)), first) == 0
    assert difference(answer(document("TOTAL", 0.8, 1.0)), first) == pytest.approx(0.1)
    assert difference(answer(document("TOTAI", 0.9, 1.0)), first) == math.inf


def test_the_report_escapes_what_it_shows_and_needs_nothing_else() -> None:
    found = Findings(
        {"model": "<script>"},
        [Dimension("Speed", [Verdict("a & b", math.inf, 5.0, "ms", note="<b>")]), Dimension("Elasticity", [])],
        rates=[Point(100.0, 20.0), Point(200.0, math.inf)],
        poisson=[Point(0.05, 21.0, 20.0), Point(0.5, 30.0, 28.0)],
    )
    html = to_html(found)
    assert "<script>" not in html
    assert "<b>" not in html
    assert html.count("<svg") == 2
    assert "prefers-color-scheme: dark" in html
    assert "http" not in html
    data = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert data["passed"] is False
    assert data["dimensions"]["Speed"][0]["have"] is None
    assert data["rates"][1] == {"per_s": 200.0, "p99_ms": None}


@pytest.mark.parametrize(
    ("verdict", "shown"),
    [
        (Verdict("w", 1234.5, 2000.0, "/s"), ("w", "1,234 /s", "at most 2000 /s", "pass", "")),
        (Verdict("w", 0.00123, 0.0), ("w", "0.00123", "at most 0", "FAIL", "")),
        (Verdict("w", 99.951, 99.95, "%", at_least=True), ("w", "99.951 %", "at least 99.95 %", "pass", "")),
        (Verdict("w", None, 1.0, note="why"), ("w", "left out", "at most 1", "-", "why")),
    ],
)
def test_a_line_shows_its_number_its_limit_and_its_verdict(verdict: Verdict, shown: tuple[str, ...]) -> None:
    assert cells(verdict) == shown
