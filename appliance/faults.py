"""Fault injection: breaks the running daemon on purpose, so that anybody can see how it recovers.

Off unless `faults.enabled`. Nothing here outlasts a restart of the daemon, and nothing is written to a bundle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from models.errors import BadInput

log = structlog.get_logger()

MEND = "none"
OF_WORKERS: Mapping[str, float] = {
    "hang": 0.0,
    "crash": 0.0,
    "leak": 16.0,
    "nan": 0.0,
    "slow": 1.0,
    "corrupt-plan": 0.0,
    "cuda-error": 700.0,
}
"""Faults of one model -> default amount: MiB a run, seconds a run, code of the CUDA error."""
OF_DAEMON: Mapping[str, float] = {"clock-step": 86400.0 * 365, "broker-loss": 0.0, "disk-full": 0.0}
"""Faults around the models -> default amount: seconds that the wall clock jumps."""
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault, as asked for."""

    fault: str
    model: str = ""
    """A model that is served; needed for faults of workers."""
    amount: float | None = None
    """How much, in the unit of the fault; None for its default."""
    for_s: float = 5.0
    """After this it is mended, unless recovery has mended it before."""


class Breakable(Protocol):
    """What a fault of a worker is done to."""

    def sabotage(self, fault: str, amount: float) -> None:
        """Break, or make whole with MEND."""


Switch = Callable[[bool, float], None]
"""Breaks (True) or mends (False) one thing around the models; the other argument is the amount."""


class Faults:
    """Injects faults and mends them in time; runs on the event loop."""

    def __init__(self, switches: Mapping[str, Switch]) -> None:
        """`switches` are those of OF_DAEMON that exist here."""
        self._switches = switches
        self._mending: dict[object, asyncio.TimerHandle] = {}

    def inject(self, injection: Injection, breakable: Breakable | None) -> None:
        """Break one thing; raises BadInput for what cannot be broken here, NotReady when it is broken already."""
        fault = injection.fault
        default = {**OF_WORKERS, **OF_DAEMON}.get(fault)
        if default is None:
            msg = f"there is no fault {fault[:100]!r}; known are {', '.join([*OF_WORKERS, *OF_DAEMON, MEND])}"
            raise BadInput(msg)
        amount = default if injection.amount is None else injection.amount
        if not 0 < injection.for_s <= LONGEST_S or not 0 <= amount < float("inf"):
            msg = f"a fault lasts more than 0 and at most {LONGEST_S:.0f} s, and its amount is no less than 0"
            raise BadInput(msg)
        broken: object
        mend: Callable[[], None]
        if fault in OF_WORKERS:
            if breakable is None:
                msg = f"fault {fault!r} needs the name of a model in `model`"
                raise BadInput(msg)
            broken, mend = breakable, lambda: breakable.sabotage(MEND, 0.0)
            breakable.sabotage(fault, amount)
        else:
            switch = self._switches.get(fault)
            if switch is None:
                msg = f"fault {fault!r} cannot be injected: what it breaks is not configured here"
                raise BadInput(msg)
            broken, mend = switch, lambda: switch(False, amount)
            switch(True, amount)
        log.warning("fault_injected", fault=fault, model=injection.model or None, amount=amount, for_s=injection.for_s)
        self._forget(broken)
        if fault != "corrupt-plan":  # its mend would start the model again, which its recovery does
            self._mending[broken] = asyncio.get_running_loop().call_later(injection.for_s, mend)

    def mend(self, breakables: list[Breakable]) -> None:
        """Make everything whole at once."""
        for broken in list(self._mending):
            self._forget(broken)
        for breakable in breakables:
            breakable.sabotage(MEND, 0.0)
        for switch in self._switches.values():
            switch(False, 0.0)

    def _forget(self, broken: object) -> None:
        timer = self._mending.pop(broken, None)
        if timer:
            timer.cancel()
