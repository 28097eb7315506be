"""What stands against a run is said before anything is touched: of BSP folder, host, keys and boards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.flashing import BSP, Bench

from provisioning.flash import checks
from provisioning.flash import plan as plans
from provisioning.flash.boards import Attached, State, attached
from provisioning.flash.facts import TOOLS, Bsp, Host, read_bsp, read_host
from provisioning.flash.plan import Wish

pytestmark = pytest.mark.unit

NANO = Wish("jetson-orin-nano-devkit", "orin-nano-devkit", ab=False, data_gib=0)
AGX = Wish("jetson-agx-orin-devkit", "agx-orin-devkit", ab=False, data_gib=0)
GOOD = Host(
    machine="x86_64",
    root=True,
    tools=frozenset(TOOLS),
    ipv6=True,
    nfs=True,
    network_manager=True,
    udisks=False,
    tlp=False,
    vpn=False,
    firewall=False,
    wsl=False,
    virtual=False,
    free_bytes=2**40,
)


@pytest.fixture(scope="module")
def bsp() -> Bsp:
    """The stand-in."""
    return read_bsp(BSP)


def test_accounts_that_a_password_opens_are_seen_and_locked_ones_are_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    shadow = bench.bsp / "rootfs/etc/shadow"
    shadow.write_text("root:*:1:::::\nnvidia:$6$salt$hash:1:::::\nmaintainer:!$6$x$y:1:::::\nguest::1:::::\nodd\n")
    assert read_bsp(bench.bsp).passwords == ("nvidia", "guest")


PKC = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
)


@pytest.mark.parametrize(
    ("option", "content", "mode", "said"),
    [
        ("--pkc", PKC, 0o600, ""),
        ("--pkc", PKC, 0o640, "can be read by others"),
        ("--pkc", b"not PEM", 0o600, "no private key in PEM"),
        ("--pkc", None, 0, "cannot be read"),
        ("--sbk", b"0x01234567 " * 8, 0o600, ""),
        ("--sbk", b"0x01234567", 0o600, "eight words"),
        ("--encryption-key", b"0f" * 32 + b"\n", 0o600, ""),
        ("--encryption-key", b"secret", 0o600, "32 or 64 hexadecimal digits"),
        ("--uefi-keys", b"UEFI_DB_1_KEY_FILE=db.key", 0o644, ""),
        ("--uefi-keys", None, 0, "cannot be read"),
    ],
)
def test_a_key_is_looked_at_before_hours_of_work_and_what_it_holds_is_not_told(
    option: str, content: bytes | None, mode: int, said: str, tmp_path: Path, bsp: Bsp
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    host = replace(GOOD, keys=read_host(BSP, tmp_path, {option: str(file)}).keys)
    found = [problem.what for problem in checks.problems(NANO, bsp, host)]
    assert bool(found) == bool(said)
    assert said in "".join(found)
    assert "secret" not in "".join(found)


def test_what_a_device_has_left_in_the_root_file_system_is_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for path in ("var/lib/appliance/keys/device.key", "etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_config"):
        (bench.bsp / "rootfs" / path).parent.mkdir(parents=True, exist_ok=True)
        (bench.bsp / "rootfs" / path).touch()
    found = read_bsp(bench.bsp)
    assert found.identities == ("var/lib/appliance/keys", "etc/ssh/ssh_host_ed25519_key")
    assert [problem.blocks for problem in checks.problems(NANO, found, GOOD)] == [True, False]


def test_a_root_file_system_that_was_unpacked_without_root_is_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert not read_bsp(bench.bsp).unprivileged
    sudo = bench.bsp / "rootfs/usr/bin/sudo"
    sudo.parent.mkdir(parents=True)
    sudo.touch(0o755)
    assert read_bsp(bench.bsp).unprivileged


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": "aarch64"}, "x86-64"),
        ({"root": False}, "sudo"),
        ({"tools": frozenset(TOOLS) - {"exportfs", "dtc"}}, "apt-get install device-tree-compiler nfs-kernel-server"),
        ({"tools": frozenset(TOOLS) - {"qemu-aarch64-static"}}, "apt-get install qemu-user-static"),
        ({"ipv6": False}, "IPv6 is off"),
        ({"nfs": False}, "warning: the NFS server does not run"),
        ({"network_manager": False}, "warning: NetworkManager does not run"),
        ({"free_bytes": 2**20}, "make room"),
        ({"udisks": True}, "warning: udisks"),
        ({"tlp": True}, "warning: TLP"),
        ({"vpn": True}, "warning: a VPN"),
        ({"firewall": True}, "warning: the firewall (ufw) is on"),
        ({"wsl": True}, "warning: this is WSL"),
        ({"virtual": True}, "warning: this is a virtual machine"),
    ],
)
def test_what_is_wrong_with_the_host_is_said_with_what_helps(changes: dict[str, Any], said: str, bsp: Bsp) -> None:
    assert checks.problems(NANO, bsp, GOOD) == []
    (problem,) = checks.problems(NANO, bsp, replace(GOOD, **changes))
    assert said in ("" if problem.blocks else "warning: ") + problem.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"release": "", "applied": ""}, "does not tell its release"),
        ({"release": "38.2.0", "applied": ""}, "this BSP is R38.2.0"),
        ({"release": "39.0.0", "applied": ""}, "R39.2 on"),
        ({"release": "35.4.1", "applied": ""}, "this BSP is R35.4.1"),
        ({"applied": "36.4.0"}, "drivers of R36.4.0"),
        ({"ubuntu": ""}, "rootfs is empty"),
        ({"ubuntu": "20.04"}, "Ubuntu 20.04"),
        ({"unprivileged": True}, "unpacked without root"),
        ({"passwords": ("maintainer", "nvidia")}, "the account 'nvidia' with a password of its own"),
        ({"identities": ("var/lib/appliance/keys",)}, "is of one device and would be of every board"),
        ({"path": "/srv/my boards/Linux_for_Tegra"}, "has a space in it"),
        ({"files": frozenset()}, "no jetson-orin-nano-devkit.conf"),
    ],
)
def test_what_is_wrong_with_the_bsp_is_said_with_what_helps(changes: dict[str, Any], said: str, bsp: Bsp) -> None:
    found = checks.problems(NANO, replace(bsp, **changes), GOOD)
    assert said in found[0].what
    assert found[0].blocks


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (replace(NANO, storage="emmc"), "has no eMMC"),
        (replace(AGX, storage="sd"), "has no SD card"),
        (replace(NANO, storage="sd", module="orin-nx-8gb"), "only orin-nano-devkit has a slot"),
        (replace(NANO, encryption_key="/k", data_gib=8), "add --data-gib 0"),
        (replace(NANO, encryption_key="/k", boards=2), "--boards 1"),
        (replace(NANO, encryption_key="/k", ab=True), "no tools/kernel_flash/flash_l4t_t234_nvme_rootfs_ab_enc.xml"),
        (replace(NANO, sbk="/k"), "give --pkc beside --sbk"),
        (replace(AGX, storage="emmc", ab=True), "--no-ab"),
        (replace(NANO, ab=True, data_gib=30), "do not fit"),
        (replace(NANO, one_step=True, boards=2), "without --one-step"),
        (replace(AGX, storage="emmc", three_step=True), "three steps"),
        (replace(NANO, options=("--direct", "sdb")), "no board is written"),
        (replace(NANO, options=("--initrd",)), "no board is written"),
        (replace(NANO, board="jetson-agx-orin-devkit-super", module="agx-orin-64gb"), "came with R39"),
    ],
)
def test_what_a_board_or_a_disk_cannot_hold_is_said_before_anything_starts(wish: Wish, said: str, bsp: Bsp) -> None:
    assert any(said in problem.what for problem in checks.problems(wish, bsp, GOOD))


def test_boards_are_seen_on_usb_with_what_they_are_doing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for port, product in (("1-1", "7523"), ("1-8.4", "7323"), ("2-1", "7020"), ("2-2", "7035"), ("3-1", "7045")):
        bench.plug(port, product, serial="1421123456789" if product == "7020" else "")
    bench.plug("3-2", "7019")
    bench.plug("3-3", "beef")
    found = attached(bench.sysroot)
    assert [(one.port, one.state.value) for one in found] == [
        ("1-1", "recovery"), ("1-8.4", "recovery"), ("2-1", "booted"), ("2-2", "flashing"), ("3-1", "debug"),
        ("3-2", "foreign"),
    ]  # fmt: skip
    assert found[0].modules == ("orin-nano-8gb", "orin-nano-devkit")
    assert found[1].behind_hub
    assert found[2].serial == "1421123456789"


def test_a_board_that_this_container_was_not_given_is_not_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.plug("1-1")
    next((bench.sysroot / "dev/bus/usb").glob("*/*")).unlink()
    assert attached(bench.sysroot) == []


RECOVERY = Attached("1-1", "7523", State.RECOVERY)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "none is on USB"),
        ([Attached("1-1", "7020", State.BOOTED)], "1-1 is booted"),
        ([RECOVERY, replace(RECOVERY, port="1-2")], "2 boards are in recovery mode"),
        ([replace(RECOVERY, product="7323")], "1-1 is orin-nx-16gb, not orin-nano-devkit"),
        ([RECOVERY, Attached("1-3", "7026", State.FOREIGN)], "Xavier or Thor"),
        ([replace(RECOVERY, port="1-8.4")], "behind a hub"),
    ],
)
def test_what_hangs_on_usb_and_cannot_be_flashed_is_said(found: list[Attached], said: str) -> None:
    assert checks.of_boards(NANO, [RECOVERY]) == []
    assert said in checks.of_boards(NANO, found)[0].what


def test_a_host_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setenv("PATH", str(bench.folder / "bin"))
    calm = read_host(bench.bsp, bench.sysroot)
    assert (calm.ipv6, calm.udisks, calm.tlp, calm.vpn, calm.wsl, calm.virtual) == (True, *[False] * 5)
    assert (calm.nfs, calm.network_manager, calm.firewall) == (True, True, False)
    bench.host("proc/sys/net/ipv6/conf/default/disable_ipv6", "1\n")
    assert not read_host(bench.bsp, bench.sysroot).ipv6, "the board's network would be without it"
    assert calm.tools == frozenset(TOOLS)
    for name, content in {
        "proc/7/comm": "udisksd\n",
        "etc/ufw/ufw.conf": "# on\nENABLED=yes\n",
        "proc/41/comm": "bash\n",
        "proc/42/comm": "bash\n",
        "run/tlp/last_pwr": "0",
        "proc/net/route": "Iface\tDestination\ntun0\t0000\n",
        "proc/version": "Linux version 5.15 (Microsoft@Microsoft.com)\n",
        "proc/cpuinfo": "flags\t: fpu hypervisor\n",
        "proc/sys/net/ipv6/conf/all/disable_ipv6": "1\n",
    }.items():
        bench.host(name, content)
    rough = read_host(bench.bsp, bench.sysroot)
    assert (rough.ipv6, rough.udisks, rough.tlp, rough.vpn, rough.wsl, rough.virtual) == (False, *[True] * 5)
    assert (rough.nfs, rough.network_manager, rough.firewall) == (False, False, True)


def test_what_is_known_to_fail_on_a_module_is_said_there_and_nowhere_else(bsp: Bsp) -> None:
    nx = plans.make(replace(NANO, module="orin-nx-8gb"), bsp)
    assert "full UEFI" in checks.known_issue(nx, "no_boot")
    assert not checks.known_issue(nx, "no_ssh")
    assert not checks.known_issue(replace(nx, release="36.4.0"), "no_boot")
    assert not checks.known_issue(plans.make(NANO, bsp), "no_boot")
