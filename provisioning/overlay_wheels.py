"""Wheels for a device, resolved on a PC of another processor and another Python.

pip judges markers by the Python that runs it, so for another one it would leave packages out or bring wrong ones.
Here the markers are judged for the device, versions are those of constraints.txt, and pip only downloads.
"""

from __future__ import annotations

import email.parser
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from models.errors import WorkshopError

_GLIBC_MINORS = {"3.10": 35, "3.11": 36, "3.12": 39}
"""Of Ubuntu 22.04, Debian 12 and Ubuntu 24.04: wheels for a newer glibc do not load there."""
_OLDEST_MINOR = 17
"""No wheel for aarch64 asks for an older one."""


def resolve(python: str, ours: Path, constraints: str, folder: Path) -> list[Path]:
    """`ours` and every wheel it needs on aarch64 under `python`; what is missing in `folder` is downloaded there.

    Raises WorkshopError when a version is not pinned, or has no wheel.
    """
    environment = _environment(python)
    pins = _pins(constraints, environment)
    found, wanted = {"": ours}, _needs(ours, {""}, environment)
    seen: dict[str, set[str]] = {}
    while wanted:
        for name, extras in wanted.items():
            if name not in pins:
                msg = f"{name} has no version for Python {python} in constraints.txt: run `make constraints`"
                raise WorkshopError(msg)
            seen.setdefault(name, set()).update(extras)
        have = _wheels(python, folder)
        missing = [f"{name}=={pins[name]}" for name in wanted if (name, pins[name]) not in have]
        if missing:
            _download(python, missing, folder)
            have = _wheels(python, folder)
        following: dict[str, set[str]] = {}
        for name in wanted:
            found[name] = have[name, pins[name]]
            for needed, extras in _needs(found[name], seen[name], environment).items():
                if not extras <= seen.get(needed, set()):
                    following.setdefault(needed, set()).update(extras)
        wanted = following
    return [found[name] for name in sorted(found)]


def _environment(python: str) -> Mapping[str, str]:
    """What markers are judged by, on a device."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "aarch64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def _pins(constraints: str, environment: Mapping[str, str]) -> dict[str, str]:
    pins = {}
    for line in constraints.splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
                (pin,) = requirement.specifier
                pins[str(canonicalize_name(requirement.name))] = str(Version(pin.version))
    return pins


def _needs(wheel: Path, extras: Iterable[str], environment: Mapping[str, str]) -> dict[str, set[str]]:
    """Packages that a wheel with `extras` needs -> extras that are wanted of them, "" for the package itself."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = email.parser.HeaderParser().parsestr(archive.read(path).decode())
    except (zipfile.BadZipFile, StopIteration, UnicodeDecodeError) as error:
        msg = f"{wheel} is no whole wheel: delete it, so that it is downloaded again"
        raise WorkshopError(msg) from error
    needed: dict[str, set[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras):
            needed.setdefault(str(canonicalize_name(requirement.name)), {""}).update(requirement.extras)
    return needed


def _wheels(python: str, folder: Path) -> dict[tuple[str, str], Path]:
    """Those of a folder that a device takes, the best fitting of each version."""
    own, version = f"cp{python.replace('.', '')}", tuple(map(int, python.split(".")))
    platforms = [*_platforms(python), "linux_aarch64"]  # the last is what a wheel built on a device is called
    fitting = [*tags.cpython_tags(version, [own], platforms), *tags.compatible_tags(version, own, platforms)]
    ranks = {tag: rank for rank, tag in enumerate(fitting)}
    found: dict[tuple[str, str], tuple[int, Path]] = {}
    for path in folder.glob("*.whl"):
        try:
            name, release, _build, marked = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue  # somebody's own name for it
        key, rank = (str(name), str(release)), min(ranks.get(tag, len(ranks)) for tag in marked)
        if rank < len(ranks):
            found[key] = min(found.get(key, (rank, path)), (rank, path))
    return {key: path for key, (_rank, path) in found.items()}


def _platforms(python: str) -> list[str]:
    minors = range(_GLIBC_MINORS[python], _OLDEST_MINOR - 1, -1)
    return [*(f"manylinux_2_{minor}_aarch64" for minor in minors), "manylinux2014_aarch64"]


def _download(python: str, pins: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    options = [option for platform in _platforms(python) for option in ("--platform", platform)]
    options += ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:", "--no-deps"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [*pip, *options, "--dest", str(folder), *pins], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        msg = f"wheels for Python {python} on aarch64 cannot be had ({said[-1]}): see the network, or give --wheels"
        raise WorkshopError(msg)
