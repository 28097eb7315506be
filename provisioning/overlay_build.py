"""Gathers what an image overlay is made of: settings, wheels, units, and bundles as a device accepts them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from appliance import settings as device
from models import schema
from models.errors import ConfigError, WorkshopError
from provisioning import overlay, overlay_wheels
from provisioning.cache import Cache
from provisioning.overlay import File, Image, Link, Parts, Published
from provisioning.serve import server

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PROJECT = Path(__file__).parent.parent


def read(path: Path) -> Image:
    """Settings from a file; raises ConfigError, also for settings of the device that its daemon would refuse."""
    try:
        wanted = schema.load(Image, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}): give the settings of an image"
        raise ConfigError(msg) from error
    except ValueError as error:  # no TOML, or SchemaError
        msg = f"{path}: {error}"
        raise ConfigError(msg) from error
    brought: set[Path] = {Path("/", overlay.CONFIG, "fleet-ca.pem")} if wanted.authority else set()
    held = dict(wanted.config)
    if wanted.published:  # the overlay names the trusted root itself
        root = Path("/", overlay.CONFIG, "root.json")
        held["update"] = {**held.get("update", {}), "root": str(root)}
        brought.add(root)
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.toml"
        config.write_text(overlay.toml(held), encoding="utf-8")
        told = device.load(profile="cpu", config=config, flags={"state_dir": Path("/", overlay.STATE)})
    _refuse_what_cannot_start(told, brought)
    return wanted


def _refuse_what_cannot_start(told: device.Settings, brought: AbstractSet[Path]) -> None:
    """Raise ConfigError for a door that lets nobody in, and for files that no image holds and nobody brings later."""
    if not told.http.on_loopback and not told.http.client_roles:
        msg = (
            f"http.host is {told.http.host!r}, which others can reach, and an image holds no token: "
            "listen on loopback, 127.0.0.1, or set http.client_roles"
        )
        raise ConfigError(msg)
    for part in ("http", "mqtt", "update"):
        for name, file in getattr(told, part):
            enrolled = isinstance(file, Path) and file.is_relative_to(told.identity_files.folder)
            if isinstance(file, Path) and file not in brought and not enrolled:
                msg = (
                    f"{part}.{name} is {file}, which this image does not hold: name a file that it brings "
                    f"({', '.join(map(str, sorted(brought))) or 'none'}), or set it on the device"
                )
                raise ConfigError(msg)


def gather(wanted: Image, folder: Path, wheel: Path | None, wheels: Path | None, scratch: Path) -> Parts:
    """Everything that an overlay is made of; paths in `wanted` are relative to `folder`, `scratch` is empty."""
    ours = wheel or _own_wheel(scratch / "own")
    store = (wheels or _cache()) / f"cp{wanted.python.replace('.', '')}"
    pins = _PROJECT / "constraints.txt"
    if not pins.is_file():
        msg = f"{pins} is missing: make images from a checkout of the project, which pins every version"
        raise WorkshopError(msg)
    found = overlay_wheels.resolve(wanted.python, ours, pins.read_text(), store)
    parts = Parts(
        wheels={path.name: path.read_bytes() for path in found},
        units={path.name: path.read_bytes() for path in sorted((_PROJECT / "systemd").iterdir())},
        authority=_bytes(folder, wanted.authority),
        ssh_keys=_bytes(folder, wanted.ssh_keys),
    )
    if wanted.published is None:
        return parts
    root = folder / wanted.published.root
    digests = _accept(wanted.published, folder, root, scratch / "state")
    state = _files(scratch / "state")
    return replace(parts, state=state, digests=tuple(digests.values()), root=_bytes(folder, wanted.published.root))


def _cache() -> Path:
    return (Cache.of_user().folder or Path()) / "wheels"


def _own_wheel(folder: Path) -> Path:
    if not (_PROJECT / "pyproject.toml").is_file():
        raise ConfigError("this is no checkout of the project: give the appliance's own wheel with --wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--no-deps"]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [*pip, "--wheel-dir", str(folder), str(_PROJECT)], capture_output=True, text=True, check=False
    )
    built = sorted(folder.glob("*.whl"))
    if done.returncode or not built:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        msg = f"the wheel of this checkout cannot be built ({said[-1]}): build one, and give it with --wheel"
        raise WorkshopError(msg)
    return built[0]


def _accept(published: Published, folder: Path, root: Path, state: Path) -> Mapping[str, str]:
    """Bundles as a device accepts them, by its own program: name -> digest."""
    with server(folder / published.folder, "127.0.0.1", 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{served.server_address[1]}"
        command = [sys.executable, "-m", "appliance.accept", "--state-dir", str(state), "--url", url]
        command += ["--root", str(root), "--channel", published.channel, *published.bundles]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own interpreter
        served.shutdown()
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise WorkshopError(said[-1])
    digests: dict[str, str] = json.loads(done.stdout)
    return digests


def _bytes(folder: Path, name: str) -> bytes:
    if not name:
        return b""
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        msg = f"{folder / name} cannot be read ({error.strerror}): the settings of the image name it"
        raise ConfigError(msg) from error


def _files(folder: Path) -> dict[str, File | Link]:
    """What is in a folder, as a tree; its lock files are left out."""
    tree: dict[str, File | Link] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            tree[name] = Link(str(path.readlink()))
        elif path.is_file() and path.name not in {"lock", ".lock"}:
            tree[name] = File(path.read_bytes(), 0o600)
    return tree
