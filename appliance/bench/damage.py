"""Bad inputs: requests that were right before something happened to them."""

from __future__ import annotations

import random

_MOST_CHANGES, _LONGEST_CUT = 8, 40
_TOKENS = (b'"', b"[", b"{", b"-", b"99999999999", b"null", b"\x00", b"\xff")


def mutated(content: bytes, chance: random.Random) -> bytes:
    """`content` with a few bytes changed, cut out, doubled or put in."""
    data = bytearray(content)
    for _ in range(chance.randint(1, _MOST_CHANGES)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.randint(1, _LONGEST_CUT)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, _LONGEST_CUT)]
            case 3:
                data[at:at] = chance.choice(_TOKENS)
            case _:
                del data[at + 1 :]
        if not data:
            break
    return bytes(data)
