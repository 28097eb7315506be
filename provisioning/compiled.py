"""Compiles the fused kernels of a bundle for devices that are not here, as steps of its build."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kernels.launch import Kernels, read_kernels
from kernels.plan import source_digest
from kernels.reference import Neck
from models.errors import ConfigError
from models.folder import pack_arrays, unpack_arrays
from models.targets import TARGETS, arch
from provisioning.steps import Steps


def archs_of(targets: Sequence[str]) -> list[str]:
    """Architectures of `targets`, each once; raises ConfigError for an unknown one."""
    for target in targets:
        if target not in TARGETS:
            msg = f"there is no target {target!r} to compile kernels for; known: {', '.join(TARGETS)}"
            raise ConfigError(msg)
    return sorted({arch(target) for target in targets})


def compile_kernels(
    steps: Steps, graphs: Mapping[str, Sequence[bytes]], archs: Sequence[str]
) -> dict[str, dict[str, bytes]]:
    """Each of `archs` -> the kernels of all marked `graphs`, which are steps of the build.

    Raises ConfigError when there are architectures and no graph is marked, or Triton is not installed.
    """
    if not archs:
        return {}
    necks = {name: found for name, contents in graphs.items() if (found := _necks(contents))}
    if not necks:
        msg = "no graph of the recipe has a fused operator to compile kernels for: put 'mark' into a graph's passes"
        raise ConfigError(msg)
    made: dict[str, dict[str, bytes]] = {}
    for one in archs:
        made[one] = {}
        for name, specs in necks.items():
            settings = [one, *(f"{spec.form} {spec.kv_heads}" for spec in specs)]
            packed = steps.run("kernels", name, "", [source_digest()], settings, _compiling(one, specs))
            made[one] |= {file: array.tobytes() for file, array in unpack_arrays(packed).items()}
    return made


def _necks(contents: Sequence[bytes]) -> list[Neck]:
    from provisioning import passes  # noqa: PLC0415 - onnx is slow to import
    from provisioning.passes import plugin  # noqa: PLC0415

    found = {neck for content in contents for neck in plugin.necks(passes.load(content, "the graph"))}
    return sorted(found, key=lambda neck: (neck.form, neck.kv_heads))


def _compiling(one: str, specs: Sequence[Neck]) -> Callable[[], bytes]:
    def make() -> bytes:
        try:
            from kernels.compile import compile_all  # noqa: PLC0415 - Triton is large, and not everywhere
        except ImportError as error:
            msg = f"kernels cannot be compiled here ({error}): pip install 'edge-appliance[kernels]'"
            raise ConfigError(msg) from error
        with tempfile.TemporaryDirectory() as folder:
            compile_all(one, specs, Path(folder))
            files: Kernels = read_kernels(Path(folder))
        return pack_arrays({name: np.frombuffer(content, np.uint8) for name, content in files.items()})

    return make
