"""Signed orders: a DSSE envelope around the JSON of a command, as the workshop makes it and a device opens it. Pure.

DSSE (Dead Simple Signing Envelope) signs the type together with the bytes, so a signature on something else that
happens to look like an order is none on an order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

PAYLOAD_TYPE = "application/vnd.appliance.command+json"
COMMANDS: Mapping[str, frozenset[str]] = {
    "status": frozenset(),
    "load": frozenset({"name"}),
    "unload": frozenset({"name"}),
    "update": frozenset({"name", "force"}),
    "rollback": frozenset({"name"}),
    "pause": frozenset(),
    "resume": frozenset(),
    "abort": frozenset(),
    "configure": frozenset({"settings"}),
    "restart-model": frozenset({"name"}),
    "snapshot": frozenset(),
    "reboot": frozenset(),
}
"""Orders that a device of this version carries out -> the args that they take."""


@dataclass(frozen=True, slots=True)
class Commander:
    """Whoever may order devices of a fleet."""

    public: str
    """Ed25519 public key, 64 hexadecimal digits."""
    author: str


@dataclass(frozen=True, slots=True)
class Commanders:
    """Content of the target that says who may order; by key id."""

    keys: Mapping[str, Commander] = field(default_factory=dict)


def is_envelope(payload: bytes) -> bool:
    """Whether a payload is meant as an envelope, signed rightly or not."""
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "payloadType" in data
