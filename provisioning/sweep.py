"""Measures a graph with every number of key and value heads that its attention can share, by every method.

The graph that is compared is the one that would be built without sharing; a recogniser's readings are also compared
with those of the graph as published, in pairs, as the gate does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from appliance.runtime import Runtime
from appliance.runtime.machine import machine, time_in_turn
from kernels.reference import ctc_head_of_softmax
from models import schema
from models.spec import Array
from models.tasks import lines as lines_task
from provisioning import accuracy, sharing
from provisioning.build import Room, open_room
from provisioning.cache import Cache
from provisioning.peak import peak_bytes
from provisioning.plot import Panel, svg
from provisioning.recipe import RecipeFile
from provisioning.sharing import METHODS, Sharing
from provisioning.steps import THREADS, Report

ALL_HEADS = "none"
"""Stands where a method stands, in the row of the graph whose heads share nothing."""
_RUNS = 15
_LIMIT_S = 60.0
_DIGITS = 6
_TINY = 1e-12
_OF_READERS = (
    ("exact match", "reading.packed.exact", ".1%", 1.0),
    ("character error rate", "reading.packed.cer", ".2%", 1.0),
    ("reads like the original", "reading.agreement", ".1%", 1.0),
    ("KL to all heads", "kl", ".4f", 1.0),
)
_OF_OTHERS = (
    ("cosine of the outputs", "cosine", ".3f", 1.0),
    ("relative error", "error", ".3f", 1.0),
    ("ms", "latency_ms", ".1f", 1.0),
    ("peak MB", "peak_bytes", ".0f", 1e6),
)
_OF_ALL = (("million parameters", "parameters", ".3f", 1e6), ("million multiply-accumulates", "macs", ".1f", 1e6))
"""Panels of the plot: title, field of a row, format and unit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One graph: with `kv_heads` heads of keys and values, found by `method`."""

    kv_heads: int
    method: str
    parameters: int
    """Numbers in its weights."""
    macs: int
    """Multiply-accumulates for the example."""
    latency_ms: float
    peak_bytes: int
    """Largest resident set of a process that opens and runs it."""
    kl: float | None = None
    """Mean divergence of the classes of each time step from those of the graph whose heads share nothing."""
    reading: Mapping[str, Any] | None = None
    """Of a recogniser: `accuracy.compare` with the graph as published, without the sources."""
    cosine: float | None = None
    """Of a graph that does not read: mean cosine between its outputs and those as published."""
    error: float | None = None
    """Of those outputs: root of the squared difference over the squared output, over all samples."""


@dataclass(frozen=True, slots=True)
class Swept:
    """All rows of one graph, the most heads first."""

    recipe: str
    graph: str
    file: str
    blocks: Mapping[str, int]
    """Attention block -> its heads."""
    not_understood: Mapping[str, str]
    """Node that looks like attention -> why it was left alone."""
    split: str
    samples: int
    example: Mapping[str, Sequence[int]]
    """Shapes for which work and time were measured."""
    machine: Mapping[str, str]
    rows: tuple[Row, ...]
    data_sha256: Mapping[str, str] = field(default_factory=dict)

    def to_svg(self) -> str:
        """The same as a picture."""
        heads = sorted({row.kv_heads for row in self.rows}, reverse=True)
        shown = _OF_READERS if self.rows[0].reading is not None else _OF_OTHERS
        panels = [self._panel(*one, heads) for one in (*shown, *_OF_ALL)]
        return svg(f"{self.recipe}, {self.graph}", "key and value heads", [str(n) for n in heads], panels)

    def _panel(self, title: str, path: str, form: str, unit: float, heads: Sequence[int]) -> Panel:
        def value(row: Row) -> float:
            found: Any = schema.dump(row)
            for part in path.split("."):
                found = found.get(part, 0.0)
            return float(found) / unit

        def of(kv_heads: int, method: str) -> float:
            wanted = (kv_heads, ALL_HEADS if kv_heads == heads[0] else method)
            return next(value(row) for row in self.rows if (row.kv_heads, row.method) == wanted)

        return Panel(title, {method: [of(n, method) for n in heads] for method in METHODS}, form)


def sweep_gqa(recipe: RecipeFile, folder: Path, split: str, cache: Cache, report: Report) -> Swept:
    """Sweep the graph of `recipe` that has attention, fitted on the calibration data of `folder`, scored on `split`.

    Raises ConfigError when no graph has attention, SourceError for unusable checkpoints and data.
    """
    room = open_room(recipe, folder, cache, report, ("calibrate", split))
    contents = {name: room.fetch(name) for name in recipe.recipe.graphs}
    found = {name: room.attention(name, content) for name, content in contents.items()}
    sharing.check({f"{name} ({recipe.recipe.graphs[name].file})": one for name, one in found.items()}, 1)
    name = next(name for name, one in found.items() if one.heads)
    return _Sweep(room, name, contents[name], split, report).run(found[name])


@dataclass(slots=True)
class _Sweep:
    room: Room
    name: str
    published: bytes
    split: str
    report: Report

    def run(self, found: sharing.Overview) -> Swept:
        recipe, heads = self.room.file.recipe, min(found.heads.values())
        plain = self.room.normalised(self.name, self.published)
        shared = {(heads, ALL_HEADS): plain}
        for kv_heads in reversed(sharing.divisors(heads)[:-1]):
            for method in METHODS:
                shared[kv_heads, method] = self.room.shared(self.name, plain, Sharing(kv_heads, method))
        graph = recipe.graphs[self.name]
        measure = self._reading if graph.role == "recognise" else self._agreement
        measured = {key: measure(plain, content) for key, content in shared.items()}
        served = {key: self.room.finished(self.name, content) for key, content in shared.items()}
        example = self.room.example(self.name)
        self.report("measuring latency, in turn")
        sessions = {key: self.room.runtime.open(content, threads=1) for key, content in served.items()}
        latency_ms = time_in_turn({str(key): one for key, one in sessions.items()}, example, _RUNS, _LIMIT_S)
        rows = []
        for key, content in served.items():
            self.report(f"{key[0]} heads, {key[1]}: memory")
            weights, macs = _size(content, example, self.room.runtime)
            peak = peak_bytes(content, example)
            rows.append(Row(*key, weights, macs, latency_ms[str(key)], peak, **measured[key]))
        return Swept(
            recipe=recipe.name,
            graph=self.name,
            file=graph.file,
            blocks=found.heads,
            not_understood=found.not_understood,
            split=self.split,
            samples=len(self.room.inputs(self.name, self.split)),
            example={name: array.shape for name, array in example.items()},
            machine=machine(),
            rows=tuple(rows),
            data_sha256={split: its.sha256 for split, its in self.room.splits.items()},
        )

    def _reading(self, plain: bytes, content: bytes) -> dict[str, Any]:
        split, runtime, steps = self.room.splits[self.split], self.room.runtime, self.room.steps
        characters = self.room.labels(self.name, self.published).split("\n")

        def read() -> bytes:
            texts = accuracy.read_lines(self.published, split.lines, characters, runtime, THREADS, None)
            return json.dumps(texts).encode()

        def read_and_compare() -> bytes:
            inputs = self.room.inputs(self.name, self.split)
            texts, kl = _read_and_compare(plain, content, inputs, characters, runtime)
            return json.dumps({"read": texts, "kl": kl}).encode()

        key = [None, characters]  # that of the gate, which reads the original as well
        original = json.loads(steps.run("read", self.name, "original", [self.published, split.sha256], key, read))
        inputs: list[bytes | str] = [plain, content, split.sha256]
        found = json.loads(steps.run("diverge", self.name, "", inputs, characters, read_and_compare))
        compared = accuracy.compare(split.lines, original, found["read"])
        return {"kl": found["kl"], "reading": {key: one for key, one in compared.items() if key != "by_source"}}

    def _agreement(self, plain: bytes, content: bytes) -> dict[str, Any]:
        del plain
        inputs = self.room.inputs(self.name, self.split)
        digest = self.room.splits[self.split].sha256

        def compare() -> bytes:
            original = accuracy.Published(self.room.runtime.open(self.published, threads=THREADS))
            other = self.room.runtime.open(content, threads=THREADS)
            return json.dumps(accuracy.output_agreement(original, other, inputs)).encode()

        settings = schema.dump(self.room.file.recipe.graphs[self.name])
        found = self.room.steps.run("agree", self.name, "", [self.published, content, digest], settings, compare)
        return dict(json.loads(found))


def _read_and_compare(
    plain: bytes, content: bytes, inputs: Sequence[Mapping[str, Array]], labels: Sequence[str], runtime: Runtime
) -> tuple[list[str], float]:
    """What a recogniser that ends in its softmax reads, and its mean divergence from `plain` a time step."""
    one, other = (runtime.open(graph, threads=1) for graph in (plain, content))

    def read(sample: Mapping[str, Array]) -> tuple[str, float]:
        (p_NTK,), (q_NTK,) = one.run(sample).values(), other.run(sample).values()
        index, probability = ctc_head_of_softmax(q_NTK)
        divergence = (p_NTK * (np.log(p_NTK + _TINY) - np.log(q_NTK + _TINY))).sum(axis=-1).mean()
        return lines_task.decode(index[0], probability[0], labels)[0], float(divergence)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(read, inputs))
    return [text for text, _ in found], round(float(np.mean([kl for _, kl in found])), _DIGITS)


def _size(content: bytes, example: Mapping[str, Array], runtime: Runtime) -> tuple[int, int]:
    """Numbers in the weights of a graph, and multiply-accumulates for `example`.

    The graph runs for that: not every size in every graph can be told from the size of its input.
    """
    import onnx_ir as ir  # noqa: PLC0415 - onnx is slow to import

    from provisioning import passes, sensitivity  # noqa: PLC0415
    from provisioning.activations import collector  # noqa: PLC0415

    model = passes.load(content, "the graph")
    arrays = (passes.constant(value) for value in model.graph.initializers.values())
    weights = sum(array.size for array in arrays if array is not None and array.dtype.kind == "f")
    working = [node for node in model.graph if node.op_type in sensitivity.WORKING]
    tensors = {str(value.name): value for node in working for value in (*node.inputs[:2], *node.outputs) if value}
    computed = [name for name, value in tensors.items() if passes.constant(value) is None]
    for name, array in next(iter(collector([example], runtime, 1)(model, computed))).items():
        if name in tensors:
            tensors[name].shape = ir.Shape(array.shape)
    return weights, sum(sensitivity.macs_of(node) for node in working)
