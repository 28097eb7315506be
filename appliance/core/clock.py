"""What time it is for trust. Pure: times are Unix seconds.

A board without a battery boots in 1970, where every expired signature is fresh. So nothing is installed before the
clock is synchronised, nor while it shows a time that is known to be past: before this version was released, or before
something signed that was accepted here.
"""

from __future__ import annotations

RELEASED_AT = 1_796_000_000.0
"""2026-11-30: this version cannot run earlier."""


def distrust(wall: float, floor: float, *, synced: bool) -> str:
    """Why the wall clock is not believed where trust depends on it; empty when it is."""
    floor = max(floor, RELEASED_AT)
    if not synced:
        return "clock_not_trusted: the clock is not synchronised yet, so nothing is installed; serving goes on"
    if wall < floor:
        late_s = floor - wall
        return f"clock_not_trusted: the clock is {late_s:.0f} s behind what was signed before; set it right"
    return ""


def raised(floor: float, signed_at: float, wall: float) -> float:
    """The floor after something accepted was signed at `signed_at`; a wrong signer cannot lift it above the clock."""
    return max(floor, min(signed_at, wall))
