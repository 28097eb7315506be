"""From somebody's own ONNX file to a recipe, and from there to a bundle that passed a gate without labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import checkpoint, own, tiny

from models import tasks
from models.errors import ConfigError, GateFailed, SourceError
from models.folder import BundleFolder
from models.tasks.detection import DetectionSettings
from provisioning import accuracy, skeleton
from provisioning.build import Built, build
from provisioning.cache import Cache
from provisioning.pack import pack
from provisioning.recipe import read

pytestmark = pytest.mark.unit


def new(model: Path, task: str = "", labels: tuple[str, ...] = ()) -> skeleton.Skeleton:
    """Write the recipe beside `model`."""
    return skeleton.write(model, model.with_suffix(".toml"), task, labels)


def change(model: Path, **texts: str) -> None:
    """Replace texts in the recipe beside `model`."""
    recipe = model.with_suffix(".toml")
    text = recipe.read_text()
    for old, later in texts.items():
        assert old in text
        text = text.replace(old, later)
    recipe.write_text(text)


def made(model: Path, precision: str = "auto") -> Built:
    """Build the recipe beside `model`."""
    file = read(model.with_suffix(".toml"))
    return build(file, file.default_data, precision, Cache(None), lambda _: None)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A classifier of colours with its pictures, and the recipe that was written for it."""
    model = own.classifier(tmp_path / "colours.onnx")
    own.coloured_folder(tmp_path / "pictures")
    new(model, labels=tuple(own.COLOURS))
    change(model, **{"mean = [0.485, 0.456, 0.406]": "mean = [0.0]", "deviation = [0.229, 0.224, 0.225]": ""})
    return model


@pytest.mark.parametrize(("layout", "shape"), [("NCHW", [-1, 3, 32, 32]), ("NHWC", [-1, 32, 32, 3])])
def test_a_classifier_is_known_by_its_scores(tmp_path: Path, layout: str, shape: list[int]) -> None:
    found = new(own.classifier(tmp_path / "My Model (2).onnx", layout=layout))
    assert (found.task, found.shape, found.settings["layout"]) == ("classification", shape, layout)
    assert "3 classes, not named in the file" in found.found
    assert {"colours", "scale", "mean", "fit"} == set(found.guessed)
    recipe = read(tmp_path / "My Model (2).toml").recipe
    assert (recipe.name, recipe.graphs["cls"].file) == ("my-model-2", "My Model (2).onnx")
    assert recipe.graphs["cls"].gate.same_class == 0.98


def test_a_graph_that_takes_any_size_gets_the_usual_one_to_check(tmp_path: Path) -> None:
    found = new(own.classifier(tmp_path / "any.onnx", side="side"))
    assert (found.settings["width"], found.shape) == (224, [-1, 3, 224, 224])
    assert {"width", "height"} <= set(found.guessed)
    assert "# CHECK: the file takes any size" in (tmp_path / "any.toml").read_text()


@pytest.mark.parametrize("head", ["yolov5", "yolov8", "yolox"])
def test_a_detector_is_known_by_the_form_of_its_output(tmp_path: Path, head: str) -> None:
    found = new(own.detector(tmp_path / "squares.onnx", head=head))
    assert (found.task, found.settings["head"], found.settings["width"]) == ("detection", head, own.SIDE)
    assert "1 classes, not named in the file" in found.found
    assert read(tmp_path / "squares.toml").recipe.graphs["det"].role == "locate"


def noted(path: Path, **properties: str) -> Path:
    """`path` with properties in its metadata, as exporters leave them."""
    model = onnx.load(path)
    onnx.helper.set_model_props(model, properties)
    onnx.save(model, path)
    return path


def test_what_exporters_note_in_the_file_is_used(tmp_path: Path) -> None:
    path = noted(own.detector(tmp_path / "squares.onnx", head="yolov8"), names="{0: 'a \"square\"'}")
    assert new(path).labels == ['a "square"']
    assert read(tmp_path / "squares.toml").recipe.task.labels == ('a "square"',)
    assert new(noted(own.classifier(tmp_path / "rows.onnx"), character="r\ng\nb")).labels == ["r", "g", "b"]
    assert new(noted(own.classifier(tmp_path / "few.onnx"), names="['r', 'g']")).labels == ()
    path = noted(own.classifier(tmp_path / "any.onnx", side="side"), imgsz="[96, 128]")
    assert new(path).shape == [-1, 3, 96, 128]


def test_a_reader_of_lines_is_known_by_its_height_and_its_steps(tmp_path: Path) -> None:
    model = tmp_path / "rec.onnx"
    model.write_bytes(checkpoint.recogniser())
    found = new(model)
    assert (found.task, found.label_key) == ("lines", "character")
    recipe = read(tmp_path / "rec.toml").recipe
    assert (recipe.task.kind, recipe.graphs["rec"].passes, recipe.data) == (
        "lines", ("normalise", "ctc_head"), "labelled",
    )  # fmt: skip


def test_anything_else_is_raw_tensors(tmp_path: Path) -> None:
    found = new(tiny.linear_model(tmp_path / "linear.onnx"))
    assert (found.task, found.samples, found.shape) == ("tensors", "tensors", [-1, 16])
    assert new(own.classifier(tmp_path / "pictures.onnx"), "tensors").samples == "pictures"


@pytest.mark.parametrize(
    ("task", "there", "reason"),
    [
        ("detection", "", "does not look like task 'detection' (input image: FP32 [-1, 3, 32, 32]; output scores"),
        ("", "colours.toml", "colours.toml is there already: take it away, or give another file with --out"),
    ],
)
def test_what_cannot_be_written_is_explained(tmp_path: Path, task: str, there: str, reason: str) -> None:
    model = own.classifier(tmp_path / "colours.onnx")
    if there:
        (tmp_path / there).touch()
    with pytest.raises(ConfigError) as refused:
        new(model, task)
    assert reason in str(refused.value)


def test_a_file_that_is_no_model_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.onnx cannot be read \(No such file"):
        new(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("text")
    with pytest.raises(SourceError, match=r"text\.onnx is no ONNX graph .*: give a whole ONNX file$"):
        new(tmp_path / "text.onnx")
    assert not (tmp_path / "text.toml").exists()


def test_a_classifier_of_somebodys_own_becomes_a_bundle_in_int8(classifier: Path, tmp_path: Path) -> None:
    manifest = pack(made(classifier), tmp_path / "bundle")
    variants = manifest.graphs["cls"].variants
    assert set(variants) == {"fp32", "int8"}
    for variant in variants.values():
        assert variant.agreement is not None
        assert variant.agreement.on == "6 of 6 unlabelled pictures"
        (check,) = variant.checks
        assert (check.name, check.limit, check.met, check.resolved) == ("same_class", 0.98, True, False)
    assert manifest.provenance.sources[0].package == ""
    folder = BundleFolder(tmp_path / "bundle")
    assert folder.read_labels() == list(own.COLOURS)
    page = json.loads((tmp_path / "bundle" / "report.json").read_text())
    assert page["facts"]["labels of cls"].startswith("unlabelled")


@pytest.mark.parametrize("colour", own.COLOURS)
def test_the_bundle_says_of_a_picture_what_it_shows(classifier: Path, tmp_path: Path, colour: str) -> None:
    built = made(classifier)
    manifest = pack(built, tmp_path / "bundle")
    session = built.runtime.open(built.graphs["cls"].variants["int8"].content, threads=1)
    task = tasks.make(manifest.task, BundleFolder(tmp_path / "bundle").read_labels())
    found = task.predict(own.coloured(colour, 50), lambda _graph, inputs: session.run(inputs))
    assert found["classes"][0]["label"] == colour


@pytest.mark.parametrize("head", ["yolov8", "yolox"])
def test_a_detector_of_somebodys_own_becomes_a_bundle_in_int8(tmp_path: Path, head: str) -> None:
    model = own.detector(tmp_path / "squares.onnx", head=head)
    own.squares_folder(tmp_path / "pictures")
    new(model)
    change(model, **{"scale = 255.0": "scale = 1.0"} if head == "yolov8" else {})
    built = made(model)
    manifest = pack(built, tmp_path / "bundle")
    int8 = manifest.graphs["det"].variants["int8"]
    assert int8.agreement is not None
    assert "boxes of both on 4 unlabelled pictures" in int8.agreement.on
    session = built.runtime.open(built.graphs["det"].variants["int8"].content, threads=1)
    task = tasks.make(manifest.task, [])
    found = task.predict(own.squares((16, 40)), lambda _graph, inputs: session.run(inputs))
    assert [one["box"][0] for one in found["objects"]] == [[16.0, 40.0]]


def test_a_model_that_finds_nothing_on_the_pictures_is_not_proven_by_that(tmp_path: Path) -> None:
    model = own.detector(tmp_path / "squares.onnx")
    for number in range(4):
        own.save(tmp_path / "pictures" / f"{number}.png", own.squares())
    new(model)
    with pytest.raises(SourceError, match="finds nothing on 2 pictures, so nothing can be compared"):
        made(model)


def test_a_precision_that_sees_other_classes_is_left_out(classifier: Path) -> None:
    change(classifier, **{"gate.same_class = 0.98": "gate.same_class = 1.0\nint8.percentile = 0.01"})
    built = made(classifier)
    assert "int8" not in built.graphs["cls"].variants
    assert "same class" in built.graphs["cls"].left_out["int8"]
    assert "unlabelled pictures" in built.graphs["cls"].left_out["int8"]


def test_raw_tensors_are_compared_on_the_arrays_that_are_given(tmp_path: Path) -> None:
    model = tiny.linear_model(tmp_path / "linear.onnx")
    (tmp_path / "tensors").mkdir()
    for number in range(4):
        np.savez(tmp_path / "tensors" / f"{number}.npz", anything=np.full((2, 16), number + 1, np.float32))
    new(model)
    (variant,) = made(model).graphs["net"].variants.values()
    assert variant.agreement is not None
    assert (variant.agreement.share, variant.agreement.on) == (pytest.approx(1), "2 samples")
    (tmp_path / "tensors" / "0.npz").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"0\.npz is no file of numpy arrays"):
        made(model)


@pytest.mark.parametrize(
    ("old", "later", "reason"),
    [
        ('"red"', '"red", "pink"', "tells 3 classes apart, but task.labels has 4"),
        ("width = 32", "width = 48", r"graphs.cls.shape is .* but task.settings make \['N', 3, 32, 48\] of a picture"),
        ('role = "classify"', 'role = "encode"', "one graph, called 'cls', of role 'classify'"),
        ("[graphs.cls.samples]\nkind", "[graphs.cls.gate_]\nkind", "unknown key"),
        ('[graphs.cls.samples]\nkind = "pictures"\ncount = 200', "", "samples is for role 'encode' and for tasks"),
        ('"red"', '""', "task.labels has an empty one"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(classifier: Path, old: str, later: str, reason: str) -> None:
    text = classifier.with_suffix(".toml").read_text().replace("  # of each half, at most", "")
    classifier.with_suffix(".toml").write_text(text)
    change(classifier, **{old: later})
    with pytest.raises((ConfigError, SourceError), match=reason):
        made(classifier)


def test_another_file_than_the_recipe_was_written_for_is_refused(classifier: Path) -> None:
    own.classifier(classifier, softmax=True)
    with pytest.raises(SourceError, match="is not the file that the recipe was written for"):
        made(classifier)
    classifier.unlink()
    with pytest.raises(SourceError, match=r"colours\.onnx cannot be read \(No such file or directory\): it is looked"):
        made(classifier)


def test_too_few_pictures_are_named_with_their_folder(classifier: Path) -> None:
    for picture in sorted((classifier.parent / "pictures").iterdir())[1:]:
        picture.unlink()
    with pytest.raises(SourceError, match=r"pictures has 1 pictures .* two are the least"):
        made(classifier)


def test_a_graph_without_any_precision_left_is_no_bundle(classifier: Path) -> None:
    change(classifier, **{"gate.same_class = 0.98": "gate.same_class = 1.0\nint8.percentile = 0.01"})
    change(classifier, **{'["fp32", "int8"]': '["int8"]'})
    with pytest.raises(GateFailed, match="graph cls has no precision left"):
        made(classifier)


class Fixed:
    """A session that always answers the same."""

    def __init__(self, *boxes: tuple[float, float, float, float]) -> None:
        self.rows = np.array([[*box, 1.0, 1.0] for box in boxes], np.float32).reshape(1, -1, 6)

    def run(self, _inputs: object) -> dict[str, object]:
        """Boxes by centre and size, all sure."""
        return {"y": self.rows}


@pytest.mark.parametrize(
    ("boxes", "share"),
    [
        ([(20, 20, 10, 10), (60, 60, 10, 10)], 1.0),
        ([(21, 20, 10, 10), (60, 62, 10, 10)], 1.0),  # moved by less than half
        ([(20, 20, 10, 10)], 2 / 3),
        ([(20, 20, 10, 10), (66, 60, 10, 10)], 0.5),  # the other is somewhere else
        ([(20, 20, 10, 10), (60, 60, 10, 10), (100, 100, 10, 10)], 0.8),
        ([(200, 200, 9, 9)], 0.0),
    ],
)
def test_boxes_match_where_they_overlap_by_half(boxes: list[tuple[float, ...]], share: float) -> None:
    original, packed = Fixed((20, 20, 10, 10), (60, 60, 10, 10)), Fixed(*boxes)  # type: ignore[arg-type]
    found = accuracy.matched(original, packed, [{}], DetectionSettings(head="yolov5"))  # type: ignore[arg-type]
    assert found.share == pytest.approx(share, abs=1e-6)
