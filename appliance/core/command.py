"""Fleet orders: what they look like, and which are refused before anything happens.

Pure. The clock, and whether an order was retained by the broker, are facts handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from models import schema
from models.orders import COMMANDS

CHANGING = frozenset(COMMANDS) - {"status"}
"""They change the device, so whoever gives them must be known: owning the broker is not owning the fleet."""

LONGEST_ID = 128
LARGEST_BYTES = 256 * 1024
"""Of an order; a larger one is refused unread."""

_LONGEST_QUOTE = 100
"""Characters of what others wrote that an answer repeats."""


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


def read(
    payload: bytes, *, device_id: str, now: float, retained: bool, authorized: bool = False, signer: str = ""
) -> Command | CommandResult:
    """The order in `payload`, or its refusal.

    `now` is trusted wall time in Unix seconds. A retained order is refused because a broker
    would repeat it at every reconnect, long after it was meant. `authorized` says that whoever gives it has shown that
    they may change the device; so does `signer`, the id of a key that is known here.
    """
    order_id = ""
    try:
        data = orjson.loads(payload)
        order_id = _usable_id(data)
        command = schema.load(Command, data)
    except ValueError as error:
        return CommandResult(order_id, "refused", f"not an order: {error}")
    if not order_id:
        return CommandResult("", "refused", f"an order needs an id of 1 to {LONGEST_ID} characters")
    reason = _refusal(command, device_id=device_id, now=now, retained=retained)
    reason = reason or _unsigned(command, authorized=authorized, signer=signer)
    return CommandResult(command.id, "refused", reason) if reason else command


def _usable_id(data: object) -> str:
    """The id under which whoever sent `data` waits for an answer; empty when there is none."""
    found = data.get("id") if isinstance(data, dict) else None
    return found if isinstance(found, str) and len(found) <= LONGEST_ID else ""


def _refusal(command: Command, *, device_id: str, now: float, retained: bool) -> str:
    if retained:
        return "retained orders are refused: publish it without the retain flag"
    if command.device_id and command.device_id != device_id:
        return f"this order is for {_quoted(command.device_id)}, this device is {device_id!r}"
    if command.group:
        return f"this order is for group {_quoted(command.group)}: this device belongs to no group yet"
    if command.expires_at is not None and command.expires_at <= now:
        return f"the order expired at {_utc(command.expires_at)}"
    if command.command not in COMMANDS:
        return f"there is no order {_quoted(command.command)}; known: {', '.join(COMMANDS)}"
    takes = COMMANDS[command.command]
    unknown = sorted(set(command.args) - takes)
    if unknown:
        what = f"args but {', '.join(sorted(takes))}" if takes else "args"
        return f"order {command.command!r} takes no {what}: leave them out"
    return ""


def _unsigned(command: Command, *, authorized: bool, signer: str) -> str:
    """Why an order may not change the device, if it would and may not."""
    if command.command not in CHANGING:
        return ""
    if command.sequence >= 2**63:
        return "the sequence is above all that can be kept: give a smaller one"
    if authorized and not signer:
        return ""
    if not signer:
        return f"order {command.command!r} changes the device: sign it with `provision command sign`"
    if not command.device_id:
        return "a signed order names its device: sign it with --device"
    if command.expires_at is None:
        return "a signed order expires: sign it with --expires-in-s"
    if command.sequence <= 0:
        return "a signed order has a sequence above 0: sign it with --sequence, or leave that out"
    return ""


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]!r}..."


def _utc(seconds: float) -> str:
    """Unix seconds as an ISO date; numpy formats one without any clock or time zone."""
    return f"{np.datetime64(int(seconds), 's')}Z" if seconds >= 0 else "a time before 1970"
