"""The first boot of a flashed device: `python -m appliance.firstboot`, started by systemd as root.

/etc/appliance/firstboot.json, written by `provision image`, says what is to be done. A step that is done is struck from
that file, so whatever is cut, the next start goes on there; each step may also be done twice. When nothing is left the
file goes, and with it the unit. Tools of the system do the work; what they print when they fail is the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from appliance.adapters.notify import notify
from models import schema
from models.folder import write_file

PLAN = "etc/appliance/firstboot.json"
UNIT = "etc/systemd/system/appliance.target.wants/appliance-firstboot.service"
STATE, HELD = "/var/lib/appliance", "usr/share/appliance/state"
_BIN = Path(sys.executable).parent
MODULES = (
    "appliance.start, appliance.daemon, appliance.worker, appliance.rollback, appliance.updater, appliance.inbox, "
    "appliance.model, appliance.cloudsync, appliance.second_opinion, appliance.adapters.exchange, "
    "appliance.adapters.identity, appliance.adapters.repository, appliance.adapters.spool, appliance.doctor_tls, "
    "appliance.runtime.onnx, appliance.runtime.tensorrt, models.tasks.classification, models.tasks.detection, "
    "models.tasks.lines, models.tasks.reading, models.tasks.tensors, securesystemslib.dsse, securesystemslib.signer"
)
"""Whoever imports them first compiles them, which only root may keep in /opt: also those imported only when needed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is left to do, in this order; the first four before the daemon starts."""

    grow: bool = False
    """Let the file system of the state folder fill its partition, and that the disk."""
    fill: bool = False
    """Bring what the image holds for the state folder there."""
    power_mode: int | None = None
    """Of nvpmodel. It may reboot the board at once."""
    bytecode: bool = False
    """Compile the daemon's modules."""
    enroll: tuple[str, ...] = ()
    """Arguments of `appliance enroll`, less the token."""
    token: str = ""
    """File with the token of the enrolment, which nobody needs after it."""
    lock: bool = False
    """Take the password from root."""


class ToolError(Exception):
    """A tool of the system failed; the message is a sentence."""


class FirstBoot:
    """One run on the machine whose file system is at `root`."""

    def __init__(self, root: Path) -> None:
        """Read the plan; raises OSError, SchemaError when that cannot be."""
        self._root, self._file = root, root / PLAN
        self._plan = schema.load(Plan, json.loads(self._file.read_bytes()))

    def run(self) -> int:
        """Do what is left; 0 when nothing is, 1 when something must be tried again."""
        plan, failed = self._plan, False
        if plan.grow:
            failed |= not self._step("growing the disk", self._grow, grow=False)
        if plan.fill:
            failed |= not self._step("filling the state folder", self._fill, fill=False)
        if plan.power_mode is not None:
            failed |= not self._step("setting the power mode", self._set_power_mode, power_mode=None)
        if plan.bytecode:
            failed |= not self._step("compiling the daemon's modules", self._compile_modules, bytecode=False)
        notify("READY=1")
        if plan.enroll:
            failed |= not self._step("enrolling", self._enroll, enroll=())
        if failed:
            return 1
        if plan.lock or plan.token:
            failed = not self._step("locking down", self._lock, lock=False, token="")
        if not failed:
            (self._root / UNIT).unlink(missing_ok=True)
            self._file.unlink()
            print("first boot: done", flush=True)
        return int(failed)

    def _step(self, what: str, work: Callable[[], None], **struck: Any) -> bool:  # noqa: ANN401 - fields of the plan
        """Do one thing and strike it; whether that went well."""
        print(f"first boot: {what}", flush=True)
        notify(f"STATUS={what}")
        try:
            work()
            self._strike(**struck)
        except (ToolError, OSError) as error:
            print(f"first boot: {what} failed: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _strike(self, **struck: Any) -> None:  # noqa: ANN401 - fields of the plan
        self._plan = replace(self._plan, **struck)
        write_file(self._file, json.dumps(schema.dump(self._plan)).encode())

    def _grow(self) -> None:
        source = _tool("findmnt", "-nro", "SOURCE", "--target", STATE).strip()
        block = self._root / "sys/class/block" / Path(source).name
        if (block / "partition").exists():
            number, disk = (block / "partition").read_text().strip(), f"/dev/{block.resolve().parent.name}"
            _tool("sfdisk", "--no-reread", "--no-tell-kernel", "-N", number, disk, given=", +\n")
            _tool("partx", "--update", "--nr", number, disk)
        _tool("resize2fs", source)

    def _fill(self) -> None:
        """Each entry appears whole or not at all; one that is there is the device's own."""
        state = self._root / STATE.lstrip("/")
        for entry in sorted((self._root / HELD).iterdir()):
            new, there = state / f".{entry.name}.new", state / entry.name
            if there.exists():
                continue
            if new.exists():  # an earlier try was cut
                shutil.rmtree(new) if new.is_dir() else new.unlink()
            shutil.copytree(entry, new, symlinks=True) if entry.is_dir() else shutil.copy2(entry, new)
            _tool("chown", "-R", "appliance:appliance", str(new))
            os.sync()
            new.rename(there)

    def _set_power_mode(self) -> None:
        wanted = str(self._plan.power_mode)
        if _tool("nvpmodel", "-q").split()[-1:] != [wanted]:
            _tool("nvpmodel", "-m", wanted, given="YES\n")  # where it must reboot for that, it asks

    def _compile_modules(self) -> None:
        _tool(f"{_BIN}/python", "-c", f"import {MODULES}")

    def _enroll(self) -> None:
        """As the daemon's user, whose key and certificate these become. A token opens one enrolment only."""
        own = {"HOME": "/var/cache/appliance"}
        enroll = ("runuser", "-u", "appliance", "--", f"{_BIN}/appliance", "enroll", "--state-dir", STATE)
        with contextlib.suppress(ToolError):  # it is not enrolled yet
            _tool(*enroll, own=own)
            return
        token = self._root / self._plan.token.lstrip("/")
        if not token.is_file():
            msg = f"there is no token in {self._plan.token}: put one there, made by `provision enroll token`"
            raise ToolError(msg)
        _tool(*enroll, *self._plan.enroll, own={**own, "APPLIANCE_ENROLMENT_TOKEN": token.read_text().strip()})

    def _lock(self) -> None:
        if self._plan.token:
            (self._root / self._plan.token.lstrip("/")).unlink(missing_ok=True)
        if self._plan.lock:
            _tool("passwd", "--lock", "root")


def _tool(*command: str, given: str = "", own: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a tool prints, that was given some input and variables; raises ToolError with its last words."""
    try:
        done = subprocess.run(  # noqa: S603 - tools of the system, by the image's own words
            command, input=given, env={**os.environ, **own}, capture_output=True, text=True, check=False
        )
    except OSError as error:
        msg = f"{command[0]} cannot be started ({error.strerror}): it is part of the image"
        raise ToolError(msg) from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        msg = f"{' '.join(command[:3])} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}"
        raise ToolError(msg)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the plan says; 0 done, 1 with a reason."""
    parser = argparse.ArgumentParser(prog="appliance.firstboot", description="Do once what a flashed device needs.")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where its file system is (default /)")
    options = parser.parse_args(arguments)
    try:
        return FirstBoot(options.root).run()
    except (OSError, ValueError) as error:
        print(f"first boot: the plan /{PLAN} cannot be used ({error}): flash the device again", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
