"""Labelled folders: what is read, what is refused, and that splits stay apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import checkpoint

from models.errors import SourceError
from models.tasks.reading import ReadingSettings
from provisioning import data

pytestmark = pytest.mark.unit

OURS = Path(__file__).parent.parent / "data" / "ocr"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint.labelled(tmp_path / "data", {"calibrate": 2, "gate": 3})


def test_calibration_never_sees_a_line_of_the_gate() -> None:
    calibrate, gate = (data.load(OURS, split) for split in ("calibrate", "gate"))
    assert (len(calibrate.lines), len(gate.lines)) == (96, 128)
    assert not {line.file for line in calibrate.lines} & {line.file for line in gate.lines}
    assert calibrate.sha256 != gate.sha256


def test_only_the_lines_of_a_split_are_read(folder: Path) -> None:
    assert [line.file for line in data.load(folder, "gate").lines] == [f"noise_gate{i}.png" for i in range(3)]
    assert len(data.load(folder, "all").lines) == 5


def test_without_splits_and_sources_every_line_counts(folder: Path) -> None:
    (folder / "splits.tsv").unlink()
    (folder / "lines" / "sources.tsv").unlink()
    assert len(data.load(folder, "gate").lines) == 5


def test_the_digest_depends_on_labels_and_pixels_alone(folder: Path, tmp_path: Path) -> None:
    again = checkpoint.labelled(tmp_path / "again", {"calibrate": 2, "gate": 3})
    assert data.load(again, "gate").sha256 == data.load(folder, "gate").sha256
    labels = again / "lines" / "labels.tsv"
    labels.write_text(labels.read_text().replace("noise_gate1.png\tabc", "noise_gate1.png\tabd"))
    assert data.load(again, "gate").sha256 != data.load(folder, "gate").sha256


def test_a_label_may_hold_what_python_takes_for_an_end_of_line(folder: Path) -> None:
    (folder / "lines" / "labels.tsv").write_bytes("noise_gate0.png\ta\u2028b\n".encode())
    assert [line.text for line in data.load(folder, "gate").lines] == ["a\u2028b"]


def cut_a_picture(folder: Path) -> None:
    picture = folder / "lines" / "noise_calibrate1.png"
    picture.write_bytes(picture.read_bytes()[:200])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_a_picture, r"noise_calibrate1\.png cannot be used: the PNG file is cut short"),
        (
            lambda at: (at / "lines" / "noise_calibrate0.png").write_bytes(b"?"),
            r"calibrate0\.png cannot be used: .*PNG",
        ),
        (lambda at: (at / "lines" / "noise_calibrate0.png").unlink(), r"noise_calibrate0\.png cannot be read"),
        (lambda at: (at / "lines" / "labels.tsv").write_text(""), "has no line of split 'calibrate'"),
        (lambda at: (at / "lines" / "labels.tsv").write_text("a.png text\n"), r"labels\.tsv:1 is not two columns"),
        (lambda at: (at / "lines" / "labels.tsv").write_bytes(b"\xff\t\xff\n"), r"labels\.tsv cannot be read"),
        (lambda at: (at / "lines" / "labels.tsv").unlink(), r"labelled data is needed, .*--data"),
        (lambda at: (at / "splits.tsv").write_text("calibrate/1\tgate\n"), "has no line of split 'calibrate'"),
    ],
)
def test_damage_is_one_clear_error(folder: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(folder)
    with pytest.raises(SourceError, match=reason):
        data.load(folder, "calibrate")


def test_pages_must_be_json_objects(folder: Path) -> None:
    (folder / "pages").mkdir()
    (folder / "pages" / "labels.jsonl").write_text("[1]\n")
    with pytest.raises(SourceError, match=r"labels\.jsonl:1 is not one JSON object"):
        data.load(folder, "gate")


def test_each_role_sees_what_the_task_would_hand_it() -> None:
    split, settings = data.load(OURS, "gate"), ReadingSettings()
    recognise = data.inputs("recognise", split, settings, "rec")
    assert {one["x"].shape[:3] for one in recognise} == {(1, 3, 48)}
    assert len(recognise) == 128
    classify = data.inputs("classify", split, settings, "cls")
    assert {one["x"].shape for one in classify} == {(2, 3, 48, 192)}
    pages = data.inputs("detect", split, settings, "det")
    assert len(pages) == 2
    assert all(one["x"].dtype == np.float32 and not one["x"].shape[3] % 32 for one in pages)


def test_without_pages_some_lines_are_shown_to_the_detector() -> None:
    split = replace(data.load(OURS, "calibrate"), pages=())
    assert len(data.inputs("detect", split, ReadingSettings(), "det")) == 24


def test_a_build_divides_a_folder_without_splits_by_those_of_the_project(folder: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (folder / "splits.tsv").rename(project / "splits.tsv")
    file = data.splits_for_build(folder, project)
    assert len(data.load(folder, "calibrate", file).lines) == 2
    (project / "splits.tsv").write_text("calibrate/1\tcalibrate\n")
    with pytest.raises(SourceError, match=r"has no splits\.tsv that says of every origin"):
        data.splits_for_build(folder, project)
