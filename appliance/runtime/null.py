"""A runtime without a model: every graph gives one float tensor back, times a number.

It is a full implementation of the seam, so the daemon, its recovery and its memory can be
tried and tested where no inference library exists. A graph is the JSON text
`{"delay_s": 0.0, "scale": 1.0, "weights_bytes": 0, "run_bytes": 0, "leak_bytes": 0}`; every key may be left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import numpy as np

from models.errors import BadInput, BundleError, InsufficientMemory, ModelError
from models.spec import Array, ModelSpec, TensorSpec

_KEYS = ("delay_s", "weights_bytes", "run_bytes", "leak_bytes")


class NullRuntime:
    """Opens nothing; takes the time and the memory that it is told to."""

    name = "null"
    opens_at_once = True

    def __init__(self, run_limit_bytes: int = 0) -> None:
        """Refuse runs that take more than `run_limit_bytes` (0: none)."""
        self._run_limit_bytes = run_limit_bytes

    def open(
        self,
        graph: bytes,
        *,
        threads: int,  # noqa: ARG002 - the seam's signature
        few_shapes: bool = True,  # noqa: ARG002
    ) -> NullSession:
        """See `Runtime.open`."""
        try:
            data = json.loads(graph)
            delay_s, *sizes = (float(data.get(key, 0)) for key in _KEYS)
            scale = float(data.get("scale", 1))
            return NullSession(delay_s, *map(int, sizes), scale=scale, run_limit_bytes=self._run_limit_bytes)
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            msg = f'not a null graph (JSON like {{"delay_s": 0.0}}): {error}'
            raise BundleError(msg) from error

    def open_again(self, graph: str, *, threads: int, few_shapes: bool = True) -> None:
        """See `WorkerRuntime.open_again`: there is nothing to make."""

    def release(self) -> None:
        """Runs leave nothing, except what they leak."""


class NullSession:
    """`y` is `x` times `scale` after `delay_s`, during which `run_bytes` are held; `leak_bytes` are never freed."""

    spec = ModelSpec(
        inputs=(TensorSpec("x", "FP32", (-1, -1), "NC"),), outputs=(TensorSpec("y", "FP32", (-1, -1), "NC"),)
    )

    def __init__(
        self,
        delay_s: float,
        weights_bytes: int = 0,
        run_bytes: int = 0,
        leak_bytes: int = 0,
        *,
        scale: float = 1.0,
        run_limit_bytes: int = 0,
    ) -> None:
        """Take `delay_s` and `run_bytes` for each run, and `weights_bytes` until closed."""
        if not 0 <= delay_s < float("inf"):
            msg = f"delay_s is {delay_s}, which is no time to wait"
            raise ValueError(msg)
        if min(weights_bytes, run_bytes, leak_bytes) < 0:
            msg = "a size is below 0"
            raise ValueError(msg)
        self._delay_s, self._run_bytes, self._leak_bytes = delay_s, run_bytes, leak_bytes
        self._scale, self._run_limit_bytes = np.float32(scale), run_limit_bytes
        self._weights = [_touched(weights_bytes)]
        self._open = True

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """See `Session.run`."""
        if not self._open:
            msg = "the session is closed"
            raise ModelError(msg)
        names = ["y"] if outputs is None else list(outputs)
        x = inputs.get("x")
        if x is None or len(inputs) != 1 or set(names) - {"y"} or x.dtype != np.float32 or x.ndim != 2:  # noqa: PLR2004
            msg = "the null model takes x, FP32 [any, any], and gives y"
            raise BadInput(msg)
        if 0 < self._run_limit_bytes < self._run_bytes:
            msg = f"this request would take {self._run_bytes} bytes, but {self._run_limit_bytes} may be used"
            raise InsufficientMemory(msg)
        held = _touched(self._run_bytes)
        if self._leak_bytes:
            self._weights.append(_touched(self._leak_bytes))
        time.sleep(self._delay_s)
        del held
        return dict.fromkeys(names, x * self._scale)

    def close(self) -> None:
        """See `Session.close`."""
        self._open = False
        self._weights.clear()


def _touched(size_bytes: int) -> Array:
    """Memory that is really there: the kernel gives pages only to who writes them."""
    return np.full(size_bytes, 1, np.uint8)
