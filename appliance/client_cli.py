"""Client commands: plain clients of the daemon's local HTTP."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from appliance import __version__, console, doctor_cli, enroll_cli, fleet_cli, token_cli
from appliance.console import DEFAULT_URL, AsJson, Url, ask, client, refused
from models.answers import items
from models.errors import ApplianceError

app = typer.Typer(
    no_args_is_help=True,
    help="Serve vision models on this device, and ask the daemon that serves them.",
    epilog="Exit codes: 0 done, 1 refused or failed (the reason is printed), 2 wrong usage.",
    pretty_exceptions_enable=False,
)

app.add_typer(token_cli.app, name="token")
app.add_typer(fleet_cli.app, name="fleet")
app.command("enroll", epilog=enroll_cli.EPILOG)(enroll_cli.enroll)
app.command(epilog="Example: appliance doctor, before or after installation; appliance doctor --drill")(
    doctor_cli.doctor
)
app.command("support-bundle", epilog="Example: appliance support-bundle --out case-17.tar.gz")(
    doctor_cli.support_bundle
)

_WANTED = {"update": "good", "rollback": "undone"}
"""Where a deployment stands when an order has come off."""
_GOES_ON = ("trial", "back")
"""Steps that a pause does not hold up."""
_PAUSED = "updates are paused: the order resume lets them go on"
_POLL_S = 0.5
_FAULTS = 3
"""The last that `status` shows."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"appliance {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Take what stands before the command."""


@app.command("run", add_help_option=False, context_settings={"ignore_unknown_options": True})
def run_daemon(
    arguments: Annotated[list[str] | None, typer.Argument(help="see: appliance run --help")] = None,
) -> None:
    """Start the daemon (see: appliance run --help)."""
    # Reached only through wrappers that call the client app directly; the entry point never comes here.
    os.execv(sys.executable, [sys.executable, "-m", "appliance", "run", *(arguments or [])])  # noqa: S606 - ourselves


@app.command(epilog="Example: appliance infer ppocr-v4 receipt.jpg --out found.png")
def infer(
    model: Annotated[str, typer.Argument(help="model to ask, e.g. ppocr-v4")],
    file: Annotated[Path, typer.Argument(help="JPEG or PNG", exists=True, dir_okay=False, readable=True)],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    deadline_ms: Annotated[float | None, typer.Option(help="give up after this long")] = None,
    out: Annotated[Path | None, typer.Option(help="draw what was found into a copy of the picture")] = None,
    escalate: Annotated[
        bool, typer.Option("--escalate", help="wait for a second opinion of upstream where the answer is doubtful")
    ] = False,
) -> None:
    """Send a picture and print what the model answers."""
    parameters: dict[str, Any] = {} if deadline_ms is None else {"deadline_ms": deadline_ms}
    if escalate:
        parameters["escalate"] = "wait"
    if out and out.exists() and out.samefile(file):
        msg = f"{out} is the picture itself: name another file"
        raise typer.BadParameter(msg, param_hint="--out")
    content = file.read_bytes()
    answer = ask("POST", url, f"/v1/models/{model}/predict", content=content, params=parameters)
    if out:
        from appliance.drawing import drawn  # noqa: PLC0415 - opencv, which the other commands need not wait for

        try:
            out.write_bytes(drawn(content, items(answer), out.suffix))
        except (ApplianceError, OSError) as error:
            console.fail(f"{out} cannot be written: {error}")
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    kind = "class" if "classes" in answer else "object" if "objects" in answer else "text"
    table = Table("", kind, "confidence", "at", box=None)
    for i, item in enumerate(items(answer), 1):
        at = "{:.0f},{:.0f}".format(*item["box"][0]) if "box" in item else ""
        table.add_row(str(i), item.get("text") or item.get("label"), f"{item['confidence']:.2f}", at)
    screen = console.plain()
    screen.print(table if table.row_count else f"no {kind} found")
    opinion = answer.get("second_opinion")
    if opinion:
        screen.print(f"second opinion: {_opinion(opinion)}")
    screen.print(
        f"{answer['model']} {answer['version']} by {answer['runtime']} ({answer['precision']})"
        f" in {answer['timing_ms']['total']:.0f} ms, {answer['trust']}",
        style="dim",
    )


@app.command(epilog="Example: appliance status --json")
def status(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what the daemon serves and how it is."""
    answer = ask("GET", url, "/v1/status")
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    screen = console.plain()
    ready, style = _readiness(answer)
    screen.print(
        f"{answer['device_id']}: {ready}, up {answer['uptime_s']:.0f} s, version {answer['appliance']}", style=style
    )
    table = Table("model", "version", "state", "runtime", "precision", "trust", "pid", "restarts", box=None)
    for model, worker in zip(answer["models"], answer["workers"], strict=True):
        table.add_row(
            model["name"],
            model["version"],
            "not ready" if worker["state"] == "ready" and not model["ready"] else worker["state"],
            model["runtime"] or "-",
            ", ".join(f"{graph} {precision}" for graph, precision in sorted(model["precision"].items())) or "-",
            model["trust"],
            str(worker["pid"] or "-"),
            str(worker["restarts"]),
        )
    screen.print(
        table if table.row_count else "no models: give one with `appliance run --bundle FOLDER` or --onnx NAME=FILE"
    )
    for model in answer["models"]:
        if model["reason"]:
            screen.print(f"{model['name']}: {model['reason']}", style="yellow")
    profile = answer["profile"]
    screen.print(f"profile {profile['name']}: {profile['because']}")
    memory = answer["memory"]
    screen.print(
        f"memory: {_mebibytes(memory['leased_bytes'])} of {_mebibytes(memory['budget_bytes'])} leased, "
        f"pressure {memory['step']}"
    )
    for fault in answer["recent_faults"][:_FAULTS]:
        spent = fault["recovery_s"]
        end = "not recovered yet" if spent is None else f"recovered in {spent:.2f} s"
        screen.print(f"fault {fault['ago_s']:.0f} s ago: {fault['model']} {fault['cause']}, {end}")
    mqtt = answer["mqtt"]
    if mqtt:
        state = "connected" if mqtt["connected"] else f"down: {mqtt['reason']}"
        screen.print(f"mqtt {mqtt['broker']}: {state}")
    sync = answer["sync"]
    if sync:
        state = "works" if sync["works"] else f"down: {sync['reason']}"
        waiting = ", ".join(f"{count} {kind}" for kind, count in sync["spool"]["waiting"].items() if count)
        held = f" ({sync['held']})" if sync["held"] else ""
        screen.print(f"upstream {sync['url']}: {state}; {waiting or 'nothing'} waiting{held}")
    if not answer["clock"]["synced"]:
        screen.print(
            "the clock is not synchronised: no update is installed until it is, or clock.assume_synced is set",
            style="dim",
        )
    update = answer["update"]
    if update:
        screen.print(f"updates from channel {update['channel']}: {update['problem'] or _progress(update)}")


@app.command(epilog="Example: appliance models --load ppocr-v4. To load and unload, APPLIANCE_TOKEN holds a token.")
def models(
    load: Annotated[str, typer.Option(help="load this one first", metavar="NAME")] = "",
    unload: Annotated[str, typer.Option(help="unload this one first", metavar="NAME")] = "",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show every model that is known here, loaded or not."""
    for verb, name in (("unload", unload), ("load", load)):
        if name:
            ask("POST", url, f"/v2/repository/models/{name}/{verb}")
    found = ask("POST", url, "/v2/repository/index")
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table("model", "version", "state", "reason", box=None)
    for one in found:
        table.add_row(one["name"], one["version"], one["state"].lower(), one["reason"])
    console.plain().print(table if found else "no models: give one with `appliance run --bundle FOLDER`")


@app.command(epilog="Example: appliance update --wait. APPLIANCE_TOKEN holds an administrator's token.")
def update(
    name: Annotated[str, typer.Option(help="bundle meant by --force (default: all)", metavar="NAME")] = "",
    force: Annotated[bool, typer.Option("--force", help="also take a version that failed on this device")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="return when the deployment has ended")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Look for new versions now, and move to them."""
    args = ({"name": name} if name else {}) | ({"force": True} if force else {})
    _order(url, "update", args, wait=wait, as_json=as_json)


@app.command(epilog="Example: appliance rollback --wait. APPLIANCE_TOKEN holds an administrator's token.")
def rollback(
    name: Annotated[str, typer.Option(help="bundle meant (default: the first)", metavar="NAME")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="return when it has ended")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Go back to the version before the one that serves."""
    _order(url, "rollback", {"name": name} if name else {}, wait=wait, as_json=as_json)


def _order(url: str, command: str, args: dict[str, Any], *, wait: bool, as_json: bool) -> None:
    """Give an order, wait for what comes of it if so wished, and print that."""
    order = {"id": str(uuid.uuid4()), "command": command, "args": args}
    before = max((one["id"] for one in _deployments(url)), default=0) if wait else 0
    answer = ask("POST", url, "/v1/commands", json=order)
    if answer["status"] != "done":
        console.fail(f"{command} is {answer['status']}: {answer['reason']}")
    screen = console.plain()
    if not wait:
        if as_json:
            print(json.dumps(answer, ensure_ascii=False))
        else:
            screen.print(f"{command} was ordered; `appliance status` shows how far it is")
        return
    state = _waited(url)
    meant = answer["result"]["deployment"]
    ours = next((one for one in _deployments(url) if one["id"] == meant or one["id"] > before), None)
    problem = _PAUSED if _held(state) else state["problem"]
    came_off = ours["step"] == _WANTED[command] if ours else not problem
    if as_json:
        print(json.dumps({"problem": problem, "deployment": ours}, ensure_ascii=False))
    else:
        if ours:
            screen.print(f"deployment {ours['id']}: {ours['name']} {ours['version']} is {ours['step']}")
        elif not problem:
            screen.print(f"nothing to do: this device runs what channel {state['channel']} holds")
        reason = problem or (ours["reason"] if ours else "")
        if reason:
            screen.print(reason, style="yellow")
    if not came_off:
        raise typer.Exit(1)


def _waited(url: str) -> dict[str, Any]:
    """Wait until no update is under way, and tell on standard error how far it is; the state of updates then."""
    screen, told = console.plain(stderr=True), ""
    with screen.status("") as shown:
        time.sleep(_POLL_S)  # until the daemon has begun what was ordered
        while (state := ask("GET", url, "/v1/status")["update"])["deployment"] or state["looking"]:
            if _held(state):
                break
            now = _progress(state) + (f" ({state['problem']})" if state["problem"] else "")
            if now != told:
                (shown.update if screen.is_terminal else screen.print)(now)
                told = now
            time.sleep(_POLL_S)
    found: dict[str, Any] = state
    return found


def _held(update: dict[str, Any]) -> bool:
    """Whether an operator has paused updates, and with them what is under way."""
    return bool(update["paused"]) and update["step"] not in _GOES_ON


def _progress(update: dict[str, Any]) -> str:
    """How far updates are, by their part of the status."""
    paused = f"; {_PAUSED}" if update["paused"] else ""
    if not update["deployment"]:
        return ("looking at the repository" if update["looking"] and not paused else "nothing to do") + paused
    share = "" if update["share"] is None else f", {int(update['share'] * 10) * 10} %"
    return f"deployment {update['deployment']} is at {update['step']}{share}{paused}"


def _deployments(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask("GET", url, "/v1/deployments")["deployments"]
    return found


@app.command(epilog="Example: appliance bench --report bench.html. It loads the daemon fully: not while it is needed.")
def bench(
    model: Annotated[str, typer.Option(help="model to measure (default: the first)", metavar="NAME")] = "",
    url: Url = DEFAULT_URL,
    report: Annotated[Path | None, typer.Option(help="write a page with plots there", metavar="FILE.html")] = None,
    as_json: AsJson = False,
    price_per_hour: Annotated[float, typer.Option(help="of the machine, power included", min=0)] = 1.0,
    faults_per_day: Annotated[float, typer.Option(help="of each kind, to compute availability from", min=0)] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="about 1 minute instead of 2")] = False,
) -> None:
    """Measure a running daemon: speed, cost, elasticity, stability, each beside the line that passes."""
    from appliance.bench import measure  # noqa: PLC0415 - the other commands need none of it
    from appliance.bench.report import cells, to_html, to_json  # noqa: PLC0415 - likewise

    lasts_s, series_s = (30.0, 5.0) if quick else (120.0, 600.0)
    plan = measure.Plan(lasts_s, series_s, price_per_hour, faults_per_day, drill=not quick)
    progress = console.plain(stderr=True)
    try:
        with client(url, timeout_s=120.0) as http, progress.status("looking at the daemon") as shown:
            found = measure.Bench(http, model, plan, shown.update).run()
        if report:
            report.write_text(to_html(found), encoding="utf-8")
    except ApplianceError as error:
        console.fail(str(error))
    except httpx.HTTPError as error:
        refused(url, error)
    except OSError as error:
        console.fail(f"the report cannot be written: {error}")
    if as_json:
        print(json.dumps(to_json(found)))
    else:
        screen = console.plain()
        for key, text in found.facts.items():
            screen.print(f"{key}: {text}", style="dim")
        table = Table("", "what", "measured", "pass line", "", "", box=None)
        for dimension in found.dimensions:
            for i, verdict in enumerate(dimension.verdicts):
                style = {True: None, False: "red", None: "dim"}[verdict.passed]
                table.add_row("" if i else dimension.name, *cells(verdict), style=style)
        screen.print(table)
    if not found.passed:
        raise typer.Exit(1)


def _readiness(answer: dict[str, Any]) -> tuple[str, str]:
    """In words, and in a colour."""
    if not answer["ready"]:
        return "not ready", "red"
    loaded = any(model["ready"] for model in answer["models"])
    return ("ready", "green") if loaded else ("ready, nothing loaded", "yellow")


def _opinion(opinion: dict[str, Any]) -> str:
    """What a larger model says, in one line."""
    if opinion.get("reason"):
        return f"none ({opinion['reason']})"
    said = " / ".join(item.get("text") or item.get("label") or "" for item in items(opinion))
    return f"{opinion['by']} {'agrees' if opinion['agrees'] else 'says'}: {said or 'nothing found'}"


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
