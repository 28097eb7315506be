"""The comparison of two readings of the same lines."""

from __future__ import annotations

import numpy as np
import pytest

from provisioning.accuracy import Counted, Difference, accuracy, compare, compare_pages
from provisioning.data import Line, Page
from provisioning.gate import detector_checks, recogniser_checks, said

pytestmark = pytest.mark.unit

NOTHING = np.zeros((1, 1, 3), np.uint8)
LINES = [Line(f"sroie_{i}.png", NOTHING, "AB CD", "sroie") for i in range(60)] + [
    Line(f"lprnet_{i}.png", NOTHING, "A-1234", "lprnet") for i in range(40)
]
RIGHT = ["ab cd"] * 60 + ["A\u00b71234"] * 40


def test_texts_are_compared_normalised() -> None:
    measured = accuracy(LINES, RIGHT)
    assert (measured.exact, measured.cer, measured.lines) == (1.0, 0.0, 100)


def test_two_equal_readings_differ_by_nothing_for_certain() -> None:
    report = compare(LINES, RIGHT, RIGHT)
    assert report["agreement"] == 1.0
    assert report["interval"] == {"exact": [0.0, 0.0], "cer": [0.0, 0.0]}
    assert report["resolved"]


def test_shares_differences_and_sources_are_reported() -> None:
    worse = ["xb cd"] * 10 + RIGHT[10:]
    report = compare(LINES, RIGHT, worse)
    assert report["original"] == {"exact": 1.0, "cer": 0.0, "lines": 100}
    assert report["packed"] == {"exact": 0.9, "cer": round(10 / (60 * 4 + 40 * 5), 6), "lines": 100}
    assert report["agreement"] == 0.9
    low, high = report["interval"]["exact"]
    assert -0.18 < low < -0.1 < high < -0.03
    low, high = report["interval"]["cer"]
    assert 0 < low < 10 / 440 < high
    assert not report["resolved"]
    assert set(report["by_source"]) == {"lprnet", "sroie"}
    assert report["by_source"]["lprnet"]["packed"] == {"exact": 1.0, "cer": 0.0, "lines": 40}


def test_the_interval_is_the_same_every_time() -> None:
    worse = ["xb cd"] * 10 + RIGHT[10:]
    assert compare(LINES, RIGHT, worse) == compare(LINES, RIGHT, worse)


def test_the_interval_is_paired_and_so_does_not_grow_with_what_both_read_wrongly() -> None:
    hard = [""] * 50 + RIGHT[50:]
    assert compare(LINES, hard, hard)["interval"]["exact"] == [0.0, 0.0]


PAGES = [
    Page("a.jpg", NOTHING, ("TOTAL 12.50", "Thank you", "x", "CASH"), "shop"),
    Page("b.jpg", NOTHING, ("Exit",), "street"),
]


@pytest.mark.parametrize(
    ("read", "found"),
    [
        ([["total12.50 rm", "thank you", "cash"], ["exit"]], 1.0),  # part of a line
        ([["TOTAL 12.5O", "THANKYOU", "CASH"], ["EXIT"]], 1.0),  # one of ten characters wrong
        ([["TOTAL 17.8O", "Thank you", "CASH"], ["Exit"]], 0.75),  # three of ten
        ([["TOTAL 12.50", "Thank you", "CASE"], ["Exit"]], 0.75),  # one of four
        ([[], []], 0.0),
        ([["x"], ["CASH"]], 0.0),  # a text counts on its own page only, and one character not at all
    ],
)
def test_a_text_of_a_page_is_found_as_the_data_says(read: list[list[str]], found: float) -> None:
    report = compare_pages(PAGES, [list(page.texts) for page in PAGES], read)
    assert report is not None
    assert report["original"] == {"found": 1.0, "lines": 4}
    assert report["packed"] == {"found": found, "lines": 4}


def test_pages_without_a_labelled_text_say_nothing() -> None:
    assert compare_pages([Page("a.jpg", NOTHING, ("", "x"), "shop")], [[]], [[]]) is None


def test_page_texts_lost_are_a_fall_held_against_its_limit() -> None:
    everything = [list(page.texts) for page in PAGES]
    (check,) = detector_checks(PAGES, everything, [["Thank you", "CASH"], ["Exit"]], {"found_drop": 0.2})
    assert (check.measured, check.met, check.on) == (0.25, False, "4 labelled texts of 2 pages")
    assert check.interval[0] <= 0.25 <= check.interval[1]
    report = compare_pages(PAGES, everything, [["Thank you", "CASH"], ["Exit"]])
    assert report is not None
    low, high = report["interval"]["found"]
    assert (-high, -low) == check.interval
    assert set(report["by_source"]) == {"shop", "street"}


WORSE = ["xb cd"] * 2 + RIGHT[2:]
"""Two of 100 lines and two of 440 characters wrong."""


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ({"exact_drop": 0.02, "cer_drop": None}, []),
        ({"exact_drop": 0.019999, "cer_drop": None}, ["exact_drop"]),
        ({"exact_drop": 0.02, "cer_drop": 0.0046}, []),
        ({"exact_drop": 0.01, "cer_drop": 0.0045}, ["exact_drop", "cer_drop"]),
    ],
)
def test_a_limit_is_met_when_the_point_estimate_is_within_it(
    limits: dict[str, float | None], missed: list[str]
) -> None:
    checks = recogniser_checks(LINES, RIGHT, WORSE, limits)
    assert [check.name for check in checks if not check.met] == missed
    assert len(checks) == sum(limit is not None for limit in limits.values())


def test_a_gain_meets_every_limit_that_allows_no_loss() -> None:
    checks = recogniser_checks(LINES, WORSE, RIGHT, {"exact_drop": 0.0, "cer_drop": 0.0})
    assert all(check.met and check.measured < 0 for check in checks)


def test_a_limit_below_one_standard_error_is_said_to_be_unresolved() -> None:
    fine, coarse = (recogniser_checks(LINES, RIGHT, WORSE, {"exact_drop": limit})[0] for limit in (0.005, 0.05))
    assert not fine.resolved
    assert coarse.resolved
    assert "not resolved by 100 lines" in said(fine)
    assert "not resolved" not in said(coarse)


def test_few_lines_that_agree_throughout_do_not_resolve_a_small_limit() -> None:
    checks = recogniser_checks(LINES[:50], RIGHT[:50], RIGHT[:50], {"exact_drop": 0.01, "cer_drop": 0.004})
    assert [(check.met, check.resolved) for check in checks] == [(True, False), (True, False)]


def test_the_standard_error_is_that_of_paired_differences() -> None:
    wrong = np.zeros(400)
    wrong[:16] = 1.0
    difference = Difference.of(Counted(np.zeros(400), np.ones(400)), Counted(wrong, np.ones(400)))
    assert difference.standard_error == pytest.approx(np.sqrt(0.04 * 0.96 / 400), rel=0.1)
    assert difference.low < 0.04 < difference.high
