"""A workshop for flashing: stand-ins for the BSP folder and its tools, a tree that stands for the host, boards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from models import schema
from models.callhome import PROOF, Reply, Report, Ticket, report_proof
from models.folder import BundleFolder
from support.processes import clean_environment
from support.tiny import WIDTH, scale_bundle

BSP = Path(__file__).parent.parent / "data" / "bsp" / "Linux_for_Tegra"
RELEASE = "36.4.3"
EXPORTS = "# mine\n/srv 10.0.0.0/8(ro)\n"
AUTOSUSPEND = "2\n"
NANO, NX, BOOTED = "7523", "7323", "7020"
_TOOLS = ("xmlstarlet", "sshpass", "abootimg", "zstd", "dtc", "cpp", "qemu-aarch64-static")
ARMED = {"armed": True, "booted": "A", "bootable": {"A": True, "B": True}}
RIGHT = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [2, WIDTH], "data": [2.0] * (2 * WIDTH)}]}


class Bench:
    """Everything in one folder."""

    def __init__(self, folder: Path) -> None:
        """Lay everything down; no board is there yet."""
        self.folder, self.sysroot = folder, folder / "host"
        self.bsp = Path(shutil.copytree(BSP, folder / "Linux_for_Tegra"))
        self.bundle = scale_bundle(folder / "bundle", 2, null=True)
        self.told: dict[str, Any] = {"sysroot": str(self.sysroot), "outcomes": {}, "serials": {}}
        self.say()
        for name, content in {
            "proc/sys/net/ipv6/conf/all/disable_ipv6": "0\n",
            "proc/version": "Linux version 6.1\n",
            "proc/41/comm": "nfsd\n",
            "proc/42/comm": "NetworkManager\n",
            "etc/exports": EXPORTS,
            "etc/udev/rules.d/70-mine.rules": "",
            "sys/module/usbcore/parameters/autosuspend": AUTOSUSPEND,
        }.items():
            self.host(name, content)
        (self.sysroot / "sys/bus/usb/devices").mkdir(parents=True)
        (folder / "bin").mkdir()
        for tool in _TOOLS:
            self.tool(tool, "exit 0")
        self.tool("sudo", 'exec env "$@"')
        self.tool("usermod", f'echo "$*" >> {folder}/usermod.log')
        self.tool("exportfs", f'echo "$*" >> {folder}/exportfs.log')
        self.path = f"{folder}/bin:{os.environ['PATH']}"

    def tool(self, name: str, does: str) -> None:
        """A program is found by this name, before any other."""
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)

    def host(self, name: str, content: str) -> None:
        """Put a file into the tree that stands for the host."""
        (self.sysroot / name).parent.mkdir(parents=True, exist_ok=True)
        (self.sysroot / name).write_text(content)

    def say(self, **told: Any) -> None:  # noqa: ANN401 - JSON
        """Tell the stand-ins what is to happen."""
        self.told |= told
        (self.bsp / "stand-in.json").write_text(json.dumps(self.told))

    def plug(self, port: str, product: str = NANO, *, serial: str = "", outcome: str = "written") -> None:
        """A board appears on USB, or comes back there in another state."""
        bus, _dash, path = port.partition("-")
        number = str(len(list((self.sysroot / "sys/bus/usb/devices").iterdir())) + 2)
        node = f"sys/bus/usb/devices/{port}"
        for name, value in {
            "idVendor": "0955",
            "idProduct": product,
            "busnum": bus,
            "devpath": path,
            "devnum": number,
            "serial": serial,
        }.items():
            self.host(f"{node}/{name}", f"{value}\n")
        self.host(f"dev/bus/usb/{int(bus):03}/{int(number):03}", "")
        self.told["outcomes"][port] = outcome
        self.told["serials"].setdefault(port, f"14211{port.replace('-', '').replace('.', '')}")
        self.say()

    def unplug(self, port: str) -> None:
        """A board is not on USB any more."""
        shutil.rmtree(self.sysroot / "sys/bus/usb/devices" / port)

    def state(self, port: str) -> str:
        """USB id that a board shows now."""
        return (self.sysroot / f"sys/bus/usb/devices/{port}/idProduct").read_text().strip()

    def calls(self) -> list[dict[str, Any]]:
        """What NVIDIA's tools were started with."""
        file = self.bsp / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def environment(self) -> dict[str, str]:
        """What a command sees here."""
        return clean_environment() | {"PATH": self.path, "PROVISION_PASSPHRASE": "secret"}

    def report(self, port: str, **changes: Any) -> Report:  # noqa: ANN401 - fields of a report
        """What the board at a port says when all is well, with changes."""
        digest = _digest(self.bundle)
        fields: dict[str, Any] = {
            "run": self.ticket().run,
            "serial": self.told["serials"][port],
            "model": "NVIDIA Jetson Orin Nano Developer Kit",
            "l4t": RELEASE,
            "slots": ARMED,
            "appliance": "1.0",
            "bundles": ({"name": "scale", "version": "2.0.0", "digest": digest},),
            "answer": RIGHT,
        }
        return Report(**fields | changes)

    def ticket(self) -> Ticket:
        """The ticket as it lies in the image."""
        return schema.load(Ticket, json.loads((self.bsp / "rootfs/etc/appliance/callhome.json").read_bytes()))


def _digest(bundle: Path) -> str:
    return BundleFolder(bundle).manifest.digest


class Calls(threading.Thread):
    """Boards that call home as soon as they have booted, until the context ends."""

    def __init__(self, bench: Bench, lies: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        """Each board on `bench` says that all is well, with the changes in `lies`; with None it says nothing."""
        super().__init__(daemon=True)
        self._bench, self._lies = bench, lies or {}
        self._over = threading.Event()
        self.replies: dict[str, Reply] = {}

    def __enter__(self) -> Calls:  # noqa: PYI034 - one class
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Call, board by board."""
        while not self._over.wait(0.05):
            for port in self._bench.told["serials"]:
                lie = self._lies.get(port, {})
                done = self.replies.get(port)
                if lie is not None and not (done and done.accepted) and self._bench.state(port) == BOOTED:
                    self._call(port, lie)

    def _call(self, port: str, lie: Mapping[str, Any]) -> None:
        ticket = self._bench.ticket()
        content = json.dumps(schema.dump(self._bench.report(port, **lie))).encode()
        with contextlib.suppress(httpx.HTTPError):  # nobody listens
            challenge = httpx.get(ticket.urls[0], trust_env=False, timeout=20).text
            proof = {PROOF: report_proof(ticket.nonce, content, challenge)}
            response = httpx.post(ticket.urls[0], content=content, headers=proof, trust_env=False, timeout=20)
            if response.is_success:
                self.replies[port] = schema.load(Reply, response.json())
