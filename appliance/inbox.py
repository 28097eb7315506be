"""Orders that change the device: whose signature counts, and which were carried out already, across restarts too.

A signed order names its device, expires, and carries a sequence number that its signer never uses twice: the device
takes none that is not higher than the last, whatever its clock says. It is written down before it is carried out, so
one that came twice gets the first answer again, or `unknown` where a power cut took that. A reboot takes its answer by
its nature: when the machine was started anew since, it is done.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from appliance.adapters import host
from appliance.adapters.journal import Entry, Journal
from appliance.core.command import Command, CommandResult
from models.errors import Forbidden
from models.orders import PAYLOAD_TYPE, Commander, is_envelope

_UNKNOWN = "it was begun before the daemon was started anew, and its end was not written down: look at the state"


class Inbox:
    """What one device remembers of its orders."""

    def __init__(
        self,
        journal: Callable[[], Journal],
        commanders: Callable[[], Mapping[str, Commander]],
        floor: Callable[[], float],
        boot_id: Callable[[], str] = host.boot_id,
    ) -> None:
        """Believe the keys of `commanders`; `floor` tells the earliest that it can be, in Unix seconds.

        `journal` opens it, in a thread, when it is needed first. `boot_id` is another after each start of the machine.
        """
        self._open, self._commanders, self.floor, self._boot_id = journal, commanders, floor, boot_id
        self._opening = asyncio.Lock()
        self._opened: Journal | None = None

    async def opened(self, payload: bytes) -> tuple[bytes, str]:
        """The order in a payload, and the key id of whoever signed it, empty for a bare one.

        Raises Forbidden for an envelope that nobody signed who is known here.
        """
        if not is_envelope(payload):
            return payload, ""
        return await asyncio.to_thread(_verified, payload, self._commanders())

    async def known(self, order: Command, signer: str) -> CommandResult | None:
        """The answer to an order that was given before, or its refusal as a replay; None for a new one."""
        entry, last = await (await self._journal()).order(order.id, signer)
        if entry:
            if (entry.signer, entry.content) != (signer, _content(order)):
                return CommandResult(order.id, "refused", "another order had this id: give each its own")
            return await self._answer(entry)
        if signer and order.sequence <= last:
            reason = f"sequence {order.sequence} is not above {last}, the last of this signer: sign the order anew"
            return CommandResult(order.id, "refused", reason)
        return None

    async def received(self, order: Command, signer: str) -> None:
        """Write down that an order is going to be carried out; raises OSError, ConfigError."""
        boot_id = self._boot_id() if order.command == "reboot" else ""
        await self._keep(Entry(order.id, signer, order.sequence, _content(order), boot_id=boot_id))

    async def answer(self, order_id: str) -> CommandResult | None:
        """The answer to an order that was taken, by now; None for one that is not remembered."""
        entry, _last = await (await self._journal()).order(order_id, "")
        return await self._answer(entry) if entry else None

    async def done(self, order: Command, signer: str, result: CommandResult) -> None:
        """Write down the answer to an order; raises OSError."""
        await self._keep(Entry(order.id, signer, order.sequence, _content(order), result))

    async def _answer(self, entry: Entry) -> CommandResult:
        if entry.result:
            return entry.result
        if not entry.boot_id or entry.boot_id == self._boot_id():
            return CommandResult(entry.id, "unknown", _UNKNOWN)
        result = CommandResult(entry.id, "done", result={"started_anew": True})
        await self._keep(replace(entry, result=result))
        return result

    async def _keep(self, entry: Entry) -> None:
        await (await self._journal()).keep_order(entry)

    async def _journal(self) -> Journal:
        async with self._opening:
            if self._opened is None:
                self._opened = await asyncio.to_thread(self._open)
            return self._opened


def _content(order: Command) -> str:
    """Digest of what is ordered."""
    said = [order.command, dict(order.args), order.device_id, order.sequence]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _verified(payload: bytes, commanders: Mapping[str, Commander]) -> tuple[bytes, str]:
    # Here, because a device that gets no signed order needs no cryptography.
    from securesystemslib.dsse import Envelope  # noqa: PLC0415
    from securesystemslib.exceptions import Error, VerificationError  # noqa: PLC0415
    from securesystemslib.signer import Key, SSlibKey  # noqa: PLC0415

    try:
        envelope = Envelope.from_dict(json.loads(payload))
        kind, signers = envelope.payload_type, list(envelope.signatures)
        known: list[Key] = [
            SSlibKey(keyid, "ed25519", "ed25519", {"public": commanders[keyid].public})
            for keyid in signers
            if keyid in commanders
        ]
        if kind != PAYLOAD_TYPE:
            msg = f"the envelope holds {str(kind)[:80]!r}, not an order ({PAYLOAD_TYPE})"
            raise Forbidden(msg)
        if not commanders:
            raise Forbidden(
                "this device knows nobody yet who may order it: it must read the repository first, and `appliance "
                "status` says what keeps it from that"
            )
        if not known:
            raise Forbidden(
                "nobody who may order this device has signed: publish the key with `provision publish commanders`"
            )
        (signer,) = envelope.verify(known, 1)
    except VerificationError as error:
        raise Forbidden("the signature is not one of this order: sign it anew with `provision command sign`") from error
    except (Error, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"the envelope cannot be read ({error}): make it with `provision command sign`"
        raise Forbidden(msg) from error
    return envelope.payload, str(signer)
