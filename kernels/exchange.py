"""How programs of one launch hand data to each other while they run: words of PTX inside Triton.

Through scratch the data is its own flag. A word that nobody has written holds -1 in every bit, which a sender never
writes; whoever needs a word reads it until it is another. So there is no fence and no counter, and a CUDA graph can
replay it. Between the two programs of a cluster (Hopper) stores count as they arrive, on a barrier in shared memory.

What waits is a thread, or a warp, never a whole program: the readers' loops are inside the inline assembly, where
Triton's `while` costs a reduction over all threads and rearranges the tensor first.
Each inline assembly holds all elements of a thread (`pack`), so that their loads are under way together.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _words(words, threads, at_bytes):
    """The words that a thread sends and gets by fours, which the threads interleave: registers, and where they lie."""
    each = [(q, at_bytes + 4 * q * threads) for q in range(0, words, 4)]
    return [(", ".join(f"s{q + i}" for i in range(4)), ", ".join(f"r{q + i}" for i in range(4)), at) for q, at in each]


@triton.constexpr_function
def _scratch_code(words, threads, slot_bytes, at_bytes):
    """PTX of `swap` through scratch. Operands: sums, own words, scratch, program."""
    quads, to = _words(words, threads, at_bytes), "st.relaxed.gpu.global.v4.b32"
    code = [f".reg .b32 s<{words}>, r<{words}>, t, k, m;", ".reg .b64 here, there;", ".reg .pred p;"]
    code += ["// swap", "mov.u32 t, %tid.x;", "mul.wide.u32 there, t, 16;", f"add.s64 there, there, ${2 * words};"]
    code += [f"mad.wide.u32 here, ${3 * words}, {slot_bytes}, there;"]
    code += [f"xor.b32 k, ${3 * words}, 1;", f"mad.wide.u32 there, k, {slot_bytes}, there;"]
    for i in range(words):
        code += [f"setp.eq.s32 p, ${words + i}, -1;", f"selp.b32 s{i}, 0x7FFFFFFF, ${words + i}, p;"]
    code += [f"{to} [there + {at}], {{{sent}}};" for sent, _, at in quads]
    code += ["again:", *(f"ld.relaxed.gpu.global.v4.b32 {{{got}}}, [here + {at}];" for _, got, at in quads)]
    code += ["mov.u32 m, 0;", *(f"max.u32 m, m, r{i};" for i in range(words))]
    code += ["setp.eq.s32 p, m, -1;", "vote.sync.any.pred p, p, 0xffffffff;", "@p bra again;"]
    code += ["mov.u32 m, -1;", *(f"{to} [here + {at}], {{m, m, m, m}};" for _, _, at in quads)]  # the only reader
    code += [f"add.f32 ${i}, s{i}, r{i};" for i in range(words)]
    return "{\n" + "\n".join(code) + "\n}"


@triton.constexpr_function
def _cluster_code(words, threads, slot_bytes, at_bytes, barrier, cluster):
    """PTX of `swap` between shared memories: stores that count as they arrive, on a barrier of their own."""
    quads, barrier_at = _words(words, threads, cluster + at_bytes), cluster + slot_bytes + 8 * barrier
    to = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
    code = [f".reg .b32 s<{words}>, r<{words}>, t, k, base, here, there, full;", ".reg .pred p;"]
    code += ["// swap", "mov.u32 t, %tid.x;", f"xor.b32 k, ${3 * words}, 1;", "mov.u32 base, global_smem;"]
    code += ["mad.lo.u32 here, t, 16, base;", "mapa.shared::cluster.u32 there, here, k;"]
    code += [f"add.u32 base, base, {barrier_at};", "mapa.shared::cluster.u32 full, base, k;"]
    code += [f"mov.b32 s{i}, ${words + i};" for i in range(words)]
    code += [f"{to} [there + {at}], {{{sent}}}, [full];" for sent, _, at in quads]
    code += ["setp.eq.u32 p, t, 0;"]
    code += [f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [base], {4 * words * threads};"]
    code += ["again:", "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [base], 0;", "@!p bra again;"]
    code += [f"ld.shared.v4.b32 {{{got}}}, [here + {at}];" for _, got, at in quads]
    code += [f"add.f32 ${i}, s{i}, r{i};" for i in range(words)]
    return "{\n" + "\n".join(code) + "\n}"


@triton.constexpr_function
def _swap_code(words, threads, slot_bytes, at_bytes, barrier, cluster):
    if cluster:
        return _cluster_code(words, threads, slot_bytes, at_bytes, barrier, cluster)
    return _scratch_code(words, threads, slot_bytes, at_bytes)


@triton.constexpr_function
def _swap_operands(words):
    return ",".join(["=f"] * words + ["r"] * words + ["l"] * words + ["r"] * words)


@triton.jit
def swap(v, slots, s, AT: tl.constexpr, SLOT: tl.constexpr, NUMBER: tl.constexpr, CLUSTER: tl.constexpr):
    """Sum of v (FP32, any shape) over the programs s = 0 and 1 of a pair, the same bits in both.

    A thread sends its elements to the thread of its own number in the other program, which holds the same ones
    whatever layout the compiler chose, so nothing is rearranged.
    CLUSTER 0: through scratch, each program's SLOT words from `slots` on, those of this exchange from AT on.
    Else the pair is a thread block cluster, CLUSTER is where in the shared memory of each its slot begins, and NUMBER
    that of the exchange, each used once.
    """
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    WORDS: tl.constexpr = v.numel // THREADS
    return tl.inline_asm_elementwise(
        _swap_code(WORDS, THREADS, 4 * SLOT, 4 * AT, NUMBER, CLUSTER),
        _swap_operands(WORDS),
        [v.to(tl.int32, bitcast=True), slots.to(tl.int64), s],
        dtype=tl.float32,
        is_pure=False,
        pack=WORDS,
    )


@triton.constexpr_function
def _open_code(at, barriers):
    code = [".reg .b32 a;", ".reg .pred p;", "mov.u32 a, global_smem;", "setp.eq.u32 p, $1, 0;"]
    code += [f"@p mbarrier.init.shared::cta.b64 [a + {at + 8 * i}], 1;" for i in range(barriers)]
    code += ["fence.mbarrier_init.release.cluster;", "barrier.cluster.arrive.release.aligned;", "mov.u32 $0, a;"]
    return "{\n" + "\n".join(code) + "\n}"


@triton.jit
def open_cluster(SLOT: tl.constexpr, NUMBERS: tl.constexpr, CLUSTER: tl.constexpr):
    """Make the barriers of NUMBERS exchanges and tell the cluster; `join_cluster` before the first `swap`."""
    each = tl.arange(0, tl.extra.cuda.num_threads())  # every thread runs it once
    code: tl.constexpr = _open_code(CLUSTER + 4 * SLOT, NUMBERS)
    tl.inline_asm_elementwise(code, "=r,r", [each], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def join_cluster():
    """Wait until the other program has opened the cluster too."""
    each = tl.arange(0, tl.extra.cuda.num_threads())
    code: tl.constexpr = "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;"
    tl.inline_asm_elementwise(code, "=r,r", [each], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def wait_code(tensors, elements, bits, apart_bytes):
    """PTX that loads `elements` neighbours of each of some tensors again, as long as one of them is at rest.

    Operands: the same elements as first loaded, then the addresses of those of the first tensor; those of tensor i lie
    i `apart_bytes` behind. Elements of 16 or 32 bits.
    """
    each = elements * bits // 32  # registers of a tensor
    words = [f"x{i}" for i in range(tensors * each)]
    vector = f".v{each}" if each > 1 else ""
    code = [".reg .pred p, q;", f".reg .b32 c, t, {', '.join(words)};"]
    code += [f"mov.b32 {word}, ${len(words) + i};" for i, word in enumerate(words)]
    code += ["again:", "mov.u32 c, 0;"]
    if bits == 16:
        for word in words:  # a half of its complement is 0: (c - 1) & ~c has that half's highest bit
            code += [f"not.b32 t, {word};", "sub.u32 t, t, 0x00010001;", f"and.b32 t, t, {word};", "or.b32 c, c, t;"]
        code += ["and.b32 c, c, 0x80008000;", "setp.ne.u32 p, c, 0;"]
    else:
        code += [*(f"max.u32 c, c, {word};" for word in words), "setp.eq.s32 p, c, -1;"]
    code += ["vote.sync.any.pred q, p, 0xffffffff;", "@!q bra done;"]
    for i in range(tensors):
        into = ", ".join(words[i * each : (i + 1) * each])
        code += [f"@p ld.relaxed.gpu.global{vector}.b32 {{{into}}}, [${2 * len(words)} + {i * apart_bytes}];"]
    code += ["bra again;", "done:", *(f"mov.b32 ${i}, {word};" for i, word in enumerate(words))]
    return "{\n" + "\n".join(code) + "\n}"


@triton.constexpr_function
def wait_operands(tensors, elements, bits):
    """What `wait_code` takes and gives."""
    each = elements * bits // 32
    return ",".join(["=r"] * tensors * each + ["r"] * tensors * each + ["l"] * elements)
