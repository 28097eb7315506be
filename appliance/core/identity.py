"""When a device renews its certificate, and when that is no use. Pure: times are Unix seconds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

_SHARE = 2 / 3
"""Of its life after which a certificate is renewed: the rest is for outages."""
_SPREAD_SHARE = 1 / 12
"""Of its life over which a fleet that was enrolled on one day renews."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 60.0, 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Tries:
    """Renewals that failed, one after the other."""

    failed: int = 0
    last_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Renewal:
    """What to do about a certificate."""

    at: float
    """When to renew it; in the past means now."""
    hindered: Literal["", "clock", "expired"] = ""
    """Why that is no use: the clock is before the certificate's beginning, or its end has passed."""


def renewal(valid_from: float, valid_until: float, now: float, spread: float, tries: Tries) -> Renewal:
    """When to renew a certificate of these dates; `spread` from 0 to 1 is where in the fleet a device stands."""
    life_s = valid_until - valid_from
    at = valid_from + life_s * (_SHARE + _SPREAD_SHARE * spread)
    if tries.failed:
        wait_s = min(_FIRST_RETRY_S * 2.0 ** min(tries.failed - 1, 30), _LONGEST_RETRY_S)
        # A clock that was set back must not put the next try off for ever.
        at = max(at, min(tries.last_at, now) + wait_s * (0.5 + 0.5 * spread))
    if now < valid_from:
        return Renewal(at, "clock")
    if now >= valid_until:
        return Renewal(at, "expired")
    return Renewal(at)


def spread_of(name: str) -> float:
    """Where a device stands in its fleet, from 0 to 1: always the same for one name, and even over many."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
