"""Bounds of one model. Their defaults stand here and nowhere else; `settings` shows them to operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one model may take."""

    queue: int = 64
    """Requests that may wait."""
    concurrency: int = 2
    """Runs at the same time in the worker."""
    hang_s: float = 20.0
    """A run that makes no progress for longer is taken for hung, and its worker is killed."""
    picture_pixels: int = 64_000_000
    """Larger pictures are refused before they are decoded."""
    body_bytes: int = 16 * 1024 * 1024
    """Largest request."""
    prove_idle_s: float = 60.0
    """A worker that nothing was asked of for so long answers a golden vector again."""
    calm_s: float = 10.0
    """A worker that stayed up this long has its earlier faults forgiven."""
    quarantine_s: float = 600.0
    """A quarantined model is tried again after this."""
