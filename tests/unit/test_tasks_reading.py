"""Reading whole pictures, with graphs that see text wherever a picture is black in blue.

The green of such a bar is the class that the recogniser answers, so a test knows which bar was read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.spec import Array
from models.tasks.reading import Reading, reading_order

pytestmark = pytest.mark.unit

LABELS = [chr(ord("A") + i) for i in range(25)]
GREEN_STEP = 10


class Graphs:
    """Doubles of the three graphs."""

    def __init__(self, upside_down: float = 0.0, confidence: float = 1.0) -> None:
        self.upside_down = upside_down
        self.confidence = confidence
        self.batches: list[tuple[int, ...]] = []

    def __call__(self, graph: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute one graph, as a runtime would."""
        x = inputs["x"]
        assert x.dtype == np.float32
        if graph == "det":
            assert x.shape[2] % 32 == x.shape[3] % 32 == 0
            return {"map": (x[:, :1] < -1).astype(np.float32)}
        if graph == "cls":
            assert x.shape[1:] == (3, 48, 192)
            return {"share": np.tile(np.array([1 - self.upside_down, self.upside_down], np.float32), (len(x), 1))}
        self.batches.append(x.shape)
        return self.read(x)

    def read(self, x: Array) -> Mapping[str, Array]:
        """One character a line: the label of the green where it is darkest."""
        row = x[:, :, 24]
        darkest = row[:, 0].argmin(axis=1)
        green = (row[np.arange(len(x)), 1, darkest] + 1) * 127.5
        best_class = np.rint(green / GREEN_STEP).astype(np.int64)[:, None]
        return {"index": best_class, "probability": np.full(best_class.shape, self.confidence, np.float32)}


def page(height: int, width: int, bars: list[tuple[int, int, int, int]]) -> Array:
    """White picture with bars (left, top, width, height); the first is class 1, and so on."""
    picture = np.full((height, width, 3), 255, np.uint8)
    for i, (left, top, bar_width, bar_height) in enumerate(bars, start=1):
        picture[top : top + bar_height, left : left + bar_width] = (0, GREEN_STEP * i, 0)
    return picture


def read(picture: Array, run: Graphs | None = None, **setting: object) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = Reading(setting, LABELS).predict(picture, run or Graphs())["lines"]
    return lines


def turned(points: Array, degrees: float) -> Array:
    """Points turned about the origin; positive is clockwise in a picture."""
    angle = math.radians(degrees)
    return points @ np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])


@pytest.mark.parametrize("scale", [1, 4, 10])
def test_boxes_are_in_pixels_of_the_picture_as_sent(scale: int) -> None:
    bar = [value * scale for value in (40, 60, 200, 20)]
    (line,) = read(page(200 * scale, 300 * scale, [(bar[0], bar[1], bar[2], bar[3])]))
    grown = 200 * 20 * 1.6 / (2 * (200 + 20))
    corners = [(40 - grown, 60 - grown), (240 + grown, 60 - grown), (240 + grown, 80 + grown), (40 - grown, 80 + grown)]
    assert np.abs(np.array(line["box"]) / scale - corners).max() < 2
    assert (line["text"], line["confidence"]) == ("A", 1.0)


def test_lines_come_top_to_bottom_and_left_to_right() -> None:
    bars = [(400, 203, 150, 20), (40, 300, 300, 20), (40, 200, 150, 24), (40, 40, 500, 30)]
    assert [line["text"] for line in read(page(800, 800, bars))] == ["D", "C", "A", "B"]


@pytest.mark.parametrize("degrees", [-4, 4])
def test_a_page_held_askew_keeps_its_order_and_has_turned_boxes(degrees: float) -> None:
    bars = [(60, 200, 150, 20), (500, 200, 150, 20), (60, 260, 150, 20), (500, 260, 150, 20)]
    turn = cv2.getRotationMatrix2D((400, 400), -degrees, 1)
    picture = cv2.warpAffine(page(800, 800, bars), turn, (800, 800), flags=cv2.INTER_NEAREST, borderValue=(255,) * 3)
    lines = read(picture)
    assert [line["text"] for line in lines] == ["A", "B", "C", "D"]
    (left, top), (right, same_side), *_ = lines[0]["box"]
    assert math.degrees(math.atan2(same_side - top, right - left)) == pytest.approx(degrees, abs=1)


def test_text_that_runs_down_is_turned_before_it_is_read() -> None:
    graphs = Graphs()
    (line,) = read(page(800, 400, [(100, 100, 30, 600)]), graphs)
    assert line["text"] == "A"
    assert graphs.batches[0][3] > 320


def test_lines_are_read_in_batches_of_one_width() -> None:
    graphs = Graphs()
    read(page(800, 900, [(20, 60 * i + 20, 100, 20) for i in range(10)] + [(200, 20, 600, 20)]), graphs, max_batch=4)
    assert sorted(shape[0] for shape in graphs.batches) == [1, 2, 4, 4]


class SureWhenDarkIsLeft(Graphs):
    """Is surer of a line whose ink lies in its left half."""

    def read(self, x: Array) -> Mapping[str, Array]:
        """A when the red ink is left, B when it is right; the line fills 131 columns."""
        ink = x[:, 2, 24, :131] < 0
        is_left = ink[:, :65].sum(axis=1) > ink[:, 65:].sum(axis=1)
        probability = np.where(is_left, 0.9, 0.6).astype(np.float32)
        return {"index": np.where(is_left, 1, 2)[:, None], "probability": probability[:, None]}


@pytest.mark.parametrize(
    ("ink", "upside_down", "text"), [("right", 0.95, "A"), ("left", 0.95, "A"), ("right", 0.5, "B")]
)
def test_a_line_that_seems_upside_down_is_turned_when_it_reads_better_so(
    ink: str, upside_down: float, text: str
) -> None:
    picture = page(800, 800, [(100, 100, 300, 60)])
    picture[100:160, slice(250, 400) if ink == "left" else slice(100, 250), 2] = 255
    (line,) = read(picture, SureWhenDarkIsLeft(upside_down))
    assert line["text"] == text


@pytest.mark.parametrize(("confidence", "count"), [(0.45, 0), (0.55, 1)])
def test_lines_read_without_confidence_are_dropped(confidence: float, count: int) -> None:
    assert len(read(page(800, 800, [(100, 100, 300, 30)]), Graphs(confidence=confidence))) == count


def test_lines_without_text_are_dropped() -> None:
    picture = page(800, 800, [(100, 100, 300, 30)])
    picture[..., 1] = 0
    assert read(picture) == []


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (2, 3), (31, 33), (1, 5000), (5000, 1), (3, 70_000), (70_000, 3), (737, 2001)]
)
def test_a_picture_of_any_shape_is_answered_with_boxes_inside_it(height: int, width: int, value: int) -> None:
    picture = np.full((height, width, 3), value, np.uint8)
    picture[..., 1] = GREEN_STEP
    lines = read(picture)
    assert value == 0 or lines == []
    for line in lines:
        box = np.array(line["box"])
        assert box.shape == (4, 2)
        assert (box >= 0).all()
        assert (box <= (width, height)).all()


def test_noise_costs_no_more_than_the_most_boxes() -> None:
    noise = np.random.default_rng(3).integers(0, 2, (100, 100, 1), np.uint8) * 255
    picture = cv2.resize(np.dstack([noise] * 3), (800, 800), interpolation=cv2.INTER_NEAREST)
    graphs = Graphs()
    read(picture, graphs, max_boxes=20, box_threshold=0.1)
    assert sum(shape[0] for shape in graphs.batches) == 20


def test_a_broken_probability_map_has_no_text() -> None:
    class Broken(Graphs):
        def __call__(self, _graph: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            return {"map": np.full_like(inputs["x"][:, :1], np.nan)}

    assert read(page(100, 100, []), Broken()) == []


@pytest.mark.property
@settings(deadline=None)
@given(data=st.data(), rows=st.integers(1, 6), columns=st.integers(1, 4), degrees=st.floats(-6, 6))
def test_any_grid_in_any_skew_is_read_row_by_row(data: st.DataObject, rows: int, columns: int, degrees: float) -> None:
    boxes = []
    for row in range(rows):
        for column in range(columns):
            height = data.draw(st.integers(20, 26))
            left, top = 300 * column, 40 * row + data.draw(st.integers(-3, 3))
            boxes.append([[left, top], [left + 200, top], [left + 200, top + height], [left, top + height]])
    mixed = data.draw(st.permutations(range(len(boxes))))
    order = reading_order(turned(np.array(boxes, np.float64), degrees)[mixed])
    assert [mixed[i] for i in order] == list(range(len(boxes)))


@pytest.mark.property
@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 500)] * 2, *[st.integers(1, 200)] * 2, st.floats(-180, 180)), max_size=15))
def test_any_boxes_are_each_read_once(specs: list[tuple[int, int, int, int, float]]) -> None:
    boxes = [
        turned(np.array([[0, 0], [width, 0], [width, height], [0, height]], float), degrees) + np.array([left, top])
        for left, top, width, height, degrees in specs
    ]
    assert sorted(reading_order(np.array(boxes, float).reshape(-1, 4, 2))) == list(range(len(specs)))
