"""From a recipe to graphs that passed their gates: every step in order, with digests of what goes in and out.

    fetch -> normalise [-> gqa] [-> ctc_head] [-> mark] = fp32
    what fp32 was before mark -> provisioning.int8 = int8, int8-unfused
    every precision -> gate: compared with the graph as published

All of it in memory: writing is for `provisioning.pack`, after all gates.
Past 400 lines because the order of all steps is one thing, and what each does is elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance.runtime import Runtime, Session, choose
from kernels.launch import Kernels
from models import schema
from models.bundle import Accuracy, Agreement, Check, Quantized, Source, Step
from models.errors import ConfigError, GateFailed, SourceError
from models.spec import Array
from models.tasks import detection
from models.tasks.classification import probabilities
from models.tasks.detection import DetectionSettings
from models.tasks.reading import ReadingSettings
from provisioning import compiled, data, samples, sharing, sources
from provisioning.accuracy import Published
from provisioning.cache import Cache
from provisioning.gate import Gate, Verdict
from provisioning.int8 import Int8
from provisioning.recipe import PICTURES, GraphRecipe, RecipeFile, fit_of
from provisioning.sharing import Overview, Sharing
from provisioning.steps import RUNTIME, Report, Steps

_EXAMPLE_SIDE = 320


@dataclass(frozen=True, slots=True)
class BuiltVariant:
    """A graph in one precision, and what the gate measured of it."""

    content: bytes
    accuracy: Accuracy | None
    agreement: Agreement | None
    checks: tuple[Check, ...] = ()
    quantized: Quantized | None = None


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
    kernels: Mapping[str, Kernels]
    """Architecture -> the fused kernels compiled for it."""


class Keeping:
    """A runtime that opens each graph once and keeps it open, for those who open the same graphs in turn."""

    def __init__(self, runtime: Runtime) -> None:
        """Open with `runtime`."""
        self.name, self.opens_at_once = runtime.name, runtime.opens_at_once
        self._runtime = runtime
        self._open: dict[tuple[bytes, int, bool], Session] = {}

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> Session:
        """See `Runtime.open`."""
        key = graph, threads, few_shapes
        if key not in self._open:
            self._open[key] = self._runtime.open(graph, threads=threads, few_shapes=few_shapes)
        return self._open[key]

    def release(self) -> None:
        """See `Runtime.release`."""
        self._runtime.release()


def build(
    recipe: RecipeFile,
    folder: Path,
    precision: str,
    cache: Cache,
    report: Report,
    wanted: Sharing | None = None,
    targets: Sequence[str] = (),
) -> Built:
    """Build every graph of `recipe` with the labelled data in `folder`.

    `precision` is "auto" (all that the recipe wants and the gate lets pass) or the one that is wanted: a graph that
    misses its gate in that is built in float. With `wanted`, attention is converted in every graph that has some.
    For `targets` the fused kernels of marked graphs are compiled.
    Raises SourceError for unusable checkpoints and data, ConfigError when attention cannot be converted as wanted,
    GateFailed when a graph has no precision left.
    """
    known = {one for graph in recipe.recipe.graphs.values() for one in graph.precisions}
    if precision != "auto" and precision not in known:
        msg = f"no graph of the recipe has {precision}, only {', '.join(sorted(known))}: choose auto or one of those"
        raise ConfigError(msg)
    archs = compiled.archs_of(targets)
    room = open_room(recipe, folder, cache, report, ("calibrate", "gate"))
    room.precision, room.sharing = precision, wanted
    contents = {name: room.fetch(name) for name in recipe.recipe.graphs}
    room.check_sharing(contents)
    own = "\n".join(recipe.recipe.task.labels)
    labels = own or "".join(room.labels(name, contents[name]) for name in recipe.recipe.graphs)
    graphs = {name: room.build(name, contents, labels.split("\n")) for name in recipe.recipe.graphs}
    steps = room.steps
    made = {name: [one.content for one in graph.variants.values()] for name, graph in graphs.items()}
    kernels = compiled.compile_kernels(steps, made, archs)
    if steps.done_before:
        report(f"{steps.done_before} steps done before")
    digests = {split: its.sha256 for split, its in room.splits.items()}
    return Built(recipe, graphs, labels, digests, steps.tools, steps.done, room.kept, room.notes, kernels)


def open_room(recipe: RecipeFile, folder: Path, cache: Cache, report: Report, splits: Sequence[str]) -> Room:
    """What the steps for `recipe` need, with the `splits` of the labelled data in `folder`."""
    steps = Steps(cache, report)
    if all(graph.samples for graph in recipe.recipe.graphs.values()):
        report("reading samples")
        return Room(steps, choose(RUNTIME), recipe, {split: _unlabelled(recipe, folder, split) for split in splits})
    report("reading labelled data")
    file = data.splits_for_build(folder, recipe.default_data)
    loaded = {split: data.load(folder, split, file) for split in splits}
    data.require_lines(folder, loaded)
    return Room(steps, choose(RUNTIME), recipe, loaded)


def _unlabelled(recipe: RecipeFile, folder: Path, split: str) -> data.Split:
    settings = fit_of(recipe.recipe.task)
    loaded = {
        name: samples.load(graph.samples, graph.shape, folder, split, settings)
        for name, graph in recipe.recipe.graphs.items()
        if graph.samples
    }
    digest = hashlib.sha256("".join(sha256 for _, sha256 in loaded.values()).encode()).hexdigest()
    return data.Split((), (), digest, tensors={name: tensors for name, (tensors, _) in loaded.items()})


@dataclass(slots=True)
class Room:
    """What the steps of all graphs share."""

    steps: Steps
    runtime: Runtime
    file: RecipeFile
    splits: Mapping[str, data.Split]
    precision: str = "auto"
    sharing: Sharing | None = None
    settings: ReadingSettings = field(init=False)
    boxes: DetectionSettings | None = field(init=False)
    """Of task "detection"."""
    kept: Keeping = field(init=False)
    notes: dict[str, str] = field(default_factory=dict)
    """What passes have to say, for the report."""

    def __post_init__(self) -> None:
        self.kept = Keeping(self.runtime)
        task = self.file.recipe.task
        try:
            self.settings = schema.load(ReadingSettings, dict(task.settings) if task.kind == "reading" else {})
            self.boxes = detection.checked(task.settings) if task.kind == "detection" else None
        except schema.SchemaError as error:
            msg = f"task.settings of the recipe do not fit: {error}"
            raise ConfigError(msg) from error

    def source(self, name: str) -> Source:
        """Where the checkpoint of a graph comes from."""
        package, graph = self.file.recipe.source, self.file.recipe.graphs[name]
        return Source(package.package, package.version, graph.file, graph.sha256)

    def fetch(self, name: str) -> bytes:
        """The checkpoint of a graph."""
        source, folder = self.source(name), self.file.folder
        return self.steps.run("fetch", name, "", [source.sha256], schema.dump(source), lambda: _fetch(source, folder))

    def check_sharing(self, contents: Mapping[str, bytes]) -> None:
        """Raise ConfigError, before anything is built, when attention cannot be converted as wanted."""
        if self.sharing is None:
            return
        graphs = self.file.recipe.graphs
        found = {f"{name} ({graphs[name].file})": self.attention(name, one) for name, one in contents.items()}
        sharing.check(found, self.sharing.kv_heads)

    def attention(self, name: str, content: bytes) -> Overview:
        """The attention that `content`, a graph, has."""
        found = self.steps.run("attention", name, "", [content], None, lambda: sharing.look(content, f"graph {name}"))
        return schema.load(Overview, json.loads(found))

    def labels(self, name: str, content: bytes) -> str:
        """Labels in the checkpoint of a graph, one a line; empty when it has none."""
        graph, package = self.file.recipe.graphs[name], self.file.recipe.source
        if graph.labels_file:
            source = Source(package.package, package.version, graph.labels_file.file, graph.labels_file.sha256)
            folder = self.file.folder
            content = self.steps.run(
                "labels", name, "", [source.sha256], schema.dump(source), lambda: sources.fetch(source, folder)
            )
            try:
                return _lines(content.decode()).removesuffix("\n").partition("\n")[2]
            except UnicodeDecodeError as error:
                msg = f"the labels in {source.file} are not UTF-8 text: name another labels_file"
                raise SourceError(msg) from error
        key = graph.labels
        if not key:
            return ""
        return self.steps.run("labels", name, "", [content], key, lambda: _labels(content, key)).decode()

    def inputs(self, name: str, split: str) -> list[dict[str, Array]]:
        """What a graph gets to see of a split."""
        return data.inputs(self.file.recipe.graphs[name].role, self.splits[split], self.settings, name)

    def example(self, name: str) -> dict[str, Array]:
        """One input of a graph, of calibration data."""
        inputs = self.inputs(name, "calibrate")
        return inputs[0] if self.file.recipe.graphs[name].samples else _example(inputs)

    def normalised(self, name: str, content: bytes) -> bytes:
        """A graph after its first pass."""
        return self._passes(name, content, self.file.recipe.graphs[name].passes[:1])

    def finished(self, name: str, content: bytes) -> bytes:
        """A normalised graph after the other passes but mark, which hides what a graph consists of."""
        passes = self.file.recipe.graphs[name].passes[1:]
        return self._passes(name, content, [step for step in passes if step != "mark"])

    def build(self, name: str, published: Mapping[str, bytes], labels: Sequence[str]) -> BuiltGraph:
        """Make every precision of a graph that is wanted, and judge it."""
        graph = self.file.recipe.graphs[name]
        calibration, example = self.inputs(name, "calibrate"), self.example(name)
        self._check_answers(name, published[name], example, labels)
        split, boxes = self.splits["gate"], self.boxes
        gate = Gate(self.steps, self.kept, split, self.settings, labels, name, graph, published, boxes)
        before_mark = graph.passes.index("mark") if "mark" in graph.passes else len(graph.passes)
        plain = self._passes(
            name, self._shared_if_wanted(name, self.normalised(name, published[name])), graph.passes[1:before_mark]
        )
        task_settings = schema.dump(self.settings)
        sha256, shape = self.splits["calibrate"].sha256, next(iter(example.values())).shape
        shown = (calibration, sha256, task_settings, shape)
        int8 = Int8(self.steps, self.runtime, name, graph, plain, *shown, self.notes, boxes.head if boxes else "")
        original = gate.original()
        made: dict[str, bytes] = {}
        quantized: dict[str, Quantized] = {}
        verdicts: dict[str, Verdict] = {}
        for precision in self._candidates(graph):
            if precision == "fp32":
                made[precision] = self._passes(name, plain, graph.passes[before_mark:])
            else:
                made[precision], quantized[precision] = int8.make(precision)
            verdicts[precision] = gate.judge(precision, made[precision])
            if graph.gate.found_drop is not None and not verdicts[precision].comparison:
                self.notes[f"{name}: found_drop"] = (
                    "not measured, because no page of the gate split has a labelled text"
                )
            if self.precision != "auto" and not verdicts[precision].reason:
                break
        left_out = {precision: verdict.reason for precision, verdict in verdicts.items() if verdict.reason}
        variants = {
            precision: BuiltVariant(
                made[precision], verdict.accuracy, verdict.agreement, verdict.checks, quantized.get(precision)
            )
            for precision, verdict in verdicts.items()
            if not verdict.reason
        }
        if not variants:
            msg = f"graph {name} has no precision left: " + "; ".join(f"{one}: {why}" for one, why in left_out.items())
            raise GateFailed(msg)
        return BuiltGraph(
            graph.role, self.source(name), published[name], variants, original, left_out, verdicts, example
        )

    def _check_answers(self, name: str, published: bytes, example: Mapping[str, Array], labels: Sequence[str]) -> None:
        """Raise SourceError unless a checkpoint answers with numbers, and with a class for every label."""
        graph = self.file.recipe.graphs[name]
        answers = Published(self.kept.open(published, threads=1)).run(example)
        if not all(np.isfinite(array).all() for array in answers.values() if array.dtype.kind == "f"):
            msg = f"{graph.file} answers with NaN or infinity on the calibration data: export the model anew"
            raise SourceError(msg)
        classes = next(iter(answers.values())).shape[-1]
        if graph.role == "recognise" and classes != len(labels) + 1:
            msg = (
                f"{graph.file} tells {classes - 1} characters and a blank apart, but has {len(labels)} labels: "
                "name others in the recipe with labels or labels_file"
            )
            raise SourceError(msg)
        task = self.file.recipe.task
        if task.kind in PICTURES:
            if len(answers) > 1:
                msg = (
                    f"{graph.file} has {len(answers)} outputs, task {task.kind!r} knows what to do with one: "
                    "export it without the others, or make its task 'tensors'"
                )
                raise SourceError(msg)
            (answer,) = answers.values()
            count = detection.class_count(answer, self.boxes) if self.boxes else probabilities(answer).shape[1]
            if task.labels and count != len(task.labels):
                msg = f"{graph.file} tells {count} classes apart, but task.labels has {len(task.labels)}: correct it"
                raise SourceError(msg)

    def _candidates(self, graph: GraphRecipe) -> list[str]:
        """Precisions to try: all of the recipe, or the one that is wanted and after it float."""
        if self.precision == "auto":
            return list(graph.precisions)
        wanted = [self.precision] if self.precision in graph.precisions else []
        return list(dict.fromkeys([*wanted, "fp32"]))

    def _passes(self, name: str, content: bytes, steps: Sequence[str]) -> bytes:
        graph = self.file.recipe.graphs[name]
        for step in steps:
            content = self.steps.run(step, name, "", [content], list(graph.shape), _pass(step, name, graph, content))
        return content

    def _shared_if_wanted(self, name: str, content: bytes) -> bytes:
        """`content`, normalised, with its attention converted, where that is wanted and there is some."""
        if self.sharing is None:
            return content
        attention = self.attention(name, content)
        for node, reason in attention.not_understood.items():
            self.steps.report(f"{name}: {node} looks like attention and stays as it is: {reason}")
        return self.shared(name, content, self.sharing) if attention.heads else content

    def shared(self, name: str, content: bytes, wanted: Sharing) -> bytes:
        """`content`, normalised, with its attention converted."""
        return self.steps.run(
            "gqa",
            name,
            "",
            [content, self.splits["calibrate"].sha256],
            [wanted.kv_heads, wanted.method],
            lambda: sharing.share(content, wanted, self.inputs(name, "calibrate"), self.runtime),
            asked=f"{wanted.kv_heads} key and value heads, {wanted.method}",
        )


def _fetch(source: Source, folder: Path) -> bytes:
    from provisioning import admit  # noqa: PLC0415 - see _labels

    content = sources.fetch(source, folder)
    if source.package:
        admit.admit(content, f"{source.file} of {source.package}")
    else:
        admit.admit(content, source.file, admit.OF_FILE)
    return content


def _labels(content: bytes, key: str) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - onnx is slow to import and rarely needed on a second build

    found = passes.load(content, "the checkpoint").metadata_props.get(key)
    if not found:
        msg = f"the checkpoint has no labels under {key!r} in its metadata: correct the recipe"
        raise SourceError(msg)
    return f"{_lines(found)}\n ".encode()


def _lines(labels: str) -> str:
    return labels.replace("\r\n", "\n")


def _pass(step: str, name: str, graph: GraphRecipe, content: bytes) -> Callable[[], bytes]:
    def make() -> bytes:
        from provisioning import passes  # noqa: PLC0415 - see _labels
        from provisioning.passes import ctc_head, mark, normalise  # noqa: PLC0415

        model = passes.load(content, f"graph {name}")
        if step == "normalise":
            return passes.save(normalise.normalise(model, graph.shape))
        return passes.save(ctc_head.ctc_head(model) if step == "ctc_head" else mark.mark(model))

    return make


def _example(samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The middle of the sample that shows most in 320 x 320 pixels."""
    cuts = [_middle(sample["x"][:1], _EXAMPLE_SIDE) for sample in samples]
    return {"x": max(cuts, key=lambda cut: cut.size)}


def _middle(x_NCHW: Array, side: int) -> Array:
    height, width = x_NCHW.shape[2:]
    top, left = max(height - side, 0) // 2, max(width - side, 0) // 2
    return np.ascontiguousarray(x_NCHW[:, :, top : top + side, left : left + side])
