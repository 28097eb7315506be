"""The gate: every precision of a graph is compared with the graph as published before it may be packed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from appliance.runtime import Runtime
from models import schema
from models.bundle import Accuracy, Agreement
from models.tasks.reading import ReadingSettings
from provisioning import accuracy, data
from provisioning.recipe import GraphRecipe
from provisioning.steps import THREADS, Steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was measured of one precision, and why it may not be packed; `reason` is empty when it may."""

    reason: str
    accuracy: Accuracy | None = None
    agreement: Agreement | None = None


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
    published: bytes

    def original(self) -> Accuracy | None:
        """How well the graph as published reads; None for one that does not read."""
        return self._accuracy("original", self.published) if self.graph.role == "recognise" else None

    def judge(self, precision: str, content: bytes, original: Accuracy | None) -> Verdict:
        """Whether `content` may be packed; `original` is what `original` returned."""
        limits = self.graph.gate
        if original:
            measured = self._accuracy(precision, content)
            drop, most = original.exact - measured.exact, limits.exact_drop or 0.0
            reason = (
                f"exact match fell by {drop:.1%} to {measured.exact:.1%} "
                f"on {original.lines} gate lines, the limit is {most:.1%}"
            )
            return Verdict("" if drop <= most else reason, accuracy=measured)
        if self.graph.role == "classify":
            agreement = self._agreement(precision, content, accuracy.same_class)
            what, least = "same class", limits.same_class or 0.0
        else:
            overlap = partial(accuracy.overlap, threshold=self.settings.text_threshold)
            agreement = self._agreement(precision, content, overlap)
            what, least = "overlap of the text found", limits.overlap or 0.0
        reason = f"{what}: {agreement.share:.1%} ({agreement.on}), the limit is {least:.1%}"
        return Verdict("" if agreement.share >= least else reason, agreement=agreement)

    def _accuracy(self, precision: str, content: bytes) -> Accuracy:
        lines = self.split.lines
        read = self.steps.run(
            "read",
            self.name,
            precision,
            [content, self.split.sha256],
            None,
            lambda: _json(accuracy.read_lines(content, lines, self.labels, self.runtime, THREADS)),
        )
        return accuracy.accuracy(lines, json.loads(read))

    def _agreement(self, precision: str, content: bytes, measure: Callable[..., Agreement]) -> Agreement:
        def compare() -> bytes:
            sessions = [self.runtime.open(graph, threads=THREADS) for graph in (self.published, content)]
            return _json(schema.dump(measure(*sessions, data.inputs(self.graph.role, self.split, self.settings))))

        inputs: list[bytes | str] = [self.published, content, self.split.sha256]
        settings = [self.graph.role, schema.dump(self.settings)]
        found = self.steps.run("compare", self.name, precision, inputs, settings, compare)
        return schema.load(Agreement, json.loads(found))


def _json(value: Any) -> bytes:  # noqa: ANN401 - plain data
    return json.dumps(value, ensure_ascii=False).encode()
