"""Shared memory between two processes' mappings: both sides see one content, and neither can harm the other."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from appliance import wire
from appliance.arena import Arena, ArenaFullError, Slot, StaleSlotError
from appliance.worker import Worker

pytestmark = pytest.mark.contract

PAGE_BYTES = 4096


@pytest.fixture
def ours() -> Iterator[Arena]:
    """The allocating side."""
    with closing(Arena.create(PAGE_BYTES)) as arena:
        yield arena


@pytest.fixture
def theirs(ours: Arena) -> Iterator[Arena]:
    """The reading side, mapped from a file descriptor that crossed a socket as it does to a worker."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        wire.send_with_fds(left, b"arenas", [ours.fd])
        data, (fd,) = wire.receive_with_fds(right, 2)
    assert data == b"arenas"
    with closing(Arena(fd)) as arena:
        yield arena


def test_what_one_side_puts_the_other_reads_and_gives_back(ours: Arena, theirs: Arena) -> None:
    slot = ours.put(b"payload")
    assert bytes(theirs.get(slot)) == b"payload"
    ours.free(slot)
    assert ours.used_bytes == 0


def test_a_slot_that_was_given_away_since_is_refused_on_both_sides(ours: Arena, theirs: Arena) -> None:
    old = ours.put(b"old")
    ours.free(old)
    new = ours.put(b"new")
    assert new.offset == old.offset
    for arena in (ours, theirs):
        with pytest.raises(StaleSlotError):
            arena.get(old)
    with pytest.raises(StaleSlotError):
        ours.free(old)
    assert bytes(theirs.get(new)) == b"new"


@pytest.mark.parametrize(
    "slot", [Slot(0, 10 * PAGE_BYTES, 1), Slot(PAGE_BYTES - 4, 1, 1), Slot(64, 1, 1), Slot(10 * PAGE_BYTES, 1, 1)]
)
def test_a_slot_that_was_never_given_is_refused(ours: Arena, slot: Slot) -> None:
    ours.put(b"payload")
    with pytest.raises(StaleSlotError):
        ours.get(slot)


@pytest.mark.parametrize("size_bytes", [0, PAGE_BYTES // 2, 2 * PAGE_BYTES])
def test_neither_side_can_change_the_size_under_the_other(ours: Arena, theirs: Arena, size_bytes: int) -> None:
    for arena in (ours, theirs):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)
    assert os.fstat(ours.fd).st_size == PAGE_BYTES


def test_the_memory_has_no_name_and_is_not_inherited(ours: Arena) -> None:
    assert str(Path(f"/proc/self/fd/{ours.fd}").readlink()).endswith("(deleted)")
    assert fcntl.fcntl(ours.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_an_arena_without_room_says_so_and_takes_the_payload_once_there_is(ours: Arena) -> None:
    slots = [ours.put(bytes(1000)) for _ in range(4)]
    with pytest.raises(ArenaFullError):
        ours.put(bytes(1000))
    ours.free(slots[1])
    assert ours.put(bytes(1000)).offset == slots[1].offset


def test_a_payload_of_the_whole_arena_fits_and_one_byte_more_does_not(ours: Arena) -> None:
    with pytest.raises(ArenaFullError):
        ours.put(bytes(PAGE_BYTES - 7))
    assert ours.put(bytes(PAGE_BYTES - 8)).length == PAGE_BYTES - 8
    assert ours.used_bytes == PAGE_BYTES


def test_a_borrowed_payload_outlives_its_arena() -> None:
    arena = Arena.create(PAGE_BYTES)
    payload = arena.get(arena.put(b"payload"))
    arena.close()
    assert bytes(payload) == b"payload"


@pytest.mark.parametrize(("length", "error"), [(300, "Overloaded"), (2000, "ModelError")])
def test_an_answer_for_which_there_is_no_room_now_is_refused_otherwise_than_one_that_never_fits(
    monkeypatch: pytest.MonkeyPatch, length: int, error: str
) -> None:
    monkeypatch.setattr("appliance.worker._ANSWER_WAIT_S", 0.05)
    kib = 1024
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right, closing(Arena.create(1024 * kib)) as answers:
        lent = [answers.put(bytes(200 * kib)) for _ in range(5)]
        for slot in lent[::2]:  # more is free than is asked for, though not in one piece
            answers.free(slot)
        worker = Worker(left)
        worker._answers = answers  # noqa: SLF001 - what `serve` does, which ends the process
        worker._reply([(wire.Done(7, (), {}), [bytes(length * kib)])])  # noqa: SLF001 - see above
        right.settimeout(20)
        ((message, _payloads, _slots),) = wire.unpack(right.recv(wire.MESSAGE_BYTES))
    assert isinstance(message, wire.Error)
    assert (message.id, message.error) == (7, error)
