"""From a recipe to graphs that passed their gates: every step in order, with digests of what goes in and out.

    fetch -> normalise [-> ctc_head] = fp32
    fp32 -> watch -> equalise -> watch -> quantize = int8
    every precision -> gate: compared with the graph as published

All of it in memory: writing is for `provisioning.pack`, after all gates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from appliance.runtime import Runtime, choose
from models import schema
from models.bundle import Accuracy, Source, Step
from models.errors import ConfigError, GateFailed, SourceError
from models.folder import pack_arrays, unpack_arrays
from models.spec import Array
from models.tasks.reading import ReadingSettings
from provisioning import accuracy, calibrate, data, sources
from provisioning.cache import Cache
from provisioning.recipe import GraphRecipe, RecipeFile

Report: TypeAlias = Callable[[str], None]
"""Told in words what starts now."""

RUNTIME = "onnxruntime-cpu"
TOOLS = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "opencv-python")
THREADS = 2
"""Each runs its own samples on one core, so results do not depend on how many there are."""
_EXAMPLE_SIDE = 320


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """One graph with the precisions that passed."""

    role: str
    source: Source
    variants: Mapping[str, bytes]
    accuracy: Mapping[str, Accuracy]
    original: Accuracy | None
    left_out: Mapping[str, str]
    example: Mapping[str, Array]
    """An input made of calibration data."""


@dataclass(frozen=True, slots=True)
class Built:
    """All that goes into a bundle."""

    recipe: RecipeFile
    graphs: Mapping[str, BuiltGraph]
    labels: str
    data_sha256: Mapping[str, str]
    tools: Mapping[str, str]
    steps: Sequence[Step]


class Steps:
    """Performs steps once: what was done before with the same inputs, code and tools is taken from the cache."""

    def __init__(self, cache: Cache, report: Report) -> None:
        """Tell `report` of each step before it starts."""
        self.done: list[Step] = []
        self.tools = {tool: metadata.version(tool) for tool in TOOLS}
        self._cache = cache
        self._report = report
        self._code = _digest_of_code()

    def run(
        self, name: str, graph: str, inputs: Sequence[bytes | str], settings: object, make: Callable[[], bytes]
    ) -> bytes:
        """What `make` makes of `inputs` (content, or a digest of it) and `settings`, which are plain data."""
        digests = [one if isinstance(one, str) else hashlib.sha256(one).hexdigest() for one in inputs]
        key = _digest([name, digests, settings, self._code, self.tools])
        content = self._cache.get(key)
        self._report(f"{graph}: {name}" if content is None else f"{graph}: {name} (done before)")
        if content is None:
            content = make()
            self._cache.put(key, content)
        entered = digests[0] if len(digests) == 1 else _digest(digests)
        self.done.append(Step(name, graph, entered, hashlib.sha256(content).hexdigest()))
        return content


def build(recipe: RecipeFile, folder: Path, precision: str, cache: Cache, report: Report) -> Built:
    """Build every graph of `recipe` with the labelled data in `folder`.

    `precision` is "auto" (all that the recipe wants and the gate lets pass) or the only one that is wanted.
    Raises SourceError for unusable checkpoints and data, GateFailed when a graph has no precision left.
    """
    for name, graph in recipe.recipe.graphs.items():
        if precision != "auto" and precision not in graph.precisions:
            msg = f"graph {name} has no {precision} in its recipe, only {', '.join(graph.precisions)}"
            raise ConfigError(msg)
    steps = Steps(cache, report)
    report("reading labelled data")
    file = data.splits_for_build(folder, recipe.default_data)
    splits = {split: data.load(folder, split, file) for split in ("calibrate", "gate")}
    room = _Room(steps, choose(RUNTIME), recipe, splits, precision)
    contents = {name: room.fetch(name) for name in recipe.recipe.graphs}
    labels = "".join(room.labels(name, contents[name]) for name in recipe.recipe.graphs)
    graphs = {name: room.build(name, contents[name], labels.split("\n")) for name in recipe.recipe.graphs}
    digests = {split: its.sha256 for split, its in splits.items()}
    return Built(recipe, graphs, labels, digests, steps.tools, steps.done)


@dataclass(slots=True)
class _Room:
    """What the steps of all graphs share."""

    steps: Steps
    runtime: Runtime
    file: RecipeFile
    splits: Mapping[str, data.Split]
    precision: str
    settings: ReadingSettings = field(init=False)

    def __post_init__(self) -> None:
        task = self.file.recipe.task
        try:
            self.settings = schema.load(ReadingSettings, dict(task.settings) if task.kind == "reading" else {})
        except schema.SchemaError as error:
            msg = f"task.settings of the recipe do not fit: {error}"
            raise ConfigError(msg) from error

    def source(self, name: str) -> Source:
        package, graph = self.file.recipe.source, self.file.recipe.graphs[name]
        return Source(package.package, package.version, graph.file, graph.sha256)

    def fetch(self, name: str) -> bytes:
        source = self.source(name)
        return self.steps.run("fetch", name, [source.sha256], schema.dump(source), lambda: sources.fetch(source))

    def labels(self, name: str, content: bytes) -> str:
        key = self.file.recipe.graphs[name].labels
        return self.steps.run("labels", name, [content], key, lambda: _labels(content, key)).decode() if key else ""

    def build(self, name: str, content: bytes, labels: Sequence[str]) -> BuiltGraph:
        graph = self.file.recipe.graphs[name]
        calibration = data.inputs(graph.role, self.splits["calibrate"], self.settings)
        wanted = graph.precisions if self.precision == "auto" else (self.precision,)
        fp32 = self._fp32(name, graph, content)
        made = {"fp32": fp32}
        if "int8" in wanted:
            made["int8"] = self._int8(name, graph, fp32, calibration)
        gate = _Gate(self.steps, self.runtime, self.splits["gate"], self.settings, labels, name, graph, content)
        reasons = {precision: gate.reason(precision, made[precision]) for precision in wanted}
        passed = {precision: made[precision] for precision, reason in reasons.items() if not reason}
        left_out = {precision: reason for precision, reason in reasons.items() if reason}
        if not passed:
            msg = f"graph {name} has no precision left: " + "; ".join(f"{one}: {why}" for one, why in left_out.items())
            raise GateFailed(msg)
        return BuiltGraph(
            graph.role, self.source(name), passed, gate.measured, gate.original, left_out, _example(calibration)
        )

    def _fp32(self, name: str, graph: GraphRecipe, content: bytes) -> bytes:
        for step in graph.passes:
            content = self.steps.run(step, name, [content], list(graph.shape), _pass(step, name, graph, content))
        return content

    def _int8(self, name: str, graph: GraphRecipe, fp32: bytes, calibration: Sequence[Mapping[str, Array]]) -> bytes:
        digest = self.splits["calibrate"].sha256
        int8 = graph.int8

        def watch(content: bytes) -> bytes:
            return self.steps.run(
                "watch",
                name,
                [content, digest],
                [graph.role, int8.percentile],
                lambda: _watch(content, calibration, self.runtime, int8.percentile),
            )

        seen = watch(fp32)
        even = self.steps.run("equalise", name, [fp32, seen], int8.share, lambda: _equalise(fp32, seen, int8.share))
        seen = watch(even)
        first = int8.float_first
        return self.steps.run("quantize", name, [even, seen], first, lambda: _quantize(even, seen, first))


@dataclass(slots=True)
class _Gate:
    """Compares the precisions of one graph with the graph as published."""

    steps: Steps
    runtime: Runtime
    split: data.Split
    settings: ReadingSettings
    labels: Sequence[str]
    name: str
    graph: GraphRecipe
    published: bytes
    original: Accuracy | None = None
    measured: dict[str, Accuracy] = field(default_factory=dict)

    def reason(self, precision: str, content: bytes) -> str:
        """Why `content` may not be packed; empty when it may."""
        limits = self.graph.gate
        if self.graph.role == "recognise" and limits.exact_drop is not None:
            self.original = self.original or self._accuracy(self.published)
            self.measured[precision] = self._accuracy(content)
            drop = self.original.exact - self.measured[precision].exact
            if drop <= limits.exact_drop:
                return ""
            return (
                f"exact match fell by {drop:.1%} to {self.measured[precision].exact:.1%} "
                f"on {self.original.lines} gate lines, the limit is {limits.exact_drop:.1%}"
            )
        if self.graph.role == "classify":
            share = self._agreement(content, accuracy.same_class)
            what, limit = "the same class on gate lines", limits.same_class or 0.0
        else:
            share = self._agreement(content, partial(accuracy.overlap, threshold=self.settings.text_threshold))
            what, limit = "overlap of the text found on gate pages", limits.overlap or 0.0
        return "" if share >= limit else f"{what}: {share:.1%}, the limit is {limit:.1%}"

    def _accuracy(self, content: bytes) -> Accuracy:
        lines = self.split.lines
        read = self.steps.run(
            "read",
            self.name,
            [content, self.split.sha256],
            None,
            lambda: _json(accuracy.read_lines(content, lines, self.labels, self.runtime, THREADS)),
        )
        return accuracy.accuracy(lines, json.loads(read))

    def _agreement(self, content: bytes, measure: Callable[..., float]) -> float:
        inputs = data.inputs(self.graph.role, self.split, self.settings)
        share = self.steps.run(
            "compare",
            self.name,
            [self.published, content, self.split.sha256],
            schema.dump(self.settings),
            lambda: _json(
                measure(
                    self.runtime.open(self.published, threads=THREADS),
                    self.runtime.open(content, threads=THREADS),
                    inputs,
                )
            ),
        )
        return float(json.loads(share))


def _labels(content: bytes, key: str) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - onnx is slow to import and rarely needed on a second build

    found = passes.load(content, "the checkpoint").metadata_props.get(key)
    if not found:
        msg = f"the checkpoint has no labels under {key!r} in its metadata: correct the recipe"
        raise SourceError(msg)
    return f"{found}\n ".encode()


def _pass(step: str, name: str, graph: GraphRecipe, content: bytes) -> Callable[[], bytes]:
    def make() -> bytes:
        from provisioning import passes  # noqa: PLC0415 - see _labels
        from provisioning.passes import ctc_head, normalise  # noqa: PLC0415

        model = passes.load(content, f"graph {name}")
        changed = normalise.normalise(model, graph.shape) if step == "normalise" else ctc_head.ctc_head(model)
        return passes.save(changed)

    return make


def _watch(content: bytes, samples: Sequence[Mapping[str, Array]], runtime: Runtime, percentile: float) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - see _labels
    from provisioning.passes import quantize  # noqa: PLC0415

    model = passes.load(content, "the graph")
    axes = quantize.expose(model)
    watched = calibrate.watch(passes.save(model), axes, samples, runtime, THREADS)
    return pack_arrays(
        {f"{name}:low": one.low for name, one in watched.items()}
        | {f"{name}:high": one.high for name, one in watched.items()}
        | {f"{name}:mean": one.mean for name, one in watched.items()}
        | {f"{name}:threshold": np.array(one.threshold(percentile)) for name, one in watched.items()}
    )


def _seen(content: bytes, what: str) -> dict[str, Array]:
    """Statistic `what` of every tensor that was watched."""
    return {
        name.removesuffix(f":{what}"): array
        for name, array in unpack_arrays(content).items()
        if name.endswith(f":{what}")
    }


def _equalise(content: bytes, seen: bytes, share: float) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - see _labels
    from provisioning.passes import equalise  # noqa: PLC0415

    model = passes.load(content, "the graph")
    equalise.equalise(model, _seen(seen, "low"), _seen(seen, "high"), share)
    return passes.save(model)


def _quantize(content: bytes, seen: bytes, float_first: int) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - see _labels
    from provisioning.passes import quantize  # noqa: PLC0415

    model = passes.load(content, "the graph")
    thresholds = {name: float(array) for name, array in _seen(seen, "threshold").items()}
    return passes.save(quantize.quantize(model, thresholds, _seen(seen, "mean"), float_first))


def _example(samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The middle of the sample that shows most in 320 x 320 pixels."""
    cuts = [_middle(sample["x"][:1], _EXAMPLE_SIDE) for sample in samples]
    return {"x": max(cuts, key=lambda cut: cut.size)}


def _middle(x_NCHW: Array, side: int) -> Array:
    height, width = x_NCHW.shape[2:]
    top, left = max(height - side, 0) // 2, max(width - side, 0) // 2
    return np.ascontiguousarray(x_NCHW[:, :, top : top + side, left : left + side])


def _json(value: Any) -> bytes:  # noqa: ANN401 - plain data
    return json.dumps(value, ensure_ascii=False).encode()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest_of_code() -> str:
    """Digest of all code that a step's result may depend on."""
    root = Path(__file__).resolve().parent
    files = [*root.rglob("*.py"), *(root.parent / "kernels").glob("*.py"), *(root.parent / "models").rglob("*.py")]
    files += (root.parent / "appliance" / "runtime").glob("*.py")
    return _digest([hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)])
