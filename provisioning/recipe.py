"""A recipe: which checkpoints become which bundle, by which steps, and how good the result must be.

A TOML file, read strictly: a key that is not known is refused with the nearest one that is.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from models import schema, tasks
from models.bundle import SHA256, TaskSpec, is_name
from models.errors import BundleError, ConfigError
from models.tasks.classification import ClassificationSettings
from models.tasks.detection import DetectionSettings
from models.tasks.fit import FitSettings
from models.tasks.lines import load_settings
from provisioning.calibrate import METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

READING = {"detect": "overlap", "classify": "same_class", "recognise": "exact_drop"}
"""What a graph does in a reading pipeline -> the limit that its gate needs."""
ROLES = {**READING, "locate": "matched", "encode": "cosine"}
"""The same with what a graph does elsewhere: finds objects, or is only compared with itself as published."""
PICTURES = {"classification": ("cls", "classify"), "detection": ("det", "locate")}
"""Task that is judged on pictures without labels -> name and role of its only graph."""
LIMITS = {role: (limit,) for role, limit in ROLES.items()} | {
    "detect": ("overlap", "found_drop"),
    "recognise": ("exact_drop", "cer_drop"),
}
"""Role -> all limits that its gate can have."""
SAMPLES = ("pictures", "tokens", "tensors")
FIRST_WORD = 1000
"""Token ids below this are no words in the vocabularies of BERT."""
SHORTEST = 4
"""Tokens of the shortest sentence."""
PASSES = ("normalise", "ctc_head", "mark")
"""In the order in which they are performed."""
_ALL_PERCENT = 100
PRECISIONS = ("fp32", "int8", "int8-unfused")
"""Without fused kernels neck and head can be quantized too; that spelling is int8-unfused."""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution that carries checkpoints."""

    package: str
    version: str


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits, as shares between 0 and 1, that every precision must keep against the graph as published."""

    exact_drop: float | None = None
    """Largest fall of exact match on the gate lines."""
    cer_drop: float | None = None
    """Largest rise of the character error rate on the gate lines."""
    same_class: float | None = None
    """Smallest share of lines or pictures that get the same class."""
    overlap: float | None = None
    """Smallest intersection over union of the text areas found on pages."""
    matched: float | None = None
    """Smallest share of the boxes found by either that both find, at an intersection over union of 0.5."""
    cosine: float | None = None
    """Smallest mean cosine between the outputs and those as published."""
    found_drop: float | None = None
    """Largest fall of the share of labelled texts on gate pages that are found, all other graphs as published."""


@dataclass(frozen=True, slots=True)
class Int8:
    """How a graph is quantized."""

    method: str = "percentile"
    """How thresholds are chosen, one of `calibrate.METHODS`."""
    percentile: float = 99.99
    """Percent of a tensor's elements that its scale represents without clipping, for the method of that name."""
    share: float = 0.7
    """How far equalisation moves the difficulty from activations to weights."""
    float_budget: float = 0.045
    """Share of the multiply-accumulates outside fused operators that may stay in float."""
    pooled: bool = False
    """Whether convolutions of pooled vectors are quantized too: nothing gets faster, but the file smaller."""
    keep_float: tuple[str, ...] | None = None
    """Operators that stay in float whatever they gain, by name; without them they are searched for."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What a graph without labelled data is shown (see `provisioning.samples`)."""

    kind: str
    """One of SAMPLES."""
    count: int = 24
    """Of each split, or as many as there are."""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Of pictures for role "encode", subtracted from red, green and blue between 0 and 1 ..."""
    deviation: tuple[float, ...] = (1.0, 1.0, 1.0)
    """... before they are divided by this."""
    vocabulary: int = 0
    """Number of token ids."""
    longest: int = 64
    """Tokens of the longest sentence; shorter ones are padded to it."""


@dataclass(frozen=True, slots=True)
class LabelsFile:
    """A file of the package with a label a line, the blank first and the space last."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class GraphRecipe:
    """One graph of the bundle."""

    role: str
    file: str
    sha256: str
    shape: tuple[int, ...]
    passes: tuple[str, ...]
    precisions: tuple[str, ...]
    gate: Gate
    labels: str = ""
    """Key of the file's metadata that holds the labels; empty when they are in no metadata."""
    labels_file: LabelsFile | None = None
    int8: Int8 = field(default_factory=Int8)
    samples: Samples | None = None
    """For graphs that have no labelled data: of role "encode", and of the tasks in PICTURES."""


@dataclass(frozen=True, slots=True)
class TaskRecipe:
    """The task of the bundle (see `models.tasks`) and its settings."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    """In class order, where they are in no checkpoint and no package."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe."""

    name: str
    version: str
    licence: str
    data: str
    task: TaskRecipe
    graphs: Mapping[str, GraphRecipe]
    source: Package = Package("", "")
    """Without it the files of the graphs are somebody's own, in the folder of the recipe."""


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe and where it was read from."""

    recipe: Recipe
    sha256: str
    default_data: Path
    """The recipe's data folder: under the project's root, or for files of somebody's own beside the recipe."""
    folder: Path
    """Where the recipe is."""


def read(path: Path) -> RecipeFile:
    """Read and check a recipe; raises ConfigError or SourceError with one sentence that names the key."""
    try:
        content = path.read_bytes()
        recipe = schema.load(Recipe, tomllib.loads(content.decode()))
    except OSError as error:
        msg = f"recipe {path} cannot be read ({error.strerror})"
        raise ConfigError(msg) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or not a recipe
        msg = f"recipe {path} cannot be used: {error}"
        raise ConfigError(msg) from error
    for fault in _faults(recipe):
        msg = f"recipe {path}: {fault}"
        raise ConfigError(msg)
    projects = path.resolve().parents if recipe.source.package else ()
    root = next((folder for folder in projects if (folder / "pyproject.toml").exists()), path.parent)
    return RecipeFile(recipe, hashlib.sha256(content).hexdigest(), root / recipe.data, path.parent)


def _faults(recipe: Recipe) -> Iterator[str]:
    """What is wrong with a recipe whose keys and types are right, in words that begin with the key."""
    names = {"name": recipe.name, "version": recipe.version, **{f"graphs.{name}": name for name in recipe.graphs}}
    for key, value in names.items():
        if not is_name(value):
            yield f"{key}: {value!r} cannot be a name: use up to 64 of a-z 0-9 . _ -, first a letter or digit"
    if bool(recipe.source.package) != bool(recipe.source.version):
        yield "source.package or source.version is empty"
    yield from _task_faults(recipe)
    roles = {graph.role for graph in recipe.graphs.values()}
    if not roles:
        yield "graphs: there is none"
    if "encode" in roles and len(roles) > 1:
        yield "graphs of role 'encode' and others, which need labelled data, cannot be in one bundle"
    for name, graph in recipe.graphs.items():
        judged = _graph_faults(graph, unlabelled=graph.role == "encode" or recipe.task.kind in PICTURES)
        yield from (f"graphs.{name}{said}" for said in chain(_unknown_words(graph), judged))
        if "." in name:
            yield f"graphs.{name}: a graph's name has no dot, because the names of its engines have"
        if graph.gate.found_drop is not None and roles != set(READING):
            yield f"graphs.{name}.gate.found_drop needs graphs of all roles, which read pages together"


def _task_faults(recipe: Recipe) -> Iterator[str]:
    task = recipe.task
    try:
        tasks.make(TaskSpec(task.kind, task.settings), task.labels)
    except BundleError as error:
        yield f"task: {error}"
        return
    if any(not label or "\n" in label for label in task.labels):
        yield "task.labels has an empty one, or one of several rows"
    wanted, have = PICTURES.get(task.kind), {name: graph.role for name, graph in recipe.graphs.items()}
    if wanted and have != dict([wanted]):
        yield f"graphs: task {task.kind!r} has one graph, called {wanted[0]!r}, of role {wanted[1]!r}"
    elif wanted:
        fits, shape = fit_of(task), recipe.graphs[wanted[0]].shape
        if fits and shape[1:] != fits.shape:
            yield f"graphs.{wanted[0]}.shape is {list(shape)}, but task.settings make {['N', *fits.shape]} of a picture"
    if not wanted and "locate" in have.values():
        yield "graphs of role 'locate' belong to task 'detection'"


def fit_of(task: TaskRecipe) -> FitSettings | None:
    """How a task of PICTURES makes a picture fit its graph; None for any other. Raises BundleError when that is odd."""
    kinds = {"classification": ClassificationSettings, "detection": DetectionSettings}
    return load_settings(kinds[task.kind], task.settings) if task.kind in kinds else None


def _unknown_words(graph: GraphRecipe) -> Iterator[str]:
    for what, values, known in (
        ("role", (graph.role,), tuple(ROLES)),
        ("passes", graph.passes, PASSES),
        ("precisions", graph.precisions, PRECISIONS),
        ("int8.method", (graph.int8.method,), METHODS),
        ("samples.kind", (graph.samples.kind,) if graph.samples else (), SAMPLES),
    ):
        unknown = [value for value in values if value not in known]
        if unknown:
            yield f".{what} has {unknown[0]!r}; known: {', '.join(known)}"


def _graph_faults(graph: GraphRecipe, *, unlabelled: bool) -> Iterator[str]:
    limits = {limit: value for limit, value in schema.dump(graph.gate).items() if value is not None}
    needed, known = ROLES[graph.role], LIMITS[graph.role]
    int8, ordered = graph.int8, sorted(graph.passes, key=PASSES.index)
    unfused, headless = "int8-unfused" in graph.precisions, "ctc_head" not in graph.passes
    rules = {
        " needs a precision and 'normalise' as its first pass": graph.passes[:1] == ("normalise",) and graph.precisions,
        f".passes must stand in the order {', '.join(PASSES)}": list(graph.passes) == ordered,
        ".precisions names one twice": len(set(graph.precisions)) == len(graph.precisions),
        " has precision 'int8-unfused', which needs the pass 'mark'": not unfused or "mark" in graph.passes,
        ".passes needs 'ctc_head', without which no task can read it": not (graph.role == "recognise" and headless),
        ".shape has sizes of 1 and more, and -1 where one varies": all(size == -1 or size > 0 for size in graph.shape),
        ".sha256 must be 64 of 0-9 a-f": SHA256.fullmatch(graph.sha256),
        f".gate.{needed} is missing, the limit of role {graph.role!r}": needed in limits,
        f".gate can have {' and '.join(known)}, not {', '.join(limits)}": set(limits) <= {*known, "found_drop"},
        ".gate: limits are shares between -1 and 1": all(-1 <= limit <= 1 for limit in limits.values()),
        ".int8.percentile must be above 0 and at most 100": 0 < int8.percentile <= _ALL_PERCENT,
        ".int8: shares are between 0 and 1": 0 <= int8.share <= 1 and 0 <= int8.float_budget <= 1,
        ".samples is for role 'encode' and for tasks without labels, which need it": unlabelled
        == (graph.samples is not None),
        " can be fp32 only: nothing measures what INT8 does to role 'encode'": graph.role != "encode"
        or graph.precisions == ("fp32",),
    }
    yield from (said for said, kept in rules.items() if not kept)
    if graph.samples:
        yield from (f".samples.{said}" for said in _sample_faults(graph.samples, graph.shape))


def _sample_faults(samples: Samples, shape: Sequence[int]) -> Iterator[str]:
    if samples.count < 1:
        yield "count must be 1 or more"
    if samples.kind == "pictures":
        if len(shape) != len(("N", "C", "H", "W")) or min(shape[2:]) < 1:
            yield "kind 'pictures' needs a shape of four sizes with height and width given"
        for key in ("mean", "deviation"):
            if len(getattr(samples, key)) != len("RGB"):
                yield f"{key} must be three numbers"
        if min(samples.deviation) <= 0:
            yield "deviation must be above 0"
    elif samples.kind == "tokens" and (samples.vocabulary <= FIRST_WORD or samples.longest < SHORTEST):
        yield f"vocabulary must be above {FIRST_WORD}, and longest {SHORTEST} or more"
