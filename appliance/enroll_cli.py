"""`appliance enroll`: gets this device its certificate, over the network or by files, and renews it.

Works on the state folder, with or without a running daemon, which takes up what changed within half a minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import console
from models.errors import ApplianceError, ConfigError

if TYPE_CHECKING:
    from appliance.adapters.identity import Facts
    from appliance.settings import Settings

# What stands behind the command is imported by it: `appliance --help` must not wait for cryptography.

EPILOG = (
    "Example: appliance enroll --url https://enrol.example.com:8453 --ca authority/authority.pem --token TOKEN. "
    "Without options: show the certificate that is there."
)

_BRING = "bring authority/authority.pem from where `provision enroll init` made it"


def enroll(  # noqa: PLR0913, PLR0917 - options of a command
    url: Annotated[str, typer.Option(help="address of the enrolment service", metavar="URL")] = "",
    token: Annotated[
        str,
        typer.Option(
            help="token that opens one enrolment; a command line can be read by others on the machine, a variable not",
            envvar="APPLIANCE_ENROLMENT_TOKEN",
            metavar="TOKEN",
        ),
    ] = "",
    ca: Annotated[Path | None, typer.Option(help="the fleet's authority (PEM)", metavar="FILE")] = None,
    fingerprint: Annotated[str, typer.Option(help="or the SHA-256 of its certificate", metavar="HEX")] = "",
    name: Annotated[str, typer.Option(help="name of this device, where it has none yet", metavar="NAME")] = "",
    request: Annotated[
        Path | None, typer.Option(help="without a network: write a certificate request there", metavar="FILE")
    ] = None,
    answer: Annotated[
        Path | None, typer.Option(help="and take the answer to it from there, with --ca", metavar="FILE")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="get a new certificate now, by showing the old one")] = False,
    state_dir: Annotated[Path | None, typer.Option(help="state folder of the daemon", metavar="DIR")] = None,
    config: Annotated[Path | None, typer.Option(help="settings of the daemon", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Get this device a certificate of its fleet. The private key is made here and never leaves."""
    from appliance import settings  # noqa: PLC0415 - see the top
    from appliance.adapters.identity import Identity, authority_of  # noqa: PLC0415
    from models import schema  # noqa: PLC0415
    from models.enrolment import Issued  # noqa: PLC0415
    from models.folder import write_file  # noqa: PLC0415

    if sum(map(bool, (url, request, answer, renew))) > 1:
        console.fail("choose one of --url, --request, --answer and --renew", 2)
    flags: dict[str, object] = {} if state_dir is None else {"state_dir": state_dir}
    # Settings may ask already for what is only about to come.
    flags["identity"], flags["http"] = {"http": False, "mqtt": False}, {"host": "127.0.0.1"}
    try:
        told = settings.load(config=config, flags=flags)
        identity = Identity(told.identity_files)
        if request:
            with _named(told, name) as device:
                write_file(request, identity.request(device).encode())
            console.plain().print(f"take {request} to `provision enroll sign`, and its answer to --answer")
            return
        if answer:
            if ca is None:
                console.fail("whom to trust is not said: give the fleet's authority with --ca FILE", 2)
            issued = json.loads(_content(answer, "bring the answer of `provision enroll sign`"))
            found = identity.accept(schema.load(Issued, issued), _content(ca, _BRING))
        elif url:
            if not token or not (ca or fingerprint):
                console.fail("give --token, and the authority with --ca FILE or --fingerprint HEX", 2)
            authority = _content(ca, _BRING) if ca else authority_of(url, fingerprint)
            with _named(told, name) as device:
                found = identity.enrol(url, token, device, authority)
        elif renew:
            found = identity.renew()
        else:
            known = identity.facts()
            if known is None:
                raise ConfigError("this device is not enrolled: give --url and --token, or --request FILE")
            found = known
    except (ApplianceError, OSError, ValueError) as error:
        console.fail(str(error))
    _show(found, as_json)


def _content(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}): {remedy}"
        raise ConfigError(msg) from error


@contextmanager
def _named(told: Settings, name: str) -> Iterator[str]:
    """The name that this device has, or is given now and keeps unless what is done under it fails.

    Raises ConfigError where it has another.
    """
    from appliance.adapters.store import Store  # noqa: PLC0415 - see the top
    from models.folder import write_file  # noqa: PLC0415

    kept = told.state_dir / "device_id"
    known = told.device_id or (kept.read_text(errors="replace").strip() if kept.exists() else "")
    if name and known not in {"", name}:
        msg = f"this device is called {known!r} already: leave --name out, or set device_id"
        raise ConfigError(msg)
    if known:
        yield known
        return
    with closing(Store(told.state_dir)) as store:
        try:
            if name:
                write_file(kept, name.encode())
            yield store.device_id()
        except BaseException:
            kept.unlink(missing_ok=True)
            raise


def _show(facts: Facts, as_json: bool) -> None:
    from appliance.doctor_tls import day  # noqa: PLC0415 - see the top

    if as_json:
        shown = {"name": facts.name, "valid_from": facts.valid_from, "valid_until": facts.valid_until}
        print(json.dumps({**shown, "service": facts.service}))
        return
    by = f"renewed by {facts.service}" if facts.service else "renewed by hand"
    console.plain().print(f"{facts.name} has a certificate until {day(facts.valid_until)}, {by}")
