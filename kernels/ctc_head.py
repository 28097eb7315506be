"""The CTC head as one Triton kernel: linear 120 -> classes, online softmax, best class and its probability.

`kernels.reference.linear_ctc_head` defines what is computed, `kernels.pack.pack_head` how the weights lie.
The class scores, 6,625 of them a token in the Chinese recognisers, never reach memory.

Axes in names: M rows (tokens of all lines), C channels (120, padded to 128), N classes of a chunk, P programs of a tile

A row tile of M rows is worked on by P programs, each with its share of the classes in chunks of N:

    m' = max(m, max_n z_n);   l' = l 2^(m - m') + sum_n 2^(z_n - m');   i' = i if m >= max_n z_n else argmax_n z_n

with log2 e folded into the weights (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
Each program leaves (m, l, i) of its share in scratch and merges all shares of a few rows: 1 / l of the merged sum is
the probability. Inside a chunk one maximum finds value and place: the lowest bits of a score (2^-16 of it, less than
FP16 inputs mean) are replaced by its place, so scores closer than that count as equal.
FORM "exchange" does it in one launch: the data is its own flag (kernels.exchange), so the P x tiles programs
must run at the same time. FORM "share" and `ctc_merge` are the two-launch form; FORM "whole" is P = 1, no merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange import wait_code, wait_operands

# The interpreter has no inline assembly and runs programs one after another.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
WIDTH = tl.constexpr(120)
WIDE = tl.constexpr(128)
NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _word(v):
    """The bits of v, never the -1 that means "at rest"."""
    bits = v.to(tl.int32, bitcast=True)
    return tl.where(bits == -1, 0x7FFFFFFF, bits)


@triton.jit
def _add_and_least(l0, i0, l1, i1):
    return l0 + l1, tl.minimum(i0, i1)


@triton.jit
def _merge(shares, best, probability, row, in_tile, live, P, M: tl.constexpr, SLOTS: tl.constexpr, WAIT: tl.constexpr):
    """Best class and probability of rows `row` (number `in_tile` of their tile) out of the shares [3, SLOTS, M]."""
    p = tl.arange(0, SLOTS)[:, None]
    at = shares + p * M + in_tile[None, :]
    mask = (p < P) & live[None, :]
    m = tl.load(at, mask, other=0, volatile=True)
    l = tl.load(at + SLOTS * M, mask, other=0, volatile=True)  # noqa: E741 (the online softmax's own letter)
    i = tl.load(at + 2 * SLOTS * M, mask, other=0, volatile=True)
    if WAIT and not INTERPRETED:
        m, l, i = tl.inline_asm_elementwise(  # noqa: E741
            wait_code(3, 1, 32, 4 * SLOTS * M),
            wait_operands(3, 1, 32),
            [m, l, i, at.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    z = tl.where(mask, m.to(tl.float32, bitcast=True), float("-inf"))
    top = tl.max(z, 0)
    share = tl.where(mask, l.to(tl.float32, bitcast=True) * tl.exp2(z - top[None, :]), 0)
    place = tl.where((z == top[None, :]) & mask, i, NONE)
    if INTERPRETED:
        total, first = tl.sum(share, 0), tl.min(place, 0)
    else:
        total, first = tl.reduce((share, place), 0, _add_and_least)
    tl.store(best + row, first.to(tl.int64), live)
    tl.store(probability + row, 1 / total, live)
    if WAIT:
        rest = tl.full([SLOTS, in_tile.shape[0]], -1, tl.int32)
        tl.store(at, rest, mask)
        tl.store(at + SLOTS * M, rest, mask)
        tl.store(at + 2 * SLOTS * M, rest, mask)


@triton.jit
def ctc_head(
    x, w, best, probability, shares, rows, chunks,
    M: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, OWN: tl.constexpr, FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From x [rows, 120] FP16 to best [rows] int64 and probability [rows] FP32. Grid: (P, tiles).

    shares [tiles, 3, SLOTS, M] int32: scratch, at rest -1. OWN: rows that a program merges, at least M / P.
    """
    p = tl.program_id(0)
    P = tl.num_programs(0)
    first = tl.program_id(1) * M
    row = first + tl.arange(0, M)
    live = row < rows
    c = tl.arange(0, WIDE)[None, :]
    x_MC = tl.load(x + row[:, None] * WIDTH + c, live[:, None] & (c < WIDTH), other=0)
    x_MC = tl.where(c == WIDTH, 1.0, x_MC).to(tl.float16)
    n = tl.arange(0, N)
    w_CN = w + tl.arange(0, WIDE)[:, None] * N + n[None, :]
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    i = tl.full([M], NONE, tl.int32)
    for chunk in tl.range(p * chunks // P, (p + 1) * chunks // P, num_stages=STAGES):
        z = tl.dot(x_MC, tl.load(w_CN + chunk * (WIDE * N)))
        marked = (z.to(tl.int32, bitcast=True) & -N) | (N - 1 - n)[None, :]
        top = tl.max(marked.to(tl.float32, bitcast=True), 1)
        here = (chunk + 1) * N - 1 - (top.to(tl.int32, bitcast=True) & (N - 1))
        new = tl.maximum(m, top)
        l = l * tl.exp2(m - new) + tl.sum(tl.exp2(z - new[:, None]), 1)  # noqa: E741
        i = tl.where(top > m, here, i)
        m = new
    if FORM == "whole":
        tl.store(best + row, i.to(tl.int64), live)
        tl.store(probability + row, 1 / l, live)
    else:
        shares += tl.program_id(1) * (3 * SLOTS * M)
        at = shares + p * M + tl.arange(0, M)
        tl.store(at, _word(m), live)
        tl.store(at + SLOTS * M, _word(l), live)
        tl.store(at + 2 * SLOTS * M, i, live)
        if FORM == "exchange":
            r = p * OWN + tl.arange(0, OWN)
            mine = (r < M) & (first + r < rows)
            _merge(shares, best, probability, first + r, r, mine, P, M, SLOTS, True)


@triton.jit
def ctc_merge(
    best, probability, shares, rows, P,
    M: tl.constexpr, SLOTS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """The second launch of FORM "share". Grid: (M / OWN, tiles)."""
    r = tl.program_id(0) * OWN + tl.arange(0, OWN)
    row = tl.program_id(1) * M + r
    at = shares + tl.program_id(1) * (3 * SLOTS * M)
    _merge(at, best, probability, row, r, row < rows, P, M, SLOTS, False)
