"""Modules and boards by the names that NVIDIA's tools know, and which of them hang on USB.

What a board is doing is told by its USB ids, read from sysfs as NVIDIA's flasher does, so recovery mode is seen before
anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from models.errors import ConfigError

_NVIDIA = "0955"


@dataclass(frozen=True, slots=True)
class Module:
    """A compute module. The four values stand for the EEPROM where images are made without a board."""

    name: str
    what: str
    product: str
    """USB id in recovery mode; several modules may share one."""
    board_id: str
    sku: str
    fab: str = ""
    """Empty where NVIDIA's table of these values leaves it empty."""
    revision: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What NVIDIA's tools read instead of the EEPROM."""
        return {"BOARDID": self.board_id, "BOARDSKU": self.sku, "FAB": self.fab, "BOARDREV": self.revision}


MODULES: Mapping[str, Module] = {
    module.name: module
    for module in (
        Module("agx-orin-devkit", "AGX Orin 32GB of early developer kits", "7023", "3701", "0000", "TS4", "A.0"),
        Module("agx-orin-32gb", "AGX Orin 32GB", "7223", "3701", "0004", "TS4", "A.0"),
        Module("agx-orin-64gb", "AGX Orin 64GB", "7023", "3701", "0005"),
        Module("agx-orin-industrial", "AGX Orin Industrial", "7023", "3701", "0008"),
        Module("orin-nx-16gb", "Orin NX 16GB", "7323", "3767", "0000", "000"),
        Module("orin-nx-8gb", "Orin NX 8GB", "7423", "3767", "0001", "000"),
        Module("orin-nano-8gb", "Orin Nano 8GB", "7523", "3767", "0003", "000"),
        Module("orin-nano-4gb", "Orin Nano 4GB", "7623", "3767", "0004", "000"),
        Module("orin-nano-devkit", "Orin Nano 8GB of the developer kit", "7523", "3767", "0005", "000"),
    )
}


@dataclass(frozen=True, slots=True)
class Board:
    """A configuration of NVIDIA's tools, with the layouts that belong to it."""

    name: str
    modules: tuple[str, ...]
    """Those that it fits; the first is meant unless another is named."""
    layout: str
    """Of an NVMe disk, from the BSP folder."""
    layout_ab: str
    internal: str
    """Options for what is on the board itself; empty where the configuration knows that by itself."""
    root_device: str
    """With the root file system on NVMe."""
    overlay: str = ""
    """Device-tree overlay that makes the firmware prefer NVMe."""
    own_storage: str = "emmc"
    """What the board has besides NVMe: emmc or sd."""
    own_layout: str = ""
    """Of that, with the firmware."""
    since: tuple[int, ...] = (36,)
    """First release of Jetson's system that has this configuration."""


_KERNEL_FLASH, _CFG = "tools/kernel_flash", "bootloader/generic/cfg"
QSPI = f"{_CFG}/flash_t234_qspi.xml"
"""Layout of the boot firmware alone."""
_NANO_MODULES = ("orin-nano-devkit", "orin-nano-8gb", "orin-nano-4gb", "orin-nx-16gb", "orin-nx-8gb")
_AGX_MODULES = ("agx-orin-64gb", "agx-orin-32gb", "agx-orin-devkit")
_LAYOUT_AB = f"{_KERNEL_FLASH}/flash_l4t_t234_nvme_rootfs_ab.xml"
LAYOUT_ENC = f"{_KERNEL_FLASH}/flash_l4t_t234_nvme_rootfs_enc.xml"
"""Of an NVMe disk with an encrypted root file system."""


def _nano(name: str, since: tuple[int, ...] = (36,)) -> Board:
    """Orin Nano, and NX, which goes by the same names: boot firmware in QSPI, everything else on NVMe."""
    layout, internal = f"{_KERNEL_FLASH}/flash_l4t_t234_nvme.xml", f"-c {QSPI}"
    own = ("sd", f"{_CFG}/flash_t234_qspi_sd.xml")
    return Board(name, _NANO_MODULES, layout, _LAYOUT_AB, internal, "internal", "", *own, since)


def _agx(name: str, modules: tuple[str, ...] = _AGX_MODULES, since: tuple[int, ...] = (36,)) -> Board:
    """AGX Orin: with NVMe its eMMC is left without a second root file system."""
    layout, emmc = f"./{_KERNEL_FLASH}/flash_l4t_external.xml", f"{_CFG}/flash_t234_qspi_sdmmc.xml"
    return Board(name, modules, layout, _LAYOUT_AB, "", "external", "BootOrderNvme.dtbo", "emmc", emmc, since)


_SUPER = (36, 4, 3)
BOARDS: Mapping[str, Board] = {
    board.name: board
    for board in (
        _nano("jetson-orin-nano-devkit"),
        _nano("jetson-orin-nano-devkit-super", _SUPER),
        _nano("jetson-orin-nano-devkit-super-maxn", _SUPER),
        _agx("jetson-agx-orin-devkit"),
        _agx("jetson-agx-orin-devkit-maxn"),
        _agx("jetson-agx-orin-devkit-industrial", ("agx-orin-industrial",)),
        _agx("jetson-agx-orin-devkit-super", since=(39,)),
        _agx("jetson-agx-orin-devkit-super-maxn", since=(39,)),
    )
}
"""By configuration. The `super` ones unlock the faster power modes; Orin NX has them under the names of Orin Nano."""


def board(name: str) -> Board:
    """The board of that name; raises ConfigError."""
    if name not in BOARDS:
        msg = f"there is no board {name!r} here; known are {', '.join(BOARDS)}"
        raise ConfigError(msg)
    return BOARDS[name]


def module(name: str, of: Board) -> Module:
    """The module of that name, or the usual one of a board; raises ConfigError where it does not fit the board."""
    chosen = name or of.modules[0]
    if chosen not in of.modules:
        msg = f"{of.name} takes no module {chosen!r}; it takes {', '.join(of.modules)}"
        raise ConfigError(msg)
    return MODULES[chosen]


class State(str, Enum):
    """What a board on USB is doing."""

    RECOVERY = "recovery"
    FLASHING = "flashing"
    BOOTED = "booted"
    DEBUG = "debug"
    """Not the board but the small controller beside it, which carries its serial console."""
    FOREIGN = "foreign"
    """Another Jetson in recovery mode, which is not flashed here."""


_STATES = {"7035": State.FLASHING, "7020": State.BOOTED, "7045": State.DEBUG}
_FOREIGN = {"7019", "7819", "7919", "7e19", "7026", "7226", "7326"}
"""Xavier and Thor in recovery mode."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A board as it hangs on USB."""

    port: str
    """Bus and path, as "1-8.4": the name that NVIDIA's tools and their logs give it."""
    product: str
    state: State
    serial: str = ""
    """Of a booted board, the serial number of its module."""

    @property
    def behind_hub(self) -> bool:
        """Whether something stands between it and the host's own port."""
        return "." in self.port

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that show this USB id in recovery mode."""
        return tuple(module.name for module in MODULES.values() if module.product == self.product)


def attached(sysroot: Path = Path("/")) -> list[Attached]:
    """Every Jetson on USB, by port; `sysroot` is where /sys and /dev are.

    One whose device node is not there, as inside a container that it was not given to, is left out: no tool could
    open it.
    """
    found = []
    for device in sorted((sysroot / "sys/bus/usb/devices").glob("*")):
        product = _read(device / "idProduct")
        if _read(device / "idVendor") != _NVIDIA or not product:
            continue
        if product in _STATES:
            state = _STATES[product]
        elif any(module.product == product for module in MODULES.values()):
            state = State.RECOVERY
        elif product in _FOREIGN:
            state = State.FOREIGN
        else:
            continue
        bus, number = _read(device / "busnum"), _read(device / "devnum")
        if not bus.isdigit() or not number.isdigit():
            continue
        if not (sysroot / f"dev/bus/usb/{int(bus):03}/{int(number):03}").exists():
            continue
        found.append(Attached(f"{bus}-{_read(device / 'devpath')}", product, state, _read(device / "serial")))
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
