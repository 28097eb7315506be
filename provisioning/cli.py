"""The command `provision`.

Results go to standard output, progress and errors to standard error.
Exit codes: 0 done, 1 refused or failed with a reason, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from models.errors import ApplianceError, ConfigError

# Everything else is imported by the command that needs it: `provision --help` must not wait for onnx.

app = typer.Typer(
    help="The workshop: makes bundles from public checkpoints and proves them on labelled data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True, highlight=False)

TARGETS = ("cpu",)


class Precision(str, Enum):
    """What a bundle is to hold."""

    auto = "auto"
    fp32 = "fp32"
    int8 = "int8"


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of labelled data; default: the recipe's.")]
Bundle = Annotated[Path, typer.Argument(help="Folder of a bundle.")]


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ApplianceError as error:
        _err.print(f"provision: {error}", markup=False)
        sys.exit(1)


@contextmanager
def _progress() -> Iterator[Any]:
    """A function that is told what starts; each line is printed when its step ends, with the seconds it took."""
    started: list[tuple[str, float]] = []

    def finish() -> None:
        if started:
            text, at = started.pop()
            _err.print(f"{time.monotonic() - at:6.1f} s  {text}", markup=False)

    with _err.status("starting") as status:  # animated on a terminal only

        def report(text: str) -> None:
            finish()
            started.append((text, time.monotonic()))
            status.update(text)

        yield report
        finish()


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML), for example models/zoo/ppocr-v4.toml.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the bundle: new, empty, or an earlier bundle.")],
    target: Annotated[str, typer.Option(help="What the bundle is measured on: " + ", ".join(TARGETS))] = "cpu",
    precision: Annotated[
        Precision, typer.Option(help="Include all that pass their gate, or only one.")
    ] = Precision.auto,
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

    pack.check_folder(out)
    read = recipes.read(recipe)
    cache = Cache(None) if no_cache else Cache.of_user()
    with _progress() as report:
        built = workshop.build(read, data or read.default_data, precision.value, cache, report)
        report("packing")
        pack.pack(built, out)
    _show(out, as_json)


@app.command()
def inspect(bundle: Bundle, as_json: Json = False) -> None:
    """Show what a bundle holds, how well it reads and where it came from."""
    _show(bundle, as_json)


@app.command()
def verify(
    bundle: Bundle,
    data: Data = None,
    precision: Annotated[Precision, typer.Option(help="Which to verify; auto: what would be served.")] = Precision.auto,
    split: Annotated[str, typer.Option(help="calibrate, tune, gate, or all.")] = "gate",
    splits: Annotated[Path | None, typer.Option("--splits", help="splits.tsv, for data that has none.")] = None,
    as_json: Json = False,
) -> None:
    """Read labelled lines with the original and with the bundle, and compare."""
    from appliance.runtime import choose  # noqa: PLC0415 - see the top
    from models.folder import BundleFolder  # noqa: PLC0415
    from provisioning import accuracy, build  # noqa: PLC0415
    from provisioning import data as labelled  # noqa: PLC0415

    folder = BundleFolder(bundle)
    with _progress() as report:
        report("reading labelled data")
        lines = labelled.load(data or labelled.default_folder(), split, splits).lines
        report(f"reading {len(lines)} lines with the original and with the bundle")
        result = accuracy.verify(folder, lines, precision.value, choose(build.RUNTIME), build.THREADS)
    if as_json:
        _print_json(result)
        return
    table = Table("", "exact", "CER", "lines")
    for what in ("original", "packed"):
        table.add_row(what, *_accuracy_cells(result[what]), end_section=what == "packed")
    for source, both in result["by_source"].items():
        for what, one in both.items():
            table.add_row(f"{source}, {what}", *_accuracy_cells(one))
    _out.print(table)
    low, high = result["interval"]["exact"]
    note = "" if result["resolved"] else f"; a difference of one point is not resolved by {len(lines)} lines"
    _out.print(
        f"{result['graph']} in {result['precision']}: both read the same on {result['agreement']:.1%} of the lines; "
        f"exact match changed by {low:+.1%} to {high:+.1%} (95 % interval){note}"
    )


def _accuracy_cells(measured: dict[str, Any]) -> tuple[str, str, str]:
    return f"{measured['exact']:.1%}", f"{measured['cer']:.2%}", str(measured["lines"])


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _show(path: Path, as_json: bool) -> None:
    """Print what a bundle holds."""
    from models import schema  # noqa: PLC0415 - see the top
    from models.folder import BundleFolder  # noqa: PLC0415

    folder = BundleFolder(path)
    manifest, measured = folder.manifest, folder.measurements("cpu")
    if as_json:
        _print_json({"digest": manifest.digest, "manifest": schema.dump(manifest), "measurements": {"cpu": measured}})
        return
    table = Table("graph", "precision", "bytes", "ms on CPU", "exact", "CER", "note")
    for name, graph in manifest.graphs.items():
        if graph.original:
            cells = _accuracy_cells(schema.dump(graph.original))
            table.add_row(name, "original", "", "", *cells[:2], f"{cells[2]} lines")
        for precision, variant in graph.variants.items():
            latency = measured.get("latency_ms", {}).get(name, {}).get(precision, "")
            exact, cer, _ = _accuracy_cells(schema.dump(variant.accuracy)) if variant.accuracy else ("", "", "")
            table.add_row(name, precision, f"{variant.graph.size_bytes:,}", str(latency), exact, cer, "")
        for precision, reason in graph.left_out.items():
            table.add_row(name, precision, "", "", "", "", f"left out: {reason}")
    _out.print(f"{manifest.name} {manifest.version} ({manifest.licence}), task {manifest.task.kind}")
    _out.print(f"digest {manifest.digest}")
    _out.print(table)
    for source in manifest.provenance.sources:
        _out.print(f"from {source.package} {source.version}: {source.file}, sha256 {source.sha256[:12]}...")
    _out.print(f"made in {len(manifest.provenance.steps)} steps with {_listed(manifest.provenance.tools)}")


def _listed(tools: Any) -> str:  # noqa: ANN401 - a mapping of names to versions
    return ", ".join(f"{name} {version}" for name, version in tools.items())
