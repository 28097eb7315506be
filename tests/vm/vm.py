"""One machine under test: switched on, spoken to, and cut off."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import httpx
import numpy as np
from machine import Machine
from support.daemon import binary_floats, binary_request
from support.processes import free_port

T = TypeVar("T")
Disks: TypeAlias = tuple[Path, Path]

_SHORT_S = 600.0
READY_S = 2400.0
"""Emulated, and on a machine that may do much else: many times what was seen on a quiet one."""
_ASK_S, _POLL_S = 300.0, 10.0
"""How long one answer is waited for: once, and at first where it is asked for again and again."""
_RELAY = Path(__file__).with_name("relay.py")
_X = np.full((1, 3), 3, np.float32)
DROP_IN = "/run/systemd/system/appliance.service.d"
_ENDS = {"good", "refused", "undone"}
OUTSIDE = "10.0.2.100"
"""What the machine reaches of the tester, and nothing else."""


class VmFailure(Exception):
    """Something was not as promised."""


def check(held: object, what: str) -> None:
    """Fail with `what` unless it held."""
    if not held:
        raise VmFailure(what)


class Vm:
    """One run of the machine, from power on to power off."""

    def __init__(self, machine: Machine, disks: Disks, console: Path, services: Mapping[int, int]) -> None:
        """Switch it on; `services` of the tester are at OUTSIDE: port there -> port here."""
        self._console = console
        self.http_port, self._agent_port = free_port(), free_port()
        forwards = f"hostfwd=tcp:127.0.0.1:{self.http_port}-10.0.2.15:8080"
        forwards += f",hostfwd=tcp:127.0.0.1:{self._agent_port}-10.0.2.15:9000"
        for there, here in services.items():  # each connection is a process: QEMU knows no other way for many of them
            forwards += f",guestfwd=tcp:{OUTSIDE}:{there}-cmd:{sys.executable} {_RELAY} {here}"
        options = {
            "-machine": "virt",
            "-cpu": "max,pauth-impdef=on",
            "-accel": "tcg,thread=multi",
            "-smp": "2",
            "-m": "1792",
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
            timeout=_ASK_S,
            trust_env=False,
        )
        self._ask_s = _ASK_S

    def until(self, look: Callable[[], T], what: str, within_s: float = _SHORT_S) -> T:
        """What `look` sees, once that is something; what is not answered yet counts as nothing."""
        began_at = time.monotonic()
        last: object = None
        while (waited_s := time.monotonic() - began_at) < within_s:
            # Who asks a machine that only starts gets no answer at all: better to ask again soon.
            self._ask_s = self.http.timeout = max(_POLL_S, waited_s / 4)
            check(self.process.poll() is None, f"the machine ended while waiting until {what}: see {self._console}")
            try:
                seen = look()
                if seen:
                    self._ask_s = self.http.timeout = _ASK_S
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
        with socket.create_connection(("127.0.0.1", self._agent_port), timeout=self._ask_s) as sock:
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

    def ready(self, within_s: float = READY_S) -> float:
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

    def under_way(self) -> str:
        """Step of the update that is under way, once the daemon knows whether there is one; empty where none is."""

        def known() -> dict[str, Any] | None:
            update: dict[str, Any] = self.status()["update"]
            return update if update["deployment"] or update["looked_s_ago"] is not None else None

        update = self.until(known, "it has looked for updates", READY_S) or {}
        return str(update["step"] or ("look" if update["looking"] else ""))

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
        self.write(f"{DROP_IN}/test.conf", "\n".join(("[Service]", *lines, "")))
        self.run("systemctl", "daemon-reload")

    def cut(self) -> None:
        """Take the power away."""
        self.process.kill()
        self.process.wait()
        self.http.close()

    def off(self) -> None:
        """Shut down in order."""
        with contextlib.suppress(OSError, ValueError):  # who answers may be stopped before it has answered
            self.attempt("systemctl", "--no-block", "poweroff")
        try:
            self.process.wait(_SHORT_S)
        finally:
            self.cut()


@contextlib.contextmanager
def running(
    machine: Machine, disks: Disks, work: Path, services: Mapping[int, int] = MappingProxyType({})
) -> Iterator[Vm]:
    """A machine that is gone afterwards, whatever happens."""
    vm = Vm(machine, disks, work / f"console-{time.strftime('%H%M%S')}.log", services)
    (work / "qemu.pid").write_text(str(vm.process.pid))
    try:
        yield vm
    finally:
        vm.cut()


def say(what: str, **figures: object) -> None:
    """A line of the report."""
    print(json.dumps({"seen": what, **figures}), flush=True)
