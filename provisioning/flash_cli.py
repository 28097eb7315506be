"""`provision flash`: from boards in recovery mode to devices that serve."""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.errors import ConfigError, WorkshopError
from provisioning.publish_cli import passphrase

if TYPE_CHECKING:
    from provisioning.flash.checks import Problem
    from provisioning.flash.run import BoardRun, Run

# Everything else is imported by the command that needs it: `provision --help` must not wait for cryptography.

app = typer.Typer(no_args_is_help=True, help="Flash Jetson Orin boards, and tell which of them really work.")
_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True, highlight=False)

Sign = Callable[[dict[str, Any]], None]

_LISTEN = "0.0.0.0:8099"
"""Boards call from networks of their own, and prove who they are."""
_WAIT_S = 1200.0


class Storage(str, Enum):
    """Where the root file system goes."""

    nvme = "nvme"
    emmc = "emmc"
    sd = "sd"


Sysroot = Annotated[
    Path, typer.Option("--sysroot", help="Where /sys, /proc, /dev and /etc are; for trials without boards.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
BundlePath = Annotated[
    Path, typer.Option("--bundle", help="Bundle whose golden question each board must answer.", metavar="DIR")
]
Listen = Annotated[str, typer.Option(help="Where boards call home.", metavar="HOST:PORT")]
WaitS = Annotated[float, typer.Option(min=0, help="Boards that have not called home after that have failed.")]
Inventory = Annotated[Path | None, typer.Option("--inventory", help="File to which signed records go.")]
Key = Annotated[str, typer.Option(help="Name of the key that signs them.")]
Keys = Annotated[Path | None, typer.Option("--keys", help="Folder with that key.", metavar="DIR")]


def _epilog(example: str) -> str:
    return f"Example: provision flash {example}\n\nExit codes: 0 done, 1 refused or failed, 2 wrong usage."


@app.command(epilog=_epilog("plan --board jetson-orin-nano-devkit --storage nvme --bsp Linux_for_Tegra --out lot.json"))
def plan(  # noqa: PLR0913, PLR0917 - options of a command
    board: Annotated[str, typer.Option(help="Configuration of NVIDIA's tools, as jetson-orin-nano-devkit.")],
    bsp: Annotated[Path, typer.Option(help="NVIDIA's folder Linux_for_Tegra.", metavar="DIR")],
    module: Annotated[str, typer.Option(help="Module on it; default: the usual one of the board.")] = "",
    storage: Annotated[Storage, typer.Option(help="Where the root file system goes.")] = Storage.nvme,
    ab: Annotated[bool, typer.Option("--ab/--no-ab", help="Two root file systems; only flashing arms them.")] = True,
    boards: Annotated[int, typer.Option(min=1, max=30, help="Boards at the same time, at most.")] = 1,
    data_gib: Annotated[
        int, typer.Option(min=0, help="Partition for models, GiB; 0 leaves NVIDIA's layout as it is.")
    ] = 12,
    slot_gib: Annotated[int, typer.Option(min=8, help="Each root file system, GiB, where the layout is changed.")] = 20,
    overlay: Annotated[
        Path | None, typer.Option(help="What `provision image` made, for the root file system.", metavar="TAR")
    ] = None,
    user: Annotated[str, typer.Option(help="Account on the board; nobody logs in with a password.")] = "maintainer",
    host_name: Annotated[str, typer.Option(help="Name that the board has at first.")] = "appliance",
    one_step: Annotated[
        bool, typer.Option("--one-step", help="Let NVIDIA's tool read the EEPROM of the one board.")
    ] = False,
    three_step: Annotated[
        bool, typer.Option("--three-step", help="Make images of the firmware and of NVMe by two commands.")
    ] = False,
    images_only: Annotated[bool, typer.Option("--images-only", help="Make images and stop, without a board.")] = False,
    network: Annotated[
        str, typer.Option(help="usb0, or eth0:<target-ip>/<subnet>:<host-ip>[:<gateway>] to write over the LAN.")
    ] = "usb0",
    pkc: Annotated[Path | None, typer.Option(help="Key that signs for a module with secure boot.")] = None,
    sbk: Annotated[Path | None, typer.Option(help="Key that encrypts for it.")] = None,
    uefi_keys: Annotated[Path | None, typer.Option(help="Configuration of UEFI's keys.")] = None,
    encryption_key: Annotated[
        Path | None, typer.Option(help="Encrypt the root file system on NVMe; key for that of the disk.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="For NVIDIA's flasher, as it is; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan, for `provision flash run`.")] = None,
    sysroot: Sysroot = Path("/"),
    as_json: Json = False,
) -> None:
    """Show every command of a run, and what stands against it; nothing is started."""
    from models import schema  # noqa: PLC0415 - see the top
    from models.folder import write_file  # noqa: PLC0415
    from provisioning.flash import boards as usb  # noqa: PLC0415
    from provisioning.flash import checks  # noqa: PLC0415
    from provisioning.flash import plan as plans  # noqa: PLC0415
    from provisioning.flash.facts import read_bsp, read_host  # noqa: PLC0415

    if overlay and not (overlay.is_file() and tarfile.is_tarfile(overlay)):
        msg = f"{overlay} is no archive: give the archive that `provision image` wrote with --overlay"
        raise ConfigError(msg)
    wish = plans.Wish(
        board=board,
        module=usb.module(module, usb.board(board)).name,
        storage=storage.value,
        ab=ab,
        boards=boards,
        data_gib=data_gib,
        slot_gib=slot_gib,
        user=user,
        host_name=host_name,
        overlay=_absolute(overlay),
        overlay_sha256=hashlib.sha256(overlay.read_bytes()).hexdigest() if overlay else "",
        one_step=one_step,
        three_step=three_step,
        images_only=images_only,
        network=network,
        options=tuple(option or ()),
        pkc=_absolute(pkc),
        sbk=_absolute(sbk),
        uefi_keys=_absolute(uefi_keys),
        encryption_key=_absolute(encryption_key),
    )
    known = read_bsp(bsp)
    made, found = plans.make(wish, known), checks.problems(wish, known, read_host(bsp, sysroot, wish.keys))
    shown = schema.dump(made)
    if out:
        write_file(out, json.dumps(shown, indent=1).encode())
    if as_json:
        problems = [{"what": one.what, "blocks": one.blocks} for one in found]
        print(json.dumps({**shown, "problems": problems}, indent=1))
        return
    _out.print(f"# {board} with {wish.module}, R{made.release}, in {made.bsp}", markup=False)
    for step in made.steps:
        _out.print(f"\n# {step.name}: {step.why}\n{step.shown()}", markup=False)
    _say(found)


@app.command(epilog=_epilog("run lot.json --run lot-7 --bundle ppocr-v4"))
def run(  # noqa: PLR0913, PLR0917 - options of a command
    plan_file: Annotated[Path, typer.Argument(help="What `provision flash plan --out` wrote.", metavar="PLAN")],
    run_folder: Annotated[Path, typer.Option("--run", help="Folder of the run; the same one goes on.", metavar="DIR")],
    bundle: BundlePath,
    call_home: Annotated[
        list[str] | None, typer.Option("--call-home", help="URL of this PC as boards see it; default: over USB.")
    ] = None,
    listen: Listen = _LISTEN,
    wait_s: WaitS = _WAIT_S,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="End when boards are written; verify later.")] = False,
    inventory: Inventory = None,
    key: Key = "",
    keys: Keys = None,
    sysroot: Sysroot = Path("/"),
    as_json: Json = False,
) -> None:
    """Flash the boards that are in recovery mode, and wait until each has called home and answered rightly."""
    from models.folder import BundleFolder  # noqa: PLC0415 - see the top
    from provisioning.flash import boards as usb  # noqa: PLC0415
    from provisioning.flash import checks  # noqa: PLC0415
    from provisioning.flash import plan as plans  # noqa: PLC0415
    from provisioning.flash.facts import read_bsp, read_host, read_package  # noqa: PLC0415
    from provisioning.flash.home import HOST_ON_USB, Exam  # noqa: PLC0415
    from provisioning.flash.run import Run, read_plan  # noqa: PLC0415

    made, where = read_plan(plan_file), _address(listen)
    wish, bsp = made.wish, Path(made.bsp)
    sign = _signer(inventory, key, keys)
    known = read_package(bsp, made.release) if wish.package else read_bsp(bsp)
    plans.check(made, known)
    _refuse(checks.problems(wish, known, read_host(bsp, sysroot, wish.keys)))
    urls = tuple(call_home or (f"http://{HOST_ON_USB}:{where[1]}/",))
    work = Run(run_folder, made, urls=urls, exam=Exam(BundleFolder(bundle)), keep=sign)

    def ready() -> list[usb.Attached]:
        there = usb.attached(sysroot)
        _refuse(checks.of_boards(wish, there))
        return [one for one in there if one.state is usb.State.RECOVERY]

    in_recovery = any(one.state is usb.State.RECOVERY for one in usb.attached(sysroot))
    only_wait = work.waiting and not in_recovery  # it was interrupted while boards were waited for
    if not (wish.images_only or only_wait):
        ready()  # before images are made, which takes long
    with _telling() as tell:
        if not only_wait:
            work.write(sysroot, tell, ready)
        if not (wish.images_only or no_wait):
            work.verify(where, sysroot, wait_s, tell)
    _finish(work, as_json=as_json, written_will_do=no_wait)


@app.command(epilog=_epilog("factory workshop/lot-7 --package mfi_jetson-orin-nano-devkit --run lot-7"))
def factory(
    workshop: Annotated[Path, typer.Argument(help="Folder of the run that made the package.", metavar="RUN")],
    package: Annotated[Path, typer.Option(help="What mfi_*.tar.gz unpacked to, on this host.", metavar="DIR")],
    run_folder: Annotated[Path, typer.Option("--run", help="Folder of the run on this host.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Begin a run on a factory's host, which writes a package that a workshop made."""
    from models import schema  # noqa: PLC0415 - see the top
    from provisioning.flash.run import hand_over  # noqa: PLC0415

    made = hand_over(workshop, package, run_folder)
    if as_json:
        print(json.dumps(schema.dump(made), indent=1))
        return
    _out.print(f"up to {made.wish.boards} boards, R{made.release}: {made.steps[0].shown()}", markup=False)
    _out.print(f"next: provision flash run {run_folder}/plan.json --run {run_folder} --bundle DIR", markup=False)


@app.command(epilog=_epilog("verify lot-7 --bundle ppocr-v4"))
def verify(  # noqa: PLR0913, PLR0917 - options of a command
    run_folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    bundle: BundlePath,
    listen: Listen = _LISTEN,
    wait_s: WaitS = _WAIT_S,
    inventory: Inventory = None,
    key: Key = "",
    keys: Keys = None,
    sysroot: Sysroot = Path("/"),
    as_json: Json = False,
) -> None:
    """Wait until the written boards of a run have called home."""
    from models.folder import BundleFolder  # noqa: PLC0415 - see the top
    from provisioning.flash.home import Exam  # noqa: PLC0415
    from provisioning.flash.run import Run, read_plan, read_state  # noqa: PLC0415

    read_state(run_folder)
    made, exam = read_plan(run_folder / "plan.json"), Exam(BundleFolder(bundle))
    work = Run(run_folder, made, urls=(), exam=exam, keep=_signer(inventory, key, keys))
    with _telling() as tell:
        work.verify(_address(listen), sysroot, wait_s, tell)
    _finish(work, as_json=as_json)


@app.command(epilog=_epilog("status lot-7 --inventory inventory.jsonl --public keys/workshop.pub.json"))
def status(
    run_folder: Annotated[Path | None, typer.Argument(help="Folder of a run.", metavar="[RUN]")] = None,
    inventory: Inventory = None,
    public: Annotated[Path | None, typer.Option(help="Public key that signed the inventory.")] = None,
    sysroot: Sysroot = Path("/"),
    as_json: Json = False,
) -> None:
    """Show what hangs on USB, what became of a run, and what the inventory holds, with its signatures checked."""
    from models import schema  # noqa: PLC0415 - see the top
    from provisioning.flash import boards as usb  # noqa: PLC0415
    from provisioning.flash.run import read_state  # noqa: PLC0415

    there = usb.attached(sysroot)
    state = read_state(run_folder) if run_folder else None
    records = _records(inventory, public) if inventory else None
    if as_json:
        attached = [{"port": one.port, "state": one.state.value, "modules": one.modules} for one in there]
        print(json.dumps({"attached": attached, "run": state and schema.dump(state), "inventory": records}, indent=1))
        return
    for one in there:
        _out.print(f"{one.port}: {one.state.value} {' or '.join(one.modules)}", markup=False)
    if not there:
        _out.print("no Jetson is on USB")
    if state:
        _table(state.boards)
    for record in records or ():
        _out.print(f"{record['serial'] or record['port']}: {record['verdict']} ({record['module']})", markup=False)


def _absolute(file: Path | None) -> str:
    return str(file.resolve()) if file else ""


def _refuse(found: Sequence[Problem]) -> None:
    """Say warnings, and raise the rest."""
    _say([one for one in found if not one.blocks])
    blocking = [one.what for one in found if one.blocks]
    if blocking:
        raise WorkshopError("; ".join(blocking))


def _say(found: Sequence[Problem]) -> None:
    for one in found:
        _err.print(f"{'stands against it' if one.blocks else 'warning'}: {one.what}", markup=False)


def _signer(inventory: Path | None, key: str, keys: Path | None) -> Sign:
    """What signs a record into the inventory; without one records are not kept. Asks for the passphrase now."""
    if inventory is None:
        return lambda _record: None
    if not key or keys is None:
        raise ConfigError("records are signed: name the key with --key and its folder with --keys")
    from provisioning.flash.inventory import append  # noqa: PLC0415 - see the top
    from provisioning.keys import Keys as KeyFolders  # noqa: PLC0415

    signer, file = KeyFolders([keys], passphrase).signer(key), inventory
    return lambda record: append(file, record, signer)


def _finish(work: Run, *, as_json: bool, written_will_do: bool = False) -> None:
    """Show what became of each board, and raise WorkshopError unless all is well."""
    from models import schema  # noqa: PLC0415 - see the top

    if as_json:
        print(json.dumps(schema.dump(work.state), indent=1))
    else:
        _table(work.state.boards)
    well = {"good", "written"} if written_will_do else {"good"}
    bad = [one for one in work.state.boards if one.state not in well]
    if bad:
        msg = f"{len(bad)} of {len(work.state.boards)} boards are not good: repair what is said, and run again"
        raise WorkshopError(msg)


def _records(file: Path, public: Path | None) -> list[dict[str, Any]]:
    from provisioning.flash.inventory import read  # noqa: PLC0415 - see the top
    from provisioning.keys import read_public  # noqa: PLC0415

    if public is None:
        raise ConfigError("an inventory is believed with its key only: give the .pub.json with --public")
    return read(file, read_public(public))


def _table(boards: Sequence[BoardRun]) -> None:
    table = Table("port", "state", "serial", "why", "attempts", "log", box=box.SIMPLE)
    for one in boards:
        table.add_row(one.port, one.state, one.serial, one.failure, str(one.attempts), escape(one.log))
    _out.print(table)


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """Lines with the time since the start; an interruption is a sentence."""
    began_at = time.monotonic()
    try:
        yield lambda text: _err.print(f"{time.monotonic() - began_at:7.1f} s  {text}", markup=False)
    except KeyboardInterrupt as error:
        raise WorkshopError("interrupted: what the host opened is closed again; run again to go on") from error


def _address(text: str) -> tuple[str, int]:
    host, _colon, port = text.rpartition(":")
    if not host or not port.isdigit():
        msg = f"{text!r} is not HOST:PORT"
        raise ConfigError(msg)
    return host.strip("[]"), int(port)
