"""How a call is cut: compiled variants, grids, scratch. Pure arithmetic, shared by compile, launch, bench and tests."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernels.reference import BLOCKS, Form, Neck
from models.errors import BadInput

ARCHS = ("sm_80", "sm_86", "sm_87", "sm_90")
SOURCES = ("conv_attention.py", "ctc_head.py", "exchange.py", "pack.py")
MAX_STEPS = 512
MAX_BATCH = 1024
SHORT = 64  # tokens whose keys fit one chunk of the attention
ROWS = 16
HALO: Mapping[Form, int] = {"v4": 1, "v6": 3}
EDGE: Mapping[Form, int] = {"v4": 64, "v6": 128}  # columns of the products of the input
FEW_MULTIPROCESSORS = 32
FEW_LAUNCHES = 3


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may differ between architectures without changing the result."""

    warps: int
    front: int = 64
    front_stages: int = 3
    mlp: int = 64
    back: int = 128
    back_stages: int = 2
    cluster: int = 0
    """Where in shared memory the two programs of a tile exchange as a thread block cluster; 0: through scratch."""


# By programs a tile. Measured on sm_90 (docs/kernels.md); for the others only the assembler's report was looked at.
_EIGHT_WARPS: Mapping[int, Tuning] = {1: Tuning(8, back=64), 2: Tuning(8, mlp=128, back=64)}
TUNINGS: Mapping[str, Mapping[int, Tuning]] = {
    "sm_80": _EIGHT_WARPS,
    "sm_86": _EIGHT_WARPS,
    "sm_87": _EIGHT_WARPS,
    "sm_90": {1: Tuning(4, back=64, back_stages=3), 2: Tuning(4, mlp=128, cluster=96 * 1024)},
}
_TUNED = Neck("v4", 2)  # on sm_90 four warps were measured for this; any other neck runs out of their registers


@dataclass(frozen=True, slots=True)
class NeckVariant:
    """One compiled form of the neck. `phase` -1 is the whole in one launch; 0, 1, 2 are its three launches."""

    arch: str
    spec: Neck
    split: int
    long: bool
    phase: int

    @property
    def name(self) -> str:
        """File name without ending."""
        length = "long" if self.long else "short"
        phase = "" if self.phase < 0 else f"-phase{self.phase}"
        return f"neck-{self.spec.form}-kv{self.spec.kv_heads}-split{self.split}-{length}{phase}.{self.arch}"

    @property
    def tuning(self) -> Tuning:
        """How it is compiled."""
        return (TUNINGS[self.arch] if self.spec == _TUNED else _EIGHT_WARPS)[self.split]

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        t = self.tuning
        return {
            "KV_HEADS": self.spec.kv_heads,
            "S": self.split,
            "V6": self.spec.form == "v6",
            "LONG": self.long,
            "PHASE": self.phase,
            "FRONT": t.front,
            "FRONT_STAGES": t.front_stages,
            "MLP": t.mlp,
            "BACK": t.back,
            "BACK_STAGES": t.back_stages,
            "CLUSTER": t.cluster,
        }


def neck_variants(arch: str, spec: Neck) -> Iterator[NeckVariant]:
    """Every variant of a neck that a bundle carries for one architecture."""
    for long in (False, True):
        for split in TUNINGS[arch]:
            yield NeckVariant(arch, spec, split, long, -1)
        for phase in range(BLOCKS + 1):
            if phase or not long:  # the first phase has no attention, so no length
                yield NeckVariant(arch, spec, 1, long, phase)


HeadForm = Literal["exchange", "share", "whole", "merge"]


@dataclass(frozen=True, slots=True)
class HeadVariant:
    """One compiled form of the CTC head; `slots` bounds the programs of a row tile."""

    arch: str
    form: HeadForm
    slots: int
    rows: int = 64

    @property
    def name(self) -> str:
        """File name without ending."""
        return f"ctc-{self.form}{self.slots}.{self.arch}"

    @property
    def chunk(self) -> int:
        """Classes of a step."""
        return 128 if self.arch == "sm_90" else 64

    @property
    def own(self) -> int:
        """Rows that one program merges; at least `slots // 2` programs a tile merge them all."""
        return 2 * self.rows // self.slots

    def constants(self) -> dict[str, int | str]:
        """The kernel's compile-time arguments."""
        common: dict[str, int | str] = {"M": self.rows, "SLOTS": self.slots, "OWN": self.own}
        return common if self.form == "merge" else common | {"N": self.chunk, "FORM": self.form, "STAGES": 3}


def head_variants(arch: str) -> Iterator[HeadVariant]:
    """Every variant of the head."""
    for slots in (16, 32, 64):
        yield HeadVariant(arch, "exchange", slots)
    yield HeadVariant(arch, "share", 64)
    yield HeadVariant(arch, "merge", 64)
    yield HeadVariant(arch, "whole", 64)


def tiles_of(spec: Neck, steps: int) -> int:
    """Row tiles of a line of `steps` tokens."""
    return -(-steps // (ROWS - 2 * HALO[spec.form]))


def local_kv(spec: Neck, split: int) -> int:
    """Key/value heads that one program computes."""
    return max(1, spec.kv_heads // split)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes of the neck's three scratch arrays for `images` lines of one launch."""

    slots: int
    kv: int
    count: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.slots + self.kv + self.count


def slot_words(spec: Neck) -> int:
    """Words that a program sends to the other one of its tile."""
    return ROWS * (2 * EDGE[spec.form] + 2 * BLOCKS * 128)


def neck_scratch(spec: Neck, split: int, tiles: int, images: int) -> Scratch:
    """Scratch of a launch; kernels.conv_attention.neck has the shapes."""
    row = 32 * local_kv(spec, split)
    valid = ROWS - 2 * HALO[spec.form]
    return Scratch(
        slots=4 * images * tiles * split * slot_words(spec) if split > 1 else 0,
        kv=2 * images * BLOCKS * split * tiles * valid * row,
        count=4 * images * split,
    )


@dataclass(frozen=True, slots=True)
class NeckPlan:
    """A call: `images` lines a launch (the last may have fewer), by the one-launch form or by three phases."""

    split: int
    long: bool
    phases: tuple[int, ...]
    images: int
    tiles: int


def plan_neck(spec: Neck, batch: int, steps: int, resident: Mapping[int, int], multiprocessors: int) -> NeckPlan:
    """How to run a batch where `resident[split]` programs of the one-launch form can be on the device at once.

    Two programs a tile while that leaves every program a multiprocessor of its own (docs/kernels.md). That many
    clusters of two find a place: multiprocessors come in pairs, and a pair can be a cluster.
    Where many launches would follow each other on few multiprocessors, phases.
    """
    if not 1 <= steps <= MAX_STEPS or not 1 <= batch <= MAX_BATCH:
        msg = f"{batch} lines of {steps} tokens; the neck takes 1 to {MAX_BATCH} of 1 to {MAX_STEPS}"
        raise BadInput(msg)
    tiles, long = tiles_of(spec, steps), steps > SHORT
    for split in sorted(resident, reverse=True):
        if split > 1 and batch * tiles * split <= min(resident[split], multiprocessors):
            return NeckPlan(split, long, (-1,), batch, tiles)
    images = resident[1] // tiles
    if images == 0 or (multiprocessors < FEW_MULTIPROCESSORS and -(-batch // images) > FEW_LAUNCHES):
        return NeckPlan(1, long, tuple(range(BLOCKS + 1)), min(batch, phase_programs(resident[1]) // tiles), tiles)
    return NeckPlan(1, long, (-1,), min(batch, images), tiles)


def phase_programs(resident: int) -> int:
    """Programs of one launch of a phase: a few waves, and at least one line of 512 tokens."""
    return max(64, 4 * resident)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A call of the head: its form, programs a row tile, row tiles."""

    form: HeadForm
    slots: int
    programs: int
    tiles: int


def plan_head(rows: int, chunks: int, resident: int, multiprocessors: int, tile_rows: int = 64) -> HeadPlan:
    """How to cut `rows` tokens and `chunks` of classes where `resident` programs can be on the device at once."""
    if not 1 <= rows <= MAX_STEPS * MAX_BATCH:
        msg = f"{rows} tokens; the head takes 1 to {MAX_STEPS * MAX_BATCH}"
        raise BadInput(msg)
    tiles = -(-rows // tile_rows)
    if tiles >= 2 * multiprocessors or chunks < 8:  # noqa: PLR2004 (half of the fewest slots)
        return HeadPlan("whole", 64, 1, tiles)
    most = min(resident // tiles, chunks, 64)
    programs = -(-chunks // -(-chunks // most)) if most else 0
    for slots in (16, 32, 64):
        if slots // 2 <= programs <= slots:
            return HeadPlan("exchange", slots, programs, tiles)
    return HeadPlan("share", 64, min(chunks, 64, max(1, 2 * multiprocessors // tiles)), tiles)


def source_digest() -> str:
    """sha256 of what decides a cubin: the kernels' and the packing's code without comments, and the tunings."""
    tunings = [*TUNINGS.items(), ("eight warps", _EIGHT_WARPS)]
    digest = hashlib.sha256(repr(sorted((which, sorted(by.items())) for which, by in tunings)).encode())
    for name in SOURCES:
        digest.update(_code(Path(__file__).with_name(name).read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def _code(text: str) -> str:
    """A source without docstrings, comments and blank lines, so that better words do not ask for a new measurement."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for row in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
                lines[row] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())
