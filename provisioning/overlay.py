"""The image overlay: everything that a root file system of JetPack lacks to be an appliance, as a tree of files.

`overlay` is pure: the same settings and parts give the same tree, and `tar` the same bytes. What is a device's own
(its key, its name, its certificate) is never in it: that is made at the first boot.
"""

from __future__ import annotations

import configparser
import io
import ipaddress
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from models import schema
from models.errors import ConfigError, WorkshopError

PYTHONS = {"3.10": "JetPack 6", "3.12": "JetPack 7", "3.11": "Debian 12, where images are tested"}
PREFIX, CONFIG, STATE = "opt/appliance", "etc/appliance", "var/lib/appliance"
HELD = "usr/share/appliance"
"""What the first boot brings into the state folder, which may be on a partition of its own."""
_UNITS, _WANTS = "etc/systemd/system", ".target.wants"
_OURS = "edge_appliance-"
_HOST = re.compile(r"[A-Za-z0-9.:-]+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class File:
    """A file of root."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    target: str


Tree: TypeAlias = "dict[str, File | Link]"
"""Path below the root, without the slash in front -> what is there."""


@dataclass(frozen=True, slots=True)
class Published:
    """Where the bundles come from that the image holds."""

    folder: str
    """A repository made by `provision publish`."""
    root: str
    """The root.json that devices trust."""
    bundles: tuple[str, ...]
    """Names."""
    channel: str = "stable"


@dataclass(frozen=True, slots=True)
class FirstBoot:
    """What a device does once."""

    grow: bool = True
    power_mode: int | None = None
    """Of nvpmodel."""
    enroll: tuple[str, ...] = ()
    """Arguments of `appliance enroll`, less the token, as --url and --ca."""
    token: str = "/etc/appliance/enroll.token"  # noqa: S105 - a file's name
    """File on the device with the token, which is of one device: whoever flashes it, or logs in, puts it there."""
    lock: bool = True


@dataclass(frozen=True, slots=True)
class Network:
    """A fixed address for the wired network; without it the system's own way (DHCP) stays."""

    address: str
    """With its length: 192.168.10.20/24."""
    gateway: str = ""
    dns: tuple[str, ...] = ()
    manager: str = "NetworkManager"
    """Or systemd-networkd."""


@dataclass(frozen=True, slots=True)
class Image:
    """Settings of an image; paths are relative to the file they stand in."""

    config: Mapping[str, Any]
    """The device's config.toml, less what the overlay knows itself."""
    python: str = "3.10"
    """Of the root file system."""
    tensorrt: bool = True
    """Link the system's TensorRT in."""
    published: Published | None = None
    first_boot: FirstBoot = field(default_factory=FirstBoot)
    data: str = ""
    """Label of a partition for the state folder, which is made a file system where it holds none; else that of /."""
    network: Network | None = None
    ntp: tuple[str, ...] = ()
    """Time servers, in place of the distribution's."""
    authority: str = ""
    """PEM file of the fleet's authority; becomes /etc/appliance/fleet-ca.pem."""
    ssh_keys: str = ""
    """authorized_keys of the user `maintainer`; without it only the key that a call home brings logs in."""
    watchdog_s: int = 30
    """The hardware resets a board whose systemd is silent for so long."""
    journal_mib: int = 200
    """Most that logs take on disk."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes that an overlay is made of."""

    wheels: Mapping[str, bytes]
    """File name -> wheel, ours among them."""
    units: Mapping[str, bytes]
    """Files of the folder systemd."""
    state: Tree = field(default_factory=dict)
    """Of the state folder: slots and accepted metadata; paths below it."""
    digests: tuple[str, ...] = ()
    """Of the bundles in it."""
    root: bytes = b""
    authority: bytes = b""
    ssh_keys: bytes = b""


def overlay(image: Image, parts: Parts) -> Tree:
    """All files of the overlay; raises ConfigError for settings that fit no image, WorkshopError for broken wheels."""
    if image.python not in PYTHONS:
        known = ", ".join(f"{version} ({what})" for version, what in PYTHONS.items())
        msg = f"python is {image.python!r}, which no image has: choose {known}"
        raise ConfigError(msg)
    _refuse_secrets(image, parts)
    tree = _environment(image, parts.wheels)
    tree |= _services(parts.units)
    tree |= {f"{HELD}/state/{path}": node for path, node in parts.state.items()}
    tree |= _data(image.data) if image.data else {}
    tree[f"{CONFIG}/config.toml"] = File(_config(image, parts).encode(), 0o640)
    for name, content in (("root.json", parts.root), ("fleet-ca.pem", parts.authority)):
        if content:
            tree[f"{CONFIG}/{name}"] = File(content)
    tree[f"{CONFIG}/firstboot.json"] = File(_first_boot(image, parts).encode())
    return tree | _system(image, parts.ssh_keys)


def _refuse_secrets(image: Image, parts: Parts) -> None:
    """One image goes to many devices, so nothing that is of one, or of the workshop, may be in it."""
    for name, content in (("authority", parts.authority), ("ssh_keys", parts.ssh_keys), ("published.root", parts.root)):
        if b"PRIVATE KEY" in content:
            msg = f"{name} holds a private key, which every device would have: give the public half of it"
            raise ConfigError(msg)
    if any(argument.partition("=")[0] == "--token" for argument in image.first_boot.enroll):
        msg = (
            "first_boot.enroll has a token, which every device would have: put it on each, where first_boot.token says"
        )
        raise ConfigError(msg)


def tar(tree: Tree) -> bytes:
    """The tree as an archive for `tar -x` at the root of a file system: the same bytes for the same tree.

    Of folders only our own are in it: those of the system keep their modes and times, from which systemd tells whether
    new users are to be made.
    """
    buffer = io.BytesIO()
    parents = {parent for path in tree for parent in PurePosixPath(path).parents}
    folders = {str(one) for one in parents if str(one).startswith((PREFIX, CONFIG, HELD))}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folders | tree.keys()):
            entry, node = tarfile.TarInfo(path), tree.get(path)
            entry.uname = entry.gname = "root"
            content = None
            if isinstance(node, File):
                entry.mode, entry.size, content = node.mode, len(node.content), io.BytesIO(node.content)
            elif node:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, node.target, 0o777
            else:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry, content)
    return buffer.getvalue()


def _environment(image: Image, wheels: Mapping[str, bytes]) -> Tree:
    """A virtual environment of the system's Python in which the wheels are installed; nothing runs for that."""
    site = f"{PREFIX}/lib/python{image.python}/site-packages"
    tree: Tree = {
        f"{PREFIX}/pyvenv.cfg": File(
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {image.python}\n".encode()
        ),
        f"{PREFIX}/bin/python": Link(f"/usr/bin/python{image.python}"),
    }
    if image.tensorrt:
        tree[f"{site}/tensorrt"] = Link(f"/usr/lib/python{image.python}/dist-packages/tensorrt")
    if not any(name.startswith(_OURS) for name in wheels):
        raise WorkshopError("the wheel of the appliance itself is missing: give it with --wheel")
    for name, content in sorted(wheels.items()):
        try:
            installed = _installed(content, site, scripts=name.startswith(_OURS))
        except (zipfile.BadZipFile, KeyError, configparser.Error) as error:
            msg = f"{name} is no wheel ({error}): delete it, so that it is downloaded again"
            raise WorkshopError(msg) from error
        tree |= installed
    return tree


def _installed(wheel: bytes, site: str, *, scripts: bool) -> Tree:
    """What an installer would lay down for a wheel; commands only where `scripts` are wanted."""
    places = {"purelib": site, "platlib": site, "data": PREFIX}
    tree: Tree = {}
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for name in archive.namelist():
            top, _slash, rest = name.partition("/")
            if name.endswith("/"):
                continue
            if name.startswith("/") or ".." in name.split("/"):
                msg = f"{name} leads out of it"
                raise zipfile.BadZipFile(msg)
            if top.endswith(".data"):
                kind, _slash, rest = rest.partition("/")
                if kind in places:
                    tree[f"{places[kind]}/{rest}"] = File(archive.read(name))
                continue
            tree[f"{site}/{name}"] = File(archive.read(name))
            if scripts and name.endswith(".dist-info/entry_points.txt"):
                tree |= _commands(archive.read(name).decode())
    return tree


def _commands(entry_points: str) -> Tree:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(entry_points)
    tree: Tree = {}
    for command, where in parser["console_scripts"].items():
        module, _colon, function = where.partition(":")
        # -I: nothing of whoever calls it, neither its folder nor its variables, decides what is imported.
        text = f"#!/{PREFIX}/bin/python -I\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        tree[f"{PREFIX}/bin/{command}"] = File(text.encode(), 0o755)
    return tree


def _services(units: Mapping[str, bytes]) -> Tree:
    """Units, enabled as their [Install] sections say, and what they need."""
    tree: Tree = {}
    for name, content in units.items():
        if name in {"sysusers.conf", "tmpfiles.conf"}:
            tree[f"usr/lib/{name.removesuffix('.conf')}.d/appliance.conf"] = File(content)
            continue
        tree[f"{_UNITS}/{name}"] = File(content)
        for wanted in re.findall(r"(?m)^WantedBy=(\S+)\.target$", content.decode()):
            tree[f"{_UNITS}/{wanted}{_WANTS}/{name}"] = Link(f"/{_UNITS}/{name}")
    return tree


def _data(label: str) -> Tree:
    """Units that mount the partition `label` as the state folder, and make it a file system before the first time."""
    if not _BARE_KEY.fullmatch(label):
        msg = f"data is {label!r}: a partition label of A-Z a-z 0-9 _ - is needed"
        raise ConfigError(msg)
    device = f"/dev/disk/by-partlabel/{label}"
    unit = f"dev-disk-by\\x2dpartlabel-{label.replace('-', chr(92) + 'x2d')}.device"
    makes = (
        "[Unit]\nDescription=File system for models\nDefaultDependencies=no\n"
        f"BindsTo={unit}\nAfter={unit}\nBefore=var-lib-appliance.mount\n"
        # It leaves alone whatever holds a file system already.
        f"[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/lib/systemd/systemd-makefs ext4 {device}\n"
        "TimeoutStartSec=0\n"
    )
    mounts = (
        "[Unit]\nDescription=Models and state\nRequires=appliance-data.service\nAfter=appliance-data.service\n"
        f"[Mount]\nWhat={device}\nWhere=/{STATE}\nType=ext4\nOptions=noatime,nodev,nosuid,noexec\n"
    )
    return {
        f"{_UNITS}/appliance-data.service": File(makes.encode()),
        f"{_UNITS}/var-lib-appliance.mount": File(mounts.encode()),
    }


def _config(image: Image, parts: Parts) -> str:
    config = {key: dict(value) if isinstance(value, Mapping) else value for key, value in image.config.items()}
    if parts.digests:
        config["bundles"] = [f"/{STATE}/slots/{digest}" for digest in parts.digests]
    if parts.root:
        config.setdefault("update", {})["root"] = f"/{CONFIG}/root.json"
    return toml(config)


def _first_boot(image: Image, parts: Parts) -> str:
    plan = schema.dump(image.first_boot) | {"grow": image.first_boot.grow, "lock": image.first_boot.lock}
    plan |= {
        "fill": bool(parts.state),
        "bytecode": True,
        "token": image.first_boot.token if image.first_boot.enroll else "",
    }
    return json.dumps(plan, indent=1, sort_keys=True)


def _system(image: Image, ssh_keys: bytes) -> Tree:
    """Settings of the system around the appliance."""
    for name, given in (("watchdog_s", image.watchdog_s), ("journal_mib", image.journal_mib)):
        if given < 1:
            msg = f"{name} is {given}: give a number above 0"
            raise ConfigError(msg)
    for server in image.ntp:
        if not _HOST.fullmatch(server):
            msg = f"ntp has {server!r}, which is no name or address of a server"
            raise ConfigError(msg)
    texts = {
        "etc/systemd/system.conf.d/appliance.conf": "# The hardware resets a board that hangs.\n"
        f"[Manager]\nRuntimeWatchdogSec={image.watchdog_s}\nRebootWatchdogSec=300\n",
        "etc/systemd/journald.conf.d/appliance.conf": "# Logs outlast a restart and cannot fill the disk.\n"
        f"[Journal]\nStorage=persistent\nSystemMaxUse={image.journal_mib}M\nSystemKeepFree=256M\n",
        "etc/ssh/sshd_config.d/appliance.conf": "# Keys only: there is no password to guess.\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin no\nX11Forwarding no\n"
        "AuthorizedKeysFile /etc/ssh/authorized_keys.d/%u\n",
        **_right_to_reboot(),
    }
    if image.ntp:
        texts["etc/systemd/timesyncd.conf.d/appliance.conf"] = f"[Time]\nNTP={' '.join(image.ntp)}\n"
    tree: Tree = {path: File(text.encode()) for path, text in texts.items()}
    if ssh_keys:
        tree["etc/ssh/authorized_keys.d/maintainer"] = File(ssh_keys)
    # Nobody has a password, so sudo cannot ask for one; a key that logs in may also come with the call home.
    tree["etc/sudoers.d/appliance"] = File(b"maintainer ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    if image.network:
        tree |= _network(image.network)
    return tree


def _right_to_reboot() -> dict[str, str]:
    """The daemon's user may start the device anew: for polkit 0.105 (Ubuntu 22.04), and for later ones (24.04)."""
    actions = [f"org.freedesktop.login1.reboot{also}" for also in ("", "-multiple-sessions")]
    why = "The appliance may start this device anew, for the order `reboot`"
    rule = (
        f'if (subject.user == "appliance" && {json.dumps(actions)}.indexOf(action.id) >= 0) return polkit.Result.YES;'
    )
    return {
        "etc/polkit-1/localauthority/50-local.d/appliance.pkla": f"[{why}]\nIdentity=unix-user:appliance\n"
        f"Action={';'.join(actions)}\nResultAny=yes\nResultInactive=yes\nResultActive=yes\n",
        "etc/polkit-1/rules.d/50-appliance.rules": f"// {why}.\npolkit.addRule(function (action, subject) {{\n"
        f"    {rule}\n}});\n",
    }


def _network(network: Network) -> Tree:
    addresses = [("gateway", network.gateway)] if network.gateway else []
    for name, given in [("address", network.address), *addresses, *(("dns", server) for server in network.dns)]:
        if not _is_address(given, with_length=name == "address"):
            msg = f"network.{name} is {given!r}: give an address, and for `address` its length too, as 192.168.10.20/24"
            raise ConfigError(msg)
    if network.manager == "systemd-networkd":
        lines = ["[Match]", "Name=en* eth*", "", "[Network]", f"Address={network.address}"]
        lines += [f"Gateway={network.gateway}"] if network.gateway else []
        lines += [f"DNS={server}" for server in network.dns]
        return {"etc/systemd/network/10-appliance.network": File(("\n".join(lines) + "\n").encode())}
    if network.manager != "NetworkManager":
        msg = f"network.manager is {network.manager!r}: choose NetworkManager or systemd-networkd"
        raise ConfigError(msg)
    lines = ["[connection]", "id=appliance", "type=ethernet", "autoconnect-priority=10", "", "[ipv4]", "method=manual"]
    lines += [f"address1={network.address}" + (f",{network.gateway}" if network.gateway else "")]
    lines += [f"dns={';'.join(network.dns)};"] if network.dns else []
    path = "etc/NetworkManager/system-connections/appliance.nmconnection"
    return {path: File(("\n".join(lines) + "\n").encode(), 0o600)}


def _is_address(text: str, *, with_length: bool) -> bool:
    try:
        return bool(ipaddress.ip_interface(text)) and with_length == ("/" in text)
    except ValueError:
        return False


def toml(table: Mapping[str, Any], at: str = "") -> str:
    """A table of scalars, lists of scalars and tables, as TOML."""
    lines, inner = [], ""
    for key, value in table.items():
        name = key if _BARE_KEY.fullmatch(key) else toml_value(key)
        if isinstance(value, Mapping):
            inner += f"\n[{at}{name}]\n{toml(value, f'{at}{name}.')}"
        else:
            lines.append(f"{name} = {toml_value(value)}\n")
    return "".join(lines) + inner


def toml_value(value: object) -> str:
    """A scalar or a list of scalars in TOML: JSON's spelling, but DEL is escaped and no surrogates are."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
