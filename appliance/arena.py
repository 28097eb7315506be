"""Shared memory between the daemon and one worker: large payloads cross without being copied twice.

An arena is an anonymous file (memfd) mapped by both sides: it has no name, so nothing leaks when
either side is killed, and it is sealed against resizing, so neither side can make the other fault.
One side allocates and frees, the other only reads and says when it has finished. Each slot begins
with a generation number; a reference to a slot that has been given away since is refused.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_HEADER = struct.Struct("<Q")
_ALIGN_BYTES = 64  # a cache line; also more than any tensor library asks for
# The fcntl module names these only in some builds; the values are part of the kernel interface.
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x0002, 0x0004


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in an arena: payload of `length` bytes behind the header at `offset`."""

    offset: int
    length: int
    generation: int


class ArenaFullError(Exception):
    """No room for a payload now; slots come back as answers are taken."""


class StaleSlotError(Exception):
    """A slot was used after it was given away: a fault of this program, never of a caller."""


class Arena:
    """One mapping of an arena. Pages cost memory only once touched; low addresses are reused first."""

    def __init__(self, fd: int) -> None:
        """Map the arena behind `fd`, which stays the caller's to close."""
        self.fd = fd
        self.capacity_bytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.capacity_bytes)
        self._view = memoryview(self._map)
        self._used: list[tuple[int, int]] = []  # (offset, end), sorted
        self._generation = 0

    @classmethod
    def create(cls, capacity_bytes: int) -> Arena:
        """Make a new arena; the result owns `fd` until `close`. Raises OSError when the machine has no room for it."""
        fd = os.memfd_create("appliance-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, capacity_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that have not been freed."""
        return sum(end - offset for offset, end in self._used)

    def put(self, payload: bytes | bytearray | memoryview) -> Slot:
        """Copy `payload` into a new slot; raises ArenaFullError when no gap holds it."""
        length = memoryview(payload).nbytes
        size = -(-(_HEADER.size + length) // _ALIGN_BYTES) * _ALIGN_BYTES
        at = 0
        for offset, end in self._used:
            if offset - at >= size:
                break
            at = end
        if at + size > self.capacity_bytes:
            raise ArenaFullError
        bisect.insort(self._used, (at, at + size))
        self._generation += 1
        _HEADER.pack_into(self._map, at, self._generation)
        start = at + _HEADER.size
        self._view[start : start + length] = memoryview(payload).cast("B")
        return Slot(at, length, self._generation)

    def get(self, slot: Slot) -> memoryview:
        """The payload of `slot`, borrowed until the slot is freed; raises StaleSlotError."""
        start = slot.offset + _HEADER.size
        if (
            start + slot.length > self.capacity_bytes
            or _HEADER.unpack_from(self._map, slot.offset)[0] != slot.generation
        ):
            raise StaleSlotError
        return self._view[start : start + slot.length]

    def lend(self, slot: Slot, give_back: Callable[[], object]) -> memoryview:
        """`get` for whoever cannot tell when they have read it: `give_back` is called when the last view has gone.

        It is called on the thread that let go of that view, and not at all at the end of the process.
        """
        self.get(slot)
        # A view of a view keeps alive what both are of: an array of its own tells when that is no more.
        owner = np.frombuffer(self._map, np.uint8, slot.length, slot.offset + _HEADER.size)
        weakref.finalize(owner, give_back).atexit = False
        return owner.data

    def free(self, slot: Slot) -> None:
        """Take a slot back (allocating side only); raises StaleSlotError when it was not out."""
        index = bisect.bisect_left(self._used, (slot.offset, 0))
        if index == len(self._used) or self._used[index][0] != slot.offset:
            raise StaleSlotError
        if _HEADER.unpack_from(self._map, slot.offset)[0] != slot.generation:
            raise StaleSlotError
        del self._used[index]
        _HEADER.pack_into(self._map, slot.offset, 0)

    def close(self) -> None:
        """Unmap and close; borrowed payloads that are still held keep their pages alive."""
        os.close(self.fd)
        # A borrowed view may still be out there; the mapping then goes with the last of them.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        del self._view, self._map
