"""What a flashed device does in the workshop: it enrols with its token, and calls home. By the units of its image."""

from __future__ import annotations

import json
import time
from pathlib import Path

from machine import Machine
from support.enrolment import Fleet
from vm import OUTSIDE, READY_S, Disks, check, running, say

from models import schema
from models.callhome import TICKET
from models.folder import BundleFolder
from provisioning.flash import home

_SERIAL, _RELEASE = "1421023000001", "36.4.3"
_L4T = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64"
_ENROL_PORT, _HOME_PORT = 8453, 8470
_PLAN, _TOKEN, _CA = "/etc/appliance/firstboot.json", "/etc/appliance/enroll.token", "/etc/appliance/fleet-ca.pem"
_IDENTITY = "/var/lib/appliance/identity"


def workshop(machine: Machine, disks: Disks, work: Path) -> None:
    """Enrol and call home, over the network."""
    exam = home.Exam(BundleFolder(work / "bundles/v1"))
    ticket = home.new_ticket("vm", (f"http://{OUTSIDE}:{_HOME_PORT}/",), "maintainer", exam)
    called = home.Home(ticket, home.Expected(_RELEASE, armed=False, exam=exam), work / "login")
    folder = work / f"fleet-{time.strftime('%H%M%S')}"
    with Fleet(folder, names=(OUTSIDE,)) as fleet, home.listening(called, "127.0.0.1", 0) as home_port:
        services = {_ENROL_PORT: int(fleet.url.rpartition(":")[2]), _HOME_PORT: home_port}
        with running(machine, disks, work, services) as vm:
            vm.ready()
            began_at = time.monotonic()
            vm.write(_CA, fleet.ca.read_text())
            vm.write(_TOKEN, fleet.token())
            enroll = ["--url", f"https://{OUTSIDE}:{_ENROL_PORT}", "--ca", _CA]
            vm.write(_PLAN, json.dumps({"enroll": enroll, "token": _TOKEN, "lock": True}))
            vm.run("systemctl", "--no-block", "start", "appliance-firstboot")
            vm.until(lambda: vm.attempt("test", "-e", _PLAN)["status"], "it is enrolled", READY_S)
            check(vm.attempt("test", "-e", _TOKEN)["status"], "the used token is still there")
            owners = set(vm.run("find", _IDENTITY, "-printf", "%U %m\\n").splitlines())
            user = vm.run("id", "-u", "appliance")
            check({line.split()[0] for line in owners} == {user}, f"owners and modes of the identity: {owners}")
            names = {entry.name for entry in fleet.authority.register().certificates.values() if entry.kind == "device"}
            check(names == {vm.status()["device_id"]}, f"the authority has certified {names}")
            say("enrolled with a token", s=round(time.monotonic() - began_at), refused=fleet.told)

            began_at = time.monotonic()
            # No Jetson: what its boot loader and its release say is put there.
            vm.write("/srv/board/serial-number", _SERIAL)
            vm.run("mount", "--bind", "/srv/board", "/sys/firmware/devicetree/base")
            vm.write("/etc/nv_tegra_release", _L4T)
            # Call home asks the daemon on loopback, where the image of a device has its door.
            door = ("-e", 's/^host = .*/host = "127.0.0.1"/', "-e", "/^tls_certificate/d")
            vm.run("sed", "-i", *door, "/etc/appliance/config.toml")
            vm.run("systemctl", "--no-block", "restart", "appliance")
            vm.write(f"/{TICKET}", json.dumps(schema.dump(ticket)))
            vm.run("systemctl", "--no-block", "start", "appliance-callhome")
            vm.until(lambda: vm.attempt("test", "-e", f"/{TICKET}")["status"], "it was accepted", READY_S)
            heard = {serial: failure for serial, (_report, failure) in called.heard().items()}
            check(heard == {_SERIAL: None}, f"who called: {heard}")
            keys = vm.run("cat", "/etc/ssh/authorized_keys.d/maintainer")
            check(home.login_key(work / "login", _SERIAL).strip() in keys, f"keys that log in: {keys}")
            say("called home, and was accepted", s=round(time.monotonic() - began_at))
