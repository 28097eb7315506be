"""What stands against a run, or may spoil it, before anything starts: of BSP folder, host, keys and boards. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.errors import ConfigError
from provisioning.flash.boards import QSPI, Attached, State
from provisioning.flash.facts import TOOLS, Bsp, Host, numbers
from provisioning.flash.plan import Plan, Wish, nvidia_layout

_GIB = 2**30
_STORAGE_GIB = 57
"""What NVIDIA's layouts take a disk to have; what is beyond stays free until the first boot."""
_OTHERS_GIB = 2
"""Of that, for kernels, recovery and reserve."""
_IMAGE_COPIES = 3
"""Free space that making images takes, in root file systems: a raw image, an archive, and the packages of both."""
_UBUNTU = {36: "22.04", 39: "24.04"}
"""Release of Jetson's system -> that of its root file system."""
_ORIN_AGAIN = (39, 2)
"""JetPack 7.0 and 7.1 (38.x) know no Orin; from here on it is back."""
_WITH_SLOT = "orin-nano-devkit"
_SMALL_UEFI = (36, 4, 3)
_NO_BOARD = {"--direct", "--initrd"}
"""Options with which NVIDIA's flasher does not write the board that is in recovery mode."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What stands against a run, or may spoil it; `what` happened and what helps, in a sentence."""

    what: str
    blocks: bool = True


def problems(wish: Wish, bsp: Bsp, host: Host) -> list[Problem]:
    """What is not as it must be, or should be, before anything is started."""
    if wish.package:
        return list(_of_host(wish, bsp, host))
    return [*_of_bsp(wish, bsp), *_of_layout(wish, bsp), *_of_options(wish), *_of_host(wish, bsp, host)]


def _of_bsp(wish: Wish, bsp: Bsp) -> Iterator[Problem]:
    version = bsp.version
    if re.search(r"\s", bsp.path):
        yield Problem(f"{bsp.path!r} has a space in it, on which NVIDIA's scripts break: move the BSP folder")
    if not version:
        yield Problem("the BSP folder does not tell its release: unpack NVIDIA's archive again")
        return
    shown = ".".join(map(str, version))
    if version[0] not in _UBUNTU or (version[0] == _ORIN_AGAIN[0] and version < _ORIN_AGAIN):
        yield Problem(f"this BSP is R{shown}; Orin is flashed here with R36.x or R{_ORIN_AGAIN[0]}.{_ORIN_AGAIN[1]} on")
        return
    yield from _of_rootfs(wish, bsp, _UBUNTU[version[0]])
    board = wish.configuration()
    if version < board.since:
        since = ".".join(map(str, board.since))
        yield Problem(f"{board.name} came with R{since}, this BSP is R{shown}: take the plain board, or a newer BSP")
    elif f"{board.name}.conf" not in bsp.files:
        yield Problem(f"the BSP has no {board.name}.conf: unpack NVIDIA's archive again")


def _of_rootfs(wish: Wish, bsp: Bsp, ubuntu: str) -> Iterator[Problem]:
    if bsp.release and bsp.applied and bsp.release != bsp.applied:
        yield Problem(
            f"the root file system has drivers of R{bsp.applied}, the BSP is R{bsp.release}: unpack the sample root "
            "file system of this release into rootfs again"
        )
    if not bsp.ubuntu:
        yield Problem(
            "rootfs is empty: unpack NVIDIA's sample root file system into it "
            "(sudo tar xpf Tegra_Linux_Sample-Root-Filesystem_*.tbz2 -C rootfs)"
        )
    elif bsp.unprivileged:
        yield Problem(
            "rootfs was unpacked without root, so nobody can become root on the board: delete it, and unpack it again "
            "with sudo tar xpf"
        )
    elif bsp.ubuntu != ubuntu:
        yield Problem(f"rootfs holds Ubuntu {bsp.ubuntu}, this BSP takes {ubuntu}: unpack that of its release")
    for path in bsp.identities:
        yield Problem(
            f"rootfs has {path}, which is of one device and would be of every board: delete it",
            blocks=not path.startswith("etc/ssh"),  # that the first boot may replace
        )
    for name in bsp.passwords:
        if name != wish.user:  # which the run locks
            lock = f"sudo usermod --prefix {bsp.path}/rootfs --lock {name}"
            yield Problem(f"rootfs has the account {name!r} with a password of its own, for every board: {lock}")


def _of_layout(wish: Wish, bsp: Bsp) -> Iterator[Problem]:
    board = wish.configuration()
    try:
        source = nvidia_layout(wish)
    except ConfigError as error:
        yield Problem(str(error))
        return
    if wish.storage != "nvme" and wish.ab:
        yield Problem("two root file systems are for NVMe, which has the room: add --no-ab, or choose NVMe")
    if wish.storage == "sd" and wish.identity().name != _WITH_SLOT:
        yield Problem(f"only {_WITH_SLOT} has a slot for an SD card: choose --storage nvme")
    firmware = wish.storage == "nvme" and (wish.separately or board.internal)
    wanted = [source, *([QSPI] if firmware else [])]
    for layout in wanted:
        if layout.removeprefix("./") not in bsp.files:
            yield Problem(f"the BSP has no {layout}: unpack NVIDIA's archive again")
    slots = 2 if wish.ab else 1
    total_gib = wish.slot_gib * slots + wish.data_gib + _OTHERS_GIB
    if wish.data_gib and total_gib > _STORAGE_GIB:
        yield Problem(f"{total_gib} GiB do not fit into the {_STORAGE_GIB} of NVIDIA's layouts: lower --slot-gib")


def _of_options(wish: Wish) -> Iterator[Problem]:
    if _NO_BOARD & set(wish.options):
        yield Problem("with --direct or --initrd no board is written: start the command of the plan yourself")
    if wish.separately and (wish.storage != "nvme" or wish.one_step):
        yield Problem("three steps, as for an encrypted disk, are for images on NVMe: leave the option out")
    if wish.encryption_key and (wish.data_gib or wish.boards > 1):
        yield Problem(
            "an encrypted layout keeps its own partition for data, and each board has a key of its own: add "
            "--data-gib 0 and --boards 1"
        )
    if wish.sbk and not wish.pkc:
        yield Problem("a module that decrypts also checks signatures: give --pkc beside --sbk")
    if wish.one_step and wish.boards > 1:
        yield Problem("one step reads the EEPROM of one board: flash several from images, without --one-step")


def _of_host(wish: Wish, bsp: Bsp, host: Host) -> Iterator[Problem]:
    if host.machine != "x86_64":
        yield Problem(f"NVIDIA's tools are programs for x86-64, this host is {host.machine}: use a PC")
    if not host.root:
        yield Problem("flashing takes root: start with sudo")
    missing = sorted({TOOLS[tool] for tool in TOOLS if tool not in host.tools})
    if missing:
        yield Problem(f"the host lacks {', '.join(missing)}: sudo apt-get install {' '.join(missing)}")
    if not host.ipv6 and wish.network == "usb0":
        yield Problem(
            "IPv6 is off, and boards are written to over it: sudo sysctl net.ipv6.conf.{all,default}.disable_ipv6=0"
        )
    yield from (Problem(fault) for fault in host.keys)
    need_bytes = bsp.rootfs_bytes * _IMAGE_COPIES + _GIB
    if host.free_bytes < need_bytes:
        have, need = host.free_bytes / _GIB, need_bytes / _GIB
        yield Problem(f"{have:.0f} GiB are free where the BSP is, images take {need:.0f}: make room")
    for unwelcome, what in (
        (not host.nfs, "the NFS server does not run, from which boards read images: sudo systemctl start nfs-server"),
        (not host.network_manager, "NetworkManager does not run, with which the flasher sets the board's network up"),
        (host.udisks, "udisks mounts disks by itself: sudo systemctl stop udisks2 while flashing"),
        (host.tlp, "TLP puts USB to sleep: sudo tlp usb off, or stop it while flashing"),
        (host.vpn, "a VPN is up, which often takes the board's network away: disconnect while flashing"),
        (host.firewall, "the firewall (ufw) is on, which keeps boards from the images: sudo ufw allow nfs"),
        (host.wsl, "this is WSL, where each USB device must be attached again: usbipd attach --auto-attach"),
        (host.virtual, "this is a virtual machine, through which USB is unreliable: a real PC spares trouble"),
    ):
        if unwelcome:
            yield Problem(what, blocks=False)


def of_boards(wish: Wish, found: Sequence[Attached]) -> list[Problem]:
    """What stands against flashing what hangs on USB now."""
    module = wish.identity()
    ready = [one for one in found if one.state is State.RECOVERY]
    wrong = [
        Problem(f"{one.port} is {' or '.join(one.modules)}, not {module.name}: unplug it, or choose --module")
        for one in ready
        if one.product != module.product
    ]
    wrong += [Problem(f"{one.port} is a Xavier or Thor: unplug it") for one in found if one.state is State.FOREIGN]
    if not ready:
        others = ", ".join(f"{one.port} is {one.state.value}" for one in found) or "none is on USB"
        wrong.append(
            Problem(
                f"no board is in recovery mode ({others}): hold its recovery button, or bridge FC REC and GND, while "
                "it is powered on, cold"
            )
        )
    if len(ready) > wish.boards:
        ports = ", ".join(one.port for one in ready)
        wrong.append(Problem(f"{len(ready)} boards are in recovery mode ({ports}): raise --boards, or unplug some"))
    return wrong + [
        Problem(f"{one.port} is behind a hub, through which flashing often fails: plug it in directly", blocks=False)
        for one in ready
        if one.behind_hub
    ]


def known_issue(plan: Plan, failure: str) -> str:
    """What is known to fail in this way with this release on this module, and what helps; empty when nothing is."""
    if failure == "no_boot" and _SMALL_UEFI <= numbers(plan.release) < (39,) and plan.wish.module.startswith("orin-nx"):
        return (
            "from R36.4.3 on, the small UEFI of the flashing boot hangs on some Orin NX: use the full UEFI for RCM boot"
        )
    return ""
