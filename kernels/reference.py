"""The operators of this package in numpy: the definition that every implementation is measured against.

Axes in names:
    B batch, T time steps, C channels, K classes, N batch of a head alone
    H query heads (8), G key/value heads (a divisor of H), D size of a head (15)
    J taps of a convolution along T; I, O channels in and out of a linear or a convolution

Activations are channel-last, x_BTC. A linear's weights are [I, O], so that y = x w + b; those of a convolution along T
are [J, I, O] with tap j reading the token t + j - J // 2, zero outside the line. Batch normalisation is folded before.

    swish(v)     = v / (1 + exp(-v))
    norm(v)      = (v - mean_C v) / sqrt(var_C v + eps) gamma + beta                     eps 1e-5 in blocks, 1e-6 after
    attention(v) = concat_h [softmax_t(q_h k_g(h)^T / sqrt(D)) v_g(h)] w_o + b_o           g(h) = h // (H / G)
    block(v)     : v = v + attention(norm(v)); v = v + swish(norm(v) w_1 + b_1) w_2 + b_2

Sources: PP-OCRv4 and PP-OCRv6 recognisers (the exported graphs, node by node); SVTR, Du et al. 2022, arXiv 2205.00159,
for the block; grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from models.errors import BadInput
from models.spec import Array

Form = Literal["v4", "v6"]  # PP-OCRv4 and v5 share a neck
Weights = Mapping[str, Array]
F64 = npt.NDArray[np.float64]

HEADS = 8
HEAD_SIZE = 15
WIDTH = HEADS * HEAD_SIZE
MLP = 240
BLOCKS = 2
INPUT = {"v4": 480, "v6": 384}
BOTTLENECK = 60
BLOCK_EPS = 1e-5
LAST_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Neck:
    """What a neck is but for its numbers: its form and how many key/value heads it has."""

    form: Form
    kv_heads: int = HEADS

    def __post_init__(self) -> None:
        """Refuse what the operator is not defined for."""
        if self.form not in INPUT:
            msg = f"no neck of form '{self.form}'; there are v4 (also of PP-OCRv5) and v6"
            raise BadInput(msg)
        if self.kv_heads < 1 or HEADS % self.kv_heads:
            msg = f"{self.kv_heads} key/value heads do not divide {HEADS} query heads"
            raise BadInput(msg)

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return INPUT[self.form]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight with its shape, in the order in which the function's inputs are written."""
        c, kv = self.channels, self.kv_heads * HEAD_SIZE
        if self.form == "v4":
            front = {"conv1": (3, c, BOTTLENECK), "conv2": (BOTTLENECK, WIDTH)}
            back = {"conv3": (WIDTH, c), "conv4": (3, 2 * c, BOTTLENECK), "conv5": (BOTTLENECK, WIDTH)}
        else:
            front = {"main": (c, WIDTH), "skip": (c, WIDTH), "depthwise": (7, WIDTH)}
            back = {}
        linears: dict[str, tuple[int, ...]] = {**front}
        norms: list[str] = []
        for i in range(BLOCKS):
            norms += [f"block{i}.norm1", f"block{i}.norm2"]
            linears |= {
                f"block{i}.q": (WIDTH, WIDTH),
                f"block{i}.k": (WIDTH, kv),
                f"block{i}.v": (WIDTH, kv),
                f"block{i}.o": (WIDTH, WIDTH),
                f"block{i}.mlp1": (WIDTH, MLP),
                f"block{i}.mlp2": (MLP, WIDTH),
            }
        linears |= back
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in linears.items():
            shapes |= {f"{name}.w": shape, f"{name}.b": shape[-1:]}
        for name in [*norms, "norm"]:
            shapes |= {f"{name}.gamma": (WIDTH,), f"{name}.beta": (WIDTH,)}
        return shapes

    def check(self, weights: Weights) -> None:
        """Refuse weights that are not exactly the ones of this neck."""
        shapes = self.shapes()
        if set(weights) != set(shapes):
            missing, extra = sorted(set(shapes) - set(weights)), sorted(set(weights) - set(shapes))
            msg = f"the neck's weights lack {missing or 'nothing'} and have {extra or 'nothing'} too many"
            raise BadInput(msg)
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                msg = f"{name} is {list(weights[name].shape)}, this neck needs {list(shape)}"
                raise BadInput(msg)


def swish(v: F64) -> F64:
    """The product v sigmoid(v), with the sigmoid spelled by tanh so that exp never overflows."""
    return v * (0.5 + 0.5 * np.tanh(0.5 * v))


def convolve(x_BTI: F64, w_JIO: F64) -> F64:
    """Convolution along T with zero padding: y_t = sum_j x_(t + j - J // 2) w_j."""
    taps = len(w_JIO)
    padded = np.pad(x_BTI, ((0, 0), (taps // 2, taps // 2), (0, 0)))
    steps = x_BTI.shape[1]
    return np.asarray(sum(padded[:, j : j + steps] @ w_JIO[j] for j in range(taps)))


def normalise(v_BTC: F64, gamma_C: F64, beta_C: F64, eps: float) -> F64:
    """Layer normalisation over C."""
    centred = v_BTC - v_BTC.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma_C + beta_C)


def attention(q_BTC: F64, k_BTE: F64, v_BTE: F64) -> F64:
    """Grouped-query attention over T without mask or position; E = G D, heads in order inside C and E."""
    batch, steps, _ = q_BTC.shape
    q_BHTD = q_BTC.reshape(batch, steps, HEADS, HEAD_SIZE).transpose(0, 2, 1, 3)
    k_BGTD, v_BGTD = (e.reshape(batch, steps, -1, HEAD_SIZE).transpose(0, 2, 1, 3) for e in (k_BTE, v_BTE))
    group = HEADS // k_BGTD.shape[1]
    k_BHTD, v_BHTD = np.repeat(k_BGTD, group, 1), np.repeat(v_BGTD, group, 1)
    s_BHTT = q_BHTD @ k_BHTD.swapaxes(2, 3) / HEAD_SIZE**0.5
    p_BHTT = np.exp(s_BHTT - s_BHTT.max(-1, keepdims=True))
    p_BHTT /= p_BHTT.sum(-1, keepdims=True)
    return np.asarray((p_BHTT @ v_BHTD).transpose(0, 2, 1, 3).reshape(batch, steps, WIDTH))


def neck(spec: Neck, weights: Weights, x_BTC: Array, dtype: npt.DTypeLike = np.float64) -> Array:
    """The neck of a recogniser, [B, T, C] to [B, T, 120], computed in `dtype`.

    v4:  u = swish(conv1x3(x));  h = swish(u w_conv2);  h = norm(block(block(h)))
         z = swish(h w_conv3);   y = swish(conv1x3(concat(x, z)));  out = swish(y w_conv5)
    v6:  m = swish(x w_main);    h = m + swish(depthwise1x7(m));    out = norm(block(block(h))) + swish(x w_skip)
    """
    spec.check(weights)
    if x_BTC.ndim != 3 or x_BTC.shape[-1] != spec.channels:  # noqa: PLR2004 (batch, time, channels)
        msg = f"the neck's input is {list(x_BTC.shape)}, this form needs [batch, time, {spec.channels}]"
        raise BadInput(msg)
    w = {name: np.asarray(value, dtype) for name, value in weights.items()}
    x = np.asarray(x_BTC, dtype)

    def linear(v: F64, name: str) -> F64:
        return np.asarray(v @ w[f"{name}.w"] + w[f"{name}.b"])

    def conv(v: F64, name: str) -> F64:
        return np.asarray(convolve(v, w[f"{name}.w"]) + w[f"{name}.b"])

    if spec.form == "v4":
        h = swish(linear(swish(conv(x, "conv1")), "conv2"))
    else:
        m = swish(linear(x, "main"))
        taps_JIO = w["depthwise.w"][:, :, None] * np.eye(WIDTH, dtype=x.dtype)
        h = m + swish(convolve(m, taps_JIO) + w["depthwise.b"])
    for i in range(BLOCKS):
        at = f"block{i}"
        n = normalise(h, w[f"{at}.norm1.gamma"], w[f"{at}.norm1.beta"], BLOCK_EPS)
        h = h + linear(attention(linear(n, f"{at}.q"), linear(n, f"{at}.k"), linear(n, f"{at}.v")), f"{at}.o")
        n = normalise(h, w[f"{at}.norm2.gamma"], w[f"{at}.norm2.beta"], BLOCK_EPS)
        h = h + linear(swish(linear(n, f"{at}.mlp1")), f"{at}.mlp2")
    h = normalise(h, w["norm.gamma"], w["norm.beta"], LAST_EPS)
    if spec.form == "v6":
        return h + swish(linear(x, "skip"))
    z = swish(linear(h, "conv3"))
    return swish(linear(swish(conv(np.concatenate([x, z], -1), "conv4")), "conv5"))


def linear_ctc_head(x_NTC: Array, w_CK: Array, b_K: Array) -> tuple[npt.NDArray[np.int64], F64]:
    """The last linear and `ctc_head` of its result: what the fused head computes without writing the scores."""
    x, w, b = (np.asarray(a, np.float64) for a in (x_NTC, w_CK, b_K))
    if x.shape[-1] != len(w) or b.shape != w.shape[1:]:
        msg = f"a head of {list(w.shape)} with bias {list(b.shape)} does not fit {x.shape[-1]} channels"
        raise BadInput(msg)
    return ctc_head(x @ w + b)


def ctc_head(logits_NTK: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Best class [N, T] of each time step, and its probability [N, T].

        index_nt       = argmax_k z_ntk                                  (the first of equal ones)
        probability_nt = max_k softmax(z_nt)_k = 1 / sum_k exp(z_ntk - max_j z_ntj)

    which is greedy decoding's first half (Graves et al. 2006, "Connectionist Temporal Classification",
    section 3.2: best path decoding) with the softmax spelled so that exp never overflows.
    """
    z_NTK = np.asarray(logits_NTK, np.float64)
    best = z_NTK.max(axis=-1, keepdims=True)
    return z_NTK.argmax(axis=-1), 1 / np.exp(z_NTK - best).sum(axis=-1)


def ctc_head_of_softmax(probabilities_NTK: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The same of a graph whose last operator is a softmax: its largest element and where that stands."""
    p_NTK = np.asarray(probabilities_NTK, np.float64)
    return p_NTK.argmax(axis=-1), p_NTK.max(axis=-1)
