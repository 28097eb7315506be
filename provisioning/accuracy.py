"""Reads labelled lines and pages, and compares: with the labels, and pairwise with the graphs as published.

Texts are compared normalised (`models.tasks.text`). A labelled text of a page, of two characters or more, counts as
found when it is part of a line that was read there, or within a fifth of its length (edit distance) of one.

What two readings of the same data differ by is estimated in pairs, because both meet the same hard lines. Its 95 %
interval is that of the bootstrap (Efron 1979) over lines, with a fixed seed. Its standard error is that of the
bootstrap, but never less than one line (one character, for the error rate) in all: that two readings agree
everywhere on few lines does not prove that they always do. The lines of one page are drawn as if they were
independent, which they are not quite: an interval from few pages is too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from appliance.runtime import Runtime, Session
from kernels.reference import ctc_head_of_softmax
from models import schema
from models.bundle import Accuracy, Agreement, Check
from models.errors import BadInput, SourceError
from models.spec import Array, ModelSpec
from models.tasks import detection, text
from models.tasks import lines as lines_task
from models.tasks.detection import Boxes, DetectionSettings
from models.tasks.reading import Reading, ReadingSettings, prepare_line
from provisioning.data import Line, Page

_RESAMPLES = 2000
_POINT = 0.01
_DIGITS = 6
_LEAST_CHARACTERS = 2
_TINY = 1e-12
_SAME_BOX = 0.5
"""Intersection over union from which two boxes count as one."""
_FAR = 0.2
"""Edit distance, as a share of the label's length, up to which a labelled text of a page counts as found."""


class Published:
    """A checkpoint as its publishers exported it, behind the face of a packed graph with one input.

    Its input is `x`, whatever it is called. With `ctc_head`, its softmax becomes `index` and `probability`.
    """

    def __init__(self, session: Session, *, ctc_head: bool = False) -> None:
        """Wrap `session`, which it owns from now on."""
        self.spec: ModelSpec = session.spec
        self._session = session
        self._ctc_head = ctc_head

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """All outputs for `x`; see `Session.run`."""
        if outputs is not None or len(inputs) != len(self.spec.inputs):
            raise BadInput("a published graph takes all its inputs and gives all its outputs")
        names = [tensor.name for tensor in self.spec.inputs] if len(inputs) == 1 else list(inputs)
        answers = self._session.run(dict(zip(names, inputs.values(), strict=True)))
        if not self._ctc_head:
            return answers
        (softmax,) = answers.values()
        index, probability = ctc_head_of_softmax(softmax)
        return {"index": index, "probability": probability}

    def close(self) -> None:
        """See `Session.close`."""
        self._session.close()


def read_lines(
    graph: bytes,
    lines: Sequence[Line],
    labels: Sequence[str],
    runtime: Runtime,
    threads: int,
    settings: ReadingSettings | None,
) -> list[str]:
    """What a recogniser reads on each line, made to fit by the `settings` of its task.

    None stands for a checkpoint, which is measured as its publishers measure it: width kept, padded to at least 320
    and no further.
    """
    opened = runtime.open(graph, threads=1)
    session: Session = opened if settings else Published(opened, ctc_head=True)

    def read(line: Line) -> str:
        if settings:
            x_NCHW = prepare_line(line.picture, settings)
        else:
            x_NCHW = lines_task.prepare(line.picture)
            height, width = line.picture.shape[:2]
            content = -(-lines_task.HEIGHT * width // height)
            x_NCHW = x_NCHW[:, :, :, : max(content, lines_task.MIN_WIDTH)]
        answers = session.run({"x": np.ascontiguousarray(x_NCHW)})
        return lines_task.decode(answers["index"][0], answers["probability"][0], labels)[0]

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(read, lines))


def read_pages(
    sessions: Mapping[str, Session],
    pages: Sequence[Page],
    settings: Mapping[str, Any],
    labels: Sequence[str],
    threads: int,
) -> list[list[str]]:
    """What the reading task with these graphs (`det`, `cls`, `rec`) reads on each page, line by line."""
    task = Reading(settings, labels)

    def run(graph: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return sessions[graph].run(inputs)

    with ThreadPoolExecutor(threads) as pool:
        answers = pool.map(lambda page: task.predict(page.picture, run)["lines"], pages)
        return [[str(line["text"]) for line in lines] for lines in answers]


@dataclass(frozen=True, slots=True)
class Counted:
    """What one reading got wrong, item by item: `wrong` of `size`, both float64 [items]."""

    wrong: Array
    size: Array

    @property
    def share(self) -> float:
        """Wrong of all."""
        return float(self.wrong.sum() / max(self.size.sum(), 1))


@dataclass(frozen=True, slots=True)
class Difference:
    """How much more another reading of the same items gets wrong than the original, as shares of all."""

    original: float
    packed: float
    low: float
    """Of the 95 % interval of packed minus original."""
    high: float
    standard_error: float

    @classmethod
    def of(cls, original: Counted, packed: Counted) -> Difference:
        """Compare two readings of the same items."""
        items = len(original.size)
        drawn = np.random.default_rng(0).integers(items, size=(_RESAMPLES, items))
        size = original.size[drawn].sum(axis=1)
        samples = (packed.wrong - original.wrong)[drawn].sum(axis=1) / np.maximum(size, 1)
        low, high = np.percentile(samples, [2.5, 97.5])
        least = 1 / max(original.size.sum(), 1)
        error = max(float(samples.std()), float(least))
        return cls(*(round(float(one), _DIGITS) for one in (original.share, packed.share, low, high, error)))

    def check(self, name: str, limit: float, on: str) -> Check:
        """Hold the difference against `limit` of the recipe, called `name`; `on` says what was counted."""
        more = round(self.packed - self.original, _DIGITS)
        return Check(name, limit, more, more <= limit, on, (self.low, self.high), limit >= self.standard_error)


def missed(lines: Sequence[Line], read: Sequence[str]) -> Counted:
    """Lines that were not read exactly."""
    return Counted(np.array([float(label != text) for label, text in _pairs(lines, read)]), np.ones(len(lines)))


def mistaken(lines: Sequence[Line], read: Sequence[str]) -> Counted:
    """Characters to correct, of those in the labels."""
    pairs = _pairs(lines, read)
    return Counted(
        np.array([float(text.edit_distance(*pair)) for pair in pairs]),
        np.array([float(len(label)) for label, _ in pairs]),
    )


def overlooked(pages: Sequence[Page], read: Sequence[Sequence[str]]) -> Counted:
    """Labelled texts of pages that were not found."""
    wrong = [not found for page, lines in zip(pages, read, strict=True) for found in _found(page, lines)]
    return Counted(np.array(wrong, np.float64), np.ones(len(wrong)))


def _found(page: Page, lines: Sequence[str]) -> list[bool]:
    read = [text.normalise(line, page.source) for line in lines]
    labels = [text.normalise(label, page.source) for label in page.texts]
    return [
        any(label in line or _close(label, line) for line in read)
        for label in labels
        if len(label) >= _LEAST_CHARACTERS
    ]


def _close(label: str, line: str) -> bool:
    most = _FAR * len(label)
    return abs(len(label) - len(line)) <= most and text.edit_distance(label, line) <= most


def _pairs(lines: Sequence[Line], read: Sequence[str]) -> list[tuple[str, str]]:
    """Label and reading of each line, normalised."""
    return [
        (text.normalise(line.text, line.source), text.normalise(one, line.source))
        for line, one in zip(lines, read, strict=True)
    ]


def accuracy(lines: Sequence[Line], read: Sequence[str]) -> Accuracy:
    """Exact match and character error rate of what was `read`.

    Where no label has a character, the error rate is the number of characters that were read all the same.
    """
    exact, cer = 1 - missed(lines, read).share, mistaken(lines, read).share
    return Accuracy(round(exact, _DIGITS), round(cer, _DIGITS), len(lines))


def compare(lines: Sequence[Line], original: Sequence[str], packed: Sequence[str]) -> dict[str, Any]:
    """Two readings of the same lines; shares between 0 and 1, only CER may pass 1.

    `agreement` is the share of lines on which both read the same normalised text, `interval` the 95 % interval of
    packed minus original. `resolved` tells whether the lines are enough to see one point: one
    standard error of the difference of exact match is no more than 0.01.
    """
    exact, cer = (Difference.of(count(lines, original), count(lines, packed)) for count in (missed, mistaken))
    same = [one[1] == other[1] for one, other in zip(_pairs(lines, original), _pairs(lines, packed), strict=True)]
    by_source = {
        source: {
            name: schema.dump(accuracy([lines[i] for i in chosen], [read[i] for i in chosen]))
            for name, read in (("original", original), ("packed", packed))
        }
        for source, chosen in _by_source(lines).items()
    }
    return {
        "original": schema.dump(accuracy(lines, original)),
        "packed": schema.dump(accuracy(lines, packed)),
        "agreement": round(float(np.mean(same)), _DIGITS),
        # `exact` counts what was missed; more missed is less exact
        "interval": {"exact": [0.0 - exact.high, 0.0 - exact.low], "cer": [cer.low, cer.high]},
        "standard_error": {"exact": exact.standard_error, "cer": cer.standard_error},
        "resolved": exact.standard_error <= _POINT,
        "by_source": by_source,
    }


def compare_pages(
    pages: Sequence[Page], original: Sequence[Sequence[str]], packed: Sequence[Sequence[str]]
) -> dict[str, Any] | None:
    """Two readings of the same pages: shares of the labelled texts found; None when no text is labelled there."""
    one, other = overlooked(pages, original), overlooked(pages, packed)
    if not len(one.size):
        return None
    difference = Difference.of(one, other)
    return {
        "original": _found_share(one),
        "packed": _found_share(other),
        "interval": {"found": [0.0 - difference.high, 0.0 - difference.low]},
        "standard_error": {"found": difference.standard_error},
        "by_source": {
            source: {
                name: _found_share(overlooked([pages[i] for i in chosen], [read[i] for i in chosen]))
                for name, read in (("original", original), ("packed", packed))
            }
            for source, chosen in _by_source(pages).items()
        },
    }


def _found_share(counted: Counted) -> dict[str, Any]:
    return {"found": round(1 - counted.share, _DIGITS), "lines": len(counted.size)}


def _by_source(pictures: Iterable[Line | Page]) -> dict[str, list[int]]:
    """Indices of pictures by their source, sources in alphabetical order."""
    found: dict[str, list[int]] = {}
    for i, picture in enumerate(pictures):
        found.setdefault(picture.source, []).append(i)
    return dict(sorted(found.items()))


def same_class(
    original: Session, packed: Session, inputs: Sequence[Mapping[str, Array]], what: str = "line pictures"
) -> Agreement:
    """Share of samples, which `what` names, that get the same class from both."""
    same = np.concatenate([_class(original, one) == _class(packed, one) for one in inputs])
    return Agreement(round(float(same.mean()), _DIGITS), f"{same.sum()} of {same.size} {what}")


def _class(session: Session, inputs: Mapping[str, Array]) -> Array:
    scores = _only(session, inputs)
    return np.asarray(scores.reshape(len(scores), -1).argmax(axis=1))


def matched(
    original: Session, packed: Session, inputs: Sequence[Mapping[str, Array]], settings: DetectionSettings
) -> Agreement:
    """Share of the boxes found by either that both found: of one class, at an intersection over union of 0.5 or more.

    Raises SourceError when neither found any.
    """
    pairs = found = 0
    for one in inputs:
        mine, theirs = (detection.boxes_of(_only(session, one), settings) for session in (original, packed))
        pairs += _pairs_of(mine, theirs)
        found += len(mine.classes) + len(theirs.classes)
    if not found:
        msg = (
            f"the model finds nothing on {len(inputs)} pictures, so nothing can be compared: take pictures of what it "
            "is to find, or correct task.settings (head, colours, scale, min_confidence)"
        )
        raise SourceError(msg)
    on = f"{2 * pairs} of {found} boxes of both on {len(inputs)} unlabelled pictures"
    return Agreement(round(2 * pairs / found, _DIGITS), on)


def _pairs_of(mine: Boxes, theirs: Boxes) -> int:
    """How many boxes have a partner in the other picture's, each at most one; the surest choose first."""
    free, pairs = np.ones(len(theirs.classes), bool), 0
    for corners, kind in zip(mine.corners, mine.classes, strict=True):
        low, high = np.maximum(corners[:2], theirs.corners[:, :2]), np.minimum(corners[2:], theirs.corners[:, 2:])
        both = np.maximum(high - low, 0).prod(axis=1)
        areas = (theirs.corners[:, 2:] - theirs.corners[:, :2]).prod(axis=1)
        either = areas + (corners[2:] - corners[:2]).prod() - both
        share = np.where(free & (theirs.classes == kind), both / np.maximum(either, _TINY), 0.0)
        if share.max(initial=0.0) >= _SAME_BOX:
            free[share.argmax()] = False
            pairs += 1
    return pairs


def overlap(original: Session, packed: Session, inputs: Sequence[Mapping[str, Array]], threshold: float) -> Agreement:
    """Intersection over union of the areas above `threshold` in the maps of both, over all samples."""
    both = either = 0
    for one in inputs:
        a, b = _only(original, one) > threshold, _only(packed, one) > threshold
        both += int((a & b).sum())
        either += int((a | b).sum())
    return Agreement(round(both / either, _DIGITS) if either else 1.0, f"{len(inputs)} pictures")


def output_agreement(original: Session, other: Session, inputs: Sequence[Mapping[str, Array]]) -> dict[str, float]:
    """How alike the float outputs of two graphs are, over all samples.

    `cosine` is the mean over samples of the cosine between all numbers of both outputs, `error` the root of the squared
    difference over the squared output.
    """
    cosines, difference, whole = [], 0.0, 0.0
    for one in inputs:
        a, b = (_floats(session.run(one)) for session in (original, other))
        cosines.append(float(a @ b / np.maximum(np.linalg.norm(a) * np.linalg.norm(b), _TINY)))
        difference, whole = difference + float(((a - b) ** 2).sum()), whole + float((a**2).sum())
    return {"cosine": round(float(np.mean(cosines)), _DIGITS), "error": round((difference / whole) ** 0.5, _DIGITS)}


def same_outputs(original: Session, packed: Session, inputs: Sequence[Mapping[str, Array]]) -> Agreement:
    """Mean cosine of the outputs of both."""
    return Agreement(output_agreement(original, packed, inputs)["cosine"], f"{len(inputs)} samples")


def _floats(outputs: Mapping[str, Array]) -> Array:
    parts = [output.reshape(-1).astype(np.float64) for output in outputs.values() if output.dtype.kind == "f"]
    return np.concatenate(parts)


def _only(session: Session, inputs: Mapping[str, Array]) -> Array:
    (output,) = session.run(inputs).values()
    return output
