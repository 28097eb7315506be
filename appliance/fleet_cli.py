"""`appliance fleet`: plain clients of the fleet's own API, which `appliance run --role upstream` serves.

Past 400 lines because every option has its words here, and nothing but options and printing is here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from appliance import console
from appliance.console import DEFAULT_URL, AsJson, Url, ask
from models.errors import ApplianceError

app = typer.Typer(
    no_args_is_help=True,
    help="Look after the devices of a fleet, at the upstream that they report to.",
    epilog="Example: appliance fleet devices --group line-3. "
    "APPLIANCE_URL is the upstream's address, APPLIANCE_TOKEN holds a token of role viewer, operator or admin.",
)
campaign = typer.Typer(no_args_is_help=True, help="Roll a version out in waves that stop by themselves.")
tokens = typer.Typer(no_args_is_help=True, help="Make, list and revoke tokens of people and devices.")
app.add_typer(campaign, name="campaign")
app.add_typer(tokens, name="tokens")

_FLEET = "/v1/fleet"
_PAGE = 500
_POLL_S = 1.0
_ENDED = ("done", "stopped", "aborted")
_PERCENT = 100

Group = Annotated[str, typer.Option(help="those of this group", metavar="NAME")]
Label = Annotated[str, typer.Option(help="those with this label", metavar="KEY=VALUE")]
Id = Annotated[str, typer.Argument(help="of the campaign, as `campaign start` and `campaign status` print it")]


@app.command(epilog="Example: appliance fleet devices --group line-3 --json")
def devices(group: Group = "", label: Label = "", url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show every device: when it was heard last, what it runs, and what it should run."""
    found = list(_devices(url, {"group": group, "label": label}))
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table("device", "seen", "runs", "should run", "health", "groups", "labels", box=None)
    for one in found:
        table.add_row(
            one["device_id"],
            _seen(one),
            _versions(one),
            ", ".join(f"{model} {version}" for model, version in sorted(one["desired"].items())) or "its channel",
            _health(one),
            ", ".join(one["groups"]),
            _labels(one),
            style=None if one["online"] else "dim",
        )
    console.plain().print(table if found else "no devices: none has reported to this upstream yet")


@app.command(epilog="Example: appliance fleet device press-7 --group line-3 --label hall=2")
def device(
    name: Annotated[str, typer.Argument(help="of the device", metavar="DEVICE")],
    group: Annotated[list[str] | None, typer.Option(help="put it into these groups alone; may be repeated")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="give it these labels alone; may be repeated", metavar="KEY=VALUE")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(help="have it run this version; without =VERSION its channel says", metavar="MODEL[=VERSION]"),
    ] = None,
    paused: Annotated[
        bool | None, typer.Option("--pause/--resume", help="have it begin no deployment", show_default=False)
    ] = None,
    retire: Annotated[
        bool, typer.Option("--retire", help="take it out of the fleet: what it sends is refused")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show one device and what happened on it, or say where it belongs and what it should run."""
    path = f"{_FLEET}/devices/{name}"
    if retire:
        ask("DELETE", url, path)
        print(json.dumps({"device_id": name, "retired": True}) if as_json else f"{name} is retired")
        return
    changes = _changes(group, label, pin, paused)
    if changes:
        ask("PATCH", url, path, json=changes)
    found = ask("GET", url, path)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    screen = console.plain()
    screen.print(f"{name}: {_seen(found)}, {_health(found)}", style="green" if found["online"] else "yellow")
    for what, text in (
        ("paused", "it begins no deployment" if found["paused"] else ""),
        ("runs", _versions(found)),
        ("should run", _versions({"versions": {m: {"version": v} for m, v in found["desired"].items()}})),
        ("groups", ", ".join(found["groups"])),
        ("labels", _labels(found)),
        ("profile", found["profile"] or ""),
    ):
        if text:
            screen.print(f"{what}: {text}")
    table = Table("when", "what", "", box=None)
    for event in found["timeline"]:
        kind = event["kind"]  # what the audit log says begins with it
        table.add_row(_moment(event["at"]), kind.replace("_", " "), event["text"].removeprefix(kind).strip())
    if found["timeline"]:
        screen.print(table)


@app.command(epilog="Example: appliance fleet audit --limit 20; a token of role operator is needed")
def audit(
    limit: Annotated[int, typer.Option(help="the latest so many", min=1, max=1000)] = 100,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show who did what, the newest first."""
    found = ask("GET", url, f"{_FLEET}/audit", params={"limit": limit})["audit"]
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table("when", "who", "what", "device", "", box=None)
    for one in found:
        detail = ", ".join(f"{key} {value}" for key, value in one["detail"].items())
        table.add_row(_moment(one["at"]), one["by"], one["action"], one["device_id"], detail)
    console.plain().print(table if found else "nothing was done yet")


@campaign.command(
    epilog="Example: appliance fleet campaign start ppocr-v4 1.1.0 --canary 5% --wave 50% --wave 100% --bundle ppocr-v4"
)
def start(  # noqa: PLR0913, PLR0917 - options of a command
    model: Annotated[str, typer.Argument(help="name of the model")],
    version: Annotated[str, typer.Argument(help="published version to roll out")],
    canary: Annotated[
        str, typer.Option(help="who goes first: 5%, group:NAME or label:KEY=VALUE", metavar="WHO")
    ] = "10%",
    wave: Annotated[
        list[str] | None, typer.Option(help="who follows, in this order (default: 100%)", metavar="WHO")
    ] = None,
    name: Annotated[str, typer.Option(help="shown beside the campaign (default: model and version)")] = "",
    needed_share: Annotated[
        float | None, typer.Option(help="of a wave that must have committed before the next", min=0, max=1)
    ] = None,
    patience_s: Annotated[
        float | None, typer.Option(help="a device that is silent for so long holds nobody up", min=1)
    ] = None,
    rollback_share: Annotated[
        float | None, typer.Option(help="stop when more of a wave than this went back or refused it", min=0, max=1)
    ] = None,
    latency_ratio: Annotated[float | None, typer.Option(help="stop when answers take so much longer", min=1)] = None,
    agreement_drop: Annotated[
        float | None, typer.Option(help="stop when second opinions agree less by more than this", min=0, max=1)
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="folder of that version, whose parity report is shown first", exists=True, file_okay=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask; needed where there is no terminal")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="return when it has ended; 1 unless it is done")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Roll a published version out, after showing what it costs in accuracy."""
    waves = [_wave(canary, "--canary") | {"canary": True}, *(_wave(one, "--wave") for one in wave or ["100%"])]
    _confirm(model, version, waves, _parity(bundle, model, version), yes=yes)
    stop = {"rollback_share": rollback_share, "latency_ratio": latency_ratio, "agreement_drop": agreement_drop}
    wish = {"needed_share": needed_share, "patience_s": patience_s, "stop": _given(stop) or None}
    asked = {"name": name or f"{model} {version}", "model": model, "version": version, "waves": waves}
    made = ask("POST", url, f"{_FLEET}/campaigns", json=asked | _given(wish))
    if wait:
        _show_end(_waited(url, made["id"]), as_json=as_json)
    elif as_json:
        print(json.dumps(made, ensure_ascii=False))
    else:
        console.plain().print(f"campaign {made['id']} has begun; `appliance fleet campaign status {made['id']}`")


@campaign.command(epilog="Example: appliance fleet campaign status --wait 3; without an id all campaigns are listed")
def status(
    which: Annotated[str, typer.Argument(help="of the campaign (default: all)", metavar="[ID]")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="return when it has ended; 1 unless it is done")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show how far campaigns are."""
    if wait and not which:
        raise typer.BadParameter("one campaign is waited for: give its id", param_hint="--wait")
    if which:
        found = _waited(url, which) if wait else ask("GET", url, f"{_FLEET}/campaigns/{which}")
        if wait:
            _show_end(found, as_json=as_json)
        elif as_json:
            print(json.dumps(found, ensure_ascii=False))
        else:
            _show(found)
        return
    found = ask("GET", url, f"{_FLEET}/campaigns")["campaigns"]
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table("campaign", "name", "state", "wave", "committed", "reason", box=None)
    for one in found:
        table.add_row(one["id"], one["name"], one["state"], _at(one), _committed(one), one["reason"] or "")
    console.plain().print(table if found else "no campaigns: begin one with `appliance fleet campaign start`")


@campaign.command(epilog="Example: appliance fleet campaign pause 3")
def pause(which: Id, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let no further device begin; those under way go on."""
    _turn(url, which, "pause", as_json=as_json)


@campaign.command(epilog="Example: appliance fleet campaign resume 3")
def resume(which: Id, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Go on where it was paused."""
    _turn(url, which, "resume", as_json=as_json)


@campaign.command(epilog="Example: appliance fleet campaign abort 3")
def abort(which: Id, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """End it, and let its devices go back to what they ran."""
    _turn(url, which, "abort", as_json=as_json)


@app.command(epilog="Example: appliance fleet command order.json --device press-7 --wait-s 60")
def command(
    file: Annotated[
        Path,
        typer.Argument(help="signed orders, a row each, as `provision command sign` prints them; -: standard input"),
    ],
    device_id: Annotated[str, typer.Option("--device", help="the one device", metavar="DEVICE")] = "",
    group: Group = "",
    label: Label = "",
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="wait so long for answers; 1 unless all are done", min=0)
    ] = 0,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Hand signed orders to the devices they are for; each has its effect once, when its device reports next."""
    target = _given({"device": device_id or None, "group": group or None, "label": label or None})
    if len(target) != 1:
        raise typer.BadParameter("say for whom: give one of --device, --group and --label")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        envelopes = [json.loads(row) for row in text.splitlines() if row.strip()]
    except (OSError, ValueError) as error:
        wrong = f"{file} cannot be read as orders ({error}): give what `provision command sign` printed"
        console.fail(wrong, 2 if isinstance(error, OSError) else 1)
    made = ask("POST", url, f"{_FLEET}/commands", json={"target": target, "envelopes": envelopes})
    until = time.monotonic() + wait_s
    path = f"{_FLEET}/commands/{made['id']}"
    while _waiting(results := ask("GET", url, path)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    if as_json:
        print(json.dumps(results, ensure_ascii=False))
    else:
        table = Table("device", "answer", "reason", box=None)
        for one in results["devices"]:
            table.add_row(one["device_id"], one["status"], one["reason"] or "")
        console.plain().print(table)
    if wait_s and any(one["status"] != "done" for one in results["devices"]):
        raise typer.Exit(1)


@tokens.command(epilog="Example: appliance fleet tokens create wall-screen --role viewer")
def create(
    name: Annotated[str, typer.Argument(help="that the audit log shows")],
    role: Annotated[str, typer.Option(help="viewer (reads), operator (campaigns, orders), admin (all), or device")],
    device_id: Annotated[str, typer.Option("--device", help="the one device that a token of role device is for")] = "",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, alone on standard output. It is shown this once."""
    made = ask(
        "POST", url, f"{_FLEET}/tokens", json=_given({"name": name, "role": role, "device_id": device_id or None})
    )
    print(json.dumps(made) if as_json else made["token"])


@tokens.command("list", epilog="Example: appliance fleet tokens list --json")
def list_tokens(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show names, roles and ages of the tokens."""
    found = ask("GET", url, f"{_FLEET}/tokens")["tokens"]
    if as_json:
        print(json.dumps(found))
        return
    table = Table("name", "role", "device", "made", box=None)
    for one in found:
        table.add_row(one["name"], one["role"], one["device_id"] or "", _moment(one["made_at"]))
    console.plain().print(table if found else "no tokens")


@tokens.command(epilog="Example: appliance fleet tokens revoke wall-screen")
def revoke(
    name: Annotated[str, typer.Argument(help="of the token")], url: Url = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Let a token open nothing any more."""
    ask("DELETE", url, f"{_FLEET}/tokens/{name}")
    print(json.dumps({"name": name, "revoked": True}) if as_json else f"{name} is revoked")


def _parity(bundle: Path | None, model: str, version: str) -> str:
    """What is known of the version's accuracy against that of the upstream, in one sentence."""
    from models.folder import BundleFolder  # noqa: PLC0415 - numpy behind it would slow every other command

    if bundle is None:
        return "no parity report is shown: --bundle FOLDER names the bundle that `provision parity` has measured"
    try:
        folder = BundleFolder(bundle)
    except ApplianceError as error:
        console.fail(str(error))
    manifest = folder.manifest
    if (manifest.name, manifest.version) != (model, version):
        console.fail(f"{bundle} holds {manifest.name} {manifest.version}, not {model} {version}: name its own folder")
    found = folder.parity()
    return str(found) if found else f"{bundle} has no parity report: `provision parity {bundle}` makes one"


def _confirm(model: str, version: str, waves: Sequence[Mapping[str, Any]], parity: str, *, yes: bool) -> None:
    """Show on standard error what is about to happen, and go on only if that is wanted."""
    screen = console.plain(stderr=True)
    screen.print(f"{model} {version}: {parity}")
    screen.print(f"waves: {', then '.join(_who(one) for one in waves)}")
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody is here to be asked: give --yes", param_hint="--yes")
    if not typer.confirm("Roll it out?", err=True):
        console.fail("not started")


def _turn(url: str, which: str, verb: str, *, as_json: bool) -> None:
    ask("POST", url, f"{_FLEET}/campaigns/{which}/{verb}")
    found = ask("GET", url, f"{_FLEET}/campaigns/{which}")
    print(json.dumps(found, ensure_ascii=False) if as_json else f"campaign {which} is {found['state']}")


def _waited(url: str, which: str) -> dict[str, Any]:
    """Wait until a campaign has ended, and tell on standard error how far it is; the campaign then."""
    screen, told = console.plain(stderr=True), ""
    while (found := ask("GET", url, f"{_FLEET}/campaigns/{which}"))["state"] not in _ENDED:
        now = f"{found['state']}, wave {_at(found)}: {_committed(found)}"
        if now != told:
            screen.print(now, style="dim")
            told = now
        time.sleep(_POLL_S)
    ended: dict[str, Any] = found
    return ended


def _show_end(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show(found)
    if found["state"] != "done":
        raise typer.Exit(1)


def _show(found: Mapping[str, Any]) -> None:
    screen = console.plain()
    style = {"done": "green", "running": None}.get(found["state"], "yellow")
    screen.print(f"{found['name']}: {found['state']}, wave {_at(found)}", style=style)
    if found["reason"]:
        screen.print(found["reason"], style=style)
    table = Table("wave", "who", "devices", "committed", "rolled back", "stuck", "waiting", box=None)
    for number, (wave, counts) in enumerate(zip(found["waves"], found["counts"], strict=True), 1):
        figures = (str(counts[one]) for one in ("wanted", "committed", "rolled_back", "stuck", "waiting"))
        table.add_row(str(number), _who(wave), *figures)
    screen.print(table)


def _at(found: Mapping[str, Any]) -> str:
    return f"{found['wave']} of {len(found['waves'])}"


def _committed(found: Mapping[str, Any]) -> str:
    return f"{sum(one['committed'] for one in found['counts'])} of {sum(one['wanted'] for one in found['counts'])}"


def _waiting(results: Mapping[str, Any]) -> bool:
    return any(one["status"] == "waiting" for one in results["devices"])


def _devices(url: str, which: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """All of them, page by page."""
    query = {key: value for key, value in which.items() if value} | {"limit": str(_PAGE)}
    after: str | None = ""
    while after is not None:
        page = ask("GET", url, f"{_FLEET}/devices", params=query | ({"after": after} if after else {}))
        yield from page["devices"]
        after = page["next"]


def _wave(text: str, option: str) -> dict[str, Any]:
    """Who is in a wave, as it is typed: 5%, group:NAME or label:KEY=VALUE."""
    kind, _, value = text.partition(":")
    if kind == "group" and value:
        return {"group": value}
    if kind == "label" and all(value.partition("=")):
        return {"label": value}
    try:
        percent = float(text.removesuffix("%")) if text.endswith("%") else 0.0
    except ValueError:
        percent = 0.0
    if not 0 < percent <= _PERCENT:
        msg = f"{text!r} is no wave: write 5%, group:NAME or label:KEY=VALUE"
        raise typer.BadParameter(msg, param_hint=option)
    return {"percent": percent}


def _who(wave: Mapping[str, Any]) -> str:
    text = (
        f"{wave['percent']:g} %"
        if wave.get("percent") is not None
        else f"group {wave['group']}"
        if wave.get("group")
        else f"label {wave['label']}"
    )
    return f"{text} (canary)" if wave.get("canary") else text


def _changes(
    group: list[str] | None, label: list[str] | None, pin: list[str] | None, paused: bool | None
) -> dict[str, Any]:
    """What is asked to be changed on a device; empty for nothing."""
    labels = None if label is None else dict(_pair(one) for one in label)
    pins = [one.partition("=") for one in pin or ()]
    wished = {model: version or None for model, _, version in pins}
    return _given({"groups": group, "labels": labels, "pins": wished or None, "paused": paused})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        msg = f"{text!r} is no label: write KEY=VALUE"
        raise typer.BadParameter(msg, param_hint="--label")
    return key, value


def _seen(one: Mapping[str, Any]) -> str:
    return (
        "online" if one["online"] else f"last heard {_moment(one['last_seen'])}" if one["last_seen"] else "never heard"
    )


def _health(one: Mapping[str, Any]) -> str:
    return f"on a fallback: {one['degraded']}" if one["degraded"] else str(one["health"] or "-")


def _versions(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{model} {facts['version']}" for model, facts in sorted(one["versions"].items())) or "-"


def _labels(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(one["labels"].items()))


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
