"""Compiles the kernels ahead of time: `python -m kernels.compile --arch sm_87 --out DIR`; no GPU needed.

For every variant a cubin, its PTX and a metadata file; for all of them limits.json and a table on the terminal.
PTX is version 8.5, what JetPack 6.2's driver (CUDA 12.6) still compiles; the cubin comes from the ptxas 12.8 that
Triton carries, because a cubin of CUDA 13 is not assumed to load there. Loading on an Orin was never tried.

Reproducible: no line information (it would hold paths), Triton pinned, nothing of the clock or the machine in a file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before Triton is imported: it reads these once.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import conv_attention, ctc_head
from kernels.plan import ARCHS, HeadVariant, NeckVariant, head_variants, neck_variants, slot_words, source_digest
from kernels.reference import Form, Neck
from models.errors import ConfigError, WorkshopError

TRITON = "3.6.0"
PTX_VERSION = 85
ALIGNMENT_BYTES = 16
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_87": 163 * 1024, "sm_90": 227 * 1024}
# On sm_90 four warps with up to 56 bytes spilled were measured faster than eight without (31.5 us against 34.7).
MAX_SPILL_BYTES = {"sm_80": 0, "sm_86": 0, "sm_87": 0, "sm_90": 64}
MAX_REGISTERS = 255
MAX_CUBIN_BYTES = 256 * 1024
_MACHINE_CUDA = 190  # EM_CUDA
# Without the statement that pointers are aligned the same source loads 2 bytes at a time, without asynchronous copies.
NARROW = re.compile(r"ld\.global[.\w]*\.[bu](?:8|16)\b")

_NECK = {
    "x": "*fp16", "w": "*fp16", "b": "*fp32", "out": "*fp16",
    "slots": "*i32", "kv": "*i16", "count": "*i32", "T": "i32",
}  # fmt: skip
_HEAD = {
    "x": "*fp16", "w": "*fp16", "best": "*i64", "probability": "*fp32",
    "shares": "*i32", "rows": "i32", "chunks": "i32",
}  # fmt: skip
_MERGE = {"best": "*i64", "probability": "*fp32", "shares": "*i32", "rows": "i32", "P": "i32"}


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a launcher, and a reader of the bundle, must know of a cubin."""

    name: str
    arch: str
    entry: str
    warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    cubin_bytes: int
    cubin_sha256: str
    ptx_sha256: str
    ptx_version: str
    assembler: str
    triton: str
    alignment_bytes: int
    arguments: dict[str, str]
    constants: dict[str, Any]
    source_digest: str


def compile_variant(variant: NeckVariant | HeadVariant, out: Path) -> Metadata:
    """Write NAME.cubin, NAME.ptx and NAME.json, and hold them to their limits."""
    if isinstance(variant, NeckVariant):
        function, arguments, warps = conv_attention.neck, _NECK, variant.tuning.warps
    else:
        merge = variant.form == "merge"
        function, arguments, warps = (ctc_head.ctc_merge, _MERGE, 1) if merge else (ctc_head.ctc_head, _HEAD, 4)
    constants = variant.constants()
    names = function.arg_names
    signature = {name: arguments.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", ALIGNMENT_BYTES]] for i, n in enumerate(names) if signature[n].startswith("*")
    }
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    target = GPUTarget("cuda", int(variant.arch[3:]), 32)
    built = triton.compile(source, target=target, options={"num_warps": warps, "ptx_version": PTX_VERSION})
    ptx: str = built.asm["ptx"]
    shared_bytes: int = built.metadata.shared
    if isinstance(variant, NeckVariant) and variant.tuning.cluster:
        # Triton gives no hold on a cluster whose programs are different ones, but PTX states it in one line.
        ptx = re.sub(r"(\.reqntid \d+.*)", r"\1\n.explicitcluster\n.reqnctapercluster 2, 1, 1", ptx, count=1)
        if shared_bytes > variant.tuning.cluster:
            msg = f"{variant.name} needs {shared_bytes} bytes of shared memory where its cluster exchanges"
            raise WorkshopError(msg)
        shared_bytes = variant.tuning.cluster + 4 * slot_words(variant.spec) + 64  # and six barriers
    cubin, report = _assemble(ptx)
    numbers = {key: int(found[1]) for key, found in report.items()}
    metadata = Metadata(
        name=variant.name,
        arch=variant.arch,
        entry=built.metadata.name,
        warps=warps,
        shared_bytes=shared_bytes,
        cubin_bytes=len(cubin),
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        ptx_sha256=hashlib.sha256(ptx.encode()).hexdigest(),
        ptx_version=_found(r"\.version (\S+)", ptx, "version")[1],
        assembler=_assembler(),
        triton=triton.__version__,
        alignment_bytes=ALIGNMENT_BYTES,
        arguments=dict(arguments),
        constants=dict(constants),
        source_digest=source_digest(),
        **numbers,
    )
    _hold(metadata, cubin, ptx)
    (out / f"{variant.name}.cubin").write_bytes(cubin)
    (out / f"{variant.name}.ptx").write_text(ptx)
    (out / f"{variant.name}.json").write_text(json.dumps(asdict(metadata), indent=1, sort_keys=True) + "\n")
    return metadata


def _assemble(ptx: str) -> tuple[bytes, dict[str, re.Match[str]]]:
    """The cubin, and what the assembler reports of it."""
    arch = _found(r"\.target (\w+)", ptx, "target")[1]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [_ptxas(), "-v", f"--gpu-name={arch}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own arguments)
        if done.returncode:
            msg = f"ptxas refused the kernel: {done.stderr.strip()[-500:]}"
            raise WorkshopError(msg)
        report = done.stderr + done.stdout
        return target.read_bytes(), {
            "registers": _found(r"Used (\d+) registers", report, "registers"),
            "stack_bytes": _found(r"(\d+) bytes stack frame", report, "stack"),
            "spill_bytes": _found(r"(\d+) bytes spill stores", report, "spills"),
        }


def _hold(built: Metadata, cubin: bytes, ptx: str) -> None:
    """Refuse what would be slow or would not load."""
    faults = []
    if cubin[:4] != b"\x7fELF" or int.from_bytes(cubin[18:20], "little") != _MACHINE_CUDA:
        faults.append("not an ELF file for CUDA")
    if elf_arch(cubin) != built.arch:
        faults.append(f"assembled for {elf_arch(cubin)}")
    if built.shared_bytes > MAX_SHARED_BYTES[built.arch]:
        faults.append(
            f"{built.shared_bytes} bytes of shared memory, the architecture has {MAX_SHARED_BYTES[built.arch]}"
        )
    if built.spill_bytes > MAX_SPILL_BYTES[built.arch]:
        faults.append(f"{built.spill_bytes} bytes of registers spilled")
    if built.registers > MAX_REGISTERS or built.cubin_bytes > MAX_CUBIN_BYTES:
        faults.append(f"{built.registers} registers, {built.cubin_bytes} bytes")
    if NARROW.search(ptx):
        faults.append(f"global memory is read {NARROW.findall(ptx)[0]}: the alignment of pointers got lost")
    if faults:
        msg = f"{built.name} is not fit to ship: {'; '.join(faults)}"
        raise WorkshopError(msg)


def elf_arch(cubin: bytes) -> str:
    """The architecture in the ELF header's flags (bits 0 to 7)."""
    return f"sm_{cubin[48]}"


def _ptxas() -> str:
    return str(triton.knobs.nvidia.ptxas.path)


def _assembler() -> str:
    version = subprocess.run([_ptxas(), "--version"], capture_output=True, text=True, check=True).stdout  # noqa: S603
    return "ptxas " + _found(r"V([\d.]+)", version, "ptxas version")[1]


def _found(pattern: str, text: str, what: str) -> re.Match[str]:
    found = re.search(pattern, text)
    if not found:
        msg = f"the assembler's output names no {what}"
        raise WorkshopError(msg)
    return found


def compile_all(arch: str, specs: Sequence[Neck], out: Path) -> list[Metadata]:
    """Every variant for one architecture, and limits.ARCH.json."""
    if triton.__version__ != TRITON:
        msg = f"Triton {triton.__version__} is installed; what is measured and ships is {TRITON}'s code"
        raise ConfigError(msg)
    out.mkdir(parents=True, exist_ok=True)
    variants: list[NeckVariant | HeadVariant] = [
        *(v for spec in specs for v in neck_variants(arch, spec)),
        *head_variants(arch),
    ]
    built = [compile_variant(variant, out) for variant in variants]
    keys = ("name", "registers", "spill_bytes", "shared_bytes", "cubin_bytes")
    table = [{key: getattr(metadata, key) for key in keys} for metadata in built]
    (out / f"limits.{arch}.json").write_text(json.dumps(table, indent=1) + "\n")
    return built


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 done, 1 refused with a reason, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=ARCHS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--form", choices=["v4", "v6"], default="v4", help="of the neck (v4 is also PP-OCRv5's)")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2], help="key/value heads, one neck each")
    parser.add_argument("--json", action="store_true", help="print the metadata instead of a table")
    given = parser.parse_args(arguments)
    form: Form = given.form
    try:
        built = compile_all(given.arch, [Neck(form, kv) for kv in given.kv_heads], given.out)
    except (WorkshopError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps([asdict(metadata) for metadata in built], indent=1))
        return 0
    print(f"{'kernel':44}{'registers':>10}{'spilled':>9}{'shared B':>10}{'cubin B':>9}")
    for m in built:
        print(f"{m.name:44}{m.registers:>10}{m.spill_bytes:>9}{m.shared_bytes:>10}{m.cubin_bytes:>9}")
    print(
        f"limits: 255 registers, {MAX_SHARED_BYTES[given.arch]} shared, {MAX_CUBIN_BYTES} bytes; {built[0].assembler}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
