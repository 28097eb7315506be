"""The systemd units: only what systemd 249 knows, tight enough, and true to what the daemon does."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from appliance.settings import Settings
from provisioning import overlay
from provisioning.overlay import File, Image, Parts

pytestmark = pytest.mark.unit


def empty_wheel() -> bytes:
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    return buffer.getvalue()


FOLDER = Path(__file__).resolve().parents[2] / "systemd"
UNITS = sorted(path for path in FOLDER.iterdir() if path.suffix in {".service", ".slice", ".target"})
MADE = {
    path: node.content.decode()
    for path, node in overlay.overlay(
        Image(config={}, data="UDA", ntp=("time.example.com",)),
        Parts(wheels={"edge_appliance-1.whl": empty_wheel()}, units={}),
    ).items()
    if path.startswith("etc/systemd/") and isinstance(node, File)
}
"""What the overlay writes for systemd itself: units of the data partition, settings of its daemons."""
JETPACK_6 = 249
SINCE: Mapping[int, str] = {
    0: """
        After Before Description OnFailure PartOf RequiresMountsFor Wants WantedBy ConditionPathExists
        Environment ExecStart ExecStopPost Group KillMode LimitNOFILE Nice NoNewPrivileges NotifyAccess PrivateNetwork
        PrivateTmp Restart RestartSec Slice SupplementaryGroups TimeoutStartSec TimeoutStopSec Type UMask User
        WatchdogSec
        CapabilityBoundingSet DeviceAllow DevicePolicy MemoryAccounting SystemCallFilter
        BindsTo DefaultDependencies NTP Options RemainAfterExit Requires RuntimeWatchdogSec Storage SystemKeepFree
        SystemMaxUse What Where
    """,
    209: "PrivateDevices SystemCallArchitectures SystemCallErrorNumber",
    211: "RestrictAddressFamilies RuntimeDirectory RuntimeDirectoryMode",
    214: "ProtectHome ProtectSystem",
    227: "TasksMax",
    229: "AmbientCapabilities StartLimitBurst",
    230: "StartLimitIntervalSec",
    231: "MemoryDenyWriteExecute MemoryHigh MemoryMax ReadWritePaths RestrictRealtime",
    232: "CPUWeight ProtectControlGroups ProtectKernelModules ProtectKernelTunables RemoveIPC",
    233: "RestrictNamespaces",
    235: """
        CacheDirectory CacheDirectoryMode ConfigurationDirectory ConfigurationDirectoryMode LockPersonality
        StateDirectory StateDirectoryMode
    """,
    236: "Delegate",  # with a list of controllers
    242: "ProtectHostname RestrictSUIDSGID",
    243: "OOMPolicy TimeoutAbortSec",
    244: "ProtectKernelLogs",
    245: "ProtectClock RebootWatchdogSec",
    247: "ProcSubset ProtectProc",
}
"""Version of systemd -> directives that came with it, as its NEWS and manual pages say; 0: before 209."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing: apt-get install -y systemd"
)


def directives(unit: Path) -> dict[str, list[str]]:
    """Name -> values in their order, over all sections."""
    return directives_of(unit.read_text())


def directives_of(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(unit.read_text(), id=unit.name) for unit in UNITS),
        *(pytest.param(text, id=path) for path, text in sorted(MADE.items())),
    ],
)
def test_every_directive_is_known_to_systemd_249(text: str) -> None:
    known = {name: since for since, names in SINCE.items() for name in names.split()}
    for name in directives_of(text):
        assert known.get(name, JETPACK_6 + 1) <= JETPACK_6, f"{name}: look up its version, and add it to the table"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with the units, and what they start, where an image has them."""
    folder = tmp_path_factory.mktemp("root")
    units = {f"etc/systemd/system/{unit.name}": unit.read_text() for unit in UNITS} | MADE
    for path, text in units.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        for command in re.findall(r"(?m)^Exec\w+=[-+!]*(\S+)", text):
            program = folder / command.lstrip("/")
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
    system = folder / "usr/lib/systemd/system"
    system.mkdir(parents=True)
    for path in Path("/usr/lib/systemd/system").glob("*.*"):
        if path.suffix in {".target", ".slice", ".mount", ".socket"}:
            (system / path.name).write_bytes(path.read_bytes())
    return folder


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_units(root: Path) -> None:
    made = [f"/{path}" for path in MADE if "/system/" in path]
    units = [f"/etc/systemd/system/{unit.name}" for unit in UNITS] + made
    done = analyze("verify", f"--root={root}", "--man=no", *units)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", ["appliance.service", "appliance-rollback.service", "appliance-callhome.service"])
def test_the_exposure_of_what_runs_for_long_is_at_most_three(root: Path, name: str) -> None:
    done = analyze("security", "--offline=true", f"--root={root}", "--no-pager", f"/etc/systemd/system/{name}")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= 3.0, done.stdout


def test_the_daemon_may_do_what_it_does_in_its_sandbox() -> None:
    unit = directives(FOLDER / "appliance.service")
    assert "MemoryDenyWriteExecute" not in unit, "CUDA writes code and runs it"
    assert "ProtectControlGroups" not in unit, "workers get groups of their own"
    assert unit["OOMPolicy"] == ["continue"], "a worker that the kernel ends must not take the daemon along"
    assert "clock_adjtime" in unit["SystemCallFilter"][-1], "it asks whether the clock is synchronised"
    assert float(unit["TimeoutStopSec"][0]) > Settings().shutdown_grace_s
    assert unit["CapabilityBoundingSet"] == [""]


def test_the_rollback_needs_no_network_no_device_and_no_settings() -> None:
    unit = directives(FOLDER / "appliance-rollback.service")
    assert unit["PrivateNetwork"] == unit["PrivateDevices"] == ["yes"]
    assert "ConfigurationDirectory" not in unit
    assert directives(FOLDER / "appliance.service")["OnFailure"] == ["appliance-rollback.service"]


def test_the_first_boot_is_skipped_when_its_plan_is_gone() -> None:
    unit = directives(FOLDER / "appliance-firstboot.service")
    assert unit["ConditionPathExists"] == [f"/{overlay.CONFIG}/firstboot.json"]
