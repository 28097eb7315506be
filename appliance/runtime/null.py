"""A runtime without a model: every graph is the identity on one float tensor.

It is a full implementation of the seam, so the daemon, its recovery and its memory can be
tried and tested where no inference library exists. A graph is the JSON text
`{"delay_s": 0.0}`; every key may be left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import numpy as np

from models.errors import BadInput, BundleError, ModelError
from models.spec import Array, ModelSpec, TensorSpec


class NullRuntime:
    """Opens nothing and takes a constant time."""

    name = "null"

    def open(self, graph: bytes, *, threads: int) -> NullSession:  # noqa: ARG002 - the seam's signature
        """See `Runtime.open`."""
        try:
            data = json.loads(graph)
            return NullSession(float(data.get("delay_s", 0.0)))
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            msg = f'not a null graph (JSON like {{"delay_s": 0.0}}): {error}'
            raise BundleError(msg) from error


class NullSession:
    """`y` is a copy of `x` after `delay_s` seconds."""

    spec = ModelSpec(
        inputs=(TensorSpec("x", "FP32", (-1, -1), "NC"),), outputs=(TensorSpec("y", "FP32", (-1, -1), "NC"),)
    )

    def __init__(self, delay_s: float) -> None:
        """Take `delay_s` for each run."""
        if not 0 <= delay_s < float("inf"):
            msg = f"delay_s is {delay_s}, which is no time to wait"
            raise ValueError(msg)
        self._delay_s = delay_s
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
        time.sleep(self._delay_s)
        return {name: x.copy() for name in names}

    def close(self) -> None:
        """See `Session.close`."""
        self._open = False
