"""Labelled pictures on disk, and what the graphs of a reading pipeline get to see of them.

A folder holds

    lines/labels.tsv     file<TAB>text, pictures beside it
    lines/sources.tsv    file<TAB>source/origin: the page, photo or plate a line was cut from
    pages/labels.jsonl   an object a page: `file`, `source` (its source/origin), `lines`, each with `text` and `ignore`
    splits.tsv           origin<TAB>calibrate|tune|gate

Lines or pages must be there, everything else may be missing; pictures are JPEG or PNG. Calibration data shapes a model
and is never scored; gate data is scored and never shapes one. So a build needs lines and splits, its folder's own or
the project's, which know every origin of the larger set that the project's data is a part of.
To measure a folder without splits every line and page counts, but for those whose origin is in another split of
the project: a build may have seen them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from models.errors import CallerError, ConfigError, SourceError
from models.spec import Array
from models.tasks import lines as lines_task
from models.tasks import picture, reading, text

SPLITS = ("calibrate", "tune", "gate")
ALL = "all"
DEFAULT = Path("tests/data/ocr")
"""Where a project keeps its labelled data."""
_UNREADABLE = "###"
"""What ICDAR labels a word with that its publishers could not read."""
_MAX_PIXELS = 50_000_000
_DETECT_EVERY = 4
"""Without pages to calibrate with, every so many of the lines are shown to the detector as if they were pages."""


@dataclass(frozen=True, slots=True)
class Line:
    """A picture of one line of text (uint8 BGR, [H, W, C]) with its label."""

    file: str
    picture: Array
    text: str
    source: str
    """What kind of picture it is: "sroie"."""


@dataclass(frozen=True, slots=True)
class Page:
    """A picture of a whole page (uint8 BGR, [H, W, C]) with the texts that can be read on it."""

    file: str
    picture: Array
    texts: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a folder."""

    lines: tuple[Line, ...]
    pages: tuple[Page, ...]
    sha256: str
    """Digest of names, labels and picture files."""
    left_out: int = 0
    """Lines and pages of the folder that are in another split."""
    tensors: Mapping[str, tuple[dict[str, Array], ...]] = field(default_factory=dict)
    """Graph -> what it is shown, where there are no lines and pages (see `provisioning.samples`)."""


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


def load(folder: Path, split: str, splits_file: Path | None = None, project: Path | None = None) -> Split:
    """Read the lines and pages of `split` ("all" for every one); raises SourceError naming what is wrong.

    Splits are those of `splits_file`, of the folder's own splits.tsv, or of the data folder of `project`, whichever is
    there first; in the last, what is of an unknown origin is in every split.
    """
    own = splits_file or folder / "splits.tsv"
    theirs = project / "splits.tsv" if project and splits_file is None and not own.exists() else None
    splits = dict(_rows(theirs or own, optional=splits_file is None))
    unknown = [one for one in (split, *splits.values()) if one not in {*SPLITS, ALL}]
    if unknown:
        where = f"{theirs or own}: " if split in {*SPLITS, ALL} else ""
        msg = f"{where}there is no split {unknown[0]!r}: choose one of {', '.join(SPLITS)}, or {ALL} to read every one"
        raise ConfigError(msg)
    origins = dict(_rows(folder / "lines" / "sources.tsv", optional=True))

    def wanted(origin: str) -> bool:
        return split == ALL or not splits or splits.get(origin, split if theirs else "") == split

    digest = hashlib.sha256()
    documents = _pages(folder / "pages" / "labels.jsonl")
    rows = _rows(folder / "lines" / "labels.tsv", optional=bool(documents))
    lines = []
    for file, label in rows:
        origin = origins.get(file, "")
        if wanted(origin):
            lines.append(Line(file, _picture(folder / "lines" / file, digest.update), label, _source(origin, file)))
            digest.update(f"{file}\t{label}\n".encode())
    pages = []
    for file, origin, texts in documents:
        if wanted(origin):
            pages.append(Page(file, _picture(folder / "pages" / file, digest.update), texts, _source(origin, file)))
            digest.update(f"{file}\t{json.dumps(texts)}\n".encode())
    if not lines and not pages:
        msg = f"{folder} has no line of split {split!r}: check lines/sources.tsv and splits.tsv, or use --split all"
        raise SourceError(msg)
    return Split(tuple(lines), tuple(pages), digest.hexdigest(), len(rows) + len(documents) - len(lines) - len(pages))


def require_lines(folder: Path, splits: Mapping[str, Split]) -> None:
    """Raise SourceError unless each of `splits`, by name, has lines: what shapes and judges a recogniser."""
    for name, split in splits.items():
        if not split.lines:
            msg = f"{folder} has no line of split {name!r}: check lines/sources.tsv and splits.tsv"
            raise SourceError(msg)


def _source(origin: str, file: str) -> str:
    """Source of a picture: the first part of its origin or else of its name; "other" when neither has parts."""
    source, slash, _ = origin.partition("/")
    if slash and source:
        return source
    name = PurePosixPath(file).name
    return text.source_of(name) or "other" if "_" in name else "other"


def _rows(path: Path, *, optional: bool = False) -> list[tuple[str, str]]:
    """Pairs of a file of two columns; empty rows say nothing."""
    if optional and not path.exists():
        return []
    rows = []
    for number, row in enumerate(_text(path), start=1):
        left, tab, right = row.rstrip("\r").partition("\t")
        if not row.strip():
            continue
        if not tab or not left:
            msg = f"{path}:{number} is not two columns with a tab between: correct that row"
            raise SourceError(msg)
        rows.append((left, right))
    return rows


def _pages(path: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """File, origin and readable texts of each page; pages are optional."""
    if not path.exists():
        return []
    pages = []
    for number, row in enumerate(_text(path), start=1):
        if not row.strip():
            continue
        try:
            page = json.loads(row)
            lines = [
                line for line in page.get("lines") or () if not line.get("ignore") and line.get("text") != _UNREADABLE
            ]
            texts = tuple(str(line.get("text") or "") for line in lines)
            pages.append((str(page["file"]), str(page.get("source", "")), texts))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"{path}:{number} is not one JSON object with a file name and its lines ({error}): correct that row"
            raise SourceError(msg) from error
    return pages


def _text(path: Path) -> list[str]:
    """Lines of a text file; a label may hold characters that `str.splitlines` takes for an end of line."""
    try:
        content = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        return content.split("\n") if content else []
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
    except (CallerError, ValueError) as error:  # no picture, or a name that no file can have
        shown = str(path) if str(path).isprintable() else repr(str(path))
        msg = f"picture {shown} cannot be used: {error}"
        raise SourceError(msg) from error


def inputs(role: str, split: Split, settings: reading.ReadingSettings, graph: str = "") -> list[dict[str, Array]]:
    """What `graph`, of `role`, gets to see of `split`: the very tensors that the reading task hands it.

    Lines alone are padded to the width of training, whatever the task's settings make of them.
    """
    if split.tensors:
        return list(split.tensors[graph])
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
        for page in [page.picture for page in split.pages] or pictures[::_DETECT_EVERY]:
            reading.detect(page, settings, run)
    else:
        for line in pictures:
            reading.upside_down([line, np.rot90(line, 2)], settings, run)
    return seen
