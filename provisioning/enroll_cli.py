"""`provision enroll`: the fleet's certificate authority, and how devices come by their certificates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from models.errors import ConfigError
from provisioning.publish_cli import passphrase

if TYPE_CHECKING:
    from appliance.authority import Authority

# Cryptography is imported by the commands that need it: `provision --help` must not wait for it.

app = typer.Typer(no_args_is_help=True, help="Give devices certificates of their fleet, and take them back.")
_out = Console(soft_wrap=True, highlight=False)

Folder = Annotated[Path, typer.Argument(help="Folder of the authority.", metavar="AUTHORITY")]
Also = Annotated[
    list[str] | None,
    typer.Option("--also", help="Host name or address that the certificate is for too; may be repeated.", metavar="H"),
]


def _epilog(example: str) -> str:
    return f"Example: provision enroll {example}\n\nThe key is encrypted; PROVISION_PASSPHRASE holds its passphrase."


def _open(folder: Path) -> Authority:
    from appliance.authority import Authority  # noqa: PLC0415 - see the top

    return Authority(folder, passphrase)


@app.command(epilog=_epilog("init authority --name press-fleet"))
def init(
    authority: Folder,
    name: Annotated[str, typer.Option(help="Name of the fleet, as certificates show it.")] = "fleet",
    device_days: Annotated[
        int, typer.Option(min=1, max=3650, help="For how long certificates of devices are valid.")
    ] = 365,
) -> None:
    """Make an authority: an ECDSA P-256 key, encrypted, and its certificate."""
    made = _open(authority)
    made.init(name, device_days, time.time())
    _out.print(f"trusted by devices and brokers: {authority / 'authority.pem'}", markup=False)
    _out.print(f"fingerprint: {made.fingerprint}", markup=False)


@app.command(epilog=_epilog("token authority --device press-7 --also 10.0.0.7"))
def token(
    authority: Folder,
    device: Annotated[str, typer.Option(help="The only device that it is for; left out: any name that is free.")] = "",
    also: Also = None,
    hours: Annotated[float, typer.Option(min=0.01, max=8760, help="For how long it opens an enrolment.")] = 24,
) -> None:
    """Print a token that opens one enrolment. It is shown this once; the register keeps what recognises it."""
    print(_open(authority).new_token(device, also or [], time.time() + hours * 3600))


@app.command(epilog=_epilog("sign authority press-7.csr --out press-7.answer"))
def sign(
    authority: Folder,
    request: Annotated[Path, typer.Argument(help="What `appliance enroll --request` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="File for the answer, for `appliance enroll --answer`.")],
    device: Annotated[str, typer.Option(help="The device that you know the request to come from.")],
    also: Also = None,
) -> None:
    """Certify a request that was brought by hand: you vouch for where it comes from."""
    from models import schema  # noqa: PLC0415 - see the top
    from models.folder import write_file  # noqa: PLC0415

    issued = _open(authority).certify(request.read_text(encoding="utf-8"), device, also or [], time.time())
    write_file(out, json.dumps(schema.dump(issued)).encode())
    _out.print(f"take {out} and {authority / 'authority.pem'} to {device}", markup=False)


@app.command(epilog=_epilog("server authority broker.example.com --out broker.pem"))
def server(
    authority: Folder,
    names: Annotated[list[str], typer.Argument(help="Host names and addresses; the first names it.", metavar="H...")],
    out: Annotated[Path, typer.Option("--out", help="File for key and certificate.")],
) -> None:
    """Make key and certificate of a server, such as the broker."""
    from models.folder import write_file  # noqa: PLC0415 - see the top

    write_file(out, _open(authority).serve_as(names, time.time()), mode=0o600)
    _out.print(f"{out} holds key and certificate of {names[0]}, for 365 days", markup=False)


@app.command(epilog=_epilog("revoke authority press-7"))
def revoke(authority: Folder, name: Annotated[str, typer.Argument(help="Device or server.")]) -> None:
    """Let no certificate of a name count any more."""
    count = _open(authority).revoke(name, time.time())
    _out.print(
        f"{count} certificates of {name} are revoked; bring {authority / 'revoked.pem'} to brokers", markup=False
    )


@app.command(epilog=_epilog("revoked authority"))
def revoked(authority: Folder) -> None:
    """Sign the list of revoked certificates anew: to be run every week, for it counts 90 days."""
    _open(authority).list_revoked(time.time())
    _out.print(f"bring {authority / 'revoked.pem'} to brokers (crlfile); devices fetch it", markup=False)


@app.command(epilog=_epilog("status authority --json"))
def status(
    authority: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
) -> None:
    """Show certificates, tokens that were not used yet, and the fingerprint."""
    from models import schema  # noqa: PLC0415 - see the top

    opened = _open(authority)
    register, now = opened.register(), time.time()
    waiting = [one for one in register.tokens.values() if not one.key_sha256 and one.expires_at > now]
    if as_json:
        certificates = schema.dump(register.certificates)
        tokens = [schema.dump(one) for one in waiting]
        print(json.dumps({"fingerprint": opened.fingerprint, "certificates": certificates, "tokens": tokens}, indent=1))
        return
    table = Table("name", "kind", "valid until", "serial", box=box.SIMPLE)
    for serial, one in sorted(register.certificates.items(), key=lambda item: (item[1].name, item[1].valid_until)):
        until = "REVOKED" if one.revoked_at else time.strftime("%Y-%m-%d", time.gmtime(one.valid_until))
        table.add_row(one.name, one.kind, until if one.revoked_at or one.counts(now) else f"{until} EXPIRED", serial)
    _out.print(table)
    for token_ in waiting:
        hours = (token_.expires_at - now) / 3600
        _out.print(f"a token for {token_.device or 'any free name'} opens for {hours:.0f} h", markup=False)
    _out.print(f"fingerprint: {opened.fingerprint}", markup=False)


@app.command(epilog=_epilog("serve authority --name enrol.example.com --host 0.0.0.0"))
def serve(
    authority: Folder,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Name or address that devices call it by; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8453,
) -> None:
    """Serve enrolments and renewals over HTTPS, for workshops and trials."""
    from provisioning.enroll_serve import EnrolmentServer  # noqa: PLC0415 - see the top

    opened = _open(authority)
    names = name or ["localhost", "127.0.0.1"]
    if host in {"0.0.0.0", "::"} and not name:  # noqa: S104 - asked for
        raise ConfigError("devices must know by which name they call: give it with --name")
    with EnrolmentServer((host, port), opened, names, lambda line: _out.print(line, markup=False)) as trial:
        taken = trial.server_address[1]
        _out.print(f"enrolling at https://{names[0]}:{taken}, authority {opened.fingerprint}", markup=False)
        try:
            trial.serve_forever()
        except KeyboardInterrupt:
            _out.print("stopped")
