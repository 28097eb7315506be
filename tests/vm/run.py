"""`make vm-test`: boots the image on an emulated arm64 machine and checks from outside.

What it needs, how long it takes and what it does not prove is in docs/image.md.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import READER, ROOT, VERSIONS, Machine, build
from support.daemon import Daemon
from vm import DROP_IN, READY_S, Disks, Vm, VmFailure, check, running, say
from workshop import workshop

_CROP = ROOT / "tests/data/ocr/lines/icdar2015_0014.png"
_FAILS_ON_TRIAL = """
import sqlite3, sys
slots = sqlite3.connect("/var/lib/appliance/journal.db").execute("SELECT document FROM slots")
sys.exit(any('"trial"' in document for (document,) in slots))
"""
"""Stands for a version with which the daemon does not start: it never comes as far as counting that."""


def first_boot(vm: Vm) -> None:
    """READY, the first boot done and gone, the bundle of the image served as signed, inside its sandbox."""
    ready_s = vm.ready()
    vm.until(lambda: vm.attempt("test", "-e", "/etc/appliance/firstboot.json")["status"], "the first boot is done")
    check(
        vm.attempt("systemctl", "is-enabled", "appliance-firstboot")["status"], "the first boot has not removed itself"
    )
    size = int(vm.run("df", "--output=size", "-B1", "/var/lib/appliance").split()[-1])
    check(size > 900 * 2**20, f"the data partition was not grown: {size} bytes")
    model = vm.model("scale")
    check((model["version"], model["trust"]) == ("1.0.0", "signed"), f"the image's bundle serves as {model}")
    check(vm.scale() == 1, "version 1 answers wrongly")
    unit = vm.shown("appliance.service", "User", "NRestarts", "MainPID", "ControlGroup")
    check(unit["User"] == "appliance" and unit["NRestarts"] == "0", f"the unit runs as {unit}")
    limit = vm.run("cat", f"/sys/fs/cgroup{unit['ControlGroup']}/worker-scale/memory.max")
    check(limit.isdigit(), f"the worker's group has no limit: {limit}")
    total = vm.run("cat", "/sys/fs/cgroup/appliance.slice/memory.max")
    check(total.isdigit(), f"the slice has no limit: {total}")
    capabilities = vm.run("grep", "CapEff", f"/proc/{unit['MainPID']}/status").split()[-1]
    check(int(capabilities, 16) == 0, f"the daemon has capabilities: {capabilities}")
    filters = ("@system-service", "~@privileged", "adjtimex clock_adjtime")
    asked = vm.run(
        *("systemd-run", "--quiet", "--pipe", "--wait", "-p", "User=appliance", "-p", "CapabilityBoundingSet="),
        *(word for one in filters for word in ("-p", f"SystemCallFilter={one}")),
        *("/opt/appliance/bin/python", "-c", "from appliance.adapters import host; print(host.clock_synced())"),
    )
    check(asked in {"True", "False"}, f"in its sandbox the daemon cannot ask for the clock: {asked}")
    failed = vm.run("systemctl", "--failed", "--no-legend", "--plain")
    check(not failed, f"units failed: {failed}")
    say("READY, first boot done", ready_s=round(ready_s), worker_limit_bytes=int(limit), clock_synced=asked)


def reads(vm: Vm, machine: Machine) -> None:
    """The recogniser reads a crop as it does here."""
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder), "--bundle", str(machine.reader)) as daemon:
        here = daemon.http.post("/v1/models/reader/predict", content=_CROP.read_bytes()).json()["lines"][0]
    (slot,) = vm.run("ls", "/var/lib/appliance/slots").split()
    bundles = f'["/var/lib/appliance/slots/{slot}","/{READER}"]'
    vm.drop_in(f"Environment='APPLIANCE_BUNDLES={bundles}'")
    vm.restart()
    vm.until(lambda: vm.model("reader")["ready"], "the recogniser is loaded", READY_S)
    began_at = time.monotonic()
    answer = vm.http.post("/v1/models/reader/predict", content=_CROP.read_bytes(), timeout=READY_S)
    there = answer.raise_for_status().json()["lines"][0]
    took_s = round(time.monotonic() - began_at, 1)
    check(there["text"] == here["text"], f"arm64 reads {there['text']!r}, x86 {here['text']!r}")
    difference = abs(there["confidence"] - here["confidence"])
    say("same text on arm64", text=there["text"], confidence_difference=difference, took_s=took_s)
    vm.run("rm", "-r", DROP_IN)
    vm.run("systemctl", "daemon-reload")
    vm.restart()


def hangs(vm: Vm) -> None:
    """A daemon that hangs is ended and started again."""
    before = vm.shown("appliance.service", "MainPID", "NRestarts")
    vm.run("kill", "-STOP", before["MainPID"])
    began_at = time.monotonic()

    def again() -> bool:
        now = vm.shown("appliance.service", "NRestarts", "SubState")
        return int(now["NRestarts"]) > int(before["NRestarts"]) and now["SubState"] == "running"

    vm.until(again, "systemd has started the daemon again", READY_S)
    vm.until(lambda: vm.scale() == 1, "it answers again")
    took_s = round(time.monotonic() - began_at, 1)
    log = vm.run("journalctl", "-u", "appliance", "--no-pager")
    check("Watchdog timeout" in log, "it was not the watchdog that ended it")
    say("hang ended by the watchdog", answering_again_after_s=took_s)


def falls_back(vm: Vm) -> None:
    """A version on trial with which the daemon does not start is taken back by the rollback unit."""
    vm.drop_in("Environment=APPLIANCE_UPDATE__TRIAL_S=3600")
    vm.restart()
    vm.publish(2)
    vm.order("update")
    on_trial = "version 2 serves on trial"
    vm.until(lambda: vm.scale() == 2 and vm.deployments()[0]["step"] == "trial", on_trial, READY_S)
    vm.write("/srv/fails.py", _FAILS_ON_TRIAL)
    # Its five starts need not fit into the unit's two minutes where everything is slow.
    vm.drop_in("ExecStartPre=/usr/bin/python3 -S -E /srv/fails.py", "[Unit]", "StartLimitIntervalSec=1800")
    vm.run("systemctl", "reset-failed", "appliance")  # the starts before do not count
    began_at = time.monotonic()
    vm.run("systemctl", "kill", "-s", "KILL", "appliance")

    def taken_back() -> bool:
        return "was taken back" in vm.run("journalctl", "-u", "appliance-rollback", "--no-pager")

    vm.until(taken_back, "the rollback unit has taken it back", READY_S)
    vm.until(lambda: vm.scale() == 1, "version 1 serves again", READY_S)
    took_s = round(time.monotonic() - began_at, 1)
    vm.until(vm.settled, "the deployment has ended")
    latest = vm.deployments()[0]
    check(latest["step"] == "undone", f"the deployment says {latest}")
    check("too often" in latest["reason"], f"the deployment says {latest}")
    failed = vm.run("journalctl", "-u", "appliance", "--no-pager").count("Control process exited")
    say("crash loop ended by the rollback unit", starts=failed, serving_again_after_s=took_s, reason=latest["reason"])


def cuts(machine: Machine, disks: Disks, work: Path, count: int, chance: random.Random) -> None:
    """Cut the power at random moments of updates; after each cut the old or the new version serves, verified.

    What was cut goes on by itself, and may be cut again; the next version is published when it has ended.
    """
    tally, number, old, new = {"old": 0, "new": 0}, 0, 2, 2
    with contextlib.ExitStack() as stack:
        vm = stack.enter_context(running(machine, disks, work))
        longest_s = uncut(vm)
        while number < count:
            if not vm.under_way():
                old, new = round(vm.scale()), new + 1
                check(new <= VERSIONS, f"{VERSIONS} versions have not been enough for {count} cuts")
                vm.publish(new)
                vm.order("update")
            time.sleep(chance.uniform(0, longest_s))
            step = vm.under_way()
            if not step:  # it was over sooner
                continue
            vm.cut()
            number += 1
            vm = stack.enter_context(running(machine, disks, work))
            ready_s = round(vm.ready())
            serves = verified(vm)
            check(serves in {old, new}, f"cut {number}: version {serves} serves, neither {old} nor {new}")
            tally["old" if serves == old else "new"] += 1
            say("power cut", number=number, at=step, ready_again_s=ready_s, serves=serves, of=[old, new])
        vm.until(lambda: not vm.under_way(), "what was cut last has ended", READY_S)
        ends = [(one["version"], one["step"]) for one in reversed(vm.deployments())]
        serves = verified(vm)
    say("power cuts", count=count, served_after=tally, serves_at_last=serves, deployments=ends)


def uncut(vm: Vm) -> float:
    """Seconds that an update from version 1 to 2 takes."""
    vm.ready()
    vm.publish(2)
    began_at = time.monotonic()
    vm.order("update")
    vm.until(lambda: vm.scale() == 2 and not vm.under_way(), "an update that nothing cuts has ended", READY_S)
    took_s = time.monotonic() - began_at
    say("an update that nothing cuts", s=round(took_s, 1))
    return took_s


def verified(vm: Vm) -> int:
    """Number of the version that serves, which is signed, and whose files are what was signed."""

    def serving() -> tuple[int, dict[str, Any]] | None:
        before, model, after = vm.scale(), vm.model("scale"), vm.scale()
        return (round(after), model) if before == after else None  # else it was just switched

    version, model = vm.until(serving, "it answers") or (0, {})
    check((model["version"], model["trust"]) == (f"{version}.0.0", "signed"), f"it serves {model}")
    blobs = f"/var/lib/appliance/slots/{model['digest']}/blobs/sha256"
    each = 'for f in *; do echo "$f  $f"; done'
    damaged = vm.attempt("sh", "-c", f"cd {blobs} && {each} | sha256sum -c --quiet")
    check(damaged["status"] == 0, f"files of what serves are damaged: {damaged['out']}")
    return version


_RECORDS = 30
_WRITE = f"""
import os
for name in ("synced", "not-synced"):
    with open(f"/var/lib/appliance/{{name}}", "wb", buffering=0) as file:
        for number in range({_RECORDS}):
            file.write(b"%07d\\n" % number)
            if name == "synced":
                os.fsync(file.fileno())
"""


def control(machine: Machine, disks: Disks, work: Path) -> None:
    """What was written without fsync must be lost, or the cuts above prove nothing; with it, nothing may be."""
    with running(machine, disks, work) as vm:
        vm.until(lambda: vm.attempt("true")["status"] == 0, "the machine is up", READY_S)
        vm.run("python3", "-c", _WRITE)
        time.sleep(1)
    with running(machine, disks, work) as vm:
        vm.until(lambda: vm.attempt("true")["status"] == 0, "the machine is up again", READY_S)
        texts = {name: vm.attempt("cat", f"/var/lib/appliance/{name}")["out"] for name in ("synced", "not-synced")}
    found = {name: text.count("\n") for name, text in texts.items()}
    check(found["synced"] == _RECORDS, f"records that were synced were lost: {found}")
    check(found["not-synced"] < _RECORDS, f"records that were not synced survived, so the cuts show nothing: {found}")
    say("control: records that survive", of=_RECORDS, **found)


def main() -> int:
    """Build, boot, check; 0 when all held."""
    parser = argparse.ArgumentParser(prog="vm-test", description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build/vm", help="folder for disks and logs")
    parser.add_argument("--bundle", type=Path, default=ROOT / ".demo/ppocr-v4", help="whose recogniser is tried")
    parser.add_argument("--cuts", type=int, default=10, help="power cuts")
    parser.add_argument("--seed", type=int, default=8, help="of the moments of the cuts")
    parser.add_argument("--only", default="first,reads,hangs,rollback,cuts,control,workshop", help="parts to run")
    parser.add_argument("--keep", action="store_true", help="use the disk that was built before")
    options = parser.parse_args()
    work, began_at = options.work.resolve(), time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    try:
        machine = Machine.kept(work) if options.keep else build(work, options.bundle.resolve())
        say("built", s=round(time.monotonic() - began_at))
        perform(machine, work, options.only.split(","), options.cuts, random.Random(options.seed))  # noqa: S311 - moments
    except VmFailure as failure:
        say("FAILED", why=str(failure))
        return 1
    say("all held", s=round(time.monotonic() - began_at))
    return 0


def copied(sources: Disks, disks: Disks) -> None:
    """Make `disks` copies; holes stay holes."""
    for source, disk in zip(sources, disks, strict=True):
        subprocess.run(["cp", "--sparse=always", source, disk], check=True)


def perform(machine: Machine, work: Path, parts: list[str], count: int, chance: random.Random) -> None:
    """The parts, each on a fresh copy of the disk as the first boot has left it."""
    disks, base = (work / "disk.raw", work / "data.raw"), (work / "base.raw", work / "base-data.raw")

    if "first" in parts:
        copied(machine.disks, disks)
        with running(machine, disks, work) as vm:
            first_boot(vm)
            vm.off()
        copied(disks, base)
    live = {"reads": lambda vm: reads(vm, machine), "hangs": hangs, "rollback": falls_back}
    if chosen := [part for name, part in live.items() if name in parts]:
        copied(base, disks)
        with running(machine, disks, work) as vm:
            vm.ready()
            for part in chosen:
                part(vm)
    if "cuts" in parts:
        copied(base, disks)
        cuts(machine, disks, work, count, chance)
    if "control" in parts:
        copied(base, disks)
        control(machine, disks, work)
    if "workshop" in parts:
        copied(base, disks)
        workshop(machine, disks, work)


if __name__ == "__main__":
    sys.exit(main())
