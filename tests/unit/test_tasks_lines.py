"""Text lines: what the recogniser is given, and how its answer becomes text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.bundle import TaskSpec
from models.errors import BadInput, BundleError, ModelError
from models.spec import Array
from models.tasks import Run, make
from models.tasks.lines import batches, decode, prepare, recognise

pytestmark = pytest.mark.unit

LABELS = ["a", "b", " "]


def answering(best_class: list[int], probability: list[float]) -> Run:
    """A recogniser that reads the same into every line."""

    def run(graph: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        assert graph == "rec"
        count = len(inputs["x"])
        return {
            "index": np.tile(np.array(best_class, np.int64), (count, 1)),
            "probability": np.tile(np.array(probability, np.float32), (count, 1)),
        }

    return run


def test_a_line_is_scaled_to_height_48_and_padded_with_mid_grey() -> None:
    prepared = prepare(np.full((24, 100, 3), (0, 255, 51), np.uint8))
    assert (prepared.shape, prepared.dtype) == ((1, 3, 48, 320), np.float32)
    assert prepared[0, :, 20, 50] == pytest.approx([-1, 1, -0.6])
    assert not prepared[..., 200:].any()


@pytest.mark.parametrize(
    ("height", "width", "prepared_width"),
    [(48, 1, 320), (48, 320, 320), (48, 321, 352), (24, 300, 608), (1, 1000, 3200), (5000, 1, 320)],
)
def test_the_width_follows_the_ratio_in_steps_between_its_limits(height: int, width: int, prepared_width: int) -> None:
    assert prepare(np.zeros((height, width, 3), np.uint8)).shape[3] == prepared_width


@pytest.mark.parametrize(
    ("width", "prepared_width"), [(10, 128), (96, 128), (97, 160), (250, 288), (300, 320), (320, 320), (330, 352)]
)
def test_a_short_line_is_padded_as_the_settings_say_but_never_beyond_320(width: int, prepared_width: int) -> None:
    line = np.zeros((48, width, 3), np.uint8)
    assert prepare(line, min_width=128, min_padding=32).shape[3] == prepared_width


def test_lines_of_different_width_never_share_a_batch() -> None:
    widths = [320, 640, 320, 320, 352, 320]
    groups = batches(widths, 3)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert all(len(group) <= 3 and len({widths[i] for i in group}) == 1 for group in groups)


def test_answers_come_back_in_the_order_of_the_lines() -> None:
    def run(_graph: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        is_bright = (inputs["x"][:, 0, 20, :1] > 0).astype(np.int32)
        return {"index": 1 + is_bright, "probability": np.ones(is_bright.shape, np.float32)}

    dark, bright = (np.full((10, width, 3), value, np.uint8) for width, value in ((300, 9), (20, 250)))
    lines = [prepare(line) for line in (dark, bright, bright, dark, bright)]
    read = recognise(lines, LABELS, run, max_batch=2)
    assert [text for text, _ in read] == ["a", "b", "b", "a", "b"]


def test_repeats_are_one_character_and_a_blank_parts_two() -> None:
    best_class = np.array([0, 1, 1, 0, 1, 3, 2, 2, 0])
    assert decode(best_class, np.ones(9, np.float32), LABELS)[0] == "aa b"


def test_confidence_is_the_mean_over_kept_characters_only() -> None:
    text, confidence = decode(np.array([1, 1, 0, 2]), np.array([0.5, 0.1, 0.2, 1.0], np.float32), LABELS)
    assert (text, confidence) == ("ab", 0.75)
    assert decode(np.zeros(4, np.int32), np.ones(4, np.float32), LABELS) == ("", 0.0)
    assert decode(np.zeros(0, np.int64), np.ones(0, np.float32), LABELS) == ("", 0.0)


@pytest.mark.parametrize("best_class", [[4], [1, -1]])
def test_a_class_without_label_says_that_graph_and_labels_do_not_match(best_class: list[int]) -> None:
    with pytest.raises(ModelError, match="3 labels"):
        decode(np.array(best_class), np.ones(len(best_class), np.float32), LABELS)


@pytest.mark.property
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)), max_size=12))
def test_decoding_undoes_any_stretching_of_a_text(steps: list[tuple[int, int, int]]) -> None:
    path: list[int] = []
    for label, repeats, blanks in steps:
        needs_blank = bool(path) and path[-1] == label
        path += [0] * needs_blank + [label] * repeats + [0] * blanks
    before = np.array(path, np.int64)
    text, confidence = decode(before, np.full(len(path), 0.5, np.float32), LABELS)
    assert text == "".join(LABELS[label - 1] for label, _, _ in steps)
    assert confidence == (0.5 if steps else 0.0)
    assert before.tolist() == path


def test_a_bundle_of_lines_answers_one_line_that_fills_the_picture() -> None:
    task = make(TaskSpec("lines"), LABELS)
    answer = task.predict(np.zeros((20, 70, 3), np.uint8), answering([1, 0, 2], [0.5, 1.0, 1.0]))
    assert answer == {"lines": [{"text": "ab", "confidence": 0.75, "box": [[0, 0], [70, 0], [70, 20], [0, 20]]}]}


def test_a_line_of_nothing_is_an_empty_text_without_confidence() -> None:
    answer = make(TaskSpec("lines"), LABELS).predict(np.zeros((1, 1, 3), np.uint8), answering([0], [1.0]))
    assert (answer["lines"][0]["text"], answer["lines"][0]["confidence"]) == ("", 0.0)


@pytest.mark.parametrize("kind", ["lines", "reading"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [({"max_witdh": 5}, "max_"), ({"max_width": "5", "max_line_width": "5"}, "max_"), ({"min_sid": 3}, "unknown")],
)
def test_settings_that_do_not_fit_are_refused_by_name(kind: str, setting: dict[str, object], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        make(TaskSpec(kind, setting), LABELS)


@pytest.mark.parametrize("setting", [{"max_batch": 0}, {"expansion": -1.0}, {"min_side": -5}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(BundleError, match="or more"):
        make(TaskSpec("reading", setting), LABELS)


def test_a_bundle_of_raw_tensors_points_to_its_infer_endpoint() -> None:
    with pytest.raises(BadInput, match="infer"):
        make(TaskSpec("tensors"), []).predict(np.zeros((2, 2, 3), np.uint8), answering([], []))
