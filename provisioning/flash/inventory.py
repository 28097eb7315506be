"""The inventory: what was flashed, one signed record a line.

Each line is a DSSE envelope (Ed25519). A record carries the digest of the line before, so that nobody who lacks the key
can change a record, or take one out of the middle. That the last ones are missing shows only who counts boards, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from models.errors import ConfigError, WorkshopError
from models.folder import sync_folder

PAYLOAD_TYPE = "application/vnd.appliance.flashed+json"


def append(file: Path, record: Mapping[str, Any], signer: CryptoSigner) -> None:
    """Sign a record and write it down for good; several runs may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as inventory:
        fcntl.flock(inventory, fcntl.LOCK_EX)
        inventory.seek(0)
        content = inventory.read()
        whole = content[: content.rfind(b"\n") + 1]
        inventory.truncate(len(whole))  # a last line without its end was torn by a power cut, and counts for nothing
        lines = whole.splitlines()
        signed = {**record, "previous": _digest(lines[-1]) if lines else ""}
        envelope = Envelope(json.dumps(signed, sort_keys=True).encode(), PAYLOAD_TYPE, {})
        envelope.sign(signer)
        inventory.write(json.dumps(envelope.to_dict()).encode() + b"\n")
        inventory.flush()
        os.fsync(inventory.fileno())
    sync_folder(file.parent)  # which may have it for the first time


def read(file: Path, public: SSlibKey) -> list[dict[str, Any]]:
    """Every record, oldest first.

    Raises WorkshopError for the first that is not signed by `public`, or not in its place; ConfigError without a file.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        msg = f"{file} cannot be read ({error.strerror}): give an inventory that `provision flash run` wrote"
        raise ConfigError(msg) from error
    records: list[dict[str, Any]] = []
    before = b""
    for number, line in enumerate(lines, 1):
        try:
            envelope = Envelope.from_dict(json.loads(line))
            envelope.verify([public], 1)
            record = dict(json.loads(envelope.payload))
        except (VerificationError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"{file}:{number} is not signed by this key: do not believe this inventory from there on"
            raise WorkshopError(msg) from error
        if envelope.payload_type != PAYLOAD_TYPE or record.get("previous") != (_digest(before) if before else ""):
            msg = f"{file}:{number} is not in its place: a record was taken out or moved"
            raise WorkshopError(msg)
        records.append(record)
        before = line
    return records


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
