"""The command `provision`.

Results go to standard output, progress and errors to standard error.
Exit codes: 0 done, 1 refused or failed with a reason, 2 wrong usage.
Past 400 lines because every option has its words here, and nothing but options and printing is here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from appliance import __version__
from models.errors import ApplianceError, ConfigError, WorkshopError
from models.targets import BACKENDS, BUILD_CHECK
from models.targets import TARGETS as ENGINE_TARGETS
from provisioning import command_cli, enroll_cli, flash_cli, overlay_cli, publish_cli

if TYPE_CHECKING:
    from models.bundle import Accuracy, Agreement, Graph
    from models.measurements import Measurements
    from provisioning.sweep import Swept

# Everything else is imported by the command that needs it: `provision --help` must not wait for onnx.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_sweep = typer.Typer(no_args_is_help=True, help="Measure a graph over every value of one setting.")
app.add_typer(_sweep, name="sweep")
_export = typer.Typer(no_args_is_help=True, help="Write a bundle in the form of another server.")
app.add_typer(_export, name="export")
app.add_typer(publish_cli.app, name="publish")
app.add_typer(command_cli.app, name="command")
app.add_typer(enroll_cli.app, name="enroll")
app.add_typer(flash_cli.app, name="flash")
_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True, highlight=False)

TARGETS = ("cpu",)
_MIB = 2**20


class Precision(str, Enum):
    """What a bundle is to hold."""

    auto = "auto"
    fp32 = "fp32"
    int8 = "int8"
    int8_unfused = "int8-unfused"


class SharingMethod(str, Enum):
    """How key and value heads to share are found."""

    subspace = "subspace"
    average = "average"


class OwnTask(str, Enum):
    """What a model of somebody's own does."""

    classification = "classification"
    detection = "detection"
    lines = "lines"
    tensors = "tensors"


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of labelled data; default: the recipe's.")]
Bundle = Annotated[Path, typer.Argument(help="Folder of a bundle.")]


def _epilog(example: str) -> str:
    return f"Example: {example}\n\nExit codes: 0 done, 1 refused or failed with a reason, 2 wrong usage."


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both interrupt, so that nothing half-written stays
    # Before numpy is loaded: sums over many threads are added up in another order on another number of cores, and
    # threads that spin take the core of the runtime's.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        app()
    except ApplianceError as error:
        _err.print(f"provision: {error}", markup=False)
        sys.exit(1)
    except OSError as error:
        what = error.filename or "a file"
        _err.print(f"provision: {what} cannot be used ({error.strerror}): make room, or give another", markup=False)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"provision {__version__}")
        raise typer.Exit


@app.callback(epilog=_epilog("provision build models/zoo/ppocr-v4.toml --out ppocr-v4"))
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The workshop: makes bundles from public checkpoints and proves them on labelled data."""


@contextmanager
def _progress() -> Iterator[Any]:
    """A function that is told what starts; each line is printed when its step ends, with the seconds it took."""
    started: list[tuple[str, float]] = []

    def finish() -> None:
        if started:
            text, at = started.pop()
            _err.print(f"{time.monotonic() - at:6.1f} s  {text}", markup=False)

    with _err.status("starting") as status:  # animated on a terminal only

        def report(text: str, *, within: bool = False) -> None:
            """`within` a step, its state is shown, and no line is printed."""
            status.update(text)
            if not within:
                finish()
                started.append((text, time.monotonic()))

        try:
            yield report
        except KeyboardInterrupt as error:
            msg = "interrupted: nothing was written, and an earlier result stands as it was"
            raise WorkshopError(msg) from error
        finish()


@app.command(epilog=_epilog("provision new --from model.onnx --labels labels.txt"))
def new(
    model: Annotated[Path, typer.Option("--from", help="ONNX file of your own.")],
    out: Annotated[Path | None, typer.Option("--out", help="Recipe to write; default: the file's name, .toml.")] = None,
    task: Annotated[
        OwnTask | None, typer.Option(help="What it does; default: what it looks like. tensors suits everything.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Text file with the name of each class, one a row.")] = None,
    as_json: Json = False,
) -> None:
    """Write a recipe for an ONNX file of your own, with what the file tells."""
    from models import schema  # noqa: PLC0415 - see the top
    from provisioning import skeleton  # noqa: PLC0415

    try:
        names = labels.read_text(encoding="utf-8").splitlines() if labels else []
    except (OSError, ValueError) as error:
        msg = f"{labels} cannot be read as UTF-8 text ({error}): give a file with a name a row with --labels"
        raise ConfigError(msg) from error
    path = out or model.with_suffix(".toml")
    found = skeleton.write(model, path, task.value if task else "", names)
    if as_json:
        _print_json({"recipe": str(path), **schema.dump(found)})
        return
    for sentence in found.found:
        _out.print(sentence, markup=False)
    _out.print(f"likely task: {found.task}; recipe: {path}", markup=False)
    for key, why in found.guessed.items():
        _out.print(f"check {key}: {why}", markup=False)
    _out.print(f"then: provision build {path} --out {path.with_suffix('').name}-bundle", markup=False)


@app.command(epilog=_epilog("provision build models/zoo/ppocr-v4.toml --target cpu --out ppocr-v4"))
def build(  # noqa: PLR0913, PLR0917 - options of a command
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML), for example models/zoo/ppocr-v4.toml.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the bundle: new, empty, or an earlier bundle.")],
    target: Annotated[str, typer.Option(help="What the bundle is measured on: " + ", ".join(TARGETS))] = "cpu",
    precision: Annotated[
        Precision, typer.Option(help="All that pass their gate, or one: float stands in where that misses its gate.")
    ] = Precision.auto,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", min=1, help="Key and value heads that attention shares; default: all.")
    ] = None,
    gqa_method: Annotated[
        SharingMethod, typer.Option(help="How heads come to share: subspace is fitted, average is the plain baseline.")
    ] = SharingMethod.subspace,
    kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--kernels", help="Pack fused kernels for a target, may be repeated: " + ", ".join(ENGINE_TARGETS)
        ),
    ] = None,
    data: Data = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do every step again.")] = False,
    as_json: Json = False,
) -> None:
    """Build a bundle from a recipe and prove it on labelled data."""
    if target not in TARGETS:
        msg = f"target {target!r} is not supported yet; supported: {', '.join(TARGETS)}"
        raise ConfigError(msg)
    from provisioning import build as workshop  # noqa: PLC0415 - see the top
    from provisioning import pack  # noqa: PLC0415
    from provisioning import recipe as recipes  # noqa: PLC0415
    from provisioning.cache import Cache  # noqa: PLC0415
    from provisioning.sharing import Sharing  # noqa: PLC0415

    pack.check_folder(out)
    read = recipes.read(recipe)
    cache = Cache(None) if no_cache else Cache.of_user()
    with _progress() as report:
        wanted = Sharing(kv_heads, gqa_method.value) if kv_heads else None
        built = workshop.build(read, data or read.default_data, precision.value, cache, report, wanted, kernels or ())
        report("packing")
        pack.pack(built, out)
    _show(out, as_json)


@app.command(epilog=_epilog("provision inspect ppocr-v4 --json"))
def inspect(bundle: Bundle, as_json: Json = False) -> None:
    """Check every byte of a bundle, and show what it holds, how well it reads and where it came from."""
    _show(bundle, as_json)


@app.command(epilog=_epilog("provision verify ppocr-v4 --precision int8 --split gate"))
def verify(
    bundle: Bundle,
    data: Data = None,
    precision: Annotated[Precision, typer.Option(help="Which to verify; auto: what would be served.")] = Precision.auto,
    split: Annotated[str, typer.Option(help="calibrate, tune, gate, or all.")] = "gate",
    splits: Annotated[Path | None, typer.Option("--splits", help="splits.tsv, for data that has none.")] = None,
    runtime: Annotated[str, typer.Option(help="What runs both, named as in a daemon's settings.")] = "onnxruntime-cpu",
    report_file: Annotated[Path | None, typer.Option("--report", help="Write the report, with plots, as HTML.")] = None,
    as_json: Json = False,
) -> None:
    """Read labelled lines and pages with the original and with the bundle, and compare."""
    from appliance.runtime import choose  # noqa: PLC0415 - see the top
    from models.folder import BundleFolder, write_file  # noqa: PLC0415
    from provisioning import data as labelled  # noqa: PLC0415
    from provisioning import steps  # noqa: PLC0415
    from provisioning.gate import said  # noqa: PLC0415
    from provisioning.verify import verify as compare  # noqa: PLC0415

    if report_file and (report_file.is_dir() or not report_file.absolute().parent.is_dir()):
        what = f"{report_file} is a folder" if report_file.is_dir() else f"{report_file.absolute().parent} is no folder"
        msg = f"{what}: give a file in a folder that is there with --report"
        raise ConfigError(msg)
    folder, project = BundleFolder(bundle), labelled.default_folder()
    opened = choose(runtime, concurrency=steps.THREADS)
    with _progress() as report:
        report("reading labelled data")
        chosen = labelled.load(data or project, split, splits, project)
        found = compare(folder, chosen, precision.value, opened, steps.THREADS, report)
    if report_file:
        write_file(report_file, found.report.to_html().encode())
    if as_json:
        _print_json(found.result)
        return
    _print_verified(found.result)
    for label, check in found.report.checks:
        _out.print(f"{label}: {'within its limit' if check.met else 'OUTSIDE its limit'}: {said(check)}")
    if report_file:
        _out.print(f"report: {report_file}")


@app.command(epilog=_epilog("provision parity ppocr-v4-kv2 ppocr-v4 --precision int8"))
def parity(
    bundle: Annotated[Path, typer.Argument(help="Folder of the bundle that devices are to run.")],
    upstream: Annotated[Path | None, typer.Argument(help="That of the one upstream; default: the same.")] = None,
    precision: Annotated[Precision, typer.Option(help="On devices; auto: what would be served.")] = Precision.auto,
    upstream_precision: Annotated[Precision, typer.Option(help="Upstream.")] = Precision.fp32,
    data: Data = None,
    split: Annotated[str, typer.Option(help="calibrate, tune, gate, or all.")] = "gate",
    splits: Annotated[Path | None, typer.Option("--splits", help="splits.tsv, for data that has none.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a device's bundle with the one upstream on the same lines, and keep that beside it."""
    from appliance.runtime import choose  # noqa: PLC0415 - see the top
    from models import schema  # noqa: PLC0415
    from models.folder import BundleFolder  # noqa: PLC0415
    from provisioning import data as labelled  # noqa: PLC0415
    from provisioning import steps  # noqa: PLC0415
    from provisioning.verify import parity as compare  # noqa: PLC0415

    ours, theirs = BundleFolder(bundle), BundleFolder(upstream or bundle)
    project = labelled.default_folder()
    with _progress() as report:
        lines: tuple[labelled.Line, ...] = ()
        if ours.manifest.reader and theirs.manifest.reader:
            report("reading labelled data")
            lines = labelled.load(data or project, split, splits, project).lines
        wanted = precision.value, upstream_precision.value
        found = compare(ours, theirs, wanted, lines, choose(steps.RUNTIME), steps.THREADS, report)
    path = ours.keep_parity(found)
    if as_json:
        _print_json(schema.dump(found))
        return
    _out.print(f"{found.device.name} {found.device.version}: {found}", markup=False)
    _out.print(f"kept in {path}; shown before a rollout is confirmed", markup=False)


def _print_verified(result: Mapping[str, Any]) -> None:
    lines, pages = result["packed"]["lines"], result["pages"]
    if result["data"]["left_out"]:
        _out.print(
            f"{result['data']['left_out']} lines and pages of other splits are not scored; --split all scores them"
        )
    if lines:
        table = Table("", "exact", "CER", "lines")
        for what in ("original", "packed"):
            table.add_row(what, *_accuracy_cells(result[what]), end_section=what == "packed")
        for source, both in result["by_source"].items():
            for what, one in both.items():
                table.add_row(f"{source}, {what}", *_accuracy_cells(one))
        _out.print(table)
        low, high = result["interval"]["exact"]
        note = "" if result["resolved"] else f"; a difference of one point is not resolved by {lines} lines"
        _out.print(
            f"{result['graph']} in {result['precision']}: both read the same on {result['agreement']:.1%} of the "
            f"lines; exact match changed by {low:+.1%} to {high:+.1%} (95 % interval){note}"
        )
    if pages:
        shares = ", ".join(f"{what} {pages[what]['found']:.1%}" for what in ("original", "detector", "packed"))
        _out.print(f"of {pages['packed']['lines']} labelled texts on {pages['pages']} pages found: {shares}")
    for name, latency_ms in result["latency_ms"].items():
        size_bytes = result["size_bytes"][name]
        costs = (f"{one} {ms:.1f} ms, {size_bytes[one] / 1e6:.2f} MB" for one, ms in latency_ms.items())
        _out.print(f"{name}: " + "; ".join(costs))


@app.command(name="compile", epilog=_epilog("provision compile ppocr-v4 --target rtx --backend tensorrt-rtx"))
def compile_(  # noqa: PLR0913, PLR0917 - options of a command
    bundle: Bundle,
    target: Annotated[str, typer.Option(help="What to compile for: " + ", ".join(ENGINE_TARGETS))],
    backend: Annotated[str, typer.Option(help="auto (what is installed), " + " or ".join(BACKENDS))] = "auto",
    precision: Annotated[Precision, typer.Option(help="auto: every precision of each graph.")] = Precision.auto,
    workspace_mib: Annotated[int, typer.Option(min=1, help="Device memory that a kernel may use as it runs.")] = 1024,
    time_limit_s: Annotated[float, typer.Option(min=1, help="A build that takes longer is stopped.")] = 1800,
    memory_limit_mib: Annotated[int, typer.Option(min=1, help="A build that holds more RAM is stopped.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="Folder of engines (default: that in the bundle).")] = None,
    as_json: Json = False,
) -> None:
    """Compile the graphs of a bundle into engines for one kind of device, each with its passport."""
    from models.folder import BundleFolder  # noqa: PLC0415 - see the top
    from provisioning import engines  # noqa: PLC0415
    from provisioning.cache import Cache  # noqa: PLC0415
    from provisioning.engines.child import Limits  # noqa: PLC0415

    limits = Limits(time_limit_s, memory_limit_mib * _MIB)
    wish = engines.Wish(target, backend, precision.value, workspace_mib * _MIB, limits)
    with _progress() as report:
        made = engines.compile_bundle(BundleFolder(bundle), wish, Cache.of_user(), report, out)
    if as_json:
        _print_json({"target": target, "engines": [one.to_json() for one in made]})
        return
    table = Table("graph", "precision", "MB", "s", "MiB in RAM", "valid for", "purpose", box=box.SIMPLE)
    for one in made:
        passport, facts = one.passport, one.passport.valid_for
        size, memory = f"{passport.plan.size_bytes / 1e6:.2f}", str(one.built.memory_bytes // _MIB)
        valid = f"SM {facts.sm}, {facts.backend} {facts.version} {facts.module}".strip()
        row = (passport.graph, passport.precision, size, f"{one.built.seconds:.1f}", memory, valid, passport.purpose)
        table.add_row(*row)
    _out.print(table)
    if any(one.passport.purpose == BUILD_CHECK for one in made):
        _out.print(f"{BUILD_CHECK}: shows that the graphs compile; never executed, and not served unless asked for")


app.command(epilog=_epilog("provision image image.toml --out overlay.tar"))(overlay_cli.image)


@_sweep.command(name="gqa", epilog=_epilog("provision sweep gqa models/zoo/ppocr-v4.toml --plot gqa.svg"))
def sweep_gqa(
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML) with a graph that has attention.")],
    data: Data = None,
    split: Annotated[
        str, typer.Option(help="What is scored: tune (to choose by), gate (to report), calibrate.")
    ] = "gate",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the rows as a picture (SVG).")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do every step again.")] = False,
    as_json: Json = False,
) -> None:
    """Measure every number of key and value heads that attention can share, by every method."""
    from models import schema  # noqa: PLC0415 - see the top
    from models.folder import write_file  # noqa: PLC0415
    from provisioning import recipe as recipes  # noqa: PLC0415
    from provisioning import sweep  # noqa: PLC0415
    from provisioning.cache import Cache  # noqa: PLC0415

    if plot and not plot.absolute().parent.is_dir():
        msg = f"{plot.absolute().parent} is no folder: make it, or give another file with --plot"
        raise ConfigError(msg)
    read = recipes.read(recipe)
    cache = Cache(None) if no_cache else Cache.of_user()
    with _progress() as report:
        swept = sweep.sweep_gqa(read, data or read.default_data, split, cache, report)
    if plot:
        write_file(plot, swept.to_svg().encode())
    if as_json:
        _print_json(schema.dump(swept))
        return
    _print_swept(swept)
    if plot:
        _out.print(f"plot: {plot}")


@_export.command(name="triton", epilog=_epilog("provision export triton ppocr-v4 --out models"))
def export_triton(
    bundle: Bundle,
    out: Annotated[Path, typer.Option("--out", help="Model repository to write into; may hold other models.")],
    precision: Annotated[str, typer.Option(help="Of every graph.")] = "fp32",
    batch: Annotated[int, typer.Option(min=0, max=64, help="Most requests in one run.")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on the CPU, not on a card.")] = False,
    as_json: Json = False,
) -> None:
    """Write each graph as a model of NVIDIA Triton, with the same names and batches, and a warm-up.

    A version that is newer lies beside the one before.
    """
    from models import schema  # noqa: PLC0415 - see the top
    from models.folder import BundleFolder  # noqa: PLC0415
    from provisioning import triton  # noqa: PLC0415

    exported = triton.export(BundleFolder(bundle), out, precision=precision, batch=batch, gpu=not cpu)
    if as_json:
        _print_json(schema.dump(exported))
        return
    for one in exported:
        batches = f"batches up to {one.batch}" if one.batch else "no batches"
        _out.print(f"{out / one.model}: version {one.version}, {one.precision}, {batches}", markup=False)


def _print_swept(swept: Swept) -> None:
    reads = swept.rows[0].reading is not None
    quality = ("exact", "CER", "agree", "KL") if reads else ("cosine", "error")
    measured: tuple[str, ...]
    table = Table("heads", "method", *quality, "parameters", "MMACs", "ms", "peak MB", box=box.SIMPLE)
    for row in swept.rows:
        if row.reading is not None:
            packed, agreement = row.reading["packed"], row.reading["agreement"]
            measured = (f"{packed['exact']:.1%}", f"{packed['cer']:.2%}", f"{agreement:.1%}", f"{row.kl or 0:.5f}")
        else:
            measured = f"{row.cosine:.4f}", f"{row.error:.4f}"
        costs = (
            f"{row.parameters:,}",
            f"{row.macs / 1e6:,.1f}",
            f"{row.latency_ms:.1f}",
            f"{row.peak_bytes / 1e6:.0f}",
        )
        table.add_row(str(row.kv_heads), row.method, *measured, *costs)
    _out.print(
        f"{swept.graph} of {swept.recipe}: {len(swept.blocks)} attention blocks, {swept.samples} of {swept.split}"
    )
    _out.print(table)
    for node, reason in swept.not_understood.items():
        _out.print(f"left alone: {node} looks like attention, but {reason}")


def _accuracy_cells(measured: dict[str, Any]) -> tuple[str, str, str]:
    return f"{measured['exact']:.1%}", f"{measured['cer']:.2%}", str(measured["lines"])


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _show(path: Path, as_json: bool) -> None:
    """Check and print what a bundle holds; raises BundleError when any of it is damaged."""
    from models import schema  # noqa: PLC0415 - see the top
    from models.folder import REPORTS, BundleFolder  # noqa: PLC0415

    folder = BundleFolder(path)
    folder.check_content()
    manifest, measured = folder.manifest, folder.measurements("cpu")
    if as_json:
        measurements = {"cpu": schema.dump(measured)} if measured else {}
        document = {"digest": manifest.digest, "manifest": schema.dump(manifest), "measurements": measurements}
        _print_json(document | {"content_verified": True})
        return
    _out.print(f"{manifest.name} {manifest.version} ({manifest.licence}), task {manifest.task.kind}")
    _out.print(f"digest {manifest.digest}, content verified")
    _print_graphs(manifest.graphs, measured)
    for arch, files in manifest.kernels.items():
        size = sum(blob.size_bytes for blob in files.values())
        _out.print(f"fused kernels for {arch}: {len(files)} files, {size / 1e6:.2f} MB")
    for source in manifest.provenance.sources:
        origin = f"{source.package} {source.version}: {source.file}" if source.package else source.file
        _out.print(f"from {origin}, sha256 {source.sha256[:12]}...")
    for step in manifest.provenance.steps:
        if step.asked:
            _out.print(f"asked for: {step.graph} with {step.asked}")
    _out.print(f"made in {len(manifest.provenance.steps)} steps with {_listed(manifest.provenance.tools)}")
    if (path / REPORTS[0]).exists():
        _out.print(f"report of the gate, with plots: {path / REPORTS[0]}")


def _print_graphs(graphs: Mapping[str, Graph], measured: Measurements | None) -> None:
    from appliance.runtime.machine import machine  # noqa: PLC0415 - see the top
    from models.measurements import fastest  # noqa: PLC0415

    latency_ms = measured.latency_ms if measured else {}
    here = measured is not None and measured.machine == machine()
    table = Table("graph", "precision", "MB", "ms on CPU", "quality", box=box.SIMPLE)
    for name, graph in graphs.items():
        times = {one: latency_ms.get(name, {}).get(one) for one in graph.variants}
        known = {one: ms for one, ms in times.items() if ms is not None}
        served = fastest(known) if here and len(known) == len(times) else ""
        if graph.original:
            table.add_row(name, "original", "", "", _quality(graph.original, None))
        for precision, variant in graph.variants.items():
            ms, quality = times[precision], _quality(variant.accuracy, variant.agreement)
            size = f"{variant.graph.size_bytes / 1e6:.2f}"
            mark = " *" if precision == served else ""
            table.add_row(name, precision + mark, size, "" if ms is None else f"{ms:.1f}", quality)
    _out.print(table)
    for name, graph in graphs.items():
        for precision, reason in graph.left_out.items():
            _out.print(f"left out: {name} {precision}, {reason}")
    if here:
        _out.print("* what this machine would serve: fp32 if it is there, unless another takes nine tenths of its time")
    else:
        why = "times are those of another machine" if measured else "no times were kept"
        _out.print(f"{why}: the daemon measures when it starts, to choose the precision it serves")
    _out.print(
        "original: the checkpoint as published; exact: share of lines read without a fault; CER: share of characters "
        "to correct; alike: share of the classes, or of the area found, that is the original's"
    )


def _quality(accuracy: Accuracy | None, agreement: Agreement | None) -> str:
    if accuracy:
        return f"exact {accuracy.exact:.1%}, CER {accuracy.cer:.2%} on {accuracy.lines} lines"
    return f"alike {agreement.share:.1%} on {agreement.on}" if agreement else ""


def _listed(tools: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in tools.items())
