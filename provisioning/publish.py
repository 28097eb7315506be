"""A repository of published bundles on plain static files, signed in the roles of The Update Framework (TUF).

`models.published` says where everything lies. Root and targets keys stay offline, several of each with a threshold:
they are needed to add, promote and revoke. Timestamp and snapshot keys are online: they are needed to refresh, which
tells devices day by day that nothing newer is kept from them.

Whatever is written, the timestamp comes last, so a reader sees the state before or the state after.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import zstandard
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.serialization import DeserializationError
from tuf.api.serialization.json import JSONSerializer

from models import published
from models.bundle import Manifest
from models.errors import ConfigError, WorkshopError
from models.folder import BundleFolder, read_measurements, write_file
from models.orders import Commanders
from models.published import Pointer, Revoked
from models.targets import TARGETS as COMPILED
from provisioning.keys import Keys

T = TypeVar("T", Root, Targets, Snapshot, Timestamp)

ROLES = ("root", "targets", "snapshot", "timestamp")
LIFETIME: Mapping[str, timedelta] = {
    "root": timedelta(days=365),
    "targets": timedelta(days=180),
    "snapshot": timedelta(days=14),
    "timestamp": timedelta(days=2),
}
"""How long a signature of each role holds; a device takes nothing new from metadata older than that."""
_LEVEL = 19
"""Of compression: done once, undone on every device at the same speed whatever it was."""
_SERIALIZER = JSONSerializer(compact=False)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many keys a role has, and how many of them must sign."""

    keys: int = 1
    threshold: int = 1


DEFAULT_SHAPE: Mapping[str, Shape] = {
    "root": Shape(3, 2),
    "targets": Shape(2, 1),
    "snapshot": Shape(),
    "timestamp": Shape(),
}


@dataclass(frozen=True, slots=True)
class Added:
    """What `Repository.add` has published."""

    name: str
    version: str
    digest: str
    channel: str
    new_blobs: int
    packed_bytes: int
    """Of those blobs."""


class Repository:
    """A folder that any static web server, object store or USB stick can carry to devices."""

    def __init__(self, path: Path, keys: Keys, now: Callable[[], datetime] | None = None) -> None:
        """Work on the repository at `path`, made by `init`; `now` tells UTC."""
        self.path, self._keys = path, keys
        self._now = now or (lambda: datetime.now(timezone.utc).replace(microsecond=0))

    def init(self, shapes: Mapping[str, Shape] = DEFAULT_SHAPE) -> Path:
        """Make an empty repository with new keys; the trusted root that devices are given.

        Raises ConfigError when there is one already, or a threshold cannot be reached.
        """
        for role, shape in shapes.items():
            if not 1 <= shape.threshold <= shape.keys:
                msg = f"{shape.threshold} of {shape.keys} keys cannot sign as {role}: choose 1 to {shape.keys}"
                raise ConfigError(msg)
        if self._metadata.exists() and any(self._metadata.iterdir()):
            msg = f"{self.path} holds a repository already: give another folder, or use it"
            raise ConfigError(msg)
        for folder in (self._metadata, self.path / published.TARGETS, self.path / published.BLOBS):
            folder.mkdir(parents=True, exist_ok=True)
        root = Root(version=1, expires=self._expires("root"), consistent_snapshot=True)
        for role in ROLES:
            root.roles[role].threshold = shapes[role].threshold
            for number in range(1, shapes[role].keys + 1):
                root.add_key(self._keys.create(f"{role}-{number}").public_key, role)
        with self._locked():
            self._sign(Metadata(root), root)
            self._sign(Metadata(Targets(version=1, expires=self._expires("targets"))), root)
            self._write_snapshot(root)
        return self._metadata / "1.root.json"

    def add(self, bundle: BundleFolder, channel: str = published.CHANNELS[0]) -> Added:
        """Publish a bundle and point `channel` to it.

        Raises BundleError when it is damaged, ConfigError when its version is published with other content.
        """
        _check_channel(channel)
        manifest, root = bundle.manifest, self._root()
        path = published.manifest_target(manifest.name, manifest.version)
        targets = self._load(Targets)
        known = targets.signed.targets.get(path)
        if known and known.hashes["sha256"] != manifest.digest:
            msg = f"{manifest.name} {manifest.version} is published with other content: give the new one a new version"
            raise ConfigError(msg)
        new_blobs = packed_bytes = 0
        with self._locked():
            for blob in manifest.blobs():
                content, file = bundle.read(blob), self.path / published.blob_file(blob)
                if not file.exists():
                    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(content)
                    write_file(file, packed)
                    new_blobs, packed_bytes = new_blobs + 1, packed_bytes + len(packed)
            self._put(targets.signed, path, manifest.to_bytes())
            for target in ("cpu", *COMPILED):
                file = bundle.path / "measurements" / f"{target}.json"
                if read_measurements(file):
                    where = published.measurements_target(manifest.name, manifest.version, target)
                    self._put(targets.signed, where, file.read_bytes())
            self._point(targets.signed, manifest, channel)
            self._write_targets(root, targets)
        return Added(manifest.name, manifest.version, manifest.digest, channel, new_blobs, packed_bytes)

    def promote(self, name: str, version: str, channel: str) -> Pointer:
        """Point `channel` to a published version, newer or older than what it has; raises ConfigError."""
        _check_channel(channel)
        root, targets = self._root(), self._load(Targets)
        manifest = self._published(targets.signed, name, version)
        reason = self._revoked(targets.signed).digests.get(manifest.digest)
        if reason is not None:
            msg = f"{name} {version} was revoked ({reason}): publish a repaired version"
            raise ConfigError(msg)
        with self._locked():
            pointer = self._point(targets.signed, manifest, channel)
            self._write_targets(root, targets)
        return pointer

    def revoke(self, name: str, version: str, reason: str) -> list[str]:
        """Forbid a published version to all devices; channels that pointed to it point to nothing and are returned.

        Raises ConfigError when it is not published.
        """
        root, targets = self._root(), self._load(Targets)
        digest = self._published(targets.signed, name, version).digest
        emptied = []
        with self._locked():
            known = self._revoked(targets.signed)
            content = published.to_bytes(Revoked({**known.digests, digest: reason}))
            self._put(targets.signed, published.REVOKED, content)
            for channel, pointer in self._pointers(targets.signed):
                if pointer.digest == digest:
                    del targets.signed.targets[published.channel_target(channel, name)]
                    emptied.append(channel)
            self._write_targets(root, targets)
        return emptied

    def command(self, commanders: Commanders) -> None:
        """Let exactly `commanders` order devices from now on."""
        root, targets = self._root(), self._load(Targets)
        with self._locked():
            self._put(targets.signed, published.COMMANDERS, published.to_bytes(commanders))
            self._write_targets(root, targets)

    def rotate_key(self, role: str, old: str) -> str:
        """Put a new key in the place of the key file `old` of `role`; the new file's name.

        The new root is signed by a threshold of the keys before and of those after, so devices follow by themselves.
        Raises ConfigError when `old` is no key of that role.
        """
        before, metadata = self._root(), self._load(Root)
        root = metadata.signed
        gone = self._keys.public(old).keyid
        if gone not in root.roles[role].keyids:
            msg = f"{old} is no key of role {role}: `provision publish status` lists them"
            raise ConfigError(msg)
        with self._locked():
            name = self._keys.next_name(role)
            root.add_key(self._keys.create(name).public_key, role)
            root.revoke_key(gone, role)
            root.version, root.expires = root.version + 1, self._expires("root")
            self._sign(metadata, before, root)
            if role == "targets":
                self._write_targets(root, self._load(Targets))
            else:
                self._write_snapshot(root)
        return name

    def refresh(self) -> None:
        """Sign timestamp and snapshot anew, with the online keys alone; to be done before the timestamp expires."""
        with self._locked():
            self._write_snapshot(self._root())

    def status(self) -> dict[str, Any]:
        """What is published, by whom it may be signed, and when it expires, as plain data."""
        now = self._now()
        signed: dict[str, Any] = {
            "root": self._root(),
            "targets": self._load(Targets).signed,
            "snapshot": self._load(Snapshot).signed,
            "timestamp": self._load(Timestamp).signed,
        }
        root, targets = signed["root"], signed["targets"]
        revoked = self._revoked(targets).digests
        here = self._keys.names()
        bundles = sorted(path for path in targets.targets if path.startswith("bundles/"))
        return {
            "repository": str(self.path),
            "roles": {
                role: {
                    "version": signed[role].version,
                    "expires": signed[role].expires.isoformat(),
                    "expired": signed[role].is_expired(now),
                    "threshold": root.roles[role].threshold,
                    "keys": {keyid: here.get(keyid) for keyid in root.roles[role].keyids},
                }
                for role in ROLES
            },
            "bundles": [
                {"name": path.split("/")[1], "version": path.split("/")[2].removesuffix(".json"), "digest": digest}
                | {"revoked": revoked.get(digest)}
                for path in bundles
                for digest in [targets.targets[path].hashes["sha256"]]
            ],
            "channels": {f"{channel}/{pointer.name}": pointer.version for channel, pointer in self._pointers(targets)},
        }

    # Reading

    @property
    def _metadata(self) -> Path:
        return self.path / published.METADATA

    def _root(self) -> Root:
        return self._load(Root).signed

    def _load(self, kind: type[T]) -> Metadata[T]:
        """The newest metadata of a role; raises ConfigError when there is none that can be read."""
        name = f"{kind.type}.json"
        if kind is not Timestamp:
            found = sorted(self._metadata.glob(f"*.{name}"), key=lambda path: int(path.name.split(".")[0]))
            if not found:
                msg = f"{self.path} is no repository: make one with `provision publish init`"
                raise ConfigError(msg)
            name = found[-1].name
        try:
            return Metadata[T].from_file(str(self._metadata / name))
        except (DeserializationError, OSError) as error:
            msg = f"{self._metadata / name} cannot be read ({error}): restore the repository from a copy"
            raise ConfigError(msg) from error

    def _published(self, targets: Targets, name: str, version: str) -> Manifest:
        path = published.manifest_target(name, version)
        if path not in targets.targets:
            msg = f"{name} {version} is not published: `provision publish status` lists what is"
            raise ConfigError(msg)
        return Manifest.from_bytes(self._content(targets, path))

    def _content(self, targets: Targets, path: str) -> bytes:
        target = targets.targets[path]
        content = self._target_file(path, target.hashes["sha256"]).read_bytes()
        target.verify_length_and_hashes(content)
        return content

    def _revoked(self, targets: Targets) -> Revoked:
        known = published.REVOKED in targets.targets
        return published.from_bytes(Revoked, self._content(targets, published.REVOKED)) if known else Revoked()

    def _pointers(self, targets: Targets) -> list[tuple[str, Pointer]]:
        return [
            (path.split("/")[1], published.from_bytes(Pointer, self._content(targets, path)))
            for path in sorted(targets.targets)
            if path.startswith("channels/")
        ]

    def _target_file(self, path: str, sha256: str) -> Path:
        where = self.path / published.TARGETS / path
        return where.with_name(f"{sha256}.{where.name}")

    # Writing

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Two that publish at once would each sign the next version."""
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            msg = f"somebody else publishes into {self.path}: wait until that is done"
            raise WorkshopError(msg) from error
        finally:
            os.close(lock)

    def _expires(self, role: str) -> datetime:
        return self._now() + LIFETIME[role]

    def _put(self, targets: Targets, path: str, content: bytes) -> None:
        target = TargetFile.from_data(path, content, ["sha256"])
        file = self._target_file(path, target.hashes["sha256"])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content)
        targets.targets[path] = target

    def _point(self, targets: Targets, manifest: Manifest, channel: str) -> Pointer:
        pointer = Pointer(manifest.name, manifest.version, manifest.digest)
        self._put(targets, published.channel_target(channel, manifest.name), published.to_bytes(pointer))
        return pointer

    def _write_targets(self, root: Root, targets: Metadata[Targets]) -> None:
        """Sign changed targets, and what leads to them."""
        targets.signed.version += 1
        targets.signed.expires = self._expires("targets")
        self._sign(targets, root)
        self._write_snapshot(root)

    def _write_snapshot(self, root: Root) -> None:
        """Sign a snapshot of the targets as they are, and the timestamp that names it."""
        first = not (self._metadata / "timestamp.json").exists()
        targets = self._load(Targets)
        snapshot, timestamp = (Metadata(Snapshot()), Metadata(Timestamp())) if first else self._online()
        snapshot.signed.version += not first
        snapshot.signed.expires = self._expires("snapshot")
        snapshot.signed.meta["targets.json"] = _meta(targets)
        self._sign(snapshot, root)
        timestamp.signed.version += not first
        timestamp.signed.expires = self._expires("timestamp")
        timestamp.signed.snapshot_meta = _meta(snapshot)
        timestamp.signed.unrecognized_fields[published.SIGNED_AT] = int(self._now().timestamp())
        self._sign(timestamp, root)

    def _online(self) -> tuple[Metadata[Snapshot], Metadata[Timestamp]]:
        return self._load(Snapshot), self._load(Timestamp)

    def _sign(self, metadata: Metadata[T], *roots: Root) -> None:
        """Sign with every key of the role that is here, check that `roots` take it, and write the file."""
        role, here = metadata.signed.type, self._keys.names()
        metadata.signatures.clear()
        for keyid in {keyid: None for root in roots for keyid in root.roles[role].keyids}:
            if keyid in here:
                metadata.sign(self._keys.signer(here[keyid]), append=True)
        try:
            for root in roots:
                root.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
        except UnsignedMetadataError as error:
            msg = f"not enough keys are here to sign as {role} ({error}): give all their folders with --keys"
            raise ConfigError(msg) from error
        name = f"{role}.json" if role == Timestamp.type else f"{metadata.signed.version}.{role}.json"
        write_file(self._metadata / name, metadata.to_bytes(_SERIALIZER))


def _meta(metadata: Metadata[T]) -> MetaFile:
    content = metadata.to_bytes(_SERIALIZER)
    return MetaFile.from_data(metadata.signed.version, content, ["sha256"])


def _check_channel(channel: str) -> None:
    if channel not in published.CHANNELS:
        msg = f"there is no channel {channel!r}; known: {', '.join(published.CHANNELS)}"
        raise ConfigError(msg)
