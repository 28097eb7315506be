"""The same operators in PyTorch, FP16, from the same channel-last layout: what the kernels are compared with.

Three spellings, since none is always the fastest; a factor is taken against the fastest that was compiled:
    softmax   attention as written, convolutions by F.conv1d
    sdpa      attention by scaled_dot_product_attention
    gemm      sdpa, and the convolutions as products of three tokens side by side, as our kernel sees them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own custom)

from kernels.reference import BLOCK_EPS, BLOCKS, HEAD_SIZE, HEADS, LAST_EPS, WIDTH, Neck
from models.errors import ModelError
from models.spec import Array

Tensors = Mapping[str, torch.Tensor]


def neck(spec: Neck, w: Tensors, x: torch.Tensor, spelling: str) -> torch.Tensor:
    """kernels.reference.neck in PyTorch; the spelling "gemm" matters to v4 only, whose convolutions mix channels."""

    def linear(v: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(v, w[f"{name}.w"], w[f"{name}.b"])

    def conv(v: torch.Tensor, name: str) -> torch.Tensor:
        if spelling == "gemm":
            p = F.pad(v, (0, 0, 1, 1))
            return F.linear(torch.cat([p[:, :-2], v, p[:, 2:]], 2), w[f"{name}.flat"], w[f"{name}.b"])
        return F.conv1d(v.transpose(1, 2), w[f"{name}.w"], w[f"{name}.b"], padding=1).transpose(1, 2)

    def norm(v: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return F.layer_norm(v, (WIDTH,), w[f"{name}.gamma"], w[f"{name}.beta"], eps)

    def heads(v: torch.Tensor) -> torch.Tensor:
        return v.unflatten(2, (-1, HEAD_SIZE)).transpose(1, 2)

    if spec.form == "v4":
        h = F.silu(linear(F.silu(conv(x, "conv1")), "conv2"))
    else:
        m = F.silu(linear(x, "main"))
        taps = w["depthwise.w"].unsqueeze(1)
        h = m + F.silu(F.conv1d(m.transpose(1, 2), taps, w["depthwise.b"], padding=3, groups=WIDTH).transpose(1, 2))
    for i in range(BLOCKS):
        n = norm(h, f"block{i}.norm1", BLOCK_EPS)
        q, k, v = (heads(linear(n, f"block{i}.{part}")) for part in "qkv")
        if spelling != "softmax":
            a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            group = HEADS // spec.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            a = torch.softmax(q @ k.transpose(2, 3) * HEAD_SIZE**-0.5, -1) @ v
        h = h + linear(a.transpose(1, 2).flatten(2), f"block{i}.o")
        h = h + linear(F.silu(linear(norm(h, f"block{i}.norm2", BLOCK_EPS), f"block{i}.mlp1")), f"block{i}.mlp2")
    h = norm(h, "norm", LAST_EPS)
    if spec.form == "v6":
        return h + F.silu(linear(x, "skip"))
    z = F.silu(linear(h, "conv3"))
    return F.silu(linear(F.silu(conv(torch.cat([x, z], 2), "conv4")), "conv5"))


def head(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear, softmax, best class and its probability."""
    probability, best = torch.softmax(F.linear(x, w, b), -1).max(-1)
    return best, probability


def to_device(weights: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Reference weights in PyTorch's layouts: linears [O, I], convolutions [O, I, J]."""
    tensors = {}
    for name, value in weights.items():
        t = torch.as_tensor(value).cuda().half()
        tensors[name] = t.permute(*reversed(range(t.ndim))).contiguous() if name.endswith(".w") else t
        if t.ndim == 3:  # noqa: PLR2004 (a convolution: taps, in, out)
            tensors[name.removesuffix("w") + "flat"] = t.flatten(0, 1).t().contiguous()
    return tensors


def time_us(call: Callable[[], object], *, graph: bool, rounds: int = 7, replays: int = 200) -> float:
    """Median time of a call in microseconds, eager or as a CUDA graph's replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        run = call
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                call()
            run = captured.replay
        times = []
        for _ in range(rounds + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            for _ in range(replays):
                run()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / replays)
    return float(sorted(times[1:])[rounds // 2])


def limits() -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), FLOP a second of a large FP16 product on random data."""
    a = torch.empty(2**30, dtype=torch.float16, device="cuda").normal_()
    b = torch.empty_like(a)
    copy_us = time_us(lambda: b.copy_(a), graph=False, rounds=3, replays=10)
    n = 8192
    m = torch.randn(n, n, device="cuda", dtype=torch.float16)
    o = torch.empty_like(m)
    matrix_us = time_us(lambda: torch.mm(m, m, out=o), graph=False, rounds=3, replays=10)
    return 2 * a.nbytes / copy_us * 1e6, 2 * n**3 / matrix_us * 1e6


class TorchRows:
    """Rows of the benchmark that PyTorch computes, each checked against the same truth as ours."""

    def __init__(self, spec: Neck, weights: Mapping[str, Array], w_CK: Array, b_K: Array, spelling: str) -> None:
        self._spec, self._compiled, self._spelling = spec, bool(spelling), spelling
        self._weights = to_device(weights)
        self._w_KC = torch.as_tensor(w_CK).cuda().half().t().contiguous()
        self._b_K = torch.as_tensor(b_K).cuda().half()

    def limits(self) -> dict[str, Any]:
        """Measured bandwidth and matrix rate."""
        bytes_per_s, flop_per_s = limits()
        return {"bytes_per_s": bytes_per_s, "flop_per_s": flop_per_s}

    def neck(self, x_BTC: Array, truth: Array, ours_error: float) -> list[dict[str, Any]]:
        """Eager, graph and compiled times; raises when our error is more than twice PyTorch's."""
        x = torch.as_tensor(x_BTC).cuda()
        rows = []
        for spelling in ("gemm", "sdpa", "softmax"):

            def call(spelling: str = spelling) -> torch.Tensor:
                return neck(self._spec, self._weights, x, spelling)

            out = call().float().cpu().numpy()
            error = float(np.linalg.norm(out - truth) / np.linalg.norm(truth))
            if ours_error > 2 * error:
                msg = f"our error {ours_error:g} is more than twice PyTorch's {error:g}"
                raise ModelError(msg)
            # Autotuning a spelling takes over a minute, so one is compiled.
            rows += self._times(
                call, f" {spelling}", {"error": error}, compiled=self._compiled and spelling == self._spelling
            )
        nct = x.transpose(1, 2).contiguous()
        us = time_us(lambda: nct.transpose(1, 2).contiguous(), graph=True)
        return [*rows, {"implementation": "transpose from [B, C, T]", "us": us}]

    def head(self, x_NC: Array) -> list[dict[str, Any]]:
        """The same of linear, softmax, max."""
        x = torch.as_tensor(x_NC).cuda()
        return self._times(lambda: head(self._w_KC, self._b_K, x), "", {}, compiled=self._compiled)

    @staticmethod
    def _times(
        call: Callable[[], Any], spelling: str, common: dict[str, Any], *, compiled: bool
    ) -> list[dict[str, Any]]:
        rows = [
            {"implementation": f"torch eager{spelling}", "us": time_us(call, graph=False, rounds=3, replays=50)},
            {"implementation": f"torch graph{spelling}", "us": time_us(call, graph=True)},
        ]
        if compiled:
            torch._dynamo.reset()  # noqa: SLF001 (the documented way to forget earlier shapes)
            fast = torch.compile(call, mode="max-autotune-no-cudagraphs", dynamic=False)
            rows.append({"implementation": f"torch compile{spelling}", "us": time_us(fast, graph=True)})
        return [row | common for row in rows]
