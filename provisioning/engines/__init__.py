"""Compiles the graphs of a bundle into engines for one target, and writes each with its passport.

    engines/<target>/<graph>.plan, .passport.json, .log (see `models.engine`)

The build itself runs in a child process (`child`, `builder`): a fault of the builder, or its hunger, takes only that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from appliance.runtime import tensorrt
from kernels import plugin
from models.bundle import Blob, Graph
from models.engine import ENGINES, NEVER, PASSPORT, Passport, stem
from models.errors import ConfigError, WorkshopError
from models.folder import BundleFolder, blob_path, write_file
from models.targets import BACKENDS, BUILD_CHECK, SERVE, TARGETS, arch
from models.tasks import shapes
from provisioning.cache import Cache
from provisioning.engines import child
from provisioning.engines.builder import Order


@dataclass(frozen=True, slots=True)
class Wish:
    """What to compile, with what, within what."""

    target: str
    backend: str
    """One of `BACKENDS`, or "auto": the first that is installed."""
    precision: str
    """ "auto": all that passed the gate."""
    workspace_bytes: int
    limits: child.Limits


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that was written."""

    path: Path
    passport: Passport
    built: child.Built

    def to_json(self) -> dict[str, Any]:
        """Plain data: the passport, and what building took."""
        return {
            "plan": str(self.path),
            "passport": json.loads(self.passport.to_bytes()),
            "seconds": round(self.built.seconds, 2),
            "cpu_s": round(self.built.cpu_s, 2),
            "build_memory_bytes": self.built.memory_bytes,
        }


class Report(Protocol):
    """Told in words what starts now, or, `within` that, how far it is."""

    def __call__(self, text: str, *, within: bool = False) -> None:
        """Take one sentence."""


def compile_bundle(
    folder: BundleFolder, wish: Wish, cache: Cache, report: Report, out: Path | None = None
) -> list[Engine]:
    """Compile the graphs of `folder`; raises ConfigError for what cannot be wished, WorkshopError for what failed.

    The engines go below `out`, or where that is None into the bundle's own folder of engines.
    Engines that are done stay when a later one fails. The cache holds the timings of earlier builds.
    """
    if wish.target not in TARGETS:
        msg = f"there is no target {wish.target!r} to compile for; known: {', '.join(TARGETS)} (cpu needs no engine)"
        raise ConfigError(msg)
    wish = dataclasses.replace(wish, backend=_backend(wish.backend))
    manifest = folder.manifest
    known = {one for graph in manifest.graphs.values() for one in graph.variants}
    if wish.precision != "auto" and wish.precision not in known:
        msg = f"{folder.path} holds no graph in {wish.precision}, only {', '.join(sorted(known))}"
        raise ConfigError(msg)
    out = (out or folder.path / ENGINES) / wish.target
    out.mkdir(parents=True, exist_ok=True)
    return [
        _compile(folder, name, precision, out, wish, cache, report)
        for name, graph in manifest.graphs.items()
        for precision in _precisions(graph, wish.precision)
    ]


def _backend(wanted: str) -> str:
    if wanted not in {*BACKENDS, "auto"}:
        msg = f"there is no backend {wanted!r}; known: auto, {', '.join(BACKENDS)}"
        raise ConfigError(msg)
    here = [backend for backend in BACKENDS if tensorrt.installed(backend)]
    if not here or wanted not in {*here, "auto"}:
        what = " or ".join(BACKENDS) if wanted == "auto" else wanted
        msg = (
            f"{what} is not installed: TensorRT comes with JetPack or NVIDIA's own packages, "
            "TensorRT-RTX with `pip install edge-appliance[rtx]`"
        )
        raise ConfigError(msg)
    return here[0] if wanted == "auto" else wanted


def _precisions(graph: Graph, wanted: str) -> list[str]:
    """Precisions of `graph` to compile: the one that is wanted, or all where it is missing or none is named."""
    return [wanted] if wanted in graph.variants else sorted(graph.variants)


def _compile(
    folder: BundleFolder, name: str, precision: str, out: Path, wish: Wish, cache: Cache, report: Report
) -> Engine:
    what = f"{name} {precision}: compiling for {wish.target} with {wish.backend}"
    report(what)
    graph = folder.manifest.graphs[name]
    variant = graph.variants[precision]
    content = folder.read(variant.graph)  # a damaged one is told as such, not as what a parser makes of it
    exported = _exported(folder, content, wish, report, what)
    example = {key: array.shape for key, array in folder.read_arrays(variant.golden.inputs).items()}
    path = out / f"{stem(name, precision)}.plan"
    part, beside = path.with_name(f".{path.name}.new"), path.with_suffix(PASSPORT)
    passport_part, graph_part = beside.with_name(f".{beside.name}.new"), path.with_name(f".{path.name}.onnx")
    order = Order(
        backend=wish.backend,
        graph=str(graph_part if exported else blob_path(folder.path, variant.graph)),
        plan=str(part),
        sm=TARGETS[wish.target],
        profiles=tuple(shapes.profiles(folder.manifest.task, name, graph.spec, example)),
        workspace_bytes=wish.workspace_bytes,
        timing_caches=str(cache.folder / "timings") if cache.folder else "",
        plugins=bool(exported),
    )
    try:
        if exported:
            write_file(graph_part, exported)
        built = child.run(
            order, path.with_suffix(".log"), wish.limits, lambda text: report(f"{what}: {text}", within=True)
        )
        plan = part.read_bytes()
        plugins = dict.fromkeys(plugin.PLUGINS, Blob.of(exported).sha256) if exported else {}
        passport = _passport(name, precision, wish, variant.graph, Blob.of(plan), plugins, built)
        write_file(passport_part, passport.to_bytes())  # a disk that is full leaves the earlier engine whole
        part.replace(path)
        passport_part.replace(beside)
    except WorkshopError as error:
        msg = f"graph {name} in {precision} could not be compiled for {wish.target}: {error}"
        raise WorkshopError(msg) from error
    except KeyboardInterrupt as error:
        msg = (
            f"interrupted while compiling {name} in {precision}: engines finished before it stay, its own is as it was"
        )
        raise WorkshopError(msg) from error
    finally:
        part.unlink(missing_ok=True)
        passport_part.unlink(missing_ok=True)
        graph_part.unlink(missing_ok=True)
    return Engine(path, passport, built)


def _exported(folder: BundleFolder, content: bytes, wish: Wish, report: Report, what: str) -> bytes:
    """The graph with its fused operators as plugins; empty where it has none, or the bundle no kernels for them."""
    files = folder.manifest.kernels.get(arch(wish.target), {})
    if not files or wish.backend != "tensorrt":  # TensorRT-RTX knows no plugins
        return b""
    try:
        from provisioning import passes  # noqa: PLC0415 - a device may have no onnx
        from provisioning.passes import plugin as export  # noqa: PLC0415
    except ImportError as error:
        report(
            f"{what}: without the fused kernels, because {error.name} is missing: pip install 'edge-appliance[jetson]'"
        )
        return b""
    model = passes.load(content, what)
    if not model.functions:
        return b""
    kernels = {name: folder.read(blob) for name, blob in files.items()}
    return passes.save(export.plugin(model, arch(wish.target), kernels))


def _passport(
    name: str, precision: str, wish: Wish, graph: Blob, plan: Blob, plugins: Mapping[str, str], built: child.Built
) -> Passport:
    outcome = built.outcome
    return Passport(
        graph=name,
        precision=precision,
        target=wish.target,
        valid_for=outcome.valid_for,
        graph_sha256=graph.sha256,
        plan=plan,
        profiles=outcome.profiles,
        memory_bytes=outcome.memory_bytes,
        flags=outcome.flags,
        plugins=plugins,
        timing_cache_sha256=outcome.timing_cache_sha256,
        purpose=SERVE if wish.backend == "tensorrt" else BUILD_CHECK,
        executed=NEVER,
    )
