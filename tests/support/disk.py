"""What a disk may hold after a power cut: `recorder.c` logs what processes do to files, and here that is done again.

Nothing reaches the disk but by a sync: of a file for what it holds, of a folder for the names in it. What was not
synced may be there or not. A write that is cut is torn after its first sector; a rename is whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import pytest

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a C compiler (cc) is not installed")
SECTOR_BYTES = 512
_HEAD = struct.Struct("<IIIc3xQq")
_ROOT = PurePosixPath("/")


def recorder(folder: Path) -> Path:
    """The library of `recorder.c`, built into `folder`."""
    library = folder / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    built = [
        COMPILER or "cc",
        "-O1",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(source),
        "-pthread",
    ]
    subprocess.run(built, check=True)
    return library


@dataclass(frozen=True)
class Event:
    """One thing that was done; `kind` as in `recorder.c`. Paths are below the root of the recording."""

    kind: str
    thread: int
    inode: int
    offset: int
    text: str
    data: bytes

    @property
    def path(self) -> PurePosixPath:
        """Its first path."""
        return PurePosixPath(self.text)

    @property
    def to(self) -> PurePosixPath:
        """Its second."""
        return PurePosixPath(self.data.decode())


def events(log: Path, root: Path) -> list[Event]:
    """What was recorded below `root`."""
    content, found, at = log.read_bytes(), [], 0

    def below(text: str) -> str:
        return text.removeprefix(str(root)) or "/"

    while at < len(content):
        text_bytes, data_bytes, thread, kind, inode, offset = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        text, data = content[at : at + text_bytes].decode(), content[at + text_bytes : at + text_bytes + data_bytes]
        at += text_bytes + data_bytes
        assert kind != b"!", f"{text} was written in a way that is not followed"
        if kind in b"RL":
            data = below(data.decode()).encode()
        found.append(Event(kind.decode(), thread, inode, offset, text if kind == b"X" else below(text), data))
    return found


@dataclass(eq=False)
class _File:
    """What a file holds, and what of it is safe; a link is a file that holds a path and was always so."""

    now: bytes = b""
    safe: bytes = b""
    torn: bytes | None = None
    """In the place of `now`, if the last thing done was to write more than a sector to it."""
    link: bool = False


@dataclass(eq=False)
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    safe: dict[str, _File | _Folder] = field(default_factory=dict)


Image: TypeAlias = Mapping[PurePosixPath, bytes | None]
"""Path -> content, None for a folder; a symbolic link holds LINK and its target."""
LINK = b"\0link\0"


class Disk:
    """A disk on which what was recorded is done again; its root is safe from the beginning."""

    def __init__(self) -> None:
        """Nothing is there."""
        self._root = _Folder()
        self._files: dict[int, _File] = {}
        """By inode; one that is given anew is another file."""
        self._written: _File | None = None

    def do(self, event: Event, *, ignore_sync: bool = False) -> None:
        """Do what was done next; a sync that is ignored has no effect, as if it were not there."""
        if self._written:
            self._written.torn = self._written = None
        if event.kind in "WTF":
            self._change(self._files[event.inode], event, ignore_sync=ignore_sync)
        elif event.kind == "f":
            folder = self._folder(event.path)
            folder.safe = folder.safe if ignore_sync else dict(folder.now)
        elif event.kind != "X":
            self._rename(event)

    def _change(self, file: _File, event: Event, *, ignore_sync: bool) -> None:
        if event.kind == "W":
            before, self._written = file.now, file
            file.now = _over(before, event.offset, event.data)
            if len(event.data) > SECTOR_BYTES:
                file.torn = _over(before, event.offset, event.data[:SECTOR_BYTES])
        elif event.kind == "T":
            file.now = file.now[: event.offset].ljust(event.offset, b"\0")
        elif not ignore_sync:
            file.safe = file.now

    def _rename(self, event: Event) -> None:
        names = self._folder(event.path.parent).now if event.kind != "L" else {}
        if event.kind == "C":
            names[event.path.name] = self._files[event.inode] = _File()
        elif event.kind == "M":
            names[event.path.name] = _Folder()
        elif event.kind == "S":
            names[event.path.name] = _File(event.data, event.data, link=True)
        else:  # a link, a new name, or none any more
            one = self._linked(event.path) if event.kind == "L" else names.pop(event.path.name)
            if event.kind != "U":
                self._folder(event.to.parent).now[event.to.name] = one

    def after_cut(self) -> Iterator[Image]:
        """What may be there if the power is cut now; each way once.

        Contents: all, only what is safe, likewise but with the lengths of all, the last write torn, and of several
        unsafe files one alone. Names: all, only what is safe.
        """
        unsafe = [file for file in set(_files(self._root)) if file.now is not file.safe and file.now != file.safe]
        torn = {file: file.torn for file in unsafe if file.torn is not None}
        choices: list[Mapping[_File, bytes]] = [{}, {file: file.safe for file in unsafe}]
        choices += [{file: file.safe.ljust(len(file.now), b"\0") for file in unsafe}]
        choices += [torn] if torn else []
        choices += [{one: one.safe for one in unsafe if one is not other} for other in unsafe if len(unsafe) > 1]
        for contents in choices:
            for safe_names in (False, True):
                yield dict(_walk(self._root, _ROOT, contents, safe_names=safe_names))

    def _folder(self, path: PurePosixPath) -> _Folder:
        found: _File | _Folder = self._root
        for name in path.parts[1:]:
            assert isinstance(found, _Folder)
            found = found.now[name]
        assert isinstance(found, _Folder)
        return found

    def _linked(self, path: PurePosixPath) -> _File | _Folder:
        try:
            return self._folder(path.parent).now[path.name]
        except KeyError:  # outside of what was recorded, where all is safe
            content = Path(path).read_bytes()
            return _File(content, content)


def _files(folder: _Folder) -> Iterator[_File]:
    for one in (*folder.now.values(), *folder.safe.values()):
        if isinstance(one, _Folder):
            yield from _files(one)
        else:
            yield one


def _over(content: bytes, offset: int, data: bytes) -> bytes:
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


def _walk(
    folder: _Folder, at: PurePosixPath, contents: Mapping[_File, bytes], *, safe_names: bool
) -> Iterator[tuple[PurePosixPath, bytes | None]]:
    for name, one in (folder.safe if safe_names else folder.now).items():
        if isinstance(one, _Folder):
            yield at / name, None
            yield from _walk(one, at / name, contents, safe_names=safe_names)
        else:
            yield at / name, (LINK if one.link else b"") + contents.get(one, one.now)


def name_of(image: Image) -> bytes:
    """The same for the same disk."""
    sha256 = hashlib.sha256()
    for path, content in sorted(image.items()):
        held = b"" if content is None else _digest(content)
        sha256.update(b"%d %d %b " % (len(str(path)), len(held), str(path).encode()) + held)
    return sha256.digest()


@cache
def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def lay_down(image: Image, root: Path) -> Path:
    """Write a disk into a folder that is not there; the folder."""
    root.mkdir(parents=True)
    for path, content in image.items():  # folders come before what is in them
        where = root / path.relative_to(_ROOT)
        if content is None:
            where.mkdir()
        elif content.startswith(LINK):
            where.symlink_to(os.fsdecode(content.removeprefix(LINK)))
        else:
            where.write_bytes(content)
    return root


def sites(found: Sequence[Event]) -> list[str]:
    """For each event that is a sync, which one of ours it is; else nothing.

    One of Python is announced by a mark of the same thread (see `recorded.py`); SQLite has no others.
    """
    said: dict[int, str] = {}
    named, last = [], ""
    for event in found:
        site = ""
        if event.kind == "X" and event.text.startswith("sync "):
            said[event.thread] = event.text.removeprefix("sync ")
        elif event.kind in "Ff":
            site = said.pop(event.thread, "") or f"SQLite, {_role_in_sqlite(event, last)}"
        elif event.kind in "UC":
            last = event.kind
        named.append(site)
    return named


def _role_in_sqlite(event: Event, last: str) -> str:
    if event.kind == "F":
        return event.path.name
    return "the folder, its journal is gone" if last == "U" else "the folder, its journal is new"
