"""A recipe: which checkpoints become which bundle, by which steps, and how good the result must be.

A TOML file, read strictly: a key that is not known is refused with the nearest one that is.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import schema
from models.errors import ConfigError, SourceError
from provisioning.calibrate import METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

READING = {"detect": "overlap", "classify": "same_class", "recognise": "exact_drop"}
"""What a graph does in a reading pipeline -> the limit that its gate needs."""
ROLES = {**READING, "encode": "cosine"}
"""The same with what a graph does elsewhere: its outputs are only compared with themselves as published."""
SAMPLES = ("pictures", "tokens")
PASSES = ("normalise", "ctc_head", "mark")
"""In the order in which they are performed."""
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
    """Smallest share of lines that get the same class."""
    overlap: float | None = None
    """Smallest intersection over union of the text areas found on pages."""
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
    """What a graph that reads no text is shown (see `provisioning.samples`)."""

    kind: str
    """One of SAMPLES."""
    count: int = 24
    """Of each split, or as many as there are."""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Of pictures, subtracted from red, green and blue between 0 and 1 ..."""
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
    """For role "encode", which has no labelled data."""


@dataclass(frozen=True, slots=True)
class TaskRecipe:
    """The task of the bundle (see `models.tasks`) and its settings."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe."""

    name: str
    version: str
    licence: str
    data: str
    source: Package
    task: TaskRecipe
    graphs: Mapping[str, GraphRecipe]


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe and where it was read from."""

    recipe: Recipe
    sha256: str
    default_data: Path
    """The recipe's data folder, under the project's root."""


def read(path: Path) -> RecipeFile:
    """Read and check a recipe; raises ConfigError or SourceError with one sentence that names the key."""
    try:
        content = path.read_bytes()
        recipe = schema.load(Recipe, tomllib.loads(content.decode()))
    except OSError as error:
        msg = f"recipe {path} cannot be read ({error.strerror})"
        raise ConfigError(msg) from error
    except ValueError as error:  # not UTF-8, not TOML, or not a recipe
        msg = f"recipe {path} cannot be used: {error}"
        raise ConfigError(msg) from error
    _check(recipe, path)
    root = next((folder for folder in path.resolve().parents if (folder / "pyproject.toml").exists()), path.parent)
    return RecipeFile(recipe, hashlib.sha256(content).hexdigest(), root / recipe.data)


def _check(recipe: Recipe, path: Path) -> None:
    _check_samples(recipe, path)
    for name, graph in recipe.graphs.items():
        _check_words(name, graph, path)
        if graph.passes[:1] != ("normalise",) or not graph.precisions:
            msg = f"recipe {path}: graphs.{name} needs a precision and 'normalise' as its first pass"
            raise ConfigError(msg)
        if list(graph.passes) != sorted(graph.passes, key=PASSES.index):
            msg = f"recipe {path}: graphs.{name}.passes must stand in the order {', '.join(PASSES)}"
            raise ConfigError(msg)
        if "int8-unfused" in graph.precisions and "mark" not in graph.passes:
            msg = f"recipe {path}: graphs.{name} has precision 'int8-unfused', which needs the pass 'mark'"
            raise ConfigError(msg)
        if graph.role == "recognise" and "ctc_head" not in graph.passes:
            msg = f"recipe {path}: graphs.{name}.passes needs 'ctc_head', without which no task can read its answers"
            raise SourceError(msg)
        if graph.gate.found_drop is not None and {one.role for one in recipe.graphs.values()} != set(READING):
            msg = f"recipe {path}: graphs.{name}.gate.found_drop needs graphs of all roles, which read pages together"
            raise ConfigError(msg)
        if getattr(graph.gate, ROLES[graph.role]) is None:
            msg = f"recipe {path}: graphs.{name}.gate.{ROLES[graph.role]} is missing, the limit of role {graph.role!r}"
            raise ConfigError(msg)


def _check_words(name: str, graph: GraphRecipe, path: Path) -> None:
    for what, values, known in (
        ("role", (graph.role,), tuple(ROLES)),
        ("passes", graph.passes, PASSES),
        ("precisions", graph.precisions, PRECISIONS),
        ("int8.method", (graph.int8.method,), METHODS),
        ("samples.kind", (graph.samples.kind,) if graph.samples else (), SAMPLES),
    ):
        unknown = [value for value in values if value not in known]
        if unknown:
            msg = f"recipe {path}: graphs.{name}.{what} has {unknown[0]!r}; known: {', '.join(known)}"
            raise ConfigError(msg)


def _check_samples(recipe: Recipe, path: Path) -> None:
    for name, graph in recipe.graphs.items():
        if (graph.role == "encode") != (graph.samples is not None):
            msg = f"recipe {path}: graphs.{name}.samples is for role 'encode', which needs it"
            raise ConfigError(msg)
        if graph.samples and graph.precisions != ("fp32",):
            msg = f"recipe {path}: graphs.{name} can be fp32 only: nothing measures what INT8 does to role 'encode'"
            raise ConfigError(msg)
    if len({graph.role == "encode" for graph in recipe.graphs.values()}) > 1:
        msg = f"recipe {path}: graphs of role 'encode' and others, which need labelled data, cannot be in one bundle"
        raise ConfigError(msg)
