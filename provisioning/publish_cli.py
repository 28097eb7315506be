"""`provision publish`: a signed repository of bundles on plain static files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from provisioning.publish import Repository

# Cryptography and TUF are imported by the commands that need them: `provision --help` must not wait for them.

app = typer.Typer(no_args_is_help=True, help="Publish bundles to devices: a signed repository on plain static files.")
_out = Console(soft_wrap=True)

PASSPHRASE_VARIABLE = "PROVISION_PASSPHRASE"  # noqa: S105 - its name, not its value
"""Not an option: a command line can be read by everybody on the machine."""

RepositoryFolder = Annotated[Path, typer.Argument(help="Folder of the repository.", metavar="REPOSITORY")]
KeyFolders = Annotated[
    list[Path], typer.Option("--keys", help="Folder with signing keys; may be repeated.", metavar="DIR")
]
Name = Annotated[str, typer.Argument(help="Name of a bundle.")]
Version = Annotated[str, typer.Argument(help="Its version.")]
Channel = Annotated[str, typer.Argument(help="dev, canary or stable.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _epilog(example: str) -> str:
    return f"Example: provision publish {example}\n\nKeys are encrypted; {PASSPHRASE_VARIABLE} holds their passphrase."


@cache
def passphrase() -> bytes:
    """That of the keys; asked once, where there is a terminal."""
    known = os.environ.get(PASSPHRASE_VARIABLE)
    if known is None and sys.stdin.isatty():
        known = typer.prompt("passphrase of the keys", hide_input=True, err=True)
    return (known or "").encode()


def _open(path: Path, keys: list[Path]) -> Repository:
    from provisioning.keys import Keys  # noqa: PLC0415 - see the top
    from provisioning.publish import Repository  # noqa: PLC0415

    return Repository(path, Keys(keys, passphrase))


@app.command(epilog=_epilog("init repository --keys keys"))
def init(
    repository: RepositoryFolder,
    keys: KeyFolders,
    root_keys: Annotated[int, typer.Option(min=1, help="Keys that may sign the root of trust.")] = 3,
    root_threshold: Annotated[int, typer.Option(min=1, help="How many of them must.")] = 2,
    targets_keys: Annotated[int, typer.Option(min=1, help="Keys that may sign what devices install.")] = 2,
    targets_threshold: Annotated[int, typer.Option(min=1, help="How many of them must.")] = 1,
) -> None:
    """Make an empty repository and its keys."""
    from provisioning.publish import Shape  # noqa: PLC0415 - see the top

    shapes = {
        "root": Shape(root_keys, root_threshold),
        "targets": Shape(targets_keys, targets_threshold),
        "snapshot": Shape(),
        "timestamp": Shape(),
    }
    root = _open(repository, keys).init(shapes)
    _out.print(f"trusted root, for every device: {root}", markup=False)
    _out.print("move the keys root-* and targets-* to places that are not online, each to another")


@app.command(epilog=_epilog("add repository ppocr-v4 --keys keys"))
def add(
    repository: RepositoryFolder,
    bundle: Annotated[Path, typer.Argument(help="Folder of a bundle.")],
    keys: KeyFolders,
    channel: Annotated[str, typer.Option(help="Channel that is to run it: dev, canary or stable.")] = "dev",
    as_json: Json = False,
) -> None:
    """Publish a bundle, and point a channel to it."""
    from models.folder import BundleFolder  # noqa: PLC0415 - see the top

    added = _open(repository, keys).add(BundleFolder(bundle), channel)
    if as_json:
        print(json.dumps(asdict(added)))
        return
    _out.print(f"{added.name} {added.version} is in channel {added.channel}, digest {added.digest}", markup=False)
    _out.print(f"{added.new_blobs} blobs are new, {added.packed_bytes / 1e6:.2f} MB compressed")


@app.command(epilog=_epilog("promote repository ppocr-v4 1.1.0 stable --keys keys"))
def promote(repository: RepositoryFolder, name: Name, version: Version, channel: Channel, keys: KeyFolders) -> None:
    """Point a channel to a published version; an older one takes its devices back."""
    pointer = _open(repository, keys).promote(name, version, channel)
    _out.print(f"channel {channel} runs {pointer.name} {pointer.version} now", markup=False)


@app.command(epilog=_epilog("revoke repository ppocr-v4 1.1.0 --reason 'reads 0 as O' --keys keys"))
def revoke(
    repository: RepositoryFolder,
    name: Name,
    version: Version,
    keys: KeyFolders,
    reason: Annotated[str, typer.Option(help="Why, for whoever reads a device's log.")],
) -> None:
    """Forbid a published version to all devices."""
    emptied = _open(repository, keys).revoke(name, version, reason)
    _out.print(f"{name} {version} is revoked; devices go back when they look next", markup=False)
    if emptied:
        _out.print(f"promote another version to {', '.join(emptied)}: that points to nothing now")


@app.command(epilog=_epilog("commanders repository commanders/ann.pub.json --keys keys"))
def commanders(
    repository: RepositoryFolder,
    public: Annotated[list[Path], typer.Argument(help="Public key of each who may order devices.", metavar="FILE...")],
    keys: KeyFolders,
) -> None:
    """Say who may order devices, in the place of those who might before."""
    from models.orders import Commander, Commanders  # noqa: PLC0415 - see the top
    from provisioning.keys import read_public  # noqa: PLC0415

    found = {(file.name.split(".")[0]): read_public(file) for file in public}
    allowed = {key.keyid: Commander(key.keyval["public"], author) for author, key in found.items()}
    _open(repository, keys).command(Commanders(allowed))
    _out.print(f"devices take signed orders of {', '.join(found)}, and of nobody else", markup=False)


@app.command(name="rotate-key", epilog=_epilog("rotate-key repository targets targets-1 --keys keys"))
def rotate_key(
    repository: RepositoryFolder,
    role: Annotated[str, typer.Argument(help="root, targets, snapshot or timestamp.")],
    old: Annotated[str, typer.Argument(help="Name of the key to replace, without its ending.")],
    keys: KeyFolders,
) -> None:
    """Replace a key; devices follow by themselves."""
    name = _open(repository, keys).rotate_key(role, old)
    _out.print(f"{name} signs as {role} now, {old} does not any more", markup=False)


@app.command(epilog=_epilog("refresh repository --keys online"))
def refresh(repository: RepositoryFolder, keys: KeyFolders) -> None:
    """Sign snapshot and timestamp anew, with the online keys: to be run every day."""
    made = _open(repository, keys)
    made.refresh()
    expires = made.status()["roles"]["timestamp"]["expires"]
    _out.print(f"refreshed; the next refresh must come before {expires}", markup=False)


@app.command(epilog=_epilog("status repository --json"))
def status(
    repository: RepositoryFolder,
    keys: Annotated[list[Path] | None, typer.Option("--keys", help="Folder with signing keys.", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Show what is published, in which channels, and when signatures expire."""
    found = _open(repository, keys or []).status()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    expiry = Column("expires", no_wrap=True)  # half a date would be no date
    table = Table("role", "version", expiry, "threshold", "keys", box=box.SIMPLE)
    for role, one in found["roles"].items():
        expires = one["expires"] + (" EXPIRED" if one["expired"] else "")
        names = ", ".join(name or keyid[:8] for keyid, name in one["keys"].items())
        table.add_row(role, str(one["version"]), expires, str(one["threshold"]), names)
    _out.print(table)
    table = Table("bundle", "version", "digest", "channels", box=box.SIMPLE)
    for one in found["bundles"]:
        here = [
            where.partition("/")[0]
            for where, version in found["channels"].items()
            if where.partition("/")[2] == one["name"] and version == one["version"]
        ]
        state = f"REVOKED: {one['revoked']}" if one["revoked"] else ", ".join(here)
        table.add_row(one["name"], one["version"], one["digest"][:12], state)
    _out.print(table)


@app.command(epilog=_epilog("serve repository --port 8090"))
def serve(
    repository: RepositoryFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8090,
) -> None:
    """Serve a repository over plain HTTP, for trials."""
    from provisioning.serve import server  # noqa: PLC0415 - see the top

    _open(repository, []).status()  # refuses what is no repository
    with server(repository, host, port) as trial:
        address, taken = trial.server_address[:2]
        _out.print(f"serving {repository} at http://{address!s}:{taken} until interrupted", markup=False)
        try:
            trial.serve_forever()
        except KeyboardInterrupt:
            _out.print("stopped")
