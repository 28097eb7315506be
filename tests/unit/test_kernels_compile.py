"""What kernels.compile writes for an Orin, read back with the assembler's own tools; no GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kernels.plan import NeckVariant, head_variants, neck_variants, source_digest
from kernels.reference import Neck

pytestmark = [
    pytest.mark.unit,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install '.[kernels]')"),
]
ROOT = Path(__file__).parents[2]
SHARED_BYTES_OF_A_BLOCK = 163 * 1024
REGISTERS = {"neck": 255, "ctc_head": 128, "ctc_merge": 32}
"""Of a thread, as docs/kernels.md states them: one neck, or four heads, fill the registers of a multiprocessor."""


def compiled(arch: str, out: Path, cache: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "kernels.compile", "--arch", arch, "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def orin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("orin")
    began = time.monotonic()
    done = compiled("sm_87", out, tmp_path_factory.mktemp("cache"))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 180, "all of an Orin in under three minutes"
    assert "registers" in done.stdout
    return out


@pytest.fixture(scope="module")
def metadata(orin: Path) -> dict[str, dict[str, Any]]:
    files = [path for path in orin.glob("*.json") if not path.name.startswith("limits")]
    return {path.stem: json.loads(path.read_bytes()) for path in files}


def cuobjdump(*arguments: str) -> str:
    from triton import knobs  # noqa: PLC0415 (not everywhere)

    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, *arguments], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip


def test_every_variant_is_there_with_ptx_and_metadata(orin: Path, metadata: dict[str, dict[str, Any]]) -> None:
    names = {v.name for v in (*neck_variants("sm_87", Neck("v4", 2)), *head_variants("sm_87"))}
    assert set(metadata) == names
    for name, found in metadata.items():
        cubin, ptx = (orin / f"{name}.cubin").read_bytes(), (orin / f"{name}.ptx").read_text()
        assert found["cubin_sha256"] == hashlib.sha256(cubin).hexdigest()
        assert found["source_digest"] == source_digest()
        assert found["assembler"].startswith("ptxas 12."), "a cubin of CUDA 13 may not load on JetPack 6.2"
        assert ".version 8.5\n" in ptx, "the newest that JetPack 6.2's driver compiles"
        assert ".target sm_87\n" in ptx
        assert ptx.count("// swap") == (6 if "split2" in name else 0), "a thread hands all its elements over at once"
        assert str(ROOT) not in ptx
    assert len(json.loads((orin / "limits.sm_87.json").read_bytes())) == len(names)


def test_cubins_hold_to_the_limits_by_the_assemblers_own_report(
    orin: Path, metadata: dict[str, dict[str, Any]]
) -> None:
    for name, found in metadata.items():
        path = orin / f"{name}.cubin"
        cubin = path.read_bytes()
        assert cubin[:4] == b"\x7fELF"
        assert cubin[48] == 87, "the ELF header's architecture"
        report = cuobjdump("-res-usage", str(path))
        assert f"Function {found['entry']}:" in report
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
        assert used["REG"] == found["registers"] <= REGISTERS[found["entry"]]
        assert used["LOCAL"] == found["spill_bytes"] == 0
        assert found["shared_bytes"] <= SHARED_BYTES_OF_A_BLOCK
        assert len(cubin) == found["cubin_bytes"] <= 256 * 1024


def test_weights_are_loaded_16_bytes_at_a_time(orin: Path, metadata: dict[str, dict[str, Any]]) -> None:
    for name, found in metadata.items():
        if found["entry"] != "ctc_merge":
            code = cuobjdump("-sass", str(orin / f"{name}.cubin"))
            assert "LDG.E.128" in code or "LDGSTS.E.BYPASS.128" in code
            assert not re.search(r"LDG\.E\.(STRONG\.SYS\.)?U?S?(16|8)\b", code), "pointers lost their alignment"


def test_compiling_again_gives_the_same_bytes(orin: Path, tmp_path: Path) -> None:
    done = compiled("sm_87", tmp_path / "again", tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    first = {path.name: path.read_bytes() for path in orin.iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_other_architectures_get_a_cubin_and_ptx_of_their_own(arch: str, tmp_path: Path) -> None:
    from kernels.compile import compile_variant  # noqa: PLC0415 (Triton is not everywhere)

    for variant in (next(iter(neck_variants(arch, Neck("v4", 2)))), next(iter(head_variants(arch)))):
        found = compile_variant(variant, tmp_path)
        cubin = (tmp_path / f"{variant.name}.cubin").read_bytes()
        assert cubin[:4] == b"\x7fELF"
        assert cubin[48] == int(arch[3:]), "the ELF header's architecture"
        assert f"Function {found.entry}:" in cuobjdump("-res-usage", str(tmp_path / f"{variant.name}.cubin"))
        ptx = (tmp_path / f"{variant.name}.ptx").read_text()
        assert f".target {arch}" in ptx
        assert f".entry {found.entry}(" in ptx


@pytest.mark.parametrize("spec", [Neck("v4", 1), Neck("v4", 4), Neck("v4", 8), Neck("v6", 8)], ids=str)
def test_the_neck_that_needs_most_registers_spills_none_on_an_orin(spec: Neck, tmp_path: Path) -> None:
    from kernels.compile import compile_variant  # noqa: PLC0415 (Triton is not everywhere)

    assert compile_variant(NeckVariant("sm_87", spec, 1, True, -1), tmp_path).spill_bytes == 0


def test_wrong_usage_is_told_apart(tmp_path: Path) -> None:
    assert compiled("sm_12", tmp_path, tmp_path).returncode == 2
    refused = compiled("sm_87", tmp_path, tmp_path, "--kv-heads", "3")
    assert refused.returncode == 1
    assert "3 key/value heads" in refused.stderr
