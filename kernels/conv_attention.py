"""The neck of a recogniser, convolutions and grouped-query attention, as one Triton kernel.

`kernels.reference.neck` defines what is computed, `kernels.pack` how the weights lie, `kernels.plan` grid and scratch.
One operator, one file, so more than 400 lines: its phases share too many tensors to be cut at any place.

Axes in names:
    B images, T tokens of a line, R rows of a program (16), K reduction, N columns, D padded head size (16)
    S programs that share the channels of one row tile (1 or 2), G local key/value heads, X query heads of one of them

How the work is cut
    An image is ceil(T / valid) row tiles of R = 16 rows (16 is the matrix unit's smallest M): `valid` rows that the
    tile owns and `halo` rows each side that it computes again, so that the last convolution needs no neighbour.
    The channels of a tile are cut over S programs, each with 1/S of nearly all weights: a chain of small products is
    bound by latency, and small batches leave most multiprocessors idle.
What crosses programs
    keys and values of own rows, once a block, between the tiles of an image: through scratch in L2;
    partial sums of 16 x 128, twice a block and once at each end, between the two programs of a tile: on Hopper from
    one's shared memory to the other's (CLUSTER), elsewhere through scratch in L2.
How it crosses
    The data is its own flag (kernels.exchange). Partial sums have one reader, which puts them back to rest. Keys have
    as many as the line has tiles, so owners write -1 back once causality proves that all have read: whoever sent the
    keys of block 1 had read those of block 0. No fence and no memset, so a CUDA graph can replay it.
    Readers wait for programs that must therefore run at the same time: launch cooperatively (kernels.launch does).
    Where that many programs do not fit, PHASE 0, 1, 2 are three launches with S = 1 in which nobody waits.
Why it is correct to fold biases
    Padding columns are free: column 120 of a normalised row is set to 1, so row 120 of the next weights is its bias.
    Column 15 of every value head is 1, so the softmax's sum arrives with the product, and o's bias sits in row 15.

Tried and measured: docs/kernels.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange import join_cluster, open_cluster, swap, wait_code, wait_operands

# The interpreter has no inline assembly and runs programs one after another.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

ROWS = tl.constexpr(16)
WIDTH = tl.constexpr(120)
WIDE = tl.constexpr(128)
HIDDEN = tl.constexpr(240)
PAD_HIDDEN = tl.constexpr(256)
Z = tl.constexpr(512)  # 480 channels of v4's conv3, padded
HEADS = tl.constexpr(8)
D = tl.constexpr(16)


@triton.jit
def _swish(v):
    """The product v sigmoid(v), by one special-function instruction (relative error 2^-11, as FP16's)."""
    half = 0.5 * v
    if INTERPRETED:
        t = 2 / (1 + tl.exp(-v)) - 1
    else:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1)
    return half + half * t


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _norm(v_RN, EPS: tl.constexpr):
    """Rows to mean 0 and variance 1 over their 120 true columns (the others are 0), column 120 to 1; FP16."""
    if INTERPRETED:
        total, squares = tl.sum(v_RN, 1), tl.sum(v_RN * v_RN, 1)
    else:
        total, squares = tl.reduce((v_RN, v_RN * v_RN), 1, _add_pairs)
    mean = total / WIDTH
    scale = tl.rsqrt(tl.maximum(squares / WIDTH - mean * mean, 0) + EPS)
    n_RN = (v_RN - mean[:, None]) * scale[:, None]
    return tl.where(tl.arange(0, WIDE)[None, :] == WIDTH, 1.0, n_RN).to(tl.float16)


@triton.jit
def _ones(v_RN, first, AT: tl.constexpr, N: tl.constexpr):
    """FP16 of v with column AT (counted from `first`) set to 1: what multiplies the next layer's bias row."""
    return tl.where(first + tl.arange(0, N)[None, :] == AT, 1.0, v_RN).to(tl.float16)


@triton.jit
def _weights(at, K: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr = None):
    return tl.load(at + tl.arange(0, K)[:, None] * (N if ROW is None else ROW) + tl.arange(0, N)[None, :])


@triton.jit
def _now(w_KN):
    """The weights at this place: loaded where `_weights` stands, stored to shared memory only here.

    Without it the compiler stores right after the load, so that a load ahead of a wait waits for itself.
    """
    if not INTERPRETED:
        w_KN = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w_KN], dtype=tl.float16, is_pure=False, pack=2)
    return w_KN


@triton.jit
def _keys_values(kv, key, live, ROW: tl.constexpr, WAIT: tl.constexpr):
    """Keys and values [keys, D] of one key/value head, waited for together."""
    at = kv + key[:, None] * ROW + tl.arange(0, D)[None, :]
    mask = live[:, None]
    k = tl.load(at, mask, other=0, volatile=WAIT)
    v = tl.load(at + D, mask, other=0, volatile=WAIT)
    if WAIT and not INTERPRETED:
        # Coalesced, a thread's elements are neighbours, so the address of the first is enough.
        EACH: tl.constexpr = at.numel // tl.extra.cuda.num_threads()
        k, v = tl.inline_asm_elementwise(
            wait_code(2, EACH, 16, 2 * D),
            wait_operands(2, EACH, 16),
            [k, v, at.to(tl.int64)],
            dtype=(tl.int16, tl.int16),
            is_pure=False,
            pack=EACH,
        )
    return k.to(tl.float16, bitcast=True), v.to(tl.float16, bitcast=True)


@triton.jit
def _attend(
    q_MD, kv, T, M: tl.constexpr, ROW: tl.constexpr, KEYS: tl.constexpr, LONG: tl.constexpr, WAIT: tl.constexpr
):
    """softmax(q k^T) v of the M queries that share one key/value head; 1 / sqrt(D) and log2 e are in q already.

    Column 15 of v is 1, so column 15 of the product is the softmax's denominator.
    """
    key = tl.arange(0, KEYS)
    last = tl.arange(0, D)[None, :] == D - 1
    if LONG:
        top = tl.full([M], float("-inf"), tl.float32)
        o_MD = tl.zeros([M, D], tl.float32)
        for start in tl.range(0, T, KEYS):
            k, v = _keys_values(kv, start + key, start + key < T, ROW, WAIT)
            s_MK = tl.where((start + key < T)[None, :], tl.dot(q_MD, tl.trans(k)), float("-inf"))
            new = tl.maximum(top, tl.max(s_MK, 1))
            p_MK = tl.exp2(s_MK - new[:, None]).to(tl.float16)
            o_MD = tl.dot(p_MK, v, o_MD * tl.exp2(top - new)[:, None])
            top = new
    else:
        k, v = _keys_values(kv, key, key < T, ROW, WAIT)
        s_MK = tl.where((key < T)[None, :], tl.dot(q_MD, tl.trans(k)), float("-inf"))
        p_MK = tl.exp2(s_MK - tl.max(s_MK, 1)[:, None]).to(tl.float16)
        o_MD = tl.dot(p_MK, v)
    return o_MD / tl.sum(tl.where(last, o_MD, 0), 1)[:, None]


@triton.jit
def _send_keys_values(n_RN, w_kvN, w_kv, kv, t_R, own_R, ROW: tl.constexpr, N: tl.constexpr):
    """Keys and values of the tile's own rows, N columns at a time; [token, local head, key | value, D]."""
    for i in tl.static_range(ROW // N):
        kv_RN = tl.dot(n_RN, _now(w_kvN)).to(tl.float16)
        if i + 1 < ROW // N:
            w_kvN = _weights(w_kv + (i + 1) * N, WIDE, N, ROW)
        bits = kv_RN.to(tl.int16, bitcast=True)
        at = kv + t_R[:, None] * ROW + i * N + tl.arange(0, N)[None, :]
        tl.store(at, tl.where(bits == -1, 0x7FFF, bits).to(tl.int16), own_R[:, None])


@triton.jit
def _attention(
    n_RN, w_qN, w_q, w_o, kv, T,
    G: tl.constexpr, X: tl.constexpr, KEYS: tl.constexpr, LONG: tl.constexpr, WAIT: tl.constexpr,
    STACKS: tl.constexpr,
):  # fmt: skip
    """This program's heads of attention(n) w_o, a partial sum [R, 128].

    X query heads of one key/value head stand below each other as a stack of 16 X rows, so grouping makes the product
    taller instead of repeating keys and values. STACKS is G, or a multiple where more than 4 heads share one: a taller
    stack runs out of registers.
    """
    o_RN = tl.zeros([ROWS, WIDE], tl.float32)
    for g in tl.static_range(STACKS):
        w_oN = _weights(w_o + g * X * D * WIDE, X * D, WIDE)
        q_RN = tl.dot(n_RN, _now(w_qN)).to(tl.float16)
        if g + 1 < STACKS:
            w_qN = _weights(w_q + (g + 1) * WIDE * X * D, WIDE, X * D)
        q_MD = tl.reshape(tl.permute(tl.reshape(q_RN, [ROWS, X, D]), [1, 0, 2]), [X * ROWS, D])
        a_MD = _attend(q_MD, kv + g * G // STACKS * 2 * D, T, X * ROWS, 2 * G * D, KEYS, LONG, WAIT).to(tl.float16)
        a_RN = tl.reshape(tl.permute(tl.reshape(a_MD, [X, ROWS, D]), [1, 0, 2]), [ROWS, X * D])
        o_RN = tl.dot(a_RN, _now(w_oN), o_RN)
    return o_RN


@triton.jit
def _mlp(n_RN, w_1N, w_1, w_2, s, S: tl.constexpr, CHUNK: tl.constexpr):
    """This program's hidden columns of swish(n w_1) w_2, a partial sum [R, 128]."""
    OWN: tl.constexpr = PAD_HIDDEN // S
    o_RN = tl.zeros([ROWS, WIDE], tl.float32)
    for i in tl.static_range(OWN // CHUNK):
        w_2N = _weights(w_2 + i * CHUNK * WIDE, CHUNK, WIDE)
        m_RN = _swish(tl.dot(n_RN, _now(w_1N)))
        if i + 1 < OWN // CHUNK:
            w_1N = _weights(w_1 + (i + 1) * WIDE * CHUNK, WIDE, CHUNK)
        o_RN = tl.dot(_ones(m_RN, s * OWN + i * CHUNK, HIDDEN, CHUNK), _now(w_2N), o_RN)
    return o_RN


@triton.jit
def _front(x, w, b, t_R, T, s, S: tl.constexpr, V6: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr):
    """This program's share of the reduction in the two products of the input, each [R, N]: into the neck and past it.

    v4's convolution over three tokens is a plain product: channel-last, the values of tokens t-1 .. t+1 are adjacent.
    """
    C: tl.constexpr = 384 if V6 else 480
    TRUE_K: tl.constexpr = 384 if V6 else 1440
    K: tl.constexpr = 384 if V6 else 1536
    N: tl.constexpr = 128 if V6 else 64
    n = tl.arange(0, N)[None, :]
    share = tl.where(s == 0, 1.0, 0.0)
    into_RN = tl.zeros([ROWS, N], tl.float32) + tl.load(b + n) * share
    past_RN = tl.zeros([ROWS, N], tl.float32) + tl.load(b + N + n) * share
    row_R = t_R if V6 else t_R - 1
    for i in tl.range(0, K // S // CHUNK, num_stages=STAGES):
        k = s * (K // S) + i * CHUNK + tl.arange(0, CHUNK)
        at = row_R[:, None] * C + k[None, :]
        x_RK = tl.load(x + at, (at >= 0) & (at < T * C) & (k < TRUE_K)[None, :], other=0)
        w_KN = w + k[:, None] * N + n
        into_RN = tl.dot(x_RK, tl.load(w_KN), into_RN)
        past_RN = tl.dot(x_RK, tl.load(w_KN + K * N), past_RN)
    return into_RN, past_RN


@triton.jit
def _row(v_RN, by, N: tl.constexpr):
    """Row r + by of v in row r (edges repeat; they are halo rows that nobody reads)."""
    r = tl.minimum(tl.maximum(tl.arange(0, ROWS)[:, None] + by, 0), ROWS - 1)
    return tl.gather(v_RN, r + tl.zeros([ROWS, N], tl.int32), 0)


@triton.jit
def _depthwise(m_RN, b):
    """The sum m + swish(depthwise 1x7 of m)."""
    n = tl.arange(0, WIDE)[None, :]
    d_RN = tl.zeros([ROWS, WIDE], tl.float32) + tl.load(b + 2 * WIDE + n)
    for j in tl.static_range(7):
        d_RN += _row(m_RN, j - 3, WIDE) * tl.load(b + (5 + j) * WIDE + n)
    return m_RN + _swish(d_RN)


@triton.jit
def _last_convolution(n_RN, w_3, w_4, in_line_R, s, S: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr):
    """This program's channels of v4's conv3, swish and their half of conv4 [R, 64]; the concatenation never exists.

    The taps' accumulators are shifted by a row once, instead of the activations in every chunk.
    """
    N: tl.constexpr = 64
    a0 = tl.zeros([ROWS, N], tl.float32)
    a1 = tl.zeros([ROWS, N], tl.float32)
    a2 = tl.zeros([ROWS, N], tl.float32)
    for i in tl.range(0, Z // S // CHUNK, num_stages=STAGES):
        c = s * (Z // S // CHUNK) + i
        z_RN = _swish(tl.dot(n_RN, _weights(w_3 + c * WIDE * CHUNK, WIDE, CHUNK)))
        z_RN = tl.where(in_line_R[:, None], z_RN, 0).to(tl.float16)
        at = w_4 + c * CHUNK * N
        a0 = tl.dot(z_RN, _weights(at, CHUNK, N), a0)
        a1 = tl.dot(z_RN, _weights(at + Z * N, CHUNK, N), a1)
        a2 = tl.dot(z_RN, _weights(at + 2 * Z * N, CHUNK, N), a2)
    return a1 + _row(a0, -1, N) + _row(a2, 1, N)


@triton.jit
def neck(
    x, w, b, out, slots, kv, count, T,
    KV_HEADS: tl.constexpr, S: tl.constexpr, V6: tl.constexpr, LONG: tl.constexpr, PHASE: tl.constexpr,
    FRONT: tl.constexpr, FRONT_STAGES: tl.constexpr, MLP: tl.constexpr,
    BACK: tl.constexpr, BACK_STAGES: tl.constexpr, CLUSTER: tl.constexpr,
):  # fmt: skip
    """From x [B, T, C] FP16 to out [B, T, 120] FP16. Grid: (tiles S, B). PHASE -1: all in one launch; 0, 1, 2: a third.

    slots [B, tiles, S, SLOT] int32, kv [B, 2, S, tiles * valid, 2 G D] int16 and count [B, S] int32 are scratch that
    rests at -1 in every bit. w, b: kernels.pack. FRONT, MLP, BACK: chunk of the reduction or channels of a loop.
    CLUSTER: see kernels.exchange.swap.
    """
    HALO: tl.constexpr = 3 if V6 else 1
    VALID: tl.constexpr = ROWS - 2 * HALO
    C: tl.constexpr = 384 if V6 else 480
    IN: tl.constexpr = 128 if V6 else 64  # columns of the front's two products
    K: tl.constexpr = 384 if V6 else 1536
    SLOT: tl.constexpr = ROWS * (2 * IN + 4 * WIDE)
    PAST: tl.constexpr = ROWS * IN
    STEP: tl.constexpr = 2 * ROWS * IN
    G: tl.constexpr = KV_HEADS // S if KV_HEADS > S else 1
    X: tl.constexpr = 4 if HEADS // S // G > 4 else HEADS // S // G
    STACKS: tl.constexpr = HEADS // S // X
    KV_ROW: tl.constexpr = 2 * G * D
    KV_COLUMNS: tl.constexpr = 64 if KV_ROW > 64 else KV_ROW
    KEYS: tl.constexpr = 64
    W_2: tl.constexpr = 2 * K * IN
    W_BLOCKS: tl.constexpr = W_2 + (0 if V6 else 64 * WIDE)
    W_KV: tl.constexpr = WIDE * KV_ROW * S
    W_BLOCK: tl.constexpr = W_KV + 2 * WIDE * WIDE + 2 * WIDE * PAD_HIDDEN
    W_3: tl.constexpr = W_BLOCKS + 2 * W_BLOCK
    W_4: tl.constexpr = W_3 + WIDE * Z
    W_5: tl.constexpr = W_4 + 3 * Z * 64
    ALL: tl.constexpr = PHASE < 0

    tile = tl.program_id(0) // S
    s = tl.program_id(0) % S
    tiles = tl.num_programs(0) // S
    image = tl.program_id(1).to(tl.int64)
    r_R = tl.arange(0, ROWS)
    t_R = tile * VALID - HALO + r_R
    in_line_R = (t_R >= 0) & (t_R < T)
    own_R = (r_R >= HALO) & (r_R < ROWS - HALO) & (t_R < T)
    n_N = tl.arange(0, WIDE)[None, :]
    y_N = tl.arange(0, IN)[None, :]
    x += image * T * C
    slots += (image * tiles + tile) * (S * SLOT)
    kv += image * (2 * S * tiles * VALID * KV_ROW) + s * (tiles * VALID * KV_ROW)
    kv_block = S * tiles * VALID * KV_ROW
    count += image * S + s
    state_h = (slots + STEP + r_R[:, None] * WIDE + n_N).to(tl.pointer_type(tl.float32))
    state_y = (slots + PAST + r_R[:, None] * IN + y_N).to(tl.pointer_type(tl.float32))

    if PHASE <= 0:
        if CLUSTER:
            open_cluster(SLOT, 6, CLUSTER)
        u_RN, y_RN = _front(x, w, b, t_R, T, s, S, V6, FRONT, FRONT_STAGES)
        if not V6:
            w_2N = _weights(w + W_2, 64, WIDE)
        if CLUSTER:
            join_cluster()
        if S > 1:
            u_RN = swap(u_RN, slots, s, 0, SLOT, 0, CLUSTER)
        u_RN = _swish(u_RN)
        if V6:
            h_RN = _depthwise(tl.where(in_line_R[:, None], u_RN, 0), b)
        else:
            h_RN = _swish(tl.dot(_ones(u_RN, 0, 60, 64), _now(w_2N)))
    else:
        h_RN = tl.load(state_h, cache_modifier=".cg")
        y_RN = tl.load(state_y, cache_modifier=".cg")

    w_kv = w + W_BLOCKS + s * WIDE * KV_ROW
    w_kvN = _weights(w_kv, WIDE, KV_COLUMNS, KV_ROW)
    n_RN = _norm(h_RN, 1e-5)
    for block in tl.static_range(2):
        at = w + W_BLOCKS + block * W_BLOCK
        w_q = at + W_KV + s * (WIDE * WIDE // S)
        w_o = at + W_KV + WIDE * WIDE + s * (WIDE * WIDE // S)
        w_1 = at + W_KV + 2 * WIDE * WIDE + s * (WIDE * PAD_HIDDEN // S)
        w_qN = _weights(w_q, WIDE, X * D)
        if ALL or PHASE == block:
            _send_keys_values(n_RN, w_kvN, w_kv, kv + block * kv_block, t_R, own_R, KV_ROW, KV_COLUMNS)
        if ALL or PHASE == block + 1:
            o_RN = _attention(n_RN, w_qN, w_q, w_o, kv + block * kv_block, T, G, X, KEYS, LONG, ALL, STACKS)
            if ALL and block == 1:
                # All keys of block 1 are here, so all programs are done with those of block 0.
                line = tl.arange(0, KV_ROW)[None, :]
                tl.store(kv + t_R[:, None] * KV_ROW + line, tl.full([ROWS, KV_ROW], -1, tl.int16), own_R[:, None])
                tl.atomic_add(count, 1, sem="relaxed")
            w_1N = _weights(w_1, WIDE, MLP)
            if S > 1:
                o_RN = swap(o_RN, slots, s, STEP + 2 * block * ROWS * WIDE, SLOT, 1 + 2 * block, CLUSTER)
            h_RN += o_RN
            o_RN = _mlp(_norm(h_RN, 1e-5), w_1N, w_1, w_1 + WIDE * PAD_HIDDEN, s, S, MLP)
            if block == 0:
                w_kv = at + W_BLOCK + s * WIDE * KV_ROW
                w_kvN = _weights(w_kv, WIDE, KV_COLUMNS, KV_ROW)
            if S > 1:
                o_RN = swap(o_RN, slots, s, STEP + (2 * block + 1) * ROWS * WIDE, SLOT, 2 + 2 * block, CLUSTER)
            h_RN += o_RN
            n_RN = _norm(h_RN, 1e-5)

    if ALL or PHASE == 2:
        if not V6:
            y_RN += _last_convolution(_norm(h_RN, 1e-6), w + W_3, w + W_4, in_line_R, s, S, BACK, BACK_STAGES)
            w_5N = _weights(w + W_5, 64, WIDE)
        if S > 1:
            y_RN = swap(y_RN, slots, s, PAST, SLOT, 5, CLUSTER)
        y_RN = _swish(y_RN)
        last_RN = _last_norm(h_RN, b) + y_RN if V6 else _swish(tl.dot(_ones(y_RN, 0, 60, 64), _now(w_5N)))
        # Every program of the tile has all of it; each stores its share of the columns.
        o = out + image * T * WIDTH + t_R[:, None] * WIDTH + n_N
        tl.store(o, last_RN.to(tl.float16), own_R[:, None] & (n_N < WIDTH) & (n_N // (WIDE // S) == s))
        if ALL:
            _leave(kv + kv_block, count, tiles, T, KV_ROW)
    else:
        tl.store(state_h, h_RN)
        if PHASE == 0:
            tl.store(state_y, y_RN)


@triton.jit
def _last_norm(h_RN, b):
    """v6 ends in its normalisation, so gamma and beta have no next linear to be folded into."""
    n = tl.arange(0, WIDE)[None, :]
    total, squares = tl.sum(h_RN, 1), tl.sum(h_RN * h_RN, 1)
    mean = total / WIDTH
    scale = tl.rsqrt(tl.maximum(squares / WIDTH - mean * mean, 0) + 1e-6)
    return (h_RN - mean[:, None]) * scale[:, None] * tl.load(b + 3 * WIDE + n) + tl.load(b + 4 * WIDE + n)


@triton.jit
def _leave(kv, count, tiles, T, KV_ROW: tl.constexpr):
    """The last block's keys and values back to rest, by whichever program sees that all have read them.

    Each adds to `count` after it read; the last to add is sure to see the full count here. If two see it, both write
    the same; each decides as a whole (the maximum), because one that resets `count` could split the threads of another.
    `count` rests at -1.
    """
    if tl.max(tl.load(count + tl.zeros([128], tl.int32), volatile=True)) == tiles - 1:
        for start in tl.range(0, T, 64):
            t = start + tl.arange(0, 64)[:, None]
            line = tl.arange(0, KV_ROW)[None, :]
            tl.store(kv + t * KV_ROW + line, tl.full([64, KV_ROW], -1, tl.int16), t < T)
        tl.store(count, -1)
