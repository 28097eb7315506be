"""What is told of hot swaps: of one, and of all those of one model. The swap itself is `memory.Keeper.swap`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from appliance.core.budget import Admission


@dataclass(frozen=True, slots=True)
class Swap:
    """How the workers of a model were exchanged."""

    admission: Admission
    """`fits` says whether memory held both at once."""
    load_s: float
    """Until the new one had proven itself."""
    switch_s: float
    """For which neither could be given a request: the assignments alone."""
    gap_s: float
    """For which requests had to wait because memory held only one of both; 0 when it held both."""


@dataclass(slots=True)
class Swaps:
    """All swaps of one model since the start."""

    beside: int = 0
    with_gap: int = 0
    refused: int = 0
    """The version before served on."""
    load_s: float = 0.0
    switch_s: float = 0.0
    gap_s: float = 0.0
    """These three in all."""
    longest_switch_s: float = 0.0
    last_gap_s: float = 0.0
    refusal: str = ""
    """Why the latest was refused; empty when it was not."""

    def done(self, swap: Swap) -> None:
        """Count one that was carried out."""
        self.beside += swap.admission.fits
        self.with_gap += not swap.admission.fits
        self.load_s += swap.load_s
        self.switch_s += swap.switch_s
        self.gap_s += swap.gap_s
        self.longest_switch_s = max(self.longest_switch_s, swap.switch_s)
        self.last_gap_s, self.refusal = swap.gap_s, ""

    def not_done(self, reason: str) -> None:
        """Count one that was not."""
        self.refused, self.refusal = self.refused + 1, reason

    def status(self) -> dict[str, Any]:
        """Plain data for operators."""
        return asdict(self) | {"refusal": self.refusal or None}
