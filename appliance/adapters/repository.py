"""The device's side of a repository of published bundles: what may be installed, and its bytes.

python-tuf's client decides what is signed and fresh; this file brings it bytes within limits of time and length, gives
it the time to judge by, and fetches blobs, which TUF does not know: each is named by its sha256 in a signed manifest.

Everything here blocks: it runs in a thread, and is imported when the first update is looked for.
As a program (`python -m appliance.adapters.repository`) it has the command line of TUF's public conformance suite.

Past 400 lines with that program: what an outside suite judges should be the very code that runs on a device.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TypeAlias, cast

import urllib3
import zstandard
from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
    SlowRetrievalError,
)
from tuf.ngclient import FetcherInterface, Updater

from appliance.adapters.outbound import Pools, why
from models import published
from models.bundle import Blob, Manifest
from models.errors import ApplianceError, Unreachable, UntrustedUpdate, UpdateError
from models.folder import MANIFEST, blob_path, make_folder, sync_folder, write_file
from models.orders import Commander, Commanders
from models.published import Pointer, Revoked

_CHUNK_BYTES = 256 * 1024
_CONNECT_S, _READ_S = 10.0, 10.0
_FILE_LIMIT_S = 120.0
"""For a whole file of metadata: a server that sends a byte now and then must not hold an update for ever."""
_RETRIES = urllib3.Retry(
    total=4,
    redirect=3,
    backoff_factor=0.5,
    backoff_jitter=0.5,
    status_forcelist=(429, 502, 503, 504),
    respect_retry_after_header=False,  # a mirror must not be able to put an update to sleep for hours
)
_FRUITLESS = 4
"""Connections in a row that bring nothing of a blob, after which it is given up for now."""
_PARALLEL = 3
"""Blobs at a time: more would only share the same link."""
_WINDOW_BYTES = 2**24
"""That a frame may ask for when it is unpacked; twice what `provision publish` uses."""
_OK, _PARTIAL, _NOT_SATISFIABLE = 200, 206, 416
_LARGEST_MANIFEST_BYTES = 16 * 2**20

OnBytes: TypeAlias = Callable[[int, int], None]
"""Told how many compressed bytes have come, and how many unpacked ones of the bundle are there, since the last call."""


@dataclass(frozen=True, slots=True)
class Link:
    """How the repository may be asked."""

    limit_bytes_per_s: float = 0.0
    """For blobs; 0 is no limit."""
    reserve_bytes: int = 0
    """Of free disk that is left alone."""
    read_s: float = _READ_S
    """A server that is silent for longer is given up."""


@dataclass(frozen=True, slots=True)
class Release:
    """What a channel has for a bundle: signed, fresh and not revoked."""

    pointer: Pointer
    manifest: Manifest


class Fetcher(FetcherInterface):
    """Brings files by HTTP within limits of time; whoever asks limits their length."""

    def __init__(self, read_s: float = _READ_S) -> None:
        """Give up a server that is silent for `read_s`."""
        self._timeout = urllib3.Timeout(connect=_CONNECT_S, read=read_s)
        self._pools = Pools(_PARALLEL)

    def open(self, url: str, start: int = 0) -> urllib3.BaseHTTPResponse:
        """Ask for a file from byte `start` on; raises DownloadError, with the status when that is the reason."""
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={start}-"} if start else {})
        try:
            response = self._pools.to(url).request(
                "GET", url, headers=headers, timeout=self._timeout, retries=_RETRIES, preload_content=False
            )
        except urllib3.exceptions.HTTPError as error:
            msg = f"{url} cannot be fetched: {why(error)}"
            raise DownloadError(msg) from error
        if response.status in {_OK, _PARTIAL} or (start and response.status == _NOT_SATISFIABLE):
            return response
        response.close()
        msg = f"{url} is answered with status {response.status}"
        raise DownloadHTTPError(msg, response.status)

    def _fetch(self, url: str) -> Iterator[bytes]:
        """See `FetcherInterface`."""
        return self._chunks(self.open(url), time.monotonic() + _FILE_LIMIT_S)

    @staticmethod
    def _chunks(response: urllib3.BaseHTTPResponse, give_up_at: float) -> Iterator[bytes]:
        with contextlib.closing(response):
            try:
                while chunk := response.read1(_CHUNK_BYTES):
                    yield chunk
                    if time.monotonic() > give_up_at:
                        msg = f"{response.url} takes more than {_FILE_LIMIT_S:g} s"
                        raise SlowRetrievalError(msg)
            except urllib3.exceptions.HTTPError as error:
                msg = f"the connection broke: {why(error)}"
                raise DownloadError(msg) from error


class Repository:
    """One repository, and what this device has accepted of it."""

    def __init__(self, url: str, root: bytes, metadata: Path, link: Link | None = None) -> None:
        """Ask the repository at `url`, trusting `root` (a root.json); accepted metadata is kept in `metadata`."""
        self._url, self._root, self._metadata = url.rstrip("/"), root, metadata
        self._link = link or Link()
        self._fetcher = Fetcher(self._link.read_s)
        self._pace = _Pace(self._link.limit_bytes_per_s)

    def refresh(self, now: float) -> Accepted:
        """What is signed at `now`, trusted wall time in Unix seconds.

        Raises UntrustedUpdate for what is not signed by enough keys, older than what was accepted before, expired or
        mixed; Unreachable when it cannot be had. Nothing of what was accepted before is lost.
        """
        with _judged():
            make_folder(self._metadata)
            client = _Client(
                str(self._metadata),
                f"{self._url}/{published.METADATA}",
                target_base_url=f"{self._url}/{published.TARGETS}",
                fetcher=self._fetcher,
                bootstrap=self._root,
            )
            # The library asks the clock of the system, which on a board without a battery says 1970: everything would
            # be fresh. There is no other way in yet.
            client._trusted_set.reference_time = datetime.fromtimestamp(now, timezone.utc)  # noqa: SLF001
            client.refresh()
            timestamp = client._trusted_set.timestamp  # noqa: SLF001 - see above
        signed_at = timestamp.unrecognized_fields.get(published.SIGNED_AT, 0)
        return Accepted(client, self._fetcher, signed_at if isinstance(signed_at, int) else 0)

    def fetch(
        self,
        manifest: Manifest,
        slot: Path,
        others: Mapping[str, Path],
        on_bytes: OnBytes = lambda _packed, _ready: None,
        gone: threading.Event | None = None,
    ) -> None:
        """Bring what `manifest` names into the folder `slot`, its manifest last.

        Blobs that are there, or as checked blobs of `others` (sha256 -> file), are not fetched. `on_bytes` is told of
        it, also in other threads; `gone`, set by others, ends it. Raises Unreachable, also when the disk would be too
        full, and UntrustedUpdate for blobs that are not what was signed. What came stays there for the next try.
        """
        missing, blobs = [], slot / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        # At once, or a power cut takes with a folder what has come into it; always, as its maker may have been killed.
        for folder in (slot.parent.parent, slot.parent, slot, blobs.parent):
            sync_folder(folder)
        for blob in manifest.blobs():
            path = blob_path(slot, blob)
            if matches(path, blob) or _linked(others.get(blob.sha256), path, blob):
                on_bytes(0, blob.size_bytes)
            else:
                missing.append(blob)
        self._check_room(slot, missing)
        self._blobs(missing, slot, on_bytes, gone or threading.Event())
        write_file(slot / MANIFEST, manifest.to_bytes())

    def _blobs(self, missing: list[Blob], slot: Path, on_bytes: OnBytes, gone: threading.Event) -> None:
        """Fetch blobs, some at a time, in threads that do not hold up the end of the process."""
        waiting, errors = iter(missing), list[BaseException]()

        def work() -> None:
            try:
                for blob in waiting:
                    if gone.is_set():
                        return
                    self._blob(blob, blob_path(slot, blob), on_bytes, gone)
            except BaseException as error:
                errors.append(error)
                gone.set()

        threads = [threading.Thread(target=work, name="blob", daemon=True) for _ in range(_PARALLEL)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if gone.is_set():
            raise Unreachable("the download was ended: it goes on later")

    def _check_room(self, slot: Path, missing: list[Blob]) -> None:
        """Refuse before anything is fetched what would not fit, compressed and unpacked."""
        need_bytes = sum(blob.size_bytes + published.packed_limit_bytes(blob.size_bytes) for blob in missing)
        have_bytes = shutil.disk_usage(slot).free - self._link.reserve_bytes
        if need_bytes > have_bytes:
            msg = (
                f"the update needs {need_bytes} bytes of disk and {max(have_bytes, 0)} are free beyond the reserve of "
                f"{self._link.reserve_bytes}: make room"
            )
            raise Unreachable(msg)

    def _blob(self, blob: Blob, path: Path, on_bytes: OnBytes, gone: threading.Event) -> None:
        """Fetch one blob; a damaged one a second time from its beginning, as its first part may be of another time."""
        part = path.with_name(f"{path.name}.part")
        for last in (False, True):
            fresh = not part.exists()
            try:
                self._stream(blob, path, part, on_bytes, gone)
            except UntrustedUpdate:
                part.unlink(missing_ok=True)
                if last or fresh:
                    raise
            else:
                part.unlink(missing_ok=True)
                return

    def _stream(self, blob: Blob, path: Path, part: Path, on_bytes: OnBytes, gone: threading.Event) -> None:
        """Fetch what is missing of `part`, unpacking and hashing as it comes, a bounded piece at a time."""
        temporary = path.with_name(f"{path.name}.new")
        sha256, size_bytes = hashlib.sha256(), 0
        with part.open("ab+") as packed, temporary.open("wb") as out:
            source = cast("IO[bytes]", _Source(self._packed(blob, packed, on_bytes, gone)))  # it is only read
            unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
            try:
                with unpacker.stream_reader(source, read_size=_CHUNK_BYTES, closefd=False) as content:
                    while (left_bytes := blob.size_bytes - size_bytes) > 0:  # what may follow is not part of it
                        piece = content.read(min(_CHUNK_BYTES, left_bytes))
                        size_bytes += len(piece)
                        sha256.update(piece)
                        out.write(piece)
                        on_bytes(0, len(piece))
                        if len(piece) < min(_CHUNK_BYTES, left_bytes):  # the frame has ended
                            break
            except zstandard.ZstdError as error:
                raise _damaged(blob, str(error)) from error
            if Blob(sha256.hexdigest(), size_bytes) != blob:
                raise _damaged(blob, "its content is not what was signed")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
        sync_folder(path.parent)

    def _packed(self, blob: Blob, packed: IO[bytes], on_bytes: OnBytes, gone: threading.Event) -> Iterator[bytes]:
        """The compressed bytes of a blob: those that `packed` holds, then the others, which are added to it.

        Whoever has enough leaves. Raises Unreachable when there are no more for now.
        """
        packed.seek(0)
        while chunk := packed.read(_CHUNK_BYTES):
            yield chunk
        fruitless = 0
        while True:
            had, why = packed.tell(), "it ends too early"
            try:
                for chunk in self._rest(blob, had):
                    if gone.is_set():
                        raise Unreachable("the download was ended: it goes on later")
                    packed.write(chunk)
                    on_bytes(len(chunk), 0)
                    self._pace(len(chunk))
                    yield chunk
            except DownloadError as error:
                why = str(error)
            fruitless = fruitless + 1 if packed.tell() == had else 0
            if fruitless >= _FRUITLESS:
                msg = f"blob {blob.sha256[:12]} cannot be fetched ({why}): it is tried again later"
                raise Unreachable(msg)
            # Jittered: a fleet that lost its mirror must not come back all at once.
            gone.wait(random.uniform(0, 0.2 * 2**fruitless))  # noqa: S311 - not for secrets

    def _rest(self, blob: Blob, start: int) -> Iterator[bytes]:
        """The compressed bytes of a blob from `start` on, never more than it can have."""
        url = f"{self._url}/{published.blob_file(blob)}"
        left_bytes = published.packed_limit_bytes(blob.size_bytes) - start
        with contextlib.closing(self._fetcher.open(url, start)) as response:
            skip_bytes = start if response.status == _OK else 0  # a server that knows no ranges sends all of it
            try:
                while response.status != _NOT_SATISFIABLE and (chunk := response.read1(_CHUNK_BYTES)):
                    if skip_bytes:
                        skipped = min(skip_bytes, len(chunk))
                        chunk, skip_bytes = chunk[skipped:], skip_bytes - skipped
                    left_bytes -= len(chunk)
                    if left_bytes < 0:
                        raise _damaged(blob, "it is longer than it can be")
                    if chunk:
                        yield chunk
            except urllib3.exceptions.HTTPError as error:
                msg = f"the connection broke: {why(error)}"
                raise DownloadError(msg) from error


class _Client(Updater):
    """python-tuf's client, whose accepted metadata is safe from power cuts.

    Lost, or empty under its name as an unsynced file may be, an older one would be accepted again.
    """

    def _persist_file(self, filename: str, data: bytes) -> None:
        """Replace a file of metadata."""
        write_file(Path(filename), data)


class Accepted:
    """Metadata that was found signed and fresh."""

    def __init__(self, client: Updater, fetcher: Fetcher, signed_at: float) -> None:
        self._client, self._fetcher = client, fetcher
        self.signed_at = signed_at
        """When its newest part was signed, in Unix seconds: it cannot be earlier now. 0 where that is not said."""

    def revoked(self) -> Mapping[str, str]:
        """Digest -> why; raises UntrustedUpdate, Unreachable."""
        content = self._target(published.REVOKED)
        return published.from_bytes(Revoked, content).digests if content is not None else {}

    def commanders(self) -> Mapping[str, Commander]:
        """Who may order devices, by key id; raises UntrustedUpdate, Unreachable."""
        content = self._target(published.COMMANDERS)
        return published.from_bytes(Commanders, content).keys if content is not None else {}

    def release(self, channel: str, name: str, version: str = "") -> Release | None:
        """What `channel` has for bundle `name`, or that `version` of it whatever the channel has; None for nothing.

        Raises UntrustedUpdate, Unreachable, BundleError.
        """
        if version:
            signed = self._target(published.manifest_target(name, version))
            pointer = Pointer(name, version, hashlib.sha256(signed or b"").hexdigest())
        else:
            content = self._target(published.channel_target(channel, name))
            if content is None:
                return None
            pointer = published.from_bytes(Pointer, content)
            signed = self._target(published.manifest_target(pointer.name, pointer.version))
        if version and signed is None:
            return None
        if signed is None or pointer.name != name or hashlib.sha256(signed).hexdigest() != pointer.digest:
            msg = f"channel {channel} points to {pointer.name} {pointer.version}, which is not published as it says"
            raise UntrustedUpdate(msg)
        return Release(pointer, Manifest.from_bytes(signed))

    def _target(self, path: str) -> bytes | None:
        with _judged():
            target = self._client.get_targetinfo(path)
            if target is None:
                return None
            if target.length > _LARGEST_MANIFEST_BYTES:
                msg = f"{path} has {target.length} bytes, which is no manifest"
                raise UntrustedUpdate(msg)
            folder, _slash, name = path.rpartition("/")
            url = f"{self._client._target_base_url}{folder}{_slash}{target.hashes['sha256']}.{name}"  # noqa: SLF001
            content = self._fetcher.download_bytes(url, target.length)
            target.verify_length_and_hashes(content)
            return content


class _Source:
    """Pieces of bytes as a file to read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, _size: int = -1) -> bytes:
        """The next piece, whatever its size; empty at the end."""
        return next(self._pieces, b"")


class _Pace:
    """Keeps all downloads together below a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._next_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def __call__(self, count: int) -> None:
        """Wait as long as `count` more bytes may take."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._next_at = max(self._next_at, now) + count / self._bytes_per_s
            wait_s = self._next_at - now
        time.sleep(wait_s)


def matches(path: Path, blob: Blob) -> bool:
    """Whether a file is there and is `blob`, read in pieces."""
    sha256, size_bytes = hashlib.sha256(), 0
    try:
        if path.stat().st_size != blob.size_bytes:
            return False
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                sha256.update(chunk)
                size_bytes += len(chunk)
    except OSError:
        return False
    return Blob(sha256.hexdigest(), size_bytes) == blob


def _linked(other: Path | None, path: Path, blob: Blob) -> bool:
    """Whether `path` could be had from another slot, without a byte over the link."""
    if other is None or not matches(other, blob):
        return False
    path.unlink(missing_ok=True)
    try:
        path.hardlink_to(other)
    except OSError:  # another file system, or one without links
        write_file(path, other.read_bytes())
    sync_folder(path.parent)
    return True


def _damaged(blob: Blob, why: str) -> UntrustedUpdate:
    return UntrustedUpdate(f"blob {blob.sha256[:12]} is not what was signed ({why}): mend the repository's copy")


@contextlib.contextmanager
def _judged() -> Iterator[None]:
    """Faults of the TUF library as errors of ours."""
    try:
        yield
    except DownloadLengthMismatchError as error:
        msg = f"the repository sends more than was signed ({error})"
        raise UntrustedUpdate(msg) from error
    except DownloadError as error:
        msg = f"the repository cannot be read ({error}): see that it is up"
        raise Unreachable(msg) from error
    except ExpiredMetadataError as error:
        msg = f"the repository is not fresh ({error}): run `provision publish refresh`, or ask who holds it back"
        raise UntrustedUpdate(msg) from error
    except RepositoryError as error:
        msg = f"the repository is not to be trusted ({type(error).__name__}: {error}): nothing of it is taken"
        raise UntrustedUpdate(msg) from error
    except OSError as error:
        msg = f"what the repository said cannot be kept ({error.strerror}): make room"
        raise Unreachable(msg) from error


def main(arguments: list[str] | None = None) -> int:
    """The command line of the public TUF client conformance suite; 0 done, 1 refused."""
    parser = argparse.ArgumentParser(prog="appliance.adapters.repository", description=main.__doc__)
    for name in ("metadata-dir", "metadata-url", "target-name", "target-base-url", "target-dir"):
        parser.add_argument(f"--{name}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("init").add_argument("root")
    commands.add_parser("refresh")
    commands.add_parser("download")
    options = parser.parse_args(arguments)
    folder = Path(options.metadata_dir)
    if options.command == "init":
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.root, folder / "root.json")
        return 0
    try:
        with _judged():
            if options.target_dir:
                Path(options.target_dir).mkdir(parents=True, exist_ok=True)
            client = _Client(
                str(folder),
                options.metadata_url,
                target_dir=options.target_dir,
                target_base_url=options.target_base_url,
                fetcher=Fetcher(),
                bootstrap=None,
            )
            client.refresh()
            if options.command == "download":
                target = client.get_targetinfo(options.target_name)
                if target is None:
                    msg = f"{options.target_name} is not signed here"
                    raise UpdateError(msg)
                if not client.find_cached_target(target):
                    client.download_target(target)
    except ApplianceError as error:
        print(f"appliance.adapters.repository: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
