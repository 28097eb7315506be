"""How a freshly flashed board calls home, as the workshop asks it to and the board does. Pure.

The ticket lies in the image, so whoever knows its nonce runs this image. The nonce never travels: a report, and the
reply to it, carry a proof (HMAC-SHA256) that was made with it; that of a report counts for one wait of the workshop
only, which is known by its challenge, and that of a reply for one report only. One image goes to many boards; what
tells them apart is the serial number of their module.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROOF = "appliance-proof"
"""Header."""
TICKET = "etc/appliance/callhome.json"
"""On the board."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a board must answer: tensors for a model, in the JSON of the Open Inference Protocol."""

    model: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a run gives to its boards."""

    run: str
    nonce: str
    """64 hexadecimal digits."""
    urls: tuple[str, ...]
    """Where to call, tried in turn."""
    user: str
    """Whose login key comes with the reply."""
    question: Question


@dataclass(frozen=True, slots=True)
class Report:
    """What a board says of itself."""

    run: str
    serial: str
    model: str = ""
    l4t: str = ""
    slots: Mapping[str, Any] = field(default_factory=dict)
    appliance: str = ""
    bundles: tuple[Mapping[str, Any], ...] = ()
    """Name, version and digest of each."""
    answer: Mapping[str, Any] | None = None
    """To the question, as the board's own daemon gave it."""
    reason: str = ""
    """Why there is no answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the workshop says to it."""

    accepted: bool
    reason: str = ""
    authorized_key: str = ""
    """Public half of the key that logs in on this board, and on no other; a line for OpenSSH."""


def report_proof(nonce: str, content: bytes, challenge: str) -> str:
    """What a board sends beside its report to the workshop that gave it `challenge`."""
    return _proof(nonce, b"report\0" + challenge.encode(), content)


def reply_proof(nonce: str, content: bytes, asked: str) -> str:
    """What the workshop sends beside its reply to the report whose proof is `asked`."""
    return _proof(nonce, b"reply\0" + asked.encode(), content)


def proves(proof: str, wanted: str) -> bool:
    """Whether a proof is the one that is wanted, in a time that tells nothing."""
    return hmac.compare_digest(proof.encode(), wanted.encode())


def _proof(nonce: str, what: bytes, content: bytes) -> str:
    return hmac.new(bytes.fromhex(nonce), what + b"\0" + content, hashlib.sha256).hexdigest()
