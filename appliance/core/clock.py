"""What time it is for trust. Pure: times are Unix seconds.

A board without a battery boots in 1970, where every expired signature is fresh. So nothing is installed before the
clock is synchronised, nor while it shows a time that is known to be past: before this version was released, or before
something signed that was accepted here.
"""

from __future__ import annotations

DAY_S = 86400.0
RELEASED_AT = 1_796_000_000.0
"""2026-11-30: this version cannot run earlier."""


def distrust(wall: float, floor: float, *, synced: bool) -> str:
    """Why the wall clock is not believed where trust depends on it; empty when it is."""
    floor = max(floor, RELEASED_AT)
    if not synced:
        return (
            "clock_not_trusted: the clock is not synchronised yet, so nothing is installed; serving goes on. Wait for "
            "the time daemon, or set clock.assume_synced where the clock is right without one"
        )
    if wall < floor:
        late_s = floor - wall
        return f"clock_not_trusted: the clock is {late_s:.0f} s behind what was signed before; set it right"
    return ""


def until_window(window: str, wall: float) -> float:
    """Seconds until `window` ("22:00-04:30", UTC) opens; 0 while it is open, and where there is none.

    One that ends when it begins is open all day.
    """
    if not window:
        return 0.0
    opens_s, ends_s = (int(text[:2]) * 3600 + int(text[3:]) * 60 for text in window.split("-"))
    since_s = (wall - opens_s) % DAY_S
    return 0.0 if opens_s == ends_s or since_s < (ends_s - opens_s) % DAY_S else DAY_S - since_s


def raised(floor: float, signed_at: float, wall: float) -> float:
    """The floor after something accepted was signed at `signed_at`; a wrong signer cannot lift it above the clock."""
    return max(floor, min(signed_at, wall))
