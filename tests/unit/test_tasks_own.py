"""Classification and detection, without a runtime: pictures in, tensors seen, answers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from models import tasks
from models.answers import items, said
from models.bundle import TaskSpec
from models.errors import BundleError, ModelError
from models.tasks import fit
from models.tasks.classification import probabilities
from models.tasks.detection import DetectionSettings, boxes_of

pytestmark = pytest.mark.unit

Array = npt.NDArray[Any]
RED = np.full((40, 80, 3), (0, 0, 255), np.uint8)


def answer(kind: str, settings: Mapping[str, Any], output: Array, labels: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a task makes of RED when its graph answers `output`."""
    return tasks.make(TaskSpec(kind, settings), labels).predict(RED, lambda _graph, _inputs: {"y": output})


def seen(**settings: object) -> Array:
    """What a graph gets to see of RED."""
    return fit.prepare(RED, fit.FitSettings(**{"width": 16, "height": 16} | settings))  # type: ignore[arg-type]


def test_pixels_are_scaled_and_ordered_as_the_settings_say() -> None:
    assert seen().shape == (1, 3, 16, 16)
    np.testing.assert_allclose(seen()[0, :, 8, 8], [1, 0, 0])
    np.testing.assert_allclose(seen(colours="bgr", scale=1.0)[0, :, 8, 8], [0, 0, 255])
    np.testing.assert_allclose(seen(mean=(0.5,), deviation=(0.5,))[0, :, 8, 8], [1, -1, -1])
    np.testing.assert_allclose(seen(mean=(0.5, 0.0, 0.25), deviation=(1.0, 1.0, 0.5))[0, :, 8, 8], [0.5, 0, -0.5])
    assert seen(layout="NHWC").shape == (1, 16, 16, 3)
    np.testing.assert_allclose(seen(layout="NHWC")[0, 8, 8], [1, 0, 0])
    assert seen(colours="grey").shape == (1, 1, 16, 16)
    np.testing.assert_allclose(seen(colours="grey")[0, 0, 8, 8], 0.299, atol=0.01)


def test_a_picture_of_another_shape_is_cut_padded_or_stretched() -> None:
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, 20:60] = 255  # the middle square is white
    settings = {"width": 16, "height": 16, "scale": 1.0}
    assert fit.prepare(picture, fit.FitSettings(**settings, fit="crop")).min() == 255
    stretched = fit.prepare(picture, fit.FitSettings(**settings, fit="stretch"))[0, 0]
    assert stretched[8].tolist() == [0.0] * 4 + [255.0] * 8 + [0.0] * 4
    padded = fit.prepare(picture, fit.FitSettings(**settings, fit="pad"))[0, 0]
    assert padded[:8, 8].tolist() == [255.0] * 8
    assert (padded[8:] == 114).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 2)])
@pytest.mark.parametrize("how", ["crop", "pad", "stretch"])
def test_a_picture_of_any_size_can_be_made_to_fit(size: tuple[int, int], how: str) -> None:
    prepared = fit.prepare(np.zeros((*size, 3), np.uint8), fit.FitSettings(width=16, height=16, fit=how))
    assert prepared.shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("classification", {"fit": "squeeze"}, "fit is 'squeeze'; known: crop, pad, stretch"),
        ("classification", {"colours": "cmyk"}, "colours is 'cmyk'; known: rgb, bgr, grey"),
        ("classification", {"mean": [0.1, 0.2]}, "mean must be one number, or 3"),
        ("classification", {"deviation": [0.0]}, "scale and deviation must be above 0"),
        ("classification", {"width": 0}, "width must be 1 or more"),
        ("classification", {"crop_share": 2.0}, "crop_share is between 0 and 1"),
        ("classification", {"wide": 3}, "unknown key 'wide'; did you mean 'width'"),
        ("detection", {"head": "ssd"}, "head is 'ssd'; known: yolov5, yolov8, yolox"),
        ("detection", {"fit": "crop"}, "a detector sees whole pictures"),
    ],
)
def test_settings_that_fit_nothing_are_named(kind: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        tasks.make(TaskSpec(kind, settings), [])


def test_classes_come_likeliest_first_with_their_labels() -> None:
    found = answer("classification", {"max_classes": 2}, np.array([[0.1, 0.7, 0.2]], np.float32), ("a", "b", "c"))
    assert [one["label"] for one in items(found)] == ["b", "c"]
    assert found["classes"][0]["confidence"] == pytest.approx(0.7)
    assert said(found) == [("b", pytest.approx(0.7))]


def test_classes_without_labels_are_called_by_their_numbers() -> None:
    assert said(answer("classification", {}, np.array([[0.0, 9.0]], np.float32)))[0][0] == "1"


def test_logits_become_probabilities_and_probabilities_stay_what_they_are() -> None:
    shares = np.array([[0.25, 0.75]], np.float32)
    np.testing.assert_array_equal(probabilities(shares), shares)
    np.testing.assert_allclose(probabilities(np.log(shares)), shares, atol=1e-6)
    np.testing.assert_allclose(probabilities(np.array([[1000.0, 0.0]], np.float32)), [[1, 0]])
    np.testing.assert_array_equal(probabilities(shares.reshape(1, 2, 1, 1)), shares)


@pytest.mark.parametrize("kind", ["classification", "detection"])
def test_labels_of_another_model_are_refused(kind: str) -> None:
    output = np.zeros((1, 3) if kind == "classification" else (1, 7, 20), np.float32)
    with pytest.raises(ModelError, match="3 classes, but the bundle has 2 labels"):
        answer(kind, {}, output, ("a", "b"))


ROWS = np.array(
    [
        # centre x, centre y, width, height, objectness, two classes
        [32, 32, 16, 16, 0.9, 0.1, 1.0],
        [33, 32, 16, 16, 0.8, 0.1, 1.0],  # the same object
        [33, 32, 16, 16, 0.7, 1.0, 0.1],  # at the same place, of the other class
        [10, 12, 8, 12, 0.5, 1.0, 0.0],
        [50, 50, 8, 8, 0.1, 1.0, 1.0],  # not sure enough
    ],
    np.float32,
)
SETTINGS = {"width": 64, "height": 64, "head": "yolov5"}


def test_of_boxes_that_overlap_the_surest_of_each_class_is_kept() -> None:
    found = boxes_of(ROWS[None], DetectionSettings(**SETTINGS))
    assert found.classes.tolist() == [1, 0, 0]
    np.testing.assert_allclose(found.confidences, [0.9, 0.7, 0.5])
    np.testing.assert_allclose(found.corners[0], [24, 24, 40, 40])
    np.testing.assert_allclose(found.corners[2], [6, 6, 14, 18])
    assert len(boxes_of(ROWS[None], DetectionSettings(**SETTINGS, max_boxes=1)).classes) == 1
    assert len(boxes_of(ROWS[None], DetectionSettings(**SETTINGS, min_confidence=0.95)).classes) == 0


def test_thousands_of_sure_candidates_are_told_apart_by_the_surest() -> None:
    rows = np.tile(np.array([16, 16, 8, 8, 1.0, 0.5, 0.0], np.float32), (20_000, 1))
    rows[:, 0] = np.linspace(0, 64, len(rows))
    rows[-1, 5] = 0.9
    found = boxes_of(rows[None], DetectionSettings(**SETTINGS, min_confidence=0.01))
    assert found.confidences[0] == np.float32(0.9)
    np.testing.assert_allclose(found.corners[0], [60, 12, 68, 20])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 2, 4, 5])
def test_a_detector_that_answers_no_numbers_has_failed(place: int, value: float) -> None:
    rows = ROWS.copy()
    rows[0, place] = value
    with pytest.raises(ModelError, match="NaN or infinity"):
        boxes_of(rows[None], DetectionSettings(**SETTINGS))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_classifier_that_answers_no_numbers_has_failed(value: float) -> None:
    with pytest.raises(ModelError, match="NaN or infinity"):
        probabilities(np.array([[0.5, value]], np.float32))


def test_the_three_forms_of_heads_say_the_same() -> None:
    wanted = boxes_of(ROWS[None], DetectionSettings(**SETTINGS))
    v8 = np.concatenate([ROWS[:, :4], ROWS[:, 4:5] * ROWS[:, 5:]], axis=1).T[None]
    of_v8 = boxes_of(v8, DetectionSettings(**SETTINGS | {"head": "yolov8"}))
    grid = np.zeros((84, 7), np.float32)  # 8 x 8 cells of 8 pixels, 4 x 4 of 16, 2 x 2 of 32
    for cell, (x, y, w, h, *scores) in zip((0, 1, 2, 3, 64), ROWS.tolist(), strict=True):
        stride, column, row = (8, cell % 8, cell // 8) if cell < 64 else (16, 0, 0)
        grid[cell] = [x / stride - column, y / stride - row, np.log(w / stride), np.log(h / stride), *scores]
    of_x = boxes_of(grid[None], DetectionSettings(**SETTINGS | {"head": "yolox"}))
    for other in (of_v8, of_x):
        np.testing.assert_array_equal(other.classes, wanted.classes)
        np.testing.assert_allclose(other.corners, wanted.corners, atol=1e-4)


def test_objects_are_told_in_pixels_of_the_picture_and_inside_it() -> None:
    rows = np.array([[[16, 16, 64, 16, 1.0, 1.0]]], np.float32)  # wider than the graph's input
    (found,) = items(answer("detection", SETTINGS, rows, ("cat",)))  # the picture of 80 x 40 was scaled by 0.8
    assert (found["label"], found["confidence"]) == ("cat", 1.0)
    assert found["box"] == [[0.0, 10.0], [60.0, 10.0], [60.0, 30.0], [0.0, 30.0]]


@pytest.mark.parametrize(
    ("head", "shape"), [("yolov5", (1, 10)), ("yolov5", (1, 10, 5)), ("yolov8", (1, 4, 10)), ("yolov8", (2, 6, 10))]
)
def test_an_output_of_another_form_says_what_to_correct(head: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"has not the form of \w+: correct task.settings.head"):
        answer("detection", {"head": head}, np.zeros(shape, np.float32))
    with pytest.raises(ModelError, match="a grid of 640 x 640 has 8400 cells"):
        answer("detection", {"head": "yolox"}, np.zeros((1, 10, 6), np.float32))


def test_nothing_found_is_no_object() -> None:
    assert answer("detection", SETTINGS, np.zeros((1, 10, 6), np.float32)) == {"objects": []}
