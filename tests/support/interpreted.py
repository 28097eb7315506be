"""Runs the Triton kernels in Triton's interpreter against the reference; prints a JSON row a case.

A program of its own, because the switch to the interpreter is read when Triton is imported. No PyTorch: numpy behind
the few methods that the interpreter asks of a tensor. The interpreter runs programs one after another, so forms that
wait for another program are tested only where there is no other.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from triton.runtime import interpreter

from kernels.conv_attention import neck
from kernels.ctc_head import ctc_head, ctc_merge
from kernels.pack import pack_head, pack_neck
from kernels.plan import SHORT, neck_scratch, tiles_of
from kernels.reference import Form, Neck, linear_ctc_head
from kernels.reference import neck as reference
from models.spec import Array

TYPES = {"float16": "fp16", "float32": "fp32", "int16": "i16", "int32": "i32", "int64": "i64"}
SEED = secrets.randbits(32)
RNG = np.random.default_rng(SEED)
NAN = float("nan")


class Tensor:
    """A numpy array as the interpreter wants it: on the host, its own storage."""

    def __init__(self, array: Array) -> None:
        self.array, self.dtype = array, TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Tensor:
        return self

    cpu = untyped_storage

    def new_empty(self, *_: object, **__: object) -> Tensor:
        return Tensor(self.array)

    def set_(self, storage: Tensor, *_: object) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, _: Tensor) -> None:
        """Nothing to copy back: there is one storage."""


def indices_of_one_element() -> None:
    """Triton 3.6 makes scalars arrays of one element and bounds of loops by int() of them, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor  # noqa: SLF001 (no public seam)

    def patched(tensor: type, scope: Any) -> None:  # noqa: ANN401 (the interpreter's own)
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched  # noqa: SLF001


def random_weights(spec: Neck) -> dict[str, Array]:
    weights = {}
    for name, shape in spec.shapes().items():
        values = RNG.standard_normal(shape) * (np.prod(shape[:-1]) ** -0.5 if name.endswith(".w") else 0.2)
        weights[name] = (values + name.endswith("gamma")).astype(np.float16)
    return weights


def rest(size_bytes: int, dtype: type) -> Array:
    return np.full(max(1, size_bytes // np.dtype(dtype).itemsize), -1, dtype)


def neck_case(form: Form, kv_heads: int, batch: int, steps: int, *, whole: bool = False, extreme: bool = False) -> dict:
    spec = Neck(form, kv_heads)
    weights = random_weights(spec)
    x_BTC = RNG.standard_normal((batch, steps, spec.channels)).astype(np.float16)
    if extreme:  # a line of nothing, and logits so far apart that the softmax is one key
        x_BTC[0] = 0
        weights["block0.q.w"] *= np.float16(40)
    truth = reference(spec, weights, x_BTC)
    packed = pack_neck(spec, weights, 1, 64, 128)
    out = np.full(truth.shape, NAN, np.float16)
    tiles = tiles_of(spec, steps)
    size, state = neck_scratch(spec, 1, tiles, batch), neck_scratch(spec, 2, tiles, batch)
    scratch = rest(size.slots if whole else state.slots, np.int32), rest(size.kv, np.int16), rest(size.count, np.int32)
    arguments = [Tensor(a) for a in (x_BTC, packed.w, packed.b, out, *scratch)]
    constants = {
        "KV_HEADS": kv_heads,
        "S": 1,
        "V6": form == "v6",
        "LONG": steps > SHORT,
        "FRONT": 64,
        "FRONT_STAGES": 2,
    }
    constants |= {"MLP": 64, "BACK": 128, "BACK_STAGES": 2, "CLUSTER": 0}
    for phase in (-1,) if whole else (0, 1, 2):
        neck[tiles, batch](*arguments, steps, PHASE=phase, **constants)
    at_rest = not whole or all((a == -1).all() for a in scratch)
    errors = (np.linalg.norm(y - truth) / np.linalg.norm(truth) for y in (out, reference(spec, weights, x_BTC, "f2")))
    error, limit = map(float, errors)
    return {"error": error, "limit": limit, "at_rest": bool(at_rest)}


def head_case(rows: int, classes: int, programs: int, form: str, *, large: bool = False) -> dict:
    w_CK = (3 * RNG.standard_normal((120, classes)) / np.sqrt(120)).astype(np.float16)
    b_K = RNG.standard_normal(classes).astype(np.float16)
    x_NC = RNG.standard_normal((rows, 120)).astype(np.float16)
    x_NC[0] = 0
    if large:
        x_NC[-1] *= 100
    truth, probability = linear_ctc_head(x_NC, w_CK, b_K)
    packed = pack_head(w_CK, b_K, 64)
    tiles, chunks = -(-rows // 64), packed.size // (128 * 64)
    best, got = np.full(rows, -7, np.int64), np.full(rows, NAN, np.float32)
    shares = np.full(tiles * 3 * 64 * 64, -1, np.int32)
    x, w, i, p, s = (Tensor(a) for a in (x_NC, packed, best, got, shares))
    constants = {"M": 64, "SLOTS": 64}
    own = 64 if form == "exchange" else 2
    ctc_head[programs, tiles](x, w, i, p, s, rows, chunks, N=64, FORM=form, STAGES=2, OWN=own, **constants)
    if form == "share":
        ctc_merge[32, tiles](i, p, s, rows, programs, OWN=2, **constants)
    scores = x_NC.astype(np.float64) @ w_CK.astype(np.float64) + b_K.astype(np.float64)
    each = np.arange(rows)
    slack = np.max((scores[each, truth] - scores[each, np.clip(best, 0, classes - 1)]) / (1 + np.abs(scores).max(1)))
    at_rest = form != "exchange" or bool((shares == -1).all())
    error = float(np.abs(got / probability - 1).max())
    return {"error": error, "limit": 2e-2, "slack": float(slack), "at_rest": at_rest}


def main() -> None:
    indices_of_one_element()
    for line in sys.stdin:
        case = json.loads(line)
        function = neck_case if case.pop("op") == "neck" else head_case
        print(json.dumps(function(**case) | {"seed": SEED}), flush=True)


if __name__ == "__main__":
    main()
