"""Packs what was built: manifest, golden vectors, labels, and beside them what was measured on this machine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from appliance.runtime import Session, choose
from appliance.runtime.machine import machine, time_in_turn
from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.errors import ConfigError, WorkshopError
from models.folder import MANIFEST, pack_arrays, write_bundle
from models.measurements import Measurements
from models.spec import ModelSpec
from provisioning.build import Built, BuiltGraph
from provisioning.steps import RUNTIME

TOLERANCE = {"fp32": (1e-3, 0.0), "int8": (0.1, 0.05)}
"""Precision -> (largest difference of a float output, largest share of differing elements of an integer one).

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
    elif there == path and any(path.iterdir()) and not (path / MANIFEST).exists() and not _only_torn(path):
        reason = "exists and is no bundle"
    if reason:
        msg = f"{there} {reason}: give an empty or a new folder with --out"
        raise ConfigError(msg)


def _only_torn(path: Path) -> bool:
    """Whether the folder holds only what a bundle without its manifest holds: writing was cut short."""
    return {entry.name for entry in path.iterdir()} <= {"blobs", "measurements", "engines", f".{MANIFEST}.new"}


def pack(built: Built, path: Path) -> Manifest:
    """Write the bundle of `built` into `path`; raises WorkshopError when it cannot be written."""
    runtime = choose(RUNTIME)
    blobs: dict[str, bytes] = {}

    def keep(content: bytes) -> Blob:
        blob = Blob.of(content)
        blobs[blob.sha256] = content
        return blob

    graphs: dict[str, Graph] = {}
    latency_ms: dict[str, dict[str, float]] = {}
    for name, graph in built.graphs.items():
        spec, variants = None, {}
        sessions: dict[str, Session] = {}
        for precision, built_variant in graph.variants.items():
            session = sessions[precision] = runtime.open(built_variant.content, threads=1)
            outputs = session.run(graph.example)
            tolerance, mismatch = TOLERANCE[precision]
            golden = Golden(keep(pack_arrays(graph.example)), keep(pack_arrays(outputs)), tolerance, mismatch)
            blob = keep(built_variant.content)
            variants[precision] = Variant(blob, golden, built_variant.accuracy, built_variant.agreement)
            spec = _with_layout(session.spec, graph)
        latency_ms[name] = time_in_turn(sessions, graph.example, _RUNS)
        if spec is not None:
            graphs[name] = Graph(spec, variants, graph.original, graph.left_out)
    recipe = built.recipe.recipe
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
    )
    try:
        write_bundle(path, manifest, blobs, {"cpu": Measurements(machine(), latency_ms)})
    except OSError as error:
        msg = f"the bundle cannot be written into {path} ({error.strerror}): make room, or give another with --out"
        raise WorkshopError(msg) from error
    return manifest


def _with_layout(spec: ModelSpec, graph: BuiltGraph) -> ModelSpec:
    layouts = _LAYOUTS[graph.role]
    return ModelSpec(
        *(
            tuple(dataclasses.replace(tensor, layout=layouts[tensor.name]) for tensor in tensors)
            for tensors in (spec.inputs, spec.outputs)
        )
    )
