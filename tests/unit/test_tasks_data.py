"""The labelled data in this repository: complete, small, and honestly split."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import cv2
import pytest

from models.tasks.text import normalise, source_of

pytestmark = pytest.mark.unit

DATA = Path(__file__).parent.parent / "data" / "ocr"


def rows(name: str) -> list[tuple[str, str]]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [(first, second) for first, second in (line.split("\t") for line in lines)]


LABELS = dict(rows("lines/labels.tsv"))
ORIGINS = dict(rows("lines/sources.tsv"))
SPLITS = dict(rows("splits.tsv"))
PAGES = [json.loads(line) for line in (DATA / "pages" / "labels.jsonl").read_text(encoding="utf-8").splitlines()]


def origins_of(split: str) -> set[str]:
    return {origin for origin in ORIGINS.values() if SPLITS[origin] == split}


def test_every_origin_is_in_exactly_one_known_split() -> None:
    assert len(rows("splits.tsv")) == len(SPLITS)
    assert set(SPLITS.values()) == {"calibrate", "tune", "gate"}
    assert set(ORIGINS.values()) | {page["source"] for page in PAGES} <= set(SPLITS)


def test_no_page_photo_or_plate_is_seen_by_calibration_and_by_the_gate() -> None:
    assert not origins_of("calibrate") & origins_of("gate")
    of_split = {
        split: {page["source"] for page in PAGES if SPLITS[page["source"]] == split} for split in SPLITS.values()
    }
    assert not of_split["calibrate"] & (origins_of("gate") | of_split["gate"])
    assert not of_split["gate"] & origins_of("calibrate")


def test_there_are_96_lines_to_calibrate_with_and_128_for_the_gate() -> None:
    assert Counter(SPLITS[origin] for origin in ORIGINS.values()) == {"calibrate": 96, "gate": 128}


@pytest.mark.parametrize("split", ["calibrate", "gate"])
def test_every_source_has_its_share_of_a_split(split: str) -> None:
    files = [file for file, origin in ORIGINS.items() if SPLITS[origin] == split]
    share = {source: count / len(files) for source, count in Counter(map(source_of, files)).items()}
    assert share == pytest.approx({"sroie": 0.51, "icdar2015": 0.28, "lprnet": 0.18, "cnocr": 0.03}, abs=0.02)


def test_every_line_has_a_picture_a_label_and_an_origin_of_its_source() -> None:
    assert len(rows("lines/labels.tsv")) == len(LABELS)
    assert set(LABELS) == set(ORIGINS) == {path.name for path in (DATA / "lines").glob("*.png")}
    for file, text in LABELS.items():
        assert normalise(text, source_of(file))
        assert ORIGINS[file].startswith(source_of(file) + "/")
        assert cv2.imread(str(DATA / "lines" / file)) is not None


def test_every_page_is_the_size_its_labels_say_and_holds_their_boxes() -> None:
    of_split = Counter((SPLITS[page["source"]], source_of(page["file"])) for page in PAGES)
    assert of_split == {
        ("gate", "sroie"): 1, ("gate", "icdar2015"): 1, ("calibrate", "sroie"): 2, ("calibrate", "icdar2015"): 3,
    }  # fmt: skip
    assert {path.name for path in (DATA / "pages").glob("*.jpg")} == {page["file"] for page in PAGES}
    for page in PAGES:
        assert cv2.imread(str(DATA / "pages" / page["file"])).shape == (page["height"], page["width"], 3)
        for line in page["lines"]:
            assert len(line["box"]) == 8
            assert line["ignore"] or line["text"]


def test_the_data_stays_under_3_mb() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 3_000_000


def test_every_source_is_attributed_with_its_licence() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for source in set(map(source_of, LABELS)):
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| {source} | ") and "http" in line]
        assert "CC BY 4.0" in row or "Apache-2.0" in row
