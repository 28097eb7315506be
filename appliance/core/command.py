"""Fleet orders: what they look like, and which are refused before anything happens.

Pure. The clock, and whether an order was retained by the broker, are facts handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from models import schema

COMMANDS = ("status",)
"""Orders this version carries out."""

LONGEST_ID = 128


@dataclass(frozen=True, slots=True)
class Command:
    """One fleet order; times are Unix seconds."""

    id: str
    command: str
    args: Mapping[str, Any] = field(default_factory=dict)
    device_id: str = ""
    group: str = ""
    issued_at: float = 0.0
    expires_at: float | None = None
    author: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer to an order; `status` is done, refused, failed or unknown."""

    id: str
    status: str
    reason: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


def read(payload: bytes, *, device_id: str, now: float, retained: bool) -> Command | CommandResult:
    """The order in `payload`, or its refusal.

    `now` is trusted wall time in Unix seconds. A retained order is refused because a broker
    would repeat it at every reconnect, long after it was meant.
    """
    try:
        command = schema.load(Command, orjson.loads(payload))
    except ValueError as error:
        return CommandResult("", "refused", f"not an order: {error}")
    if not 0 < len(command.id) <= LONGEST_ID:
        return CommandResult("", "refused", f"an order needs an id of 1 to {LONGEST_ID} characters")
    reason = _refusal(command, device_id=device_id, now=now, retained=retained)
    return CommandResult(command.id, "refused", reason) if reason else command


def _refusal(command: Command, *, device_id: str, now: float, retained: bool) -> str:
    if retained:
        return "retained orders are refused: publish it without the retain flag"
    if command.device_id and command.device_id != device_id:
        return f"this order is for {command.device_id!r}, this device is {device_id!r}"
    if command.expires_at is not None and command.expires_at <= now:
        return f"the order expired {now - command.expires_at:.0f} s ago"
    if command.command not in COMMANDS:
        return f"there is no order {command.command!r}; known: {', '.join(COMMANDS)}"
    return ""
