"""`appliance doctor` and `appliance support-bundle`: what is wrong here, and what somebody far away needs to know."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.table import Table

from appliance import console
from appliance.console import AsJson, Config, StateDir, client, reason_of, refused, settings_of
from models.errors import ApplianceError, ConfigError

if TYPE_CHECKING:
    from appliance.doctor_tls import Check
    from appliance.settings import Settings

Url = Annotated[
    str,
    typer.Option(
        help="address of the daemon (default: as in its settings)",
        envvar="APPLIANCE_URL",
        metavar="URL",
        show_default=False,
    ),
]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def doctor(
    drill: Annotated[bool, typer.Option("--drill", help="inject every fault, and time each recovery")] = False,
    model: Annotated[str, typer.Option(help="model to drill on (default: the first)", metavar="NAME")] = "",
    config: Config = None,
    state_dir: StateDir = None,
    url: Url = "",
    as_json: AsJson = False,
) -> None:
    """Examine this machine and the daemon on it, and say what to do about what is not well.

    Needs no daemon and no installation. With --drill it breaks a running daemon in every way and watches it recover:
    not while it is needed.
    """
    told, found = known(config, state_dir)
    if drill and not url and found.verdict == "fail":
        console.fail(found.reason)
    url = url or address_of(told)
    if drill:
        _drill(url, model, as_json=as_json)
        return
    with console.plain(stderr=True).status("looking"):
        checks = [found, *examined(told, url)]
    failed = any(check.verdict == "fail" for check in checks)
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        table = Table("", "check", "what was found", box=None)
        for check in checks:
            table.add_row(check.verdict, check.name, check.reason, style=_STYLES[check.verdict])
            if check.remedy:
                table.add_row("", "", f"-> {check.remedy}")
        console.plain().print(table)
    if failed:
        raise typer.Exit(1)


def known(config: Path | None, state_dir: Path | None) -> tuple[Settings, Check]:
    """The daemon's settings, or the defaults where they cannot be used, and the check that says so."""
    from appliance.doctor_tls import Check  # noqa: PLC0415 - the other commands need none of it
    from appliance.settings import Settings  # noqa: PLC0415 - likewise

    try:
        return settings_of(config, state_dir), Check("settings", "ok", "they can be used")
    except ConfigError as error:
        told = Settings() if state_dir is None else Settings(state_dir=state_dir)
        return told, Check("settings", "fail", str(error), "mend the file or variable that it names")


def address_of(told: Settings) -> str:
    """Where a daemon with these settings answers on this machine."""
    http = told.http
    if http.tls_certificate and (http.on_loopback or http.host in {"0.0.0.0", "::"}):  # noqa: S104 - no name to call it by
        return f"https://localhost:{http.port}"  # a certificate is for names
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"http{'s' if http.tls_certificate else ''}://{host}:{http.port}"


def examined(told: Settings, url: str) -> list[Check]:
    """Every check of this machine; a daemon at `url` that does not answer is no error."""
    from appliance.doctor import Here, examine  # noqa: PLC0415 - the other commands need none of it

    status: Mapping[str, Any] | None = None
    why = ""
    try:
        with client(url, timeout_s=5.0) as http:
            status = http.get("/v1/status").raise_for_status().json()
    except httpx.HTTPError as error:
        why = reason_of(url, error)
    except ValueError:
        why = f"what answers at {url} is not the daemon: give its address with --url"
    return list(examine(Here(), told, now=time.time(), status=status, unanswered=why))


def _drill(url: str, model: str, *, as_json: bool) -> None:
    from appliance.drill import Drill  # noqa: PLC0415 - the other commands need none of it

    results = []
    try:
        with client(url, timeout_s=120.0) as http:
            held = Drill(http, model)
            with console.plain(stderr=True).status("breaking things") as shown:
                for result in held.run():
                    shown.update(f"{result.fault}: {result.verdict}")
                    results.append(result)
    except ApplianceError as error:
        console.fail(str(error))
    except httpx.HTTPError as error:
        refused(url, error)
    failed = any(result.verdict == "failed" for result in results)
    if as_json:
        print(json.dumps({"model": held.model, "passed": not failed, "faults": [asdict(one) for one in results]}))
    else:
        table = Table("fault", "what it is", "detected by", "answer while broken", "recovery", "verdict", box=None)
        for one in results:
            recovery = "-" if one.recovery_s is None else f"{one.recovery_s:.2f} s"
            verdict = f"{one.verdict} ({one.note})" if one.note else one.verdict
            style = {"failed": "red", "not caught": "yellow", "skipped": "dim"}.get(one.verdict)
            table.add_row(one.fault, one.means, one.detected_by, one.answers, recovery, verdict, style=style)
        console.plain().print(table)
    if failed:
        raise typer.Exit(1)


def support_bundle(
    out: Annotated[
        Path | None,
        typer.Option(
            help="file to write (default: support-DEVICE-TIME.tar.gz here)", metavar="FILE", show_default=False
        ),
    ] = None,
    config: Config = None,
    state_dir: StateDir = None,
    url: Url = "",
    as_json: AsJson = False,
) -> None:
    """Collect settings without secrets, log, metrics, checks, deployments and the flight recorder into one file.

    What cannot be had is left out and named. Pictures, tokens, keys and passwords are never in it.
    """
    from appliance import support  # noqa: PLC0415 - the other commands need none of it

    told, found = known(config, state_dir)
    url = url or address_of(told)
    checks = [found, *examined(told, url)]
    with client(url, timeout_s=30.0) as http:
        parts, left_out = support.collect(http, told if found.verdict == "ok" else None)
    parts["checks.json"] = json.dumps([asdict(check) for check in checks], indent=1).encode()
    try:
        path = support.write(out, parts, left_out, time.time())
    except OSError as error:
        console.fail(f"the file cannot be written ({error.strerror}): give another with --out")
    if as_json:
        print(json.dumps({"file": str(path), "parts": sorted(parts), "left_out": left_out}))
        return
    screen = console.plain()
    if config is None:
        screen.print("the settings are those of this shell: where the daemon has others, give --config", style="yellow")
    screen.print(f"{path}: {', '.join(sorted(parts))}")
    for name, why in left_out.items():
        screen.print(f"left out: {name} ({why})", style="yellow")
