"""`appliance token`: who may ask the daemon for what.

Works on the state folder, not over HTTP, so that a first token can be made before anybody is let in.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from appliance import console
from appliance.console import AsJson, Config, StateDir, settings_of
from models.errors import ApplianceError, BadInput

if TYPE_CHECKING:
    from appliance.adapters.tokens import TokenFile

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke the tokens that the HTTP door asks for.",
    epilog="Example: appliance token create gate-camera --role infer",
)


@app.command(epilog="Example: appliance token create gate-camera --role infer")
def create(
    name: Annotated[str, typer.Argument(help="name that logs and `token list` show")],
    role: Annotated[str, typer.Option(help="infer (run models, read), operate (also load, unload) or admin (all)")],
    state_dir: StateDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, alone on standard output. It is shown this once: the file keeps what recognises it."""
    from appliance.adapters.tokens import Role  # noqa: PLC0415 - numpy behind it would slow every other command

    try:
        file = _file(state_dir, config)
        token = file.create(name, Role.of(role))
    except BadInput as error:
        console.fail(str(error), 2)
    except ApplianceError as error:
        console.fail(str(error))
    if as_json:
        print(json.dumps({"name": name, "role": role, "token": token, "file": str(file.path)}))
        return
    print(token)
    console.plain(stderr=True).print(f"{name} opens the daemon whose state folder is {file.path.parent}", style="dim")


@app.command("list", epilog="Example: appliance token list --json")
def list_tokens(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    """Show names, roles and ages of the tokens; what opens with them is kept nowhere."""
    try:
        tokens = _file(state_dir, config).read()
    except ApplianceError as error:
        console.fail(str(error))
    if as_json:
        rows = [{"name": name, "role": token.role, "made_at": token.made_at} for name, token in sorted(tokens.items())]
        print(json.dumps(rows))
        return
    table = Table("name", "role", "made", box=None)
    for name, token in sorted(tokens.items()):
        table.add_row(name, token.role, time.strftime("%Y-%m-%d %H:%M", time.localtime(token.made_at)))
    console.plain().print(table if tokens else "no tokens: make one with `appliance token create NAME --role ROLE`")


@app.command(epilog="Example: appliance token revoke gate-camera")
def revoke(
    name: Annotated[str, typer.Argument(help="name of the token")],
    state_dir: StateDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Let a token open nothing any more, within a second."""
    try:
        file = _file(state_dir, config)
        file.revoke(name)
    except ApplianceError as error:
        console.fail(str(error))
    print(json.dumps({"name": name, "revoked": True, "file": str(file.path)}) if as_json else f"{name} is revoked")


def _file(state_dir: Path | None, config: Path | None) -> TokenFile:
    """The tokens of a daemon that, being still to start, may have no state folder yet: that is told, not refused."""
    from appliance.adapters.tokens import TokenFile  # noqa: PLC0415 - only here a client needs it

    folder = settings_of(config, state_dir).state_dir.absolute()
    if not os.access(folder / "lock", os.F_OK):
        console.plain(stderr=True).print(
            f"no daemon has ever used {folder}: give the --state-dir or --config of the daemon if it has another",
            style="yellow",
        )
    return TokenFile(folder)
