"""The W3C trace context of a request: where in somebody's trace it stands. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """A request as one span of a trace."""

    trace_id: str
    """32 hexadecimal digits."""
    parent_id: str
    """The caller's span, 16 hexadecimal digits."""
    span_id: str
    """Our own, which callers are told."""
    sampled: bool
    """Whether the caller keeps this trace."""

    @property
    def header(self) -> str:
        """`traceparent` for whoever comes after us."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def read(traceparent: str, span_id: str) -> Trace | None:
    """The context of a request that came with `traceparent` and becomes span `span_id`; None for what is not one."""
    found = _FORM.fullmatch(traceparent)
    return Trace(found[1], found[2], span_id, bool(int(found[3], 16) & _SAMPLED)) if found else None
