"""The comparison of two readings of the same lines."""

from __future__ import annotations

import numpy as np
import pytest

from provisioning.accuracy import accuracy, compare
from provisioning.data import Line

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
