"""The gate: every precision of a graph is compared with the graph as published before it may be packed.

A limit of the recipe holds for the point estimate on gate data. Beside it stand the paired 95 % interval and
whether so many lines can resolve the limit at all, which decide nothing (see docs/accuracy.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from appliance.runtime import Runtime
from models import schema
from models.bundle import Accuracy, Agreement, Check
from models.tasks.detection import DetectionSettings
from models.tasks.reading import ReadingSettings
from provisioning import accuracy, data
from provisioning.recipe import GraphRecipe
from provisioning.steps import THREADS, Steps

READERS = {"detect": "det", "classify": "cls", "recognise": "rec"}
"""Role -> name of the graph that plays it in the reading task."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was measured of one precision, and why it may not be packed; `reason` is empty when it may."""

    reason: str
    accuracy: Accuracy | None = None
    agreement: Agreement | None = None
    checks: tuple[Check, ...] = ()
    comparison: Mapping[str, Any] = field(default_factory=dict)
    """Of a recogniser, what `accuracy.compare` says; of a detector, what `accuracy.compare_pages` says."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Judges the precisions of one graph."""

    steps: Steps
    runtime: Runtime
    split: data.Split
    settings: ReadingSettings
    labels: Sequence[str]
    name: str
    graph: GraphRecipe
    published: Mapping[str, bytes]
    """All graphs as published, by name; `name` is the one that is judged."""
    boxes: DetectionSettings | None = None
    """Of a graph of role "locate"."""

    def original(self) -> Accuracy | None:
        """How well the graph as published reads; None for one that does not read."""
        if self.graph.role != "recognise":
            return None
        return accuracy.accuracy(self.split.lines, self._read("original", self.published[self.name]))

    def judge(self, precision: str, content: bytes) -> Verdict:
        """Whether `content` may be packed."""
        if self.graph.role == "recognise":
            return self._judge_recogniser(precision, content)
        if self.graph.role == "classify":
            unlabelled = len(self.split.tensors.get(self.name, ()))
            what = "unlabelled pictures" if unlabelled else "line pictures"
            agreement = self._agreement(precision, content, partial(accuracy.same_class, what=what))
            check = _kept("same_class", self.graph.gate.same_class, agreement, unlabelled)
            return _verdict([check], agreement=agreement)
        if self.boxes is not None:
            agreement = self._agreement(precision, content, partial(accuracy.matched, settings=self.boxes))
            return _verdict([_kept("matched", self.graph.gate.matched, agreement)], agreement=agreement)
        if self.graph.role == "encode":
            agreement = self._agreement(precision, content, accuracy.same_outputs)
            return _verdict([_kept("cosine", self.graph.gate.cosine, agreement)], agreement=agreement)
        return self._judge_detector(precision, content)

    def _judge_recogniser(self, precision: str, content: bytes) -> Verdict:
        lines, limits = self.split.lines, self.graph.gate
        original = self._read("original", self.published[self.name])
        packed = self._read(precision, content)
        checks = recogniser_checks(
            lines, original, packed, {"exact_drop": limits.exact_drop, "cer_drop": limits.cer_drop}
        )
        comparison = accuracy.compare(lines, original, packed)
        return _verdict(checks, accuracy=accuracy.accuracy(lines, packed), comparison=comparison)

    def _judge_detector(self, precision: str, content: bytes) -> Verdict:
        overlap = partial(accuracy.overlap, threshold=self.settings.text_threshold)
        agreement = self._agreement(precision, content, overlap)
        checks = [_kept("overlap", self.graph.gate.overlap, agreement)]
        comparison: dict[str, Any] | None = None
        if self.graph.gate.found_drop is not None:
            pages = self.split.pages
            original = self._read_pages("original", self.published[self.name])
            packed = self._read_pages(precision, content)
            comparison = accuracy.compare_pages(pages, original, packed)
            if comparison:
                checks += detector_checks(pages, original, packed, {"found_drop": self.graph.gate.found_drop})
        return _verdict(checks, agreement=agreement, comparison=comparison or {})

    def _read(self, precision: str, content: bytes) -> list[str]:
        settings = None if precision == "original" else self.settings

        def read() -> bytes:
            lines, labels = self.split.lines, self.labels
            return _json(accuracy.read_lines(content, lines, labels, self.runtime, THREADS, settings))

        inputs: list[bytes | str] = [content, self.split.sha256]
        key = [settings and schema.dump(settings), list(self.labels)]
        found: list[str] = json.loads(self.steps.run("read", self.name, precision, inputs, key, read))
        return found

    def _read_pages(self, precision: str, detector: bytes) -> list[list[str]]:
        """What is read on the gate pages with `detector`, and everything else as published."""
        graphs = {**self.published, self.name: detector}

        def read() -> bytes:
            sessions = {
                name: accuracy.Published(self.runtime.open(graphs[name], threads=1), ctc_head=role == "recognise")
                for role, name in READERS.items()
            }
            settings = schema.dump(self.settings)
            return _json(accuracy.read_pages(sessions, self.split.pages, settings, self.labels, THREADS))

        inputs: list[bytes | str] = [*(graphs[name] for name in READERS.values()), self.split.sha256]
        key = [schema.dump(self.settings), list(self.labels)]
        found: list[list[str]] = json.loads(self.steps.run("read_pages", self.name, precision, inputs, key, read))
        return found

    def _agreement(self, precision: str, content: bytes, measure: Callable[..., Agreement]) -> Agreement:
        published = self.published[self.name]

        def compare() -> bytes:
            original = accuracy.Published(self.runtime.open(published, threads=1))
            packed = self.runtime.open(content, threads=1)
            inputs = data.inputs(self.graph.role, self.split, self.settings, self.name)
            return _json(schema.dump(measure(original, packed, inputs)))

        inputs: list[bytes | str] = [published, content, self.split.sha256]
        settings = [self.graph.role, schema.dump(self.settings), schema.dump(self.boxes)]
        found = self.steps.run("compare", self.name, precision, inputs, settings, compare)
        return schema.load(Agreement, json.loads(found))


def recogniser_checks(
    lines: Sequence[data.Line], original: Sequence[str], packed: Sequence[str], limits: Mapping[str, float | None]
) -> list[Check]:
    """Hold what two readings of `lines` differ by against `limits`, by name; None is no limit."""
    counts = {"exact_drop": accuracy.missed, "cer_drop": accuracy.mistaken}
    return [
        accuracy.Difference.of(count(lines, original), count(lines, packed)).check(name, limit, f"{len(lines)} lines")
        for name, count in counts.items()
        if (limit := limits.get(name)) is not None
    ]


def detector_checks(
    pages: Sequence[data.Page],
    original: Sequence[Sequence[str]],
    packed: Sequence[Sequence[str]],
    limits: Mapping[str, float | None],
) -> list[Check]:
    """The same for what two detectors let the other graphs find on `pages`."""
    limit = limits.get("found_drop")
    if limit is None:
        return []
    one, other = accuracy.overlooked(pages, original), accuracy.overlooked(pages, packed)
    on = f"{len(one.size)} labelled texts of {len(pages)} pages"
    return [accuracy.Difference.of(one, other).check("found_drop", limit, on)]


def _kept(name: str, limit: float | None, agreement: Agreement, count: int = 0) -> Check:
    """Hold `agreement` against `limit`; one of `count` samples may differ, or so few cannot resolve the limit."""
    least = limit or 0.0
    resolved = not count or count * (1 - least) >= 1
    return Check(name, least, agreement.share, agreement.share >= least, agreement.on, resolved=resolved)


_LOSSES = {
    "exact_drop": ("exact match", "fell", "rose"),
    "cer_drop": ("the character error rate", "rose", "fell"),
    "found_drop": ("the share of labelled page lines found", "fell", "rose"),
}
"""Limit of a loss -> what is meant, and what it did when something was lost, and when something was won."""
_SHARES = {
    "same_class": "same class",
    "matched": "boxes that both found",
    "cosine": "cosine of the outputs",
    "overlap": "overlap of the text found",
}


def said(check: Check) -> str:
    """One check in words. A loss and its interval, of which less is better, are in points of a share."""
    doubt = "" if check.resolved else f"; not resolved by {check.on}"
    if check.name in _SHARES:
        share = f"{_SHARES[check.name]}: {check.measured:.2%} ({check.on})"
        return f"{share}, the limit {check.name} is {check.limit:.2%}{doubt}"
    what, lost, won = _LOSSES[check.name]
    did, points = (lost if check.measured >= 0 else won), abs(check.measured) * 100
    interval = " to ".join(f"{one * 100:+.2f}" for one in check.interval)
    within = f", 95 % interval of the loss {interval}" if interval else ""
    return (
        f"{what} {did} by {points:.2f} points ({check.on}{within}), "
        f"the limit {check.name} is {check.limit * 100:.2f}{doubt}"
    )


def _verdict(checks: Sequence[Check], **measured: Any) -> Verdict:  # noqa: ANN401 - fields of Verdict
    reason = "; ".join(said(check) for check in checks if not check.met)
    return Verdict(reason, checks=tuple(checks), **measured)


def _json(value: Any) -> bytes:  # noqa: ANN401 - plain data
    return json.dumps(value, ensure_ascii=False).encode()
