"""Reads labelled data with a bundle and its checkpoints, or with two bundles, through the runtime that will serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.runtime import Runtime, Session
from appliance.runtime.machine import machine, time_in_turn
from models import schema
from models.bundle import Check
from models.errors import BundleError, SourceError
from models.folder import BundleFolder
from models.measurements import Answering, Parity, fastest
from models.tasks.lines import load_settings
from models.tasks.reading import ReadingSettings
from provisioning import accuracy, gate, sources
from provisioning.data import Line, Split
from provisioning.report import ORIGINAL, Report
from provisioning.steps import Report as Tell

_RUNS = 15
_LIMIT_S = 4.0
"""For all precisions of one graph together."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found out."""

    result: Mapping[str, Any]
    """What `provision verify --json` prints; shares between 0 and 1."""
    report: Report


def verify(folder: BundleFolder, split: Split, precision: str, runtime: Runtime, threads: int, tell: Tell) -> Verified:
    """Read `split` with the bundle in `folder` and with its checkpoints, and compare.

    `precision` "auto" takes the fastest of each graph, as it was measured where the bundle was built; any other is
    that of the recogniser, and of every other graph that has it. Raises BundleError when the bundle is damaged or
    holds no recogniser in that precision, SourceError when a checkpoint is not installed.
    """
    folder.check_content()
    room = _Room(folder, runtime, threads, precision)
    lines, pages = split.lines, split.pages
    comparison, checks = room.compare_lines(split, tell)
    on_pages: dict[str, Any] | None = None
    shown: dict[str, Mapping[str, Any]] = {}
    compared = room.compare_pages(split, tell)
    if compared:
        alone, everything, check = compared
        detector = {name: alone[name] for name in ("interval", "standard_error")} | alone["packed"]
        on_pages = {**everything, "detector": detector, "pages": len(pages)}
        shown = {room.label(gate.READERS["detect"]): alone, "all packed": everything}
        checks += check
    tell("measuring latency")
    latency_ms, size_bytes = room.latency_ms(), room.size_bytes()
    manifest = folder.manifest
    bundle = {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}
    facts = {"lines": len(lines), "pages": len(pages), "left_out": split.left_out, "sha256": split.sha256}
    result = {
        "graph": room.reader,
        "precision": room.precisions[room.reader],
        **comparison,
        "pages": on_pages,
        "limits": [{"graph": label, **schema.dump(check), "resolved": check.resolved} for label, check in checks],
        "precisions": room.precisions,
        "latency_ms": latency_ms,
        "size_bytes": size_bytes,
        "bundle": bundle,
        "data": facts,
        "runtime": runtime.name,
        "machine": machine(runtime=runtime.name),
    }
    report = Report(
        title=f"{manifest.name} {manifest.version} against its checkpoints",
        facts={
            "bundle digest": manifest.digest,
            "data": f"{len(lines)} lines, {len(pages)} pages ({split.left_out} of another split left out), "
            f"sha256 {split.sha256}",
            "precisions": ", ".join(f"{name} {one}" for name, one in room.precisions.items()),
            "runtime": runtime.name,
            "machine": str(machine()["cpu"]),
        },
        lines={room.label(room.reader): comparison} if lines else {},
        pages=shown,
        checks=checks,
        latency_ms=latency_ms,
        size_bytes=size_bytes,
    )
    return Verified(result, report)


def parity(
    device: BundleFolder,
    upstream: BundleFolder,
    precisions: tuple[str, str],
    lines: Sequence[Line],
    runtime: Runtime,
    threads: int,
    tell: Tell,
) -> Parity:
    """How far the bundle `device` answers as `upstream` does, each in its precision of `precisions` (see `verify`).

    Where both read lines of text it is measured on `lines`, by exact match; otherwise on the golden inputs of
    `device`, by the cosine of the outputs of the graph that is least alike. Both run on this machine. Raises
    BundleError for a bundle that is damaged, lacks its precision, or holds none of the other's graphs, SourceError
    where lines are needed and there are none.
    """
    for folder in (device, upstream):
        folder.check_content()
    sides = tuple(zip((device, upstream), precisions, strict=True))
    if not (device.manifest.reader and upstream.manifest.reader):
        shared = [name for name in device.manifest.graphs if name in upstream.manifest.graphs]
        if not shared:
            msg = f"{device.path} and {upstream.path} have no graph of the same name: compare bundles of one kind"
            raise BundleError(msg)
        likeness = {}
        for name in shared:
            tell(f"{name}: answering the golden inputs")
            likeness[name] = _likeness(sides, name, runtime)
        least = min(likeness, key=lambda name: likeness[name])
        ours, theirs = (_answering(folder, least, _chosen(folder, one, least)) for folder, one in sides)
        points = _points(likeness[least] - 1)
        on = f"golden inputs of {least}"
        return Parity(ours, theirs, "likeness of outputs", points, on, runtime.name, machine())
    if not lines:
        raise SourceError(
            "the labelled data has no lines, and readers are compared on these: name other data with --data"
        )
    rooms = [_Room(folder, runtime, threads, one) for folder, one in sides]
    read = [room.read_lines(room.precisions[room.reader], lines, tell) for room in rooms]
    found = accuracy.compare(lines, original=read[1], packed=read[0])
    ours, theirs = (_answering(room.folder, room.reader, room.precisions[room.reader]) for room in rooms)
    return Parity(
        ours,
        theirs,
        "exact match",
        _points(found["packed"]["exact"] - found["original"]["exact"]),
        f"{len(lines)} lines",
        runtime.name,
        machine(),
        interval_points=tuple(map(_points, found["interval"]["exact"])),
        agreement=found["agreement"],
    )


def _likeness(sides: Sequence[tuple[BundleFolder, str]], name: str, runtime: Runtime) -> float:
    """Cosine of the outputs of graph `name` of two bundles, in the wanted precisions, for the first's golden inputs."""
    variants = [folder.manifest.graphs[name].variants[_chosen(folder, one, name)] for folder, one in sides]
    inputs = sides[0][0].read_arrays(variants[0].golden.inputs)
    ours, theirs = (
        runtime.open(folder.read(variant.graph), threads=1)
        for (folder, _), variant in zip(sides, variants, strict=True)
    )
    return accuracy.same_outputs(theirs, ours, [inputs]).share


def _answering(folder: BundleFolder, graph: str, precision: str) -> Answering:
    """One side of a comparison. Of shared heads the provenance tells: "2 key and value heads, subspace"."""
    manifest = folder.manifest
    asked = [step.asked.partition(" key and value heads") for step in manifest.provenance.steps if step.graph == graph]
    kv_heads = next((int(number) for number, said, _ in asked if said and number.isdecimal()), 0)
    return Answering(manifest.name, manifest.version, manifest.digest, precision, kv_heads)


def _points(share: float) -> float:
    return round(share * 100, 4) + 0.0  # no "-0.0"


def _chosen(folder: BundleFolder, precision: str, name: str) -> str:
    """`precision` of a graph where it is there, otherwise the fastest that was measured."""
    variants = folder.manifest.graphs[name].variants
    if precision in variants:
        return precision
    measured = folder.measurements("cpu")
    latency_ms = measured.latency_ms.get(name, {}) if measured else {}
    return fastest({one: latency_ms.get(one, math.inf) for one in variants})


class _Room:
    """A bundle's graphs and the checkpoints behind them."""

    def __init__(self, folder: BundleFolder, runtime: Runtime, threads: int, precision: str) -> None:
        """Choose a precision for every graph."""
        self.folder = folder
        task = folder.manifest.task
        self._line_settings = load_settings(ReadingSettings, task.settings if task.kind == "reading" else {})
        self._runtime = runtime
        self._threads = threads
        self._published: dict[str, bytes] = {}
        self.labels = folder.read_labels()
        graphs = folder.manifest.graphs
        reader = folder.manifest.reader
        if reader is None:
            msg = (
                f"{folder.path} holds no graph that reads lines, and only these are verified on labelled data: "
                "`provision inspect` shows what the gate measured"
            )
            raise BundleError(msg)
        self.reader = reader
        if precision != "auto" and precision not in graphs[reader].variants:
            reason = graphs[reader].left_out.get(precision, "it was not asked for")
            holds = ", ".join(graphs[reader].variants)
            msg = f"{folder.path} holds no {precision} of {reader} ({reason}); it holds {holds}"
            raise BundleError(msg)
        self.precisions = {name: _chosen(folder, precision, name) for name in graphs}
        self.reads_pages = folder.manifest.task.kind == "reading" and set(gate.READERS.values()) <= set(graphs)

    def label(self, name: str) -> str:
        """A graph and its precision, in words."""
        return f"{name} {self.precisions[name]}"

    def compare_lines(self, split: Split, tell: Tell) -> tuple[dict[str, Any], list[tuple[str, Check]]]:
        """What checkpoint and bundle read on the lines, held against the limits; nulls when there are no lines."""
        lines, name = split.lines, self.reader
        if not lines:
            nothing = {"exact": None, "cer": None, "lines": 0}
            comparison: dict[str, Any] = {"original": nothing, "packed": nothing, "agreement": None}
            return comparison | {"interval": {"exact": None, "cer": None}, "resolved": False, "by_source": {}}, []
        read = {}
        for precision in (ORIGINAL, self.precisions[name]):
            read[precision] = self.read_lines(precision, lines, tell)
        original, packed = read.values()
        checks = gate.recogniser_checks(lines, original, packed, self.limits(name))
        return accuracy.compare(lines, original, packed), [(self.label(name), check) for check in checks]

    def read_lines(self, precision: str, lines: Sequence[Line], tell: Tell) -> list[str]:
        """What the recogniser reads on each line."""
        tell(f"{self.reader} {precision}: reading {len(lines)} lines")
        settings = None if precision == ORIGINAL else self._line_settings
        graph = self.graph(self.reader, precision)
        return accuracy.read_lines(graph, lines, self.labels, self._runtime, self._threads, settings)

    def compare_pages(
        self, split: Split, tell: Tell
    ) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, Check]]] | None:
        """What checkpoints and bundle find on the pages: with only the detector packed, with all packed, and checks.

        None when no text is labelled there, or the bundle reads no pages.
        """
        name, pages = gate.READERS["detect"], split.pages
        if not self.reads_pages or not any(page.texts for page in pages):
            return None
        original, detector, packed = (self.read_pages(split, what, tell) for what in (ORIGINAL, "detector", "packed"))
        alone = accuracy.compare_pages(pages, original, detector)
        everything = accuracy.compare_pages(pages, original, packed)
        if alone is None or everything is None:
            return None
        checks = gate.detector_checks(pages, original, detector, self.limits(name))
        return alone, everything, [(self.label(name), check) for check in checks]

    def graph(self, name: str, precision: str) -> bytes:
        """One graph of the bundle, or the checkpoint it was made of as "original"."""
        if precision == ORIGINAL:
            if name not in self._published:
                self._published[name] = self._fetch(name)
            return self._published[name]
        return self.folder.read(self.folder.manifest.graphs[name].variants[precision].graph)

    def _fetch(self, name: str) -> bytes:
        provenance = self.folder.manifest.provenance
        fetched = {step.output for step in provenance.steps if (step.name, step.graph) == ("fetch", name)}
        source = next((source for source in provenance.sources if source.sha256 in fetched), None)
        if source is None:
            msg = f"{self.folder.path} does not say which checkpoint {name} was made of: build the bundle again"
            raise BundleError(msg)
        return sources.fetch(source)

    def limits(self, name: str) -> dict[str, float | None]:
        """The limits that the chosen precision of a graph was held to when it was built."""
        variant = self.folder.manifest.graphs[name].variants[self.precisions[name]]
        return {check.name: check.limit for check in variant.checks}

    def read_pages(self, split: Split, what: str, tell: Tell) -> list[list[str]]:
        """What is read on every page with the checkpoints, with only the detector packed, or with all graphs packed."""
        tell(f"reading {len(split.pages)} pages, {'packed ' if what == 'detector' else ''}{what}")
        sessions: dict[str, Session] = {}
        for role, name in gate.READERS.items():
            packed = what == "packed" or (what == "detector" and role == "detect")
            opened = self._runtime.open(self.graph(name, self.precisions[name] if packed else ORIGINAL), threads=1)
            sessions[name] = opened if packed else accuracy.Published(opened, ctc_head=role == "recognise")
        settings = self.folder.manifest.task.settings
        return accuracy.read_pages(sessions, split.pages, settings, self.labels, self._threads)

    def latency_ms(self) -> dict[str, dict[str, float]]:
        """Milliseconds of one run of each graph on its golden input, original and all precisions in turn."""
        return {name: self._latency_ms(name) for name in self.precisions}

    def _latency_ms(self, name: str) -> dict[str, float]:
        variants = self.folder.manifest.graphs[name].variants
        sessions: dict[str, Session] = {
            ORIGINAL: accuracy.Published(self._runtime.open(self.graph(name, ORIGINAL), threads=1)),
            **{
                one: self._runtime.open(self.folder.read(variant.graph), threads=1) for one, variant in variants.items()
            },
        }
        golden = self.folder.read_arrays(variants[self.precisions[name]].golden.inputs)
        return time_in_turn(sessions, golden, _RUNS, _LIMIT_S)

    def size_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of each graph, original and every precision."""
        return {
            name: {ORIGINAL: len(self.graph(name, ORIGINAL))}
            | {one: variant.graph.size_bytes for one, variant in graph.variants.items()}
            for name, graph in self.folder.manifest.graphs.items()
        }
