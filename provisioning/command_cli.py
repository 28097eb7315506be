"""`provision command`: orders for devices, signed."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from models.errors import ConfigError
from provisioning.publish_cli import passphrase

app = typer.Typer(no_args_is_help=True, help="Sign orders that change devices.")
_out = Console(soft_wrap=True)

KeyFolder = Annotated[Path, typer.Option("--keys", help="Folder with signing keys.", metavar="DIR")]


def _epilog(example: str) -> str:
    return f"Example: provision command {example}\n\nKeys are encrypted; PROVISION_PASSPHRASE holds their passphrase."


@app.command(name="new-key", epilog=_epilog("new-key ann --keys commanders"))
def new_key(name: Annotated[str, typer.Argument(help="Who will sign with it.")], keys: KeyFolder) -> None:
    """Make a key that signs orders; `provision publish commanders` makes devices obey it."""
    from provisioning.keys import Keys  # noqa: PLC0415 - cryptography is slow to load

    Keys([keys], passphrase).create(name)
    _out.print(f"{keys / name}.pem signs orders; publish {keys / name}.pub.json", markup=False)


@app.command(epilog=_epilog("sign update --device press-7 --key ann --keys commanders"))
def sign(
    command: Annotated[str, typer.Argument(help="The order, e.g. update or restart-model; docs/mqtt.md has all.")],
    device: Annotated[str, typer.Option(help="The one device that is to take it.")],
    key: Annotated[str, typer.Option(help="Name of the signing key.")],
    keys: KeyFolder,
    args: Annotated[str, typer.Option(help="Arguments, a JSON object.")] = "{}",
    expires_in_s: Annotated[float, typer.Option(min=1, help="The device refuses it from then on.")] = 3600,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Higher than of every order before; default: milliseconds since 1970.")
    ] = None,
) -> None:
    """Print an order in a signed envelope: the payload for mosquitto_pub."""
    from securesystemslib.dsse import Envelope  # noqa: PLC0415 - cryptography is slow to load

    from models.orders import COMMANDS, PAYLOAD_TYPE  # noqa: PLC0415
    from provisioning.keys import Keys  # noqa: PLC0415

    if command not in COMMANDS:
        msg = f"there is no order {command!r}; known: {', '.join(COMMANDS)}"
        raise ConfigError(msg)
    try:
        given = json.loads(args)
    except ValueError as error:
        msg = f'--args is no JSON ({error}): write it like \'{{"name": "ppocr-v4"}}\''
        raise ConfigError(msg) from error
    now = time.time()
    order = {
        "id": str(uuid.uuid4()),
        "device_id": device,
        "command": command,
        "args": given,
        "issued_at": round(now),
        "expires_at": round(now + expires_in_s),
        "author": key,
        "sequence": sequence or int(now * 1000),
    }
    envelope = Envelope(json.dumps(order).encode(), PAYLOAD_TYPE, {})
    envelope.sign(Keys([keys], passphrase).signer(key))
    print(json.dumps(envelope.to_dict()))
