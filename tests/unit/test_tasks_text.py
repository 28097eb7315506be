"""How read text is compared with labels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tasks.text import edit_distance, exact_and_cer, normalise, source_of

pytestmark = pytest.mark.unit

short_text = st.text(alphabet="abc", max_size=7)


@pytest.mark.parametrize(
    ("source", "text", "same_as"),
    [
        ("sroie", "Total  RM 5.00", "TOTAL RM5.00"),
        ("sroie", "\uff32\uff2d\uff15", "rm5"),
        ("icdar2015", "STRASSE", "stra\u00dfe"),
        ("lprnet", "\u7696A\u00b712345", "\u7696A12345"),
    ],
)
def test_texts_that_differ_only_in_convention_are_the_same(source: str, text: str, same_as: str) -> None:
    assert normalise(text, source) == normalise(same_as, source)


def test_signs_count_everywhere_but_on_plates() -> None:
    assert normalise("5.00", "sroie") != normalise("500", "sroie")


def test_the_source_is_the_file_name_up_to_the_first_underscore() -> None:
    assert source_of("icdar2015_img_143.jpg") == "icdar2015"


@pytest.mark.parametrize(
    ("left", "right", "distance"), [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("total", "tota1", 1)]
)
def test_edit_distance_counts_single_character_changes(left: str, right: str, distance: int) -> None:
    assert edit_distance(left, right) == distance


@pytest.mark.property
@settings(deadline=None)
@given(short_text, short_text, short_text)
def test_edit_distance_is_a_metric(first: str, second: str, third: str) -> None:
    distance = edit_distance(first, second)
    assert distance == edit_distance(second, first)
    assert (distance == 0) == (first == second)
    assert abs(len(first) - len(second)) <= distance <= max(len(first), len(second))
    assert distance <= edit_distance(first, third) + edit_distance(third, second)


@pytest.mark.property
@settings(deadline=None)
@given(short_text, short_text, short_text, short_text)
def test_common_beginnings_and_ends_cost_nothing(start: str, first: str, second: str, end: str) -> None:
    assert edit_distance(start + first + end, start + second + end) <= edit_distance(first, second)


def test_accuracy_weighs_lines_for_exact_and_characters_for_cer() -> None:
    exact, cer = exact_and_cer([("a", "b"), ("total", "total"), ("abcd", "abd")])
    assert exact == pytest.approx(1 / 3)
    assert cer == pytest.approx(2 / 10)


def test_accuracy_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        exact_and_cer([])
