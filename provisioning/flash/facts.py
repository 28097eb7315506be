"""What a BSP folder holds and what this host is like, read once; what that means is judged in `plan`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from models.errors import ConfigError

FLASHER = "tools/kernel_flash/l4t_initrd_flash.sh"
TOOLS: Mapping[str, str] = {
    "xmlstarlet": "xmlstarlet",
    "sshpass": "sshpass",
    "abootimg": "abootimg",
    "zstd": "zstd",
    "exportfs": "nfs-kernel-server",
    "dtc": "device-tree-compiler",
    "cpp": "cpp",
    "qemu-aarch64-static": "qemu-user-static",
}
"""Programs that NVIDIA's flasher calls -> Debian package."""
_KEY_FORMS = {
    "--sbk": re.compile(rb"(0x[0-9a-fA-F]{8}\s*){8}"),
    "--encryption-key": re.compile(rb"([0-9a-fA-F]{32}){1,2}"),
}
_KEY_WORDS = {"--sbk": "eight words as 0x01234567", "--encryption-key": "32 or 64 hexadecimal digits"}
_IDENTITIES = ("var/lib/appliance/*", "etc/ssh/ssh_host_*_key")
_RELEASE = re.compile(r"# R(\d+) \(release\), REVISION: ([\d.]+)")
_CORE = re.compile(r"nvidia-l4t-core_([\d.]+)-.*\.deb")


@dataclass(frozen=True, slots=True)
class Bsp:
    """NVIDIA's folder Linux_for_Tegra."""

    path: str
    release: str
    """Of the folder's own packages, "36.4.3"; empty when it does not tell."""
    applied: str
    """Release of what `apply_binaries.sh` has put into the root file system; empty when it has not run."""
    ubuntu: str
    """Version of the root file system, "22.04"; empty when there is none."""
    users: tuple[str, ...]
    """People who can log in there."""
    files: frozenset[str]
    """Board configurations and layouts, relative to the folder."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Content of the layouts."""
    rootfs_bytes: int = 0
    passwords: tuple[str, ...] = ()
    """Accounts there that a password logs in to, or none at all."""
    identities: tuple[str, ...] = ()
    """Files there that belong to one device: of its state, and the keys by which its SSH server is known."""
    unprivileged: bool = False
    """Whether the root file system was unpacked without root, so that nothing in it may become root."""

    @property
    def version(self) -> tuple[int, ...]:
        """The release as numbers, (36, 4, 3); empty when it does not tell."""
        return numbers(self.release or self.applied)


def numbers(release: str) -> tuple[int, ...]:
    """Those of a release like "36.4.3", to be compared."""
    return tuple(int(part) for part in release.split(".") if part)


def read_bsp(path: Path) -> Bsp:
    """Look into a BSP folder; raises ConfigError in one sentence where it is none."""
    missing = next((name for name in ("flash.sh", FLASHER, "rootfs") if not (path / name).exists()), None)
    if missing:
        msg = (
            f"{path} is no BSP folder ({missing} is missing): give the Linux_for_Tegra that NVIDIA's Jetson_Linux "
            "archive unpacks to"
        )
        raise ConfigError(msg)
    rootfs = path / "rootfs"
    packages = sorted(path.glob("nv_tegra/l4t_deb_packages/*.deb"))
    core = [found[1] for package in packages if (found := _CORE.match(package.name))]
    applied = _RELEASE.match(_text(rootfs / "etc/nv_tegra_release"))
    ubuntu = re.search(r'^VERSION_ID="?([\d.]+)', _text(rootfs / "etc/os-release"), re.MULTILINE)
    layouts = [*path.glob("tools/kernel_flash/*.xml"), *path.glob("bootloader/generic/cfg/flash_*.xml")]
    return Bsp(
        path=str(path.resolve()),
        release=core[0] if core else "",
        applied=f"{applied[1]}.{applied[2]}" if applied else "",
        ubuntu=ubuntu[1] if ubuntu else "",
        users=users(path),
        files=frozenset(str(file.relative_to(path)) for file in (*path.glob("*.conf"), *layouts)),
        layouts={str(file.relative_to(path)): _text(file) for file in layouts},
        rootfs_bytes=_tree_bytes(rootfs),
        passwords=_passwords(rootfs / "etc/shadow"),
        identities=tuple(str(file.relative_to(rootfs)) for form in _IDENTITIES for file in sorted(rootfs.glob(form))),
        unprivileged=_unprivileged(rootfs / "usr/bin/sudo"),
    )


def read_package(path: Path, release: str) -> Bsp:
    """Look into an unpacked package for several boards, of a `release` that only its maker knows.

    Raises ConfigError in one sentence where it is none.
    """
    missing = next((name for name in (FLASHER, "tools/kernel_flash/images") if not (path / name).exists()), None)
    if missing:
        msg = f"{path} is no package ({missing} is missing): give the folder that mfi_*.tar.gz unpacks to"
        raise ConfigError(msg)
    return Bsp(str(path.resolve()), release, applied=release, ubuntu="", users=(), files=frozenset())


@dataclass(frozen=True, slots=True)
class Host:
    """The PC that flashes."""

    machine: str
    root: bool
    """Whether we may do everything."""
    tools: frozenset[str]
    """Of TOOLS, those that are here."""
    ipv6: bool
    nfs: bool
    """Whether the kernel's NFS server runs."""
    network_manager: bool
    udisks: bool
    """Something here mounts disks by itself."""
    tlp: bool
    """Something here puts USB to sleep."""
    vpn: bool
    firewall: bool
    wsl: bool
    virtual: bool
    free_bytes: int
    """Where the BSP folder is."""
    keys: tuple[str, ...] = ()
    """What is wrong with the files of keys, each a sentence."""


def read_host(bsp: Path, sysroot: Path = Path("/"), keys: Mapping[str, str] = MappingProxyType({})) -> Host:
    """Look at this host; `sysroot` is where /proc, /sys, /run and /etc are, `keys` the files of keys by their option.

    With another one than / no right is asked for: nothing of the real system is touched then.
    """
    proc = sysroot / "proc"
    conf = proc / "sys/net/ipv6/conf"
    running = {_text(process / "comm").strip() for process in proc.glob("[0-9]*")}
    routes = _text(proc / "net/route")
    return Host(
        machine=platform.machine(),
        root=os.geteuid() == 0 or sysroot != Path("/"),
        tools=frozenset(tool for tool in TOOLS if shutil.which(tool)),
        # The board's network appears while the flasher runs, with what is the default then.
        ipv6=[_text(conf / name / "disable_ipv6").strip() for name in ("all", "default")] in (["0", "0"], ["0", ""]),
        nfs="nfsd" in running,
        network_manager="NetworkManager" in running,
        udisks="udisksd" in running,
        tlp=(sysroot / "run/tlp").is_dir(),
        vpn=bool(re.search(r"^(tun|tap|ppp|wg|gpd)", routes, re.MULTILINE)),
        firewall=bool(re.search(r"^ENABLED=yes", _text(sysroot / "etc/ufw/ufw.conf"), re.MULTILINE)),
        wsl="microsoft" in _text(proc / "version").lower(),
        virtual="hypervisor" in _text(proc / "cpuinfo"),
        free_bytes=shutil.disk_usage(bsp).free,
        keys=tuple(fault for option, file in keys.items() if file and (fault := _key_fault(option, Path(file)))),
    )


def _key_fault(option: str, file: Path) -> str:
    """What is wrong with a key, in a sentence; what it holds is never told."""
    try:
        content, mode = file.read_bytes(), file.stat().st_mode
    except OSError as error:
        return f"{option} {file} cannot be read ({error.strerror}): give the file of that key"
    if option == "--uefi-keys":
        return ""
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{option} {file} can be read by others than its owner: chmod 600 {file}"
    if option == "--pkc":
        try:
            load_pem_private_key(content, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            return f"{option} {file} is no private key in PEM without a passphrase, which NVIDIA's signing takes"
        return ""
    if not _KEY_FORMS[option].fullmatch(content.strip()):
        return f"{option} {file} has not the form of that key: {_KEY_WORDS[option]}"
    return ""


def users(bsp: Path) -> tuple[str, ...]:
    """People who have an account in the root file system of a BSP folder."""
    fields = [line.split(":") for line in _text(bsp / "rootfs/etc/passwd").splitlines()]
    shells = 7
    return tuple(
        entry[0]
        for entry in fields
        if len(entry) == shells and entry[2].isdigit() and 1000 <= int(entry[2]) < 65534  # noqa: PLR2004 - Debian's range
    )


def _passwords(shadow: Path) -> tuple[str, ...]:
    fields = [line.split(":") for line in _text(shadow).splitlines()]
    return tuple(entry[0] for entry in fields if len(entry) > 1 and not entry[1].startswith(("!", "*")))


def _unprivileged(program: Path) -> bool:
    try:
        found = program.lstat()
    except OSError:
        return False
    return found.st_uid != 0 or not found.st_mode & stat.S_ISUID


def _tree_bytes(folder: Path) -> int:
    """Of all files below a folder, links not followed; what cannot be read counts for nothing."""
    total = 0
    for where, _folders, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118 - 200,000 files
            except OSError:  # noqa: PERF203 - see above
                continue
    return total


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
