"""A session that is broken on purpose, for fault injection: what a model looks like when it hangs, leaks or lies."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from appliance.runtime import Session
from models.errors import ModelError
from models.spec import Array

_MOST_LEAKS = 32
"""A drill must not take down the machine when nothing else stops the leak."""


class BrokenSession:
    """A session that goes wrong in one way, and is otherwise `whole`, which it borrows."""

    def __init__(self, whole: Session, fault: str, amount: float) -> None:
        """`fault`: hang, slow (by `amount` seconds), leak (`amount` MiB a run), nan or cuda-error (code `amount`)."""
        self.whole, self.spec = whole, whole.spec
        self._fault, self._amount = fault, amount
        self._leaked: list[Array] = []

    @property
    def leaked_bytes(self) -> int:
        """What it keeps for nothing."""
        return sum(array.nbytes for array in self._leaked)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """See `Session.run`, except for what is broken."""
        if self._fault == "hang":
            threading.Event().wait()
        elif self._fault == "slow":
            time.sleep(self._amount)
        elif self._fault == "cuda-error":
            msg = f"CUDA failure {self._amount:.0f}: injected"
            raise ModelError(msg)
        elif self._fault == "leak" and len(self._leaked) < _MOST_LEAKS:
            self._leaked.append(np.ones(int(self._amount * 2**20), np.uint8))
        answers = self.whole.run(inputs, outputs)
        if self._fault == "nan":
            answers = {name: _spoiled(array) for name, array in answers.items()}
        return answers

    def close(self) -> None:
        """See `Session.close`."""
        self.whole.close()


def _spoiled(array: Array) -> Array:
    return np.full_like(array, np.nan) if np.issubdtype(array.dtype, np.floating) else array
