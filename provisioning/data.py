"""Labelled pictures on disk, and what the graphs of a reading pipeline get to see of them.

A folder holds

    lines/labels.tsv     file<TAB>text, pictures beside it       needed
    lines/sources.tsv    file<TAB>origin: the page, photo or plate a line was cut from
    pages/labels.jsonl   an object a page with at least `file` and `source` (its origin)
    splits.tsv           origin<TAB>calibrate|tune|gate

Calibration data shapes a model and is never scored; gate data is scored and never shapes one. So a build needs splits,
its folder's own or the project's, which know every origin of the larger set that the project's data is a part of.
To measure, every line and page of a folder without splits counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.errors import CallerError, SourceError
from models.spec import Array
from models.tasks import lines as lines_task
from models.tasks import picture, reading

ALL = "all"
DEFAULT = Path("tests/data/ocr")
"""Where a project keeps its labelled data."""
_MAX_PIXELS = 50_000_000
_DETECT_EVERY = 4
"""Without pages to calibrate with, every so many of the lines are shown to the detector as if they were pages."""


@dataclass(frozen=True, slots=True)
class Line:
    """A picture of one line of text (uint8 BGR, [H, W, C]) with its label."""

    file: str
    picture: Array
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a folder."""

    lines: tuple[Line, ...]
    pages: tuple[Array, ...]
    sha256: str
    """Digest of names, labels and picture files."""


def default_folder() -> Path:
    """The labelled data of the project in whose folder, or from whose checkout, this runs."""
    here = Path.cwd()
    roots = [here, *here.parents, Path(__file__).resolve().parents[1]]
    return next((root / DEFAULT for root in roots if (root / DEFAULT).is_dir()), here / DEFAULT)


def splits_for_build(folder: Path, project: Path) -> Path:
    """The file of splits by which `folder` is divided; raises SourceError when there is none that knows its origins."""
    _text(folder / "lines" / "labels.tsv")  # what is no labelled data at all gets its own error
    for path in (folder / "splits.tsv", project / "splits.tsv"):
        known = dict(_rows(path, optional=True))
        origins = dict(_rows(folder / "lines" / "sources.tsv", optional=True))
        if known and origins and set(origins.values()) <= set(known):
            return path
    msg = (
        f"{folder} has no splits.tsv that says of every origin what is for calibration and what for the gate: write one"
    )
    raise SourceError(msg)


def load(folder: Path, split: str, splits_file: Path | None = None) -> Split:
    """Read the lines and pages of `split` ("all" for every one); raises SourceError naming what is wrong.

    `splits_file` is the folder's own splits.tsv when None; without any, every line and page belongs to every split.
    """
    splits = dict(_rows(splits_file or folder / "splits.tsv", optional=splits_file is None))
    origins = dict(_rows(folder / "lines" / "sources.tsv", optional=True))

    def wanted(origin: str) -> bool:
        return split == ALL or not splits or splits.get(origin) == split

    digest = hashlib.sha256()
    lines = []
    for file, text in _rows(folder / "lines" / "labels.tsv"):
        if wanted(origins.get(file, "")):
            lines.append(Line(file, _picture(folder / "lines" / file, digest.update), text))
            digest.update(f"{file}\t{text}\n".encode())
    if not lines:
        msg = f"{folder} has no line of split {split!r}: check lines/sources.tsv and splits.tsv, or use --split all"
        raise SourceError(msg)
    pages = []
    for file, origin in _pages(folder / "pages" / "labels.jsonl"):
        if wanted(origin):
            pages.append(_picture(folder / "pages" / file, digest.update))
            digest.update(f"{file}\n".encode())
    return Split(tuple(lines), tuple(pages), digest.hexdigest())


def _rows(path: Path, *, optional: bool = False) -> list[tuple[str, str]]:
    """Pairs of a file of two columns."""
    if optional and not path.exists():
        return []
    rows = []
    for number, row in enumerate(_text(path), start=1):
        left, tab, right = row.partition("\t")
        if not tab or not left:
            msg = f"{path}:{number} is not two columns with a tab between"
            raise SourceError(msg)
        rows.append((left, right))
    return rows


def _pages(path: Path) -> list[tuple[str, str]]:
    """File and origin of each page; pages are optional."""
    if not path.exists():
        return []
    try:
        pages = [json.loads(row) for row in _text(path)]
        return [(str(page["file"]), str(page.get("source", ""))) for page in pages]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is not one JSON object with a file name a line ({error})"
        raise SourceError(msg) from error


def _text(path: Path) -> list[str]:
    """Lines of a text file; a label may hold characters that `str.splitlines` takes for an end of line."""
    try:
        text = path.read_bytes().decode().replace("\r\n", "\n").removesuffix("\n")
        return text.split("\n") if text else []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        msg = f"labelled data is needed, but {path} cannot be read ({reason}): give a folder of that layout with --data"
        raise SourceError(msg) from error


def _picture(path: Path, saw: Callable[[bytes], None]) -> Array:
    try:
        content = path.read_bytes()
        saw(hashlib.sha256(content).digest())
        return picture.decode_picture(content, _MAX_PIXELS)
    except OSError as error:
        msg = f"picture {path} cannot be read ({error.strerror}): correct the labels or bring the file back"
        raise SourceError(msg) from error
    except CallerError as error:
        msg = f"picture {path} cannot be used: {error}"
        raise SourceError(msg) from error


def inputs(role: str, split: Split, settings: reading.ReadingSettings) -> list[dict[str, Array]]:
    """What a graph of `role` gets to see of `split`: the very tensors that the reading task hands it."""
    pictures = [line.picture for line in split.lines]
    if role == "recognise":
        return [{"x": lines_task.prepare(line)} for line in pictures]
    seen: list[dict[str, Array]] = []

    def run(_: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Keep what the task hands over, and answer that there is nothing."""
        seen.append(dict(tensors))
        count, _, height, width = tensors["x"].shape
        return {"y": np.zeros((count, 1, height, width) if role == "detect" else (count, 2), np.float32)}

    if role == "detect":
        for page in split.pages or pictures[::_DETECT_EVERY]:
            reading.detect(page, settings, run)
    else:
        for line in pictures:
            reading.upside_down([line, np.rot90(line, 2)], settings, run)
    return seen
