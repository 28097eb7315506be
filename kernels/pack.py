"""The neck's and the head's weights as the kernels read them: folded, padded, in one flat FP16 and one FP32 buffer.

Folded in float64: gamma and beta of a block's normalisation into the linear after it, 1 / sqrt(D) log2 e into q, nearly
every bias into a row of padding that the kernel multiplies by 1.
Padded: 15 -> 16 (head), 60 -> 64, 120 -> 128, 240 -> 256, 480 -> 512, 1440 -> 1536, with zeros.
Laid out for S programs that share a row tile's channels: what one of them reads of a matrix is contiguous.

FP16 buffer, in order ([rows, columns], row-major; s over S programs, g over the program's key/value heads,
stack over its query heads, at most 4 of one key/value head):
    v4 conv1 [1536, 64], x half of conv4 [1536, 64], conv2 [64, 128];  v6 main, skip [384, 128]
    block 0, 1: s [128, g (key 16 | value 16)];  s, stack [128, queries];  s, stack [queries, 128];
                [128, 256] in chunks of columns;  [256, 128]
    v4 conv3 in chunks of columns [128, 512]; z half of conv4 [3, 512, 64];  conv5 [64, 128]
FP32 buffer: v4 biases of conv1, conv4 [64]; v6 biases of main, skip, depthwise, gamma, beta of the last norm [128],
    depthwise [7, 128].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.reference import BLOCKS, BOTTLENECK, F64, HEAD_SIZE, HEADS, MLP, WIDTH, Neck, Weights
from models.errors import BadInput
from models.spec import Array

D = 16
STACK = 4  # query heads of one product with their key/value head
WIDE = 128
PAD_MLP = 256
Z = 512


@dataclass(frozen=True, slots=True)
class Packed:
    """The two buffers of a kernel's weights."""

    w: Array
    b: Array


def pack_neck(spec: Neck, weights: Weights, split: int, mlp: int, back: int) -> Packed:
    """Weights for `split` programs a tile, chunks of `mlp` hidden columns and of `back` channels of conv3."""
    spec.check(weights)
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    if spec.form == "v4":
        c = spec.channels
        halves = (w["conv1.w"], w["conv4.w"][:, :c])
        parts = [_pad(half.reshape(3 * c, BOTTLENECK), 1536, 64) for half in halves]
        parts.append(_pad(_biased(w["conv2.w"], w["conv2.b"]), 64, WIDE))
        biases = [_pad(w[f"{name}.b"][None], 1, 64) for name in ("conv1", "conv4")]
    else:
        parts = [_pad(w[f"{name}.w"], None, WIDE) for name in ("main", "skip")]
        names = ("main.b", "skip.b", "depthwise.b", "norm.gamma", "norm.beta")
        biases = [_pad(w[name][None], 1, WIDE) for name in names]
        biases += [_pad(tap[None], 1, WIDE) for tap in w["depthwise.w"]]
    for i in range(BLOCKS):
        parts += _block(spec, w, f"block{i}.", split, mlp)
    if spec.form == "v4":
        after = _pad(_after_norm(w, "norm", "conv3"), WIDE, Z)
        parts += np.split(after, Z // back, axis=1)
        parts += [_pad(tap, Z, 64) for tap in w["conv4.w"][:, spec.channels :]]
        parts.append(_pad(_biased(w["conv5.w"], w["conv5.b"]), 64, WIDE))
    return Packed(_half(np.concatenate([part.ravel() for part in parts])), np.concatenate(biases).ravel().astype("f4"))


def pack_head(w_CK: Array, b_K: Array, chunk: int) -> Array:
    """Weights of the CTC head times log2 e, classes padded to whole chunks: [chunks, 128, chunk], biases in row 120.

    A padded class has weight 0 and the lowest bias there is, so it is never the best and adds nothing to the sum.
    """
    w, b = np.asarray(w_CK, np.float64), np.asarray(b_K, np.float64)
    if w.ndim != 2 or w.shape[0] != WIDTH or b.shape != w.shape[1:]:  # noqa: PLR2004 (a matrix)
        msg = f"a head of {list(w.shape)} with bias {list(b.shape)}; the kernel is for {WIDTH} channels"
        raise BadInput(msg)
    classes = -(-w.shape[1] // chunk) * chunk
    w_CK = _pad(_biased(w, b) * np.log2(np.e), WIDE, classes)
    w_CK[WIDTH, w.shape[1] :] = np.finfo(np.float16).min
    return _half(w_CK.reshape(WIDE, -1, chunk).swapaxes(0, 1).ravel())


def _block(spec: Neck, w: dict[str, F64], at: str, split: int, mlp: int) -> list[F64]:
    """One attention block: keys and values, queries, output, and the two linears of the MLP."""
    scale = np.log2(np.e) / np.sqrt(HEAD_SIZE)
    q = _heads(_after_norm(w, at + "norm1", at + "q") * scale)  # [121, H, 16]
    k, v = (_heads(_after_norm(w, at + "norm1", at + name)) for name in ("k", "v"))
    v[WIDTH, :, HEAD_SIZE] = 1  # the softmax's denominator
    o = np.zeros((HEADS, D, WIDTH))
    o[:, :HEAD_SIZE] = w[at + "o.w"].reshape(HEADS, HEAD_SIZE, WIDTH)
    o[0, HEAD_SIZE] = w[at + "o.b"]
    local = max(1, spec.kv_heads // split)
    queries = min(HEADS // split // local, STACK)
    firsts = [s * (HEADS // split) for s in range(split)]
    kv_parts, q_parts, o_parts = [], [], []
    for first in firsts:
        groups = [(first + g * (HEADS // split // local)) // (HEADS // spec.kv_heads) for g in range(local)]
        kv_parts.append(_pad(np.concatenate([np.concatenate([k[:, g], v[:, g]], 1) for g in groups], 1), WIDE, None))
        for at_head in range(first, first + HEADS // split, queries):
            mine = slice(at_head, at_head + queries)
            q_parts.append(_pad(q[:, mine].reshape(WIDTH + 1, -1), WIDE, None))
            o_parts.append(_pad(o[mine].reshape(-1, WIDTH), None, WIDE))
    mlp1 = _pad(_after_norm(w, at + "norm2", at + "mlp1"), WIDE, PAD_MLP)
    mlp2 = _pad(_biased(w[at + "mlp2.w"], w[at + "mlp2.b"]), PAD_MLP, WIDE)
    return [*kv_parts, *q_parts, *o_parts, *np.split(mlp1, PAD_MLP // mlp, axis=1), mlp2]


def _after_norm(w: dict[str, F64], norm: str, linear: str) -> F64:
    """[121, O]: (n gamma + beta) w + b = n (gamma w) + (beta w + b), the bias as the last row."""
    matrix = w[f"{linear}.w"]
    return _biased(w[f"{norm}.gamma"][:, None] * matrix, w[f"{norm}.beta"] @ matrix + w[f"{linear}.b"])


def _biased(matrix: F64, bias: F64) -> F64:
    return np.concatenate([matrix, bias[None]])


def _heads(matrix: F64) -> F64:
    """[rows, heads 15] to [rows, heads, 16]."""
    return np.pad(matrix.reshape(len(matrix), -1, HEAD_SIZE), ((0, 0), (0, 0), (0, D - HEAD_SIZE)))


def _pad(matrix: F64, rows: int | None, columns: int | None) -> F64:
    rows, columns = rows or len(matrix), columns or matrix.shape[1]
    return np.pad(matrix, ((0, rows - len(matrix)), (0, columns - matrix.shape[1])))


def _half(values: F64) -> Array:
    """FP16, refusing what it cannot hold: an infinite weight would be a silent NaN later."""
    with np.errstate(over="ignore"):  # looked for below
        half: Array = values.astype(np.float16)
    if not np.isfinite(half).all():
        msg = f"a folded weight of {np.abs(values).max():g} does not fit FP16"
        raise BadInput(msg)
    return half


assert MLP < PAD_MLP  # noqa: S101 (column 240 carries the bias)
