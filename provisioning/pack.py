"""Packs what was built: manifest, golden vectors, labels, and beside them what was measured on this machine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from appliance.runtime import Runtime, choose
from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.errors import ConfigError
from models.folder import MANIFEST, pack_arrays, write_bundle
from models.spec import Array, ModelSpec
from provisioning.build import RUNTIME, Built, BuiltGraph

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
    """Raise ConfigError unless `path` is free for a bundle: missing, empty, or holding an earlier one."""
    if path.is_dir() and (not any(path.iterdir()) or (path / MANIFEST).exists() or _only_torn(path)):
        return
    if path.exists():
        msg = f"{path} exists and is no bundle: give an empty or a new folder with --out"
        raise ConfigError(msg)


def _only_torn(path: Path) -> bool:
    """Whether the folder holds only what a bundle without its manifest holds: writing was cut short."""
    return {entry.name for entry in path.iterdir()} <= {"blobs", "measurements", "engines", f".{MANIFEST}.new"}


def pack(built: Built, path: Path) -> Manifest:
    """Write the bundle of `built` into `path`."""
    runtime = choose(RUNTIME)
    blobs: dict[str, bytes] = {}

    def keep(content: bytes) -> Blob:
        blob = Blob.of(content)
        blobs[blob.sha256] = content
        return blob

    graphs: dict[str, Graph] = {}
    latency_ms: dict[str, dict[str, float]] = {}
    for name, graph in built.graphs.items():
        spec, variants, latency_ms[name] = None, {}, {}
        for precision, content in graph.variants.items():
            session = runtime.open(content, threads=1)
            outputs = session.run(graph.example)
            tolerance, mismatch = TOLERANCE[precision]
            golden = Golden(keep(pack_arrays(graph.example)), keep(pack_arrays(outputs)), tolerance, mismatch)
            variants[precision] = Variant(keep(content), golden, graph.accuracy.get(precision))
            spec = _with_layout(session.spec, graph)
            latency_ms[name][precision] = _latency_ms(runtime, content, graph.example)
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
    machine = {"cpu": _cpu(), "onnxruntime": built.tools["onnxruntime"]}
    write_bundle(path, manifest, blobs, {"cpu": {"machine": machine, "latency_ms": latency_ms}})
    return manifest


def _with_layout(spec: ModelSpec, graph: BuiltGraph) -> ModelSpec:
    layouts = _LAYOUTS[graph.role]
    return ModelSpec(
        *(
            tuple(dataclasses.replace(tensor, layout=layouts[tensor.name]) for tensor in tensors)
            for tensors in (spec.inputs, spec.outputs)
        )
    )


def _latency_ms(runtime: Runtime, content: bytes, inputs: Mapping[str, Array]) -> float:
    """Median time of one run on one thread, in milliseconds, after one run that is not counted."""
    session = runtime.open(content, threads=1)
    session.run(inputs)
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        session.run(inputs)
        seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds) * 1000, 3)


def _cpu() -> str:
    """Name of this machine's processor."""
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    named = [row.partition(":")[2].strip() for row in rows if row.startswith(("model name", "Model"))]
    return named[0] if named else "unknown"
