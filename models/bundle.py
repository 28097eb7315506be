"""The manifest of a bundle: what ships, in canonical bytes whose digest is the bundle's identity.

A bundle is a folder:

    manifest.json               canonical bytes of `Manifest`; its sha256 is the content digest
    blobs/sha256/<hex>          everything the manifest names, content-addressed
    measurements/<target>.json  what was measured on one machine: advisory, outside the digest
    report.html, report.json    the gate's figures with plots and latency: advisory, outside the digest

This module is pure: it takes and returns bytes and values. `models.folder` reads the disk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from models import schema
from models.errors import BundleError
from models.spec import Array, ModelSpec

FORMAT = 1
TASKS = ("reading", "lines", "classification", "detection", "tensors")
"""Kinds of task that `models.tasks` carries out."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def is_name(name: str) -> bool:
    """Whether `name` can stand in a path and in a topic."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Refuse what is no name; raises BundleError."""
    if not is_name(name):
        msg = f"{name!r} cannot be a name: use up to 64 of a-z 0-9 . _ -, first a letter or digit"
        raise BundleError(msg)


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of the bundle, named by its content."""

    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, content: bytes) -> Blob:
        """Name `content`."""
        return cls(hashlib.sha256(content).hexdigest(), len(content))

    def check(self, content: bytes) -> None:
        """Raise BundleError unless `content` is what this blob names."""
        if Blob.of(content) != self:
            msg = f"blob {self.sha256[:12]} is damaged: fetch or build the bundle again"
            raise BundleError(msg)


@dataclass(frozen=True, slots=True)
class Golden:
    """Known answers of one graph in one precision: both blobs are npz files keyed by tensor name.

    `tolerance` is the largest absolute difference of a float output;
    `mismatch` the largest share of elements of an integer output that may differ.
    """

    inputs: Blob
    outputs: Blob
    tolerance: float
    mismatch: float = 0.0

    def check(self, answers: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Compare answers to the inputs with the outputs as read; raises BundleError for one outside the tolerance."""
        for name, want in wanted.items():
            have = answers.get(name)
            if have is None or have.shape != want.shape:
                gave = "nothing" if have is None else f"shape {list(have.shape)}"
                wanted_shape = list(want.shape)
                msg = f"golden answer {name!r} has shape {wanted_shape}, the graph gave {gave}: build the bundle again"
                raise BundleError(msg)
            if np.issubdtype(want.dtype, np.integer):
                share = float(np.mean(have != want))
                if share > self.mismatch:
                    msg = f"golden answer {name!r} differs in {share:.1%} of its elements, allowed: {self.mismatch:.1%}"
                    raise BundleError(msg)
            else:
                off = float(np.max(np.abs(have.astype(np.float64) - want), initial=0.0))
                if not off <= self.tolerance:  # NaN must fail too
                    msg = f"golden answer {name!r} is off by {off:.3g}, allowed are {self.tolerance:.3g}"
                    raise BundleError(msg)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Quality on the gate lines: exact match and character error rate (CER), shares between 0 and 1."""

    exact: float
    cer: float
    lines: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a graph that reads no text does what the graph as published does, a share between 0 and 1."""

    share: float
    on: str
    """What was counted: "253 of 256 line pictures"."""


@dataclass(frozen=True, slots=True)
class Check:
    """One limit of the recipe, and what the gate measured against it, both as shares."""

    name: str
    """Of the limit in the recipe: "exact_drop", "cer_drop", "found_drop", "same_class", "overlap", "matched"."""
    limit: float
    measured: float
    """The loss against the graph as published for a limit called a drop; otherwise the share that must be kept."""
    met: bool
    on: str
    """What was counted: "128 gate lines"."""
    interval: tuple[float, ...] = ()
    """95 % interval of the loss, low and high; empty where there is none."""
    resolved: bool = True
    """Whether so many lines can tell a loss of that size from chance: one standard error is within the limit."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a graph computes on INT8."""

    thresholds: str
    """How the largest number of each tensor's scale was chosen: "percentile 99.99"."""
    share: float
    """Of the multiply-accumulates outside fused operators, those on INT8."""
    share_of_all: float
    """The same of all multiply-accumulates; the two are one where nothing is fused."""
    divergence: float
    """Mean KL divergence of the outputs from those in float on calibration samples, in nats a decision."""
    kept_float: Mapping[str, float] = field(default_factory=dict)
    """Operators that could be quantized and are not -> how many nats each took off the divergence."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One precision of a graph that passed the gate."""

    graph: Blob
    golden: Golden
    accuracy: Accuracy | None = None
    agreement: Agreement | None = None
    checks: tuple[Check, ...] = ()
    """Every limit that the gate held it to."""
    quantized: Quantized | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph of a bundle in every precision ("fp32", "int8", "int8-unfused") that passed the gate."""

    spec: ModelSpec
    variants: Mapping[str, Variant]
    original: Accuracy | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Precisions that were built and missed a limit, with the reason."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Which file of `models.tasks` turns pictures into answers, and its settings."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: Blob | None = None
    """UTF-8 text, one label a line, in class order; the blank of a CTC head is not listed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a graph came from."""

    package: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the build with the digests of what went in and what came out.

    Each of `inputs` is a source, a split of the data, or the output of an earlier step.
    """

    name: str
    graph: str
    inputs: tuple[str, ...]
    output: str
    precision: str = ""
    """The one that this was done for; empty when it was for all of them."""
    asked: str = ""
    """What the builder asked for, where the recipe leaves a choice: "2 key and value heads, subspace"."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the bundle was made: enough to make it again."""

    recipe_sha256: str
    data_sha256: Mapping[str, str]
    """Data split name -> digest of its files and labels."""
    tools: Mapping[str, str]
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The versioned set that ships."""

    name: str
    version: str
    licence: str
    task: TaskSpec
    graphs: Mapping[str, Graph]
    provenance: Provenance
    format: int = FORMAT
    kernels: Mapping[str, Mapping[str, Blob]] = field(default_factory=dict)
    """Architecture ("sm_87") -> the fused kernels compiled for it: NAME.cubin, NAME.ptx and NAME.json, by file name."""

    def __post_init__(self) -> None:
        """Refuse names and digests that could not be what they say."""
        for name in (self.name, self.version, *self.graphs, *self.kernels, *chain(*self.kernels.values())):
            check_name(name)
        for name, graph in self.graphs.items():
            if not graph.variants:
                msg = f"manifest has no precision of graph {name!r}: build the bundle again"
                raise BundleError(msg)
        if not self.graphs:
            raise BundleError("manifest names no graph: build the bundle again")
        for blob in self.blobs():
            if not SHA256.fullmatch(blob.sha256) or blob.size_bytes < 0:
                msg = f"manifest names a blob {blob.sha256[:80]!r} that is no sha256"
                raise BundleError(msg)

    @property
    def reader(self) -> str | None:
        """Name of the graph that reads lines of text; None where none does."""
        return next((name for name, graph in self.graphs.items() if graph.original), None)

    def blobs(self) -> list[Blob]:
        """Every blob the manifest names, each once."""
        found = {}
        if self.task.labels:
            found[self.task.labels.sha256] = self.task.labels
        for graph in self.graphs.values():
            for variant in graph.variants.values():
                for blob in (variant.graph, variant.golden.inputs, variant.golden.outputs):
                    found[blob.sha256] = blob
        for files in self.kernels.values():
            found |= {blob.sha256: blob for blob in files.values()}
        return list(found.values())

    def to_bytes(self) -> bytes:
        """Canonical bytes: JSON with sorted keys, no white space, UTF-8, the format always written."""
        data = schema.dump(self) | {"format": self.format}
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()

    @property
    def digest(self) -> str:
        """The bundle's identity: sha256 of its canonical bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse and check; raises BundleError for anything but the canonical bytes of a known format."""
        try:
            data = json.loads(content)
        except (ValueError, RecursionError) as error:
            msg = f"manifest.json is not JSON ({error}): fetch or build the bundle again"
            raise BundleError(msg) from error
        written = data.get("format") if isinstance(data, dict) else None
        if written != FORMAT:
            msg = f"manifest has format {written!r}, this version reads {FORMAT}: update the appliance"
            raise BundleError(msg)
        try:
            manifest = schema.load(cls, data)
        except schema.SchemaError as error:
            msg = f"manifest.json does not fit: {error}"
            raise BundleError(msg) from error
        try:
            canonical = manifest.to_bytes()
        except ValueError as error:  # NaN, or half of a surrogate pair, in the task's settings or a text
            msg = f"manifest.json holds what JSON cannot carry ({error}): build the bundle again"
            raise BundleError(msg) from error
        if canonical != content:
            msg = "manifest.json is not in canonical form, so its digest means nothing: build the bundle again"
            raise BundleError(msg)
        return manifest
