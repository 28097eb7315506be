"""Packs what was built: manifest, golden vectors, labels, and beside them the report and what was measured here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from appliance.runtime import Session
from appliance.runtime.machine import machine, time_in_turn
from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.errors import BundleError, ConfigError, WorkshopError
from models.folder import MANIFEST, REPORTS, BundleFolder, is_torn, pack_arrays, write_bundle
from models.measurements import Measurements, fastest
from models.spec import ModelSpec
from provisioning import accuracy
from provisioning.build import Built, BuiltGraph
from provisioning.peak import memory_of
from provisioning.report import ORIGINAL, Report

TOLERANCE = {"fp32": (1e-3, 0.0), "int8": (0.1, 0.05), "int8-unfused": (0.1, 0.05)}
"""Precision -> (largest difference of a float output, largest share of differing elements of an integer one).

The difference is that of probabilities; it grows with the largest element of outputs that are logits or pixels.

Runtimes and CPUs add products up in different orders. In float that changes the last bits: inputs moved by 1e-6 moved
outputs by 4e-5, and 1e-3 leaves room for other instruction sets. With Q/DQ a last bit can push a value over the border
between two INT8 steps, and the error of a whole step travels on: the same inputs moved a probability by 8e-4.
A kernel that rounds elsewhere does that to many values at once; 0.1, or one time step in twenty, is less
than what quantization as a whole does.
"""
_LAYOUTS = {
    "detect": {"x": "NCHW", "y": "NCHW"},
    "classify": {"x": "NCHW", "y": "NC"},
    "recognise": {"x": "NCHW", "index": "NT", "probability": "NT"},
    "locate": {"x": "NCHW"},
    "encode": {},
}
_RUNS = 15


def check_folder(path: Path) -> None:
    """Raise ConfigError unless a bundle can be written into `path`: missing, empty, or holding an earlier one."""
    there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    reason = ""
    if not there.is_dir():
        reason = "exists and is no bundle" if there == path else "is no folder"
    elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        reason = "may not be written to"
    elif there == path and not (_is_bundle(path) if (path / MANIFEST).exists() else is_torn(path)):
        reason = "exists and is no bundle"
    if reason:
        msg = f"{there} {reason}: give an empty or a new folder with --out"
        raise ConfigError(msg)


def _is_bundle(path: Path) -> bool:
    try:
        BundleFolder(path)
    except BundleError:
        return False
    return True


def pack(built: Built, path: Path) -> Manifest:
    """Write the bundle of `built` into `path`; raises WorkshopError when it cannot be written."""
    runtime = built.runtime
    blobs: dict[str, bytes] = {}

    def keep(content: bytes) -> Blob:
        blob = Blob.of(content)
        blobs[blob.sha256] = content
        return blob

    graphs: dict[str, Graph] = {}
    latency_ms: dict[str, dict[str, float]] = {}
    size_bytes: dict[str, dict[str, int]] = {}
    for name, graph in built.graphs.items():
        spec, variants = None, {}
        sessions: dict[str, Session] = {
            ORIGINAL: accuracy.Published(runtime.open(graph.published, threads=1)),
        }
        for precision, built_variant in graph.variants.items():
            session = sessions[precision] = runtime.open(built_variant.content, threads=1)
            outputs = session.run(graph.example)
            tolerance, mismatch = TOLERANCE[precision]
            tolerance *= max([1.0, *(float(np.abs(one).max()) for one in outputs.values() if one.dtype.kind == "f")])
            golden = Golden(keep(pack_arrays(graph.example)), keep(pack_arrays(outputs)), tolerance, mismatch)
            blob = keep(built_variant.content)
            measured = (built_variant.accuracy, built_variant.agreement, built_variant.checks)
            variants[precision] = Variant(blob, golden, *measured, built_variant.quantized)
            spec = _with_layout(session.spec, graph, built.recipe.recipe.task.settings.get("layout"))
        latency_ms[name] = time_in_turn(sessions, graph.example, _RUNS)
        size_bytes[name] = {ORIGINAL: len(graph.published)}
        size_bytes[name] |= {precision: variant.graph.size_bytes for precision, variant in variants.items()}
        if spec is not None:
            graphs[name] = Graph(spec, variants, graph.original, graph.left_out)
    recipe = built.recipe.recipe
    kernels = {arch: {name: keep(file) for name, file in files.items()} for arch, files in built.kernels.items()}
    labels = keep(built.labels.encode()) if built.labels else None
    manifest = Manifest(
        name=recipe.name,
        version=recipe.version,
        licence=recipe.licence,
        task=TaskSpec(recipe.task.kind, recipe.task.settings, labels),
        graphs=graphs,
        provenance=Provenance(
            recipe_sha256=built.recipe.sha256,
            data_sha256=built.data_sha256,
            tools=built.tools,
            sources=tuple(graph.source for graph in built.graphs.values()),
            steps=tuple(built.steps),
        ),
        kernels=kernels,
    )
    packed_ms = {
        name: {one: ms for one, ms in its.items() if one in graphs[name].variants} for name, its in latency_ms.items()
    }
    served = {
        name: (graph.variants[fastest(packed_ms[name])].content, graph.example)
        for name, graph in built.graphs.items()
        if name in graphs
    }
    report = _report(built, manifest, latency_ms, size_bytes)
    contents = (report.to_html(), json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    reports = {name: content.encode() for name, content in zip(REPORTS, contents, strict=True)}
    try:
        write_bundle(path, manifest, blobs, {"cpu": Measurements(machine(), packed_ms, memory_of(served))}, reports)
    except OSError as error:
        msg = f"the bundle cannot be written into {path} ({error.strerror}): make room, or give another with --out"
        raise WorkshopError(msg) from error
    return manifest


def _report(
    built: Built,
    manifest: Manifest,
    latency_ms: Mapping[str, Mapping[str, float]],
    size_bytes: Mapping[str, Mapping[str, float]],
) -> Report:
    """What the gate measured of every precision that was tried, the left out ones too."""
    verdicts = {
        f"{name} {precision}": (graph.role, verdict)
        for name, graph in built.graphs.items()
        for precision, verdict in graph.verdicts.items()
    }
    compared = {label: (role, verdict.comparison) for label, (role, verdict) in verdicts.items() if verdict.comparison}
    sources = (
        f"{one.file} of {one.package or 'its owner'} {one.version}, sha256 {one.sha256}"
        for one in manifest.provenance.sources
    )
    return Report(
        title=f"{manifest.name} {manifest.version}, as built",
        facts={
            "bundle digest": manifest.digest,
            "recipe": f"sha256 {built.recipe.sha256}",
            **{f"data, {split}": f"sha256 {sha256}" for split, sha256 in built.data_sha256.items()},
            **_labelling(built),
            "runtime": built.runtime.name,
            "machine": str(machine()["cpu"]),
        },
        lines={label: one for label, (role, one) in compared.items() if role == "recognise"},
        pages={label: one for label, (role, one) in compared.items() if role == "detect"},
        checks=[(label, check) for label, (_, verdict) in verdicts.items() for check in verdict.checks],
        latency_ms=latency_ms,
        size_bytes=size_bytes,
        left_out={label: verdict.reason for label, (_, verdict) in verdicts.items() if verdict.reason},
        notes={
            "sources": "; ".join(sources),
            "tools": ", ".join(f"{tool} {version}" for tool, version in built.tools.items()),
            "steps": f"{len(built.steps)}, each with its digests in manifest.json",
            **built.notes,
        },
    )


def _labelling(built: Built) -> dict[str, str]:
    unlabelled = [name for name, graph in built.recipe.recipe.graphs.items() if graph.samples]
    said = "unlabelled: held against what the graph as published answers, right or wrong"
    return {f"labels of {', '.join(unlabelled)}": said} if unlabelled else {}


def _with_layout(spec: ModelSpec, graph: BuiltGraph, of_pictures: str | None) -> ModelSpec:
    layouts = _LAYOUTS[graph.role] | ({"x": of_pictures} if of_pictures else {})
    return ModelSpec(
        *(
            tuple(dataclasses.replace(tensor, layout=layouts.get(tensor.name, "")) for tensor in tensors)
            for tensors in (spec.inputs, spec.outputs)
        )
    )
