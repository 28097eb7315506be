"""The exact commands that flash boards, made of a wish and of facts. Pure: nothing is read, written or started.

The commands are those of NVIDIA's README_initrd_flash and developer guide. Images are made first, from the values that
stand for a board's EEPROM, and then written to any number of boards; `one_step` lets NVIDIA's tool read the EEPROM of a
single board and do both.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models import callhome
from models.errors import ConfigError
from provisioning.flash import boards
from provisioning.flash.boards import Attached, Board, Module, State
from provisioning.flash.facts import FLASHER, TOOLS, Bsp, Host

_GIB = 2**30
_INITRD_FLASH = f"./{FLASHER}"
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
_SMALL_UEFI = (36, 4, 3)
_IPV4 = r"\d{1,3}(\.\d{1,3}){3}"
_NETWORK = re.compile(rf"usb0|eth0:{_IPV4}/\d{{1,2}}:{_IPV4}(:{_IPV4})?")
"""What NVIDIA's flasher takes: over USB, or addresses of board, host and perhaps gateway."""
_DATA = "UDA"
"""NVIDIA's name of the partition that belongs to the user."""
PASSWORD, TICKET = "{throw-away password}", "{ticket of this run}"
"""Stand in a plan for what only a run knows."""
OVERLAY = "overlay"
"""Name of the step before which what an earlier overlay has brought is taken back."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What an operator wants of a flashed board."""

    board: str
    module: str
    storage: str = "nvme"
    """Where the root file system goes: nvme or emmc."""
    ab: bool = True
    """Two root file systems. Only flashing can arm that."""
    boards: int = 1
    """At the same time, at most."""
    data_gib: int = 12
    """Partition for models, which the first boot lets fill the disk; 0 leaves NVIDIA's layout as it is."""
    slot_gib: int = 20
    """Of each root file system, when the layout is changed."""
    user: str = "maintainer"
    host_name: str = "appliance"
    overlay: str = ""
    """Absolute path of an archive (tar) that is laid over the root file system."""
    overlay_sha256: str = ""
    one_step: bool = False
    images_only: bool = False
    network: str = "usb0"
    options: tuple[str, ...] = ()
    """For NVIDIA's flasher, passed on as they are."""

    def configuration(self) -> Board:
        """The board; raises ConfigError where it is not known."""
        return boards.board(self.board)

    def identity(self) -> Module:
        """The module; raises ConfigError where it does not fit the board."""
        return boards.module(self.module, self.configuration())


@dataclass(frozen=True, slots=True)
class Step:
    """One command, run in the BSP folder, or one file that is written there."""

    name: str
    why: str
    argv: tuple[str, ...] = ()
    file: str = ""
    content: str = ""
    flashes: bool = False
    """Whether boards in recovery mode are written to."""
    account: str = ""
    """The step is left out where the root file system has this account by now."""

    def shown(self) -> str:
        """As a person would type it."""
        return shlex.join(self.argv) if self.argv else f"write {self.file} ({len(self.content)} characters)"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run will do; two plans that do the same are the same."""

    wish: Wish
    bsp: str
    release: str
    steps: tuple[Step, ...]


def make(wish: Wish, bsp: Bsp) -> Plan:
    """The steps from this BSP folder to flashed boards.

    Raises ConfigError for a network that the flasher does not know, and where a layout is missing or cannot be changed.
    """
    if wish.network and not _NETWORK.fullmatch(wish.network):
        msg = f"{wish.network!r} is no network of the flasher: give usb0, or eth0:<target-ip>/<subnet>:<host-ip>"
        raise ConfigError(msg)
    return Plan(wish, bsp.path, bsp.release or bsp.applied, (*_preparations(wish, bsp), *_images(wish)))


def _preparations(wish: Wish, bsp: Bsp) -> Iterator[Step]:
    if not bsp.applied:
        yield Step("binaries", "NVIDIA's drivers into the root file system", ("sudo", "./apply_binaries.sh"))
    if wish.user not in bsp.users:
        create = ("./tools/l4t_create_default_user.sh", "-u", wish.user, "-p", PASSWORD, "-n", wish.host_name)
        argv = ("sudo", *create, "--accept-license")
        yield Step("user", "an account, so that the first boot asks nothing", argv, account=wish.user)
        lock = ("sudo", "usermod", "--prefix", f"{bsp.path}/rootfs", "--lock", wish.user)
        yield Step("lock", "nobody logs in with a password", lock)
    if wish.overlay:
        unpack = ("sudo", "tar", "-xpf", wish.overlay, "-C", "rootfs")
        yield Step(OVERLAY, "the appliance into the root file system", unpack)
    install = ("sudo", "install", "-D", "-m", "600", TICKET, f"rootfs/{callhome.TICKET}")
    yield Step("ticket", "the number by which a board proves that it runs this image", install)
    if wish.data_gib:
        source = _nvidia_layout(wish)
        why = f"{source} with its partition {_DATA} at the end of the disk, for models"
        content = data_layout(bsp.layouts.get(source.removeprefix("./"), ""), wish.data_gib * _GIB, source)
        yield Step("layout", why, file=_layout(wish), content=content)


def _images(wish: Wish) -> Iterator[Step]:
    board, module = wish.configuration(), wish.identity()
    several = ("--massflash", str(wish.boards)) if wish.boards > 1 else ()
    if wish.storage == "emmc" and not several and not wish.images_only:
        layout = ("-c", _layout(wish), "-S", f"{wish.slot_gib}GiB") if wish.data_gib else ()
        argv = ("sudo", *_environment(wish), "./flash.sh", *wish.options, *layout, board.name, "internal")
        yield Step("flash", "everything, from the host, over USB", argv, flashes=True)
        return
    root_device = board.root_device if wish.storage == "nvme" else "internal"
    network = ("--network", wish.network) if wish.network else ()
    if wish.one_step:
        argv = ("sudo", *_environment(wish), _INITRD_FLASH, *_layouts(wish), *wish.options, *network)
        why = "reads the board's EEPROM, makes images for it and writes them"
        yield Step("flash", why, (*argv, board.name, root_device), flashes=True)
        return
    known = [f"{name}={value}" for name, value in module.environment.items()]
    argv = ("sudo", *known, *_environment(wish), _INITRD_FLASH, "--no-flash", *several, *_layouts(wish), *wish.options)
    why = f"signed images for {module.what}, without a board"
    yield Step("images", why, (*argv, *network, board.name, root_device))
    if wish.images_only:
        return
    flash = ("sudo", _INITRD_FLASH, "--flash-only", *several, *network, board.name)
    why = f"writes them to up to {wish.boards} boards at once" if several else "writes them to the board"
    yield Step("flash", why, flash if several else (*flash, root_device), flashes=True)


def _environment(wish: Wish) -> list[str]:
    overlay = wish.configuration().overlay if wish.storage == "nvme" else ""
    prefer = [f"ADDITIONAL_DTB_OVERLAY_OPT={overlay}"] if overlay else []
    return [*prefer, *(["ROOTFS_AB=1"] if wish.ab else [])]


def _layouts(wish: Wish) -> list[str]:
    """Options of NVIDIA's flasher that say what goes where."""
    if wish.storage == "emmc":
        layout = f"-c {_layout(wish)} -S {wish.slot_gib}GiB" if wish.data_gib else ""
        return ["-p", layout] if layout else []
    size = ["-S", f"{wish.slot_gib}GiB"] if wish.data_gib else []
    own = wish.configuration().internal
    internal = ["-p", own] if own else []
    return ["--external-device", "nvme0n1p1", "-c", _layout(wish), *size, *internal]


def _nvidia_layout(wish: Wish) -> str:
    board = wish.configuration()
    if wish.storage == "emmc":
        if not board.emmc_layout:
            msg = f"{board.name} has no eMMC: choose --storage nvme"
            raise ConfigError(msg)
        return board.emmc_layout
    return board.layout_ab if wish.ab else board.layout


def _layout(wish: Wish) -> str:
    source = _nvidia_layout(wish)
    folder, _slash, name = source.rpartition("/")
    return f"{folder}/appliance_{name}" if wish.data_gib else source


def data_layout(xml: str, size_bytes: int, source: str = "the layout") -> str:
    """A layout of NVIDIA's with its user partition at the end of its disk, where the first boot can let it grow.

    Everything else stays as it is, byte by byte. Raises ConfigError where the layout has no such partition.
    """
    found = re.search(rf'[ \t]*<partition name="{_DATA}".*?</partition>\n', xml, re.DOTALL)
    if found is None:
        msg = f"{source} has no partition {_DATA}: use the layouts of the BSP, or --data-gib 0"
        raise ConfigError(msg)
    partition = re.sub(r"<size>[^<]*</size>", f"<size> {size_bytes} </size>", found[0])
    rest, after = xml[: found.start()] + xml[found.end() :], found.start()
    end = re.compile(r'[ \t]*<partition name="secondary_gpt"').search(rest, after)
    if end is None:
        msg = f"{source} has no end of the disk after {_DATA}: use the layouts of the BSP, or --data-gib 0"
        raise ConfigError(msg)
    return rest[: end.start()] + partition + rest[end.start() :]


@dataclass(frozen=True, slots=True)
class Problem:
    """What stands against a run, or may spoil it; `what` happened and what helps, in a sentence."""

    what: str
    blocks: bool = True


def problems(wish: Wish, bsp: Bsp, host: Host) -> list[Problem]:
    """What is not as it must be, or should be, before anything is started."""
    return [*_of_bsp(wish, bsp), *_of_layout(wish, bsp), *_of_host(wish, bsp, host)]


def _of_bsp(wish: Wish, bsp: Bsp) -> Iterator[Problem]:
    version = bsp.version
    if not version:
        yield Problem("the BSP folder does not tell its release: unpack NVIDIA's archive again")
        return
    shown = ".".join(map(str, version))
    if version[0] not in _UBUNTU or (version[0] == _ORIN_AGAIN[0] and version < _ORIN_AGAIN):
        yield Problem(f"this BSP is R{shown}; Orin is flashed here with R36.x or R{_ORIN_AGAIN[0]}.{_ORIN_AGAIN[1]} on")
        return
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
    elif bsp.ubuntu != _UBUNTU[version[0]]:
        want = _UBUNTU[version[0]]
        yield Problem(f"rootfs holds Ubuntu {bsp.ubuntu}, R{version[0]} takes {want}: unpack that of this release")
    board = wish.configuration()
    if version < board.since:
        since = ".".join(map(str, board.since))
        yield Problem(f"{board.name} came with R{since}, this BSP is R{shown}: take the plain board, or a newer BSP")
    elif f"{board.name}.conf" not in bsp.files:
        yield Problem(f"the BSP has no {board.name}.conf: unpack NVIDIA's archive again")


def _of_layout(wish: Wish, bsp: Bsp) -> Iterator[Problem]:
    board = wish.configuration()
    try:
        source = _nvidia_layout(wish)
    except ConfigError as error:
        yield Problem(str(error))
        return
    if wish.storage == "emmc" and wish.ab:
        yield Problem("two root file systems do not fit into eMMC beside models: add --no-ab, or choose NVMe")
    wanted = [source, *(board.internal.split()[1:] if wish.storage == "nvme" else ())]
    for layout in wanted:
        if layout.removeprefix("./") not in bsp.files:
            yield Problem(f"the BSP has no {layout}: unpack NVIDIA's archive again")
    slots = 2 if wish.ab else 1
    total_gib = wish.slot_gib * slots + wish.data_gib + _OTHERS_GIB
    if wish.data_gib and total_gib > _STORAGE_GIB:
        yield Problem(f"{total_gib} GiB do not fit into the {_STORAGE_GIB} of NVIDIA's layouts: lower --slot-gib")
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
        yield Problem("IPv6 is off, and boards are written to over it: sudo sysctl net.ipv6.conf.all.disable_ipv6=0")
    need_bytes = bsp.rootfs_bytes * _IMAGE_COPIES + _GIB
    if host.free_bytes < need_bytes:
        have, need = host.free_bytes / _GIB, need_bytes / _GIB
        yield Problem(f"{have:.0f} GiB are free where the BSP is, images take {need:.0f}: make room")
    for unwelcome, what in (
        (host.udisks, "udisks mounts disks by itself: sudo systemctl stop udisks2 while flashing"),
        (host.tlp, "TLP puts USB to sleep: sudo tlp usb off, or stop it while flashing"),
        (host.vpn, "a VPN is up, which often takes the board's network away: disconnect while flashing"),
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
    release = tuple(int(part) for part in plan.release.split("."))
    if failure == "no_boot" and _SMALL_UEFI <= release < (39,) and plan.wish.module.startswith("orin-nx"):
        return (
            "from R36.4.3 on, the small UEFI of the flashing boot hangs on some Orin NX: use the full UEFI for RCM boot"
        )
    return ""
