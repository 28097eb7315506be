"""Whether a model can be loaded. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a model can be loaded, and at whose cost."""

    fits: bool
    need_bytes: int
    have_bytes: int
    """Free now."""
    would_evict: tuple[str, ...]
