"""Hypothesis on shared and slow machines: examples are counted, not timed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
