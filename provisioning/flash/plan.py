"""The exact commands that flash boards, made of a wish and of facts. Pure: nothing is read, written or started.

The commands are those of NVIDIA's README_initrd_flash and developer guide. Images are made first, from the values that
stand for a board's EEPROM, and then written to any number of boards; `one_step` lets NVIDIA's tool read the EEPROM of a
single board and do both.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from models import callhome
from models.errors import ConfigError
from provisioning.flash import boards
from provisioning.flash.boards import LAYOUT_ENC, QSPI, Board, Module
from provisioning.flash.facts import FLASHER, Bsp

_GIB = 2**30
_INITRD_FLASH = f"./{FLASHER}"
_IPV4 = r"\d{1,3}(\.\d{1,3}){3}"
_NETWORK = re.compile(rf"usb0|eth0:{_IPV4}/\d{{1,2}}:{_IPV4}(:{_IPV4})?")
"""What NVIDIA's flasher takes: over USB, or addresses of board, host and perhaps gateway."""
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_STORAGES = {"emmc": "eMMC", "sd": "SD card"}
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
    """Where the root file system goes: nvme, emmc, or sd of a developer kit."""
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
    three_step: bool = False
    """Images of the firmware and of NVMe are made by two commands."""
    images_only: bool = False
    package: bool = False
    """Images are those of a package for several boards, which NVIDIA's tool made with another BSP folder."""
    network: str = "usb0"
    options: tuple[str, ...] = ()
    """For NVIDIA's flasher, passed on as they are."""
    pkc: str = ""
    """Absolute path of the key that signs for a fused module, as are the three below."""
    sbk: str = ""
    """Of the key that encrypts for it."""
    uefi_keys: str = ""
    """Of the configuration of UEFI's keys."""
    encryption_key: str = ""
    """Of the key from which that of the disk is made; the root file system is encrypted where it is given."""

    def configuration(self) -> Board:
        """The board; raises ConfigError where it is not known."""
        return boards.board(self.board)

    def identity(self) -> Module:
        """The module; raises ConfigError where it does not fit the board."""
        return boards.module(self.module, self.configuration())

    @property
    def separately(self) -> bool:
        """Whether images of the firmware and of NVMe are made by two commands; only so can one be encrypted."""
        return self.three_step or bool(self.encryption_key)

    @property
    def signing(self) -> tuple[str, ...]:
        """Options of NVIDIA's flasher for a module with secure boot."""
        given = (("-u", self.pkc), ("-v", self.sbk), ("--uefi-keys", self.uefi_keys))
        return tuple(itertools.chain.from_iterable(pair for pair in given if pair[1]))

    @property
    def keys(self) -> dict[str, str]:
        """By our own option, the files of keys."""
        return {
            "--pkc": self.pkc,
            "--sbk": self.sbk,
            "--uefi-keys": self.uefi_keys,
            "--encryption-key": self.encryption_key,
        }


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

    Raises ConfigError for a network that the flasher does not know, for names that a system cannot have, and where a
    layout is missing or cannot be changed.
    """
    for name, given, form in (("user", wish.user, _USER), ("host name", wish.host_name, _HOST_NAME)):
        if not form.fullmatch(given):
            msg = f"{given!r} is no {name} that a Linux system can have: give letters, digits and dashes"
            raise ConfigError(msg)
    if wish.network and not _NETWORK.fullmatch(wish.network):
        msg = f"{wish.network!r} is no network of the flasher: give usb0, or eth0:<target-ip>/<subnet>:<host-ip>"
        raise ConfigError(msg)
    if wish.package:
        return Plan(wish, bsp.path, bsp.release, (_writing(wish, ""),))
    return Plan(wish, bsp.path, bsp.release or bsp.applied, (*_preparations(wish, bsp), *_images(wish)))


def check(plan: Plan, bsp: Bsp) -> None:
    """Raise ConfigError where a plan is not what its wish needs in this BSP folder as it is now.

    What a run has done already may stand in it, because a run goes on with its plan.
    """
    variants = (
        replace(bsp, applied=applied, users=users)
        for applied, users in itertools.product(("", "by now"), ((), (plan.wish.user,)))
    )
    known = any(plan.steps == make(plan.wish, one).steps for one in variants)
    now = make(plan.wish, bsp)
    if not (known and plan.release == now.release and plan.bsp == now.bsp and set(now.steps) <= set(plan.steps)):
        msg = f"the plan is not what {bsp.path} needs, because one of them has changed: plan again"
        raise ConfigError(msg)


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
        source = nvidia_layout(wish)
        why = f"{source} with its partition {_DATA} at the end of the disk, for models"
        content = data_layout(bsp.layouts.get(source.removeprefix("./"), ""), wish.data_gib * _GIB, source)
        yield Step("layout", why, file=_layout(wish), content=content)


def _images(wish: Wish) -> Iterator[Step]:
    board, module, options = wish.configuration(), wish.identity(), (*wish.signing, *wish.options)
    several = ("--massflash", str(wish.boards)) if wish.boards > 1 else ()
    if wish.storage != "nvme" and not several and not wish.images_only:
        layout = ("-c", _layout(wish), "-S", f"{wish.slot_gib}GiB") if wish.data_gib else ()
        argv = ("sudo", *_environment(wish), "./flash.sh", *options, *layout, board.name, "internal")
        yield Step("flash", "everything, from the host, over USB", argv, flashes=True)
        return
    root_device = board.root_device if wish.storage == "nvme" else "internal"
    network = ("--network", wish.network) if wish.network else ()
    if wish.one_step:
        argv = ("sudo", *_environment(wish), _INITRD_FLASH, *_layouts(wish), *options, *network)
        why = "reads the board's EEPROM, makes images for it and writes them"
        yield Step("flash", why, (*argv, board.name, root_device), flashes=True)
        return
    known = [f"{name}={value}" for name, value in module.environment.items()]
    layouts, why = _layouts(wish), f"signed images for {module.what}, without a board"
    if wish.separately:
        argv = ("sudo", *known, _INITRD_FLASH, "--no-flash", "--reuse", "-p", f"-c {QSPI}", *options)
        yield Step(
            "firmware", f"signed images of the firmware for {module.what}", (*argv, *network, board.name, "internal")
        )
        encrypted = ["-i", wish.encryption_key] if wish.encryption_key else []
        root_device, layouts = "external", [*_external(wish), *encrypted, "--external-only", "--append"]
    argv = ("sudo", *known, *_environment(wish), _INITRD_FLASH, "--no-flash", *several, *layouts, *options)
    yield Step("images", why, (*argv, *network, board.name, root_device))
    if wish.images_only:
        return
    yield _writing(wish, root_device)


def _writing(wish: Wish, root_device: str) -> Step:
    """The step that writes images; those for several boards are signed as they are, so whoever does it needs no key."""
    network, board = ("--network", wish.network) if wish.network else (), wish.board
    if wish.boards > 1 or wish.package:
        argv = ("sudo", _INITRD_FLASH, "--flash-only", "--massflash", str(wish.boards), *network, board)
        return Step("flash", f"writes them to up to {wish.boards} boards at once", argv, flashes=True)
    argv = ("sudo", _INITRD_FLASH, "--flash-only", *wish.signing, *network, board, root_device)
    return Step("flash", "writes them to the board", argv, flashes=True)


def _environment(wish: Wish) -> list[str]:
    overlay = wish.configuration().overlay if wish.storage == "nvme" else ""
    prefer = [f"ADDITIONAL_DTB_OVERLAY_OPT={overlay}"] if overlay else []
    encrypted = ["ROOTFS_ENC=1"] if wish.encryption_key else []
    return [*prefer, *(["ROOTFS_AB=1"] if wish.ab else []), *encrypted]


def _layouts(wish: Wish) -> list[str]:
    """Options of NVIDIA's flasher that say what goes where."""
    if wish.storage != "nvme":
        layout = f"-c {_layout(wish)} -S {wish.slot_gib}GiB" if wish.data_gib else ""
        return ["-p", layout] if layout else []
    own = wish.configuration().internal
    return [*_external(wish), *(["-p", own] if own else [])]


def _external(wish: Wish) -> list[str]:
    size = ["-S", f"{wish.slot_gib}GiB"] if wish.data_gib else []
    return ["--external-device", "nvme0n1p1", "-c", _layout(wish), *size]


def nvidia_layout(wish: Wish) -> str:
    """Of the BSP folder, before anything is changed in it; raises ConfigError for storage that a board lacks."""
    board = wish.configuration()
    if wish.storage != "nvme":
        if board.own_storage != wish.storage:
            what = _STORAGES.get(wish.storage, wish.storage)
            msg = f"{board.name} has no {what}: choose --storage nvme or {board.own_storage}"
            raise ConfigError(msg)
        return board.own_layout
    if wish.encryption_key:
        return board.layout_ab.replace(".xml", "_enc.xml") if wish.ab else LAYOUT_ENC
    return board.layout_ab if wish.ab else board.layout


def _layout(wish: Wish) -> str:
    source = nvidia_layout(wish)
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
