"""The layout of a repository of published bundles, which the workshop writes and devices read.

    metadata/                     of The Update Framework: root, targets, snapshot, timestamp
    targets/bundles/NAME/         targets `VERSION.json`: manifests, so a target's sha256 is the bundle's digest
    targets/channels/CHANNEL/     targets `NAME.json`: which version devices of that channel should run
    targets/revoked.json          target: digests that no device may run any more
    targets/commanders.json       target: who may order devices
    targets/measurements/NAME/VERSION/  targets `TARGET.json`: advice about time and memory
    blobs/sha256/HEX.zst          what manifests name, by the sha256 of the content before compression

Only targets are signed; a blob is vouched for by the manifest that names it. Every file is static. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from models import schema
from models.bundle import Blob, check_name
from models.errors import UntrustedUpdate
from models.orders import Commanders

T = TypeVar("T")

CHANNELS = ("dev", "canary", "stable")
REVOKED, COMMANDERS = "revoked.json", "commanders.json"
SIGNED_AT = "x-appliance-signed-at"
"""Key in the timestamp's metadata: Unix seconds at which it was signed, the earliest that it can be now."""
METADATA, TARGETS, BLOBS = "metadata", "targets", "blobs/sha256"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Content of a channel's target: what its devices should run."""

    name: str
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """Content of `REVOKED`: digest -> why."""

    digests: Mapping[str, str] = field(default_factory=dict)


def manifest_target(name: str, version: str) -> str:
    """Path of the target that is a bundle's manifest; raises BundleError for what is no name."""
    check_name(name)
    check_name(version)
    return f"bundles/{name}/{version}.json"


def channel_target(channel: str, name: str) -> str:
    """Path of the target that says what a channel runs; raises BundleError for what is no name."""
    check_name(channel)
    check_name(name)
    return f"channels/{channel}/{name}.json"


def measurements_target(name: str, version: str, target: str) -> str:
    """Path of the target that holds what was measured."""
    return f"measurements/{name}/{version}/{target}.json"


def blob_file(blob: Blob) -> str:
    """Path of a compressed blob in the repository."""
    return f"{BLOBS}/{blob.sha256}.zst"


def packed_limit_bytes(size_bytes: int) -> int:
    """The most that `size_bytes` take when compressed with zstd, in one frame with a checksum.

    ZSTD_compressBound of zstd 1.5 is size + size / 256 + 64 at most; frame header and checksum add 22.
    """
    return size_bytes + size_bytes // 256 + 128


def to_bytes(content: Pointer | Revoked | Commanders) -> bytes:
    """Content of a target."""
    return json.dumps(schema.dump(content), sort_keys=True, separators=(",", ":")).encode()


def from_bytes(kind: type[T], content: bytes) -> T:
    """A `Pointer`, `Revoked` or `Commanders` from a target's content; raises UntrustedUpdate when it is none."""
    try:
        return schema.load(kind, json.loads(content))
    except (ValueError, RecursionError) as error:
        msg = f"a signed file cannot be read ({error}): publish it again with this version's `provision publish`"
        raise UntrustedUpdate(msg) from error
