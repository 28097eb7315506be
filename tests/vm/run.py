"""`make vm-test`: boots the image on an emulated arm64 machine and checks from outside.

What it needs, how long it takes and what it does not prove is in docs/image.md.
More than 400 lines: everything that one machine goes through, in its order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import READER, ROOT, VERSIONS, Machine, build
from support.daemon import Daemon, binary_floats, binary_request
from support.processes import free_port

T = TypeVar("T")
Disks: TypeAlias = tuple[Path, Path]

_FIRST_S, _READY_S, _SHORT_S = 900.0, 400.0, 120.0
"""Emulated, and on a machine that does other things: three to four times what was seen."""
_AGENT_S = 30.0
"""No command in the machine waits for a start: those are polled."""
_X = np.full((1, 3), 3, np.float32)
_DROP_IN = "/run/systemd/system/appliance.service.d"
_ENDS = {"good", "refused", "undone"}
_CROP = ROOT / "tests/data/ocr/lines/icdar2015_0014.png"
_FAILS_ON_TRIAL = """
import sqlite3, sys
slots = sqlite3.connect("/var/lib/appliance/journal.db").execute("SELECT document FROM slots")
sys.exit(any('"trial"' in document for (document,) in slots))
"""
"""Stands for a version with which the daemon does not start: it never comes as far as counting that."""


class VmFailure(Exception):
    """Something was not as promised."""


def check(held: object, what: str) -> None:
    """Fail with `what` unless it held."""
    if not held:
        raise VmFailure(what)


class Vm:
    """One run of the machine, from power on to power off."""

    def __init__(self, machine: Machine, disks: Disks, console: Path, memory_mib: int = 1792) -> None:
        """Switch it on."""
        self._console = console
        self.http_port, self._agent_port = free_port(), free_port()
        forwards = f"hostfwd=tcp:127.0.0.1:{self.http_port}-10.0.2.15:8080"
        forwards += f",hostfwd=tcp:127.0.0.1:{self._agent_port}-10.0.2.15:9000"
        options = {
            "-machine": "virt",
            "-cpu": "max,pauth-impdef=on",
            "-accel": "tcg,thread=multi",
            "-smp": "2",
            "-m": str(memory_mib),
            "-display": "none",
            "-monitor": "none",
            "-serial": f"file:{console}",
            "-kernel": str(machine.kernel),
            "-initrd": str(machine.initrd),
            "-append": "root=/dev/vda rw console=ttyAMA0 panic=5 loglevel=4 systemd.show_status=0",
            "-netdev": f"user,id=n0,restrict=on,{forwards}",
        }
        devices = ["virtio-net-pci,netdev=n0,romfile=", "virtio-rng-pci"]
        words = [word for pair in options.items() for word in pair]
        for number, disk in enumerate(disks):
            words += ["-drive", f"file={disk},if=none,id=d{number},format=raw,cache=none"]
            devices.append(f"virtio-blk-pci,drive=d{number}")
        words += [word for device in devices for word in ("-device", device)]
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(["qemu-system-aarch64", "-nodefaults", "-no-reboot", *words])
        context = ssl.create_default_context(cafile=str(machine.authority))
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{self.http_port}",
            headers={"authorization": f"Bearer {machine.token}"},
            verify=context,
            timeout=60.0,
            trust_env=False,
        )

    def until(self, look: Callable[[], T], what: str, within_s: float = _SHORT_S) -> T:
        """What `look` sees, once that is something; what is not answered yet counts as nothing."""
        give_up_at = time.monotonic() + within_s
        last: object = None
        while time.monotonic() < give_up_at:
            check(self.process.poll() is None, f"the machine ended while waiting until {what}: see {self._console}")
            try:
                seen = look()
                if seen:
                    return seen
                last = seen
            except (VmFailure, httpx.HTTPError, OSError, ValueError) as error:
                last = error
            time.sleep(0.5)
        msg = f"not within {within_s:.0f} s: {what} (last: {last!r}); console {self._console}"
        raise VmFailure(msg)

    def run(self, *words: str) -> str:
        """What a command prints in the machine; a failed one is a failure of the test."""
        answer = self.attempt(*words)
        check(answer["status"] == 0, f"{' '.join(words)[:200]} ended with {answer['status']}: {answer['err'][-500:]}")
        return str(answer["out"]).strip()

    def attempt(self, *words: str) -> dict[str, Any]:
        """Run a command in the machine."""
        with socket.create_connection(("127.0.0.1", self._agent_port), timeout=_AGENT_S) as sock:
            sock.sendall(json.dumps(words).encode() + b"\n")
            return dict(json.loads(sock.makefile().readline()))

    def shown(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.run("systemctl", "show", unit, "-p", ",".join(names)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def status(self) -> dict[str, Any]:
        """The daemon's status document."""
        return dict(self.http.get("/v1/status").raise_for_status().json())

    def model(self, name: str) -> dict[str, Any]:
        """Status of one model."""
        found = [dict(one) for one in self.status()["models"] if one["name"] == name]
        if not found:
            msg = f"{name} is not served"
            raise ValueError(msg)
        return found[0]

    def scale(self) -> float:
        """What the served version multiplies by, by its answer."""
        content, headers = binary_request({"x": _X})
        answer = self.http.post("/v2/models/scale.g/infer", content=content, headers=headers)
        if answer.status_code != 200:
            raise ValueError(answer.text)
        return float(binary_floats(answer)[0, 0] / _X[0, 0])

    def ready(self, within_s: float = _READY_S) -> float:
        """Wait until systemd says that the daemon is ready and it answers; seconds since power on."""
        self.until(lambda: self.shown("appliance.service", "SubState")["SubState"] == "running", "READY", within_s)
        self.until(lambda: self.http.get("/v2/health/ready").status_code == 200, "the doors are open")
        return time.monotonic() - self.started_at

    def restart(self) -> None:
        """Start the daemon anew, and wait until it is ready."""
        before = self.shown("appliance.service", "MainPID")
        self.run("systemctl", "--no-block", "restart", "appliance")
        self.until(
            lambda: self.shown("appliance.service", "MainPID") not in (before, {"MainPID": "0"}), "a new process"
        )
        self.ready()

    def order(self, command: str) -> None:
        """Give an order."""
        order = {"id": f"{command}-{time.monotonic_ns()}", "command": command, "args": {}}
        answer = self.http.post("/v1/commands", json=order).raise_for_status().json()
        check(answer["status"] == "done", f"{command} was {answer}")

    def deployments(self) -> list[dict[str, Any]]:
        """The newest first."""
        return list(self.http.get("/v1/deployments").raise_for_status().json()["deployments"])

    def settled(self) -> bool:
        """Whether no deployment is under way."""
        return all(one["step"] in _ENDS for one in self.deployments()) and not self.status()["update"]["looking"]

    def publish(self, number: int) -> None:
        """Let the repository hold version `number`."""
        self.run("ln", "-sfn", str(number), "/srv/repository/now")
        self.run("sync")

    def write(self, path: str, text: str) -> None:
        """Put a file there."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("python3", "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", path, text)

    def drop_in(self, *lines: str) -> None:
        """Change the daemon's unit until the next boot."""
        self.write(f"{_DROP_IN}/test.conf", "\n".join(("[Service]", *lines, "")))
        self.run("systemctl", "daemon-reload")

    def cut(self) -> None:
        """Take the power away."""
        self.process.kill()
        self.process.wait()
        self.http.close()

    def off(self) -> None:
        """Shut down in order."""
        self.attempt("systemctl", "--no-block", "poweroff")
        try:
            self.process.wait(_SHORT_S)
        finally:
            self.cut()


@contextlib.contextmanager
def running(machine: Machine, disks: Disks, work: Path) -> Iterator[Vm]:
    """A machine that is gone afterwards, whatever happens."""
    vm = Vm(machine, disks, work / f"console-{time.strftime('%H%M%S')}.log")
    (work / "qemu.pid").write_text(str(vm.process.pid))
    try:
        yield vm
    finally:
        vm.cut()


def say(what: str, **figures: object) -> None:
    """A line of the report."""
    print(json.dumps({"seen": what, **figures}), flush=True)


def first_boot(vm: Vm) -> None:
    """READY, the first boot done and gone, the bundle of the image served as signed, inside its sandbox."""
    ready_s = vm.ready(_FIRST_S)
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
    vm.drop_in(f"Environment='APPLIANCE_BUNDLES={bundles}'", "TimeoutStartSec=600")
    vm.restart()
    vm.until(lambda: vm.model("reader")["ready"], "the recogniser is loaded", _READY_S)
    began_at = time.monotonic()
    answer = vm.http.post("/v1/models/reader/predict", content=_CROP.read_bytes(), timeout=_READY_S)
    there = answer.raise_for_status().json()["lines"][0]
    took_s = round(time.monotonic() - began_at, 1)
    check(there["text"] == here["text"], f"arm64 reads {there['text']!r}, x86 {here['text']!r}")
    difference = abs(there["confidence"] - here["confidence"])
    say("same text on arm64", text=there["text"], confidence_difference=difference, took_s=took_s)
    vm.run("rm", "-r", _DROP_IN)
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

    vm.until(again, "systemd has started the daemon again", _READY_S)
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
    vm.until(lambda: vm.scale() == 2 and vm.deployments()[0]["step"] == "trial", on_trial, _READY_S)
    vm.write("/srv/fails.py", _FAILS_ON_TRIAL)
    vm.drop_in("ExecStartPre=/usr/bin/python3 /srv/fails.py")
    began_at = time.monotonic()
    vm.run("systemctl", "kill", "-s", "KILL", "appliance")

    def taken_back() -> bool:
        return "was taken back" in vm.run("journalctl", "-u", "appliance-rollback", "--no-pager")

    vm.until(taken_back, "the rollback unit has taken it back", _READY_S)
    vm.until(lambda: vm.scale() == 1, "version 1 serves again", _READY_S)
    took_s = round(time.monotonic() - began_at, 1)
    vm.until(vm.settled, "the deployment has ended")
    latest = vm.deployments()[0]
    check(latest["step"] == "undone", f"the deployment says {latest}")
    check("too often" in latest["reason"], f"the deployment says {latest}")
    say("crash loop ended by the rollback unit", serving_again_after_s=took_s, reason=latest["reason"])


def cuts(machine: Machine, disks: Disks, work: Path, count: int, chance: random.Random) -> None:
    """Cut the power at a random moment of an update; after each cut the old or the new version serves, verified."""
    tally = {"old": 0, "new": 0}
    with contextlib.ExitStack() as stack:
        vm = stack.enter_context(running(machine, disks, work))
        longest_s = uncut(vm)
        old = 2
        for number in range(1, count + 1):
            new = number + 2
            vm.publish(new)
            began_at = time.monotonic()
            vm.order("update")
            time.sleep(chance.uniform(0, longest_s))
            after_s = round(time.monotonic() - began_at, 1)
            vm.cut()
            vm = stack.enter_context(running(machine, disks, work))
            ready_s = round(vm.ready())
            serves = round(vm.until(vm.scale, "it answers"))
            check(serves in {old, new}, f"cut {number}: version {serves} serves, neither {old} nor {new}")
            verified(vm, serves)
            tally["new" if serves == new else "old"] += 1
            vm.until(vm.settled, "what was cut has ended", _READY_S)
            steps = [one["step"] for one in vm.deployments() if one["version"] == f"{new}.0.0"]
            served = {"served": serves, "of": [old, new], "then": steps}
            say("power cut", number=number, after_s=after_s, ready_again_s=ready_s, **served)
            old = round(vm.scale())
    say("power cuts", count=count, **tally)


def uncut(vm: Vm) -> float:
    """Seconds that an update from version 1 to 2 takes."""
    vm.ready()
    vm.publish(2)
    began_at = time.monotonic()
    vm.order("update")
    vm.until(lambda: vm.scale() == 2 and vm.settled(), "an update that nothing cuts has ended", _READY_S)
    took_s = time.monotonic() - began_at
    say("an update that nothing cuts", s=round(took_s, 1))
    return took_s


def verified(vm: Vm, version: int) -> None:
    """What serves is the signed `version`, and its files are what was signed."""
    model = vm.model("scale")
    check((model["version"], model["trust"]) == (f"{version}.0.0", "signed"), f"it serves {model}")
    blobs = f"/var/lib/appliance/slots/{model['digest']}/blobs/sha256"
    each = 'for f in *; do echo "$f  $f"; done'
    damaged = vm.attempt("sh", "-c", f"cd {blobs} && {each} | sha256sum -c --quiet")
    check(damaged["status"] == 0, f"files of what serves are damaged: {damaged['out']}")


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
        vm.until(lambda: vm.attempt("true")["status"] == 0, "the machine is up", _READY_S)
        vm.run("python3", "-c", _WRITE)
        time.sleep(1)
    with running(machine, disks, work) as vm:
        vm.until(lambda: vm.attempt("true")["status"] == 0, "the machine is up again", _READY_S)
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
    parser.add_argument("--cuts", type=int, default=10, help=f"at most {VERSIONS - 2}")
    parser.add_argument("--seed", type=int, default=8, help="of the moments of the cuts")
    parser.add_argument("--only", default="first,reads,hangs,rollback,cuts,control", help="parts to run")
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


if __name__ == "__main__":
    sys.exit(main())
