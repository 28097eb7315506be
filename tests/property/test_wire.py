"""Messages between daemon and worker: what is sent is what arrives, and a refusal leaves nothing behind."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import wire
from appliance.arena import Arena, ArenaFullError
from models.errors import TooLarge
from models.spec import ModelSpec, TensorSpec

pytestmark = pytest.mark.property

TEXT = st.text(max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SHAPE = st.lists(st.integers(-1, 2**40), max_size=4).map(tuple)
WHOLE = st.integers(0, 2**53)
HEAD = st.builds(wire.TensorHead, TEXT, TEXT, SHAPE)
HEADS = st.lists(HEAD, max_size=4).map(tuple)
LATENCY = st.dictionaries(TEXT, st.dictionaries(TEXT, FINITE, max_size=2), max_size=2)
SPECS = st.lists(st.builds(TensorSpec, TEXT, TEXT, SHAPE, TEXT), max_size=2).map(tuple)
INFO = st.builds(wire.GraphInfo, st.builds(ModelSpec, SPECS, SPECS), TEXT)
MESSAGE = st.one_of(
    st.builds(wire.Open, TEXT, TEXT, TEXT, TEXT, TEXT, WHOLE, LATENCY, WHOLE, TEXT),
    st.builds(
        wire.Run,
        WHOLE,
        TEXT,
        HEADS,
        st.none() | st.lists(TEXT, max_size=3).map(tuple),
        st.none() | FINITE,
        st.booleans(),
    ),
    st.builds(wire.Drop, WHOLE),
    st.builds(wire.Free, st.lists(st.tuples(WHOLE, WHOLE, WHOLE), max_size=3).map(tuple)),
    st.just(wire.Stop()),
    st.builds(wire.Ready, st.dictionaries(TEXT, INFO, max_size=2), TEXT, FINITE, LATENCY, TEXT),
    st.builds(wire.Failed, TEXT, TEXT),
    st.builds(wire.Done, WHOLE, HEADS, st.dictionaries(TEXT, FINITE, max_size=3), FINITE),
    st.builds(wire.Error, WHOLE, TEXT, TEXT),
    st.builds(wire.Skipped, WHOLE),
    st.builds(wire.Unmeasured, WHOLE),
    st.builds(wire.Measured, TEXT, WHOLE, WHOLE),
)
# Lengths around what still travels in the message.
PAYLOAD = st.one_of(st.binary(max_size=50), st.integers(0, 70_000).map(lambda n: bytes(i % 251 for i in range(n))))
ARENA_BYTES = 512 * 1024


@pytest.fixture(scope="module")
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The kind of pair that stands between daemon and worker, with its default buffers."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.setblocking(False)
        yield left, right


def carried(sockets: tuple[socket.socket, socket.socket], data: bytes) -> bytes:
    """`data` after a trip through the socket."""
    left, right = sockets
    left.send(data)
    return right.recv(wire.MESSAGE_BYTES)


@given(MESSAGE)
def test_every_message_arrives_as_it_was_sent(
    sockets: tuple[socket.socket, socket.socket], message: wire.Message
) -> None:
    assert wire.decode(carried(sockets, wire.encode(message))) == (message, [], [])


@given(st.lists(st.tuples(MESSAGE, st.lists(PAYLOAD, max_size=3)), max_size=4))
def test_messages_that_travel_together_arrive_in_order_each_with_its_payloads(
    sockets: tuple[socket.socket, socket.socket], parcels: list[wire.Parcel]
) -> None:
    arena = Arena.create(4 * ARENA_BYTES)
    try:
        arrived = wire.unpack(carried(sockets, wire.pack(parcels, arena)), arena)
        assert [(message, list(map(bytes, payloads))) for message, payloads, _slots in arrived] == parcels
        for _message, _payloads, slots in arrived:
            for slot in slots:
                arena.free(slot)
        assert arena.used_bytes == 0
        del arrived
    finally:
        arena.close()


@given(st.lists(PAYLOAD, max_size=6))
def test_payloads_of_every_size_arrive_in_order_and_their_slots_are_named_to_the_receiver(
    sockets: tuple[socket.socket, socket.socket], payloads: Sequence[bytes]
) -> None:
    arena = Arena.create(ARENA_BYTES)
    try:
        data = wire.encode(wire.Stop(), payloads, arena)
        assert len(data) <= wire.MESSAGE_BYTES
        _message, arrived, named = wire.decode(carried(sockets, data), arena)
        assert [bytes(payload) for payload in arrived] == list(payloads)
        assert (named == []) is (sum(map(len, payloads)) <= wire.INLINE_BYTES)
        for slot in named:
            arena.free(slot)
        assert arena.used_bytes == 0
    finally:
        arena.close()


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=4), st.integers(64, 150_000))
def test_a_message_for_which_there_is_no_room_leaves_the_arena_as_it_was(lengths: list[int], room: int) -> None:
    arena = Arena.create(room // 64 * 64)
    try:
        held = arena.put(b"of another request")
        used_bytes = arena.used_bytes
        slots = []
        with contextlib.suppress(ArenaFullError):
            data = wire.encode(wire.Stop(), [bytes(length) for length in lengths], arena)
            _message, _payloads, slots = wire.decode(data, arena)
            del _payloads
        for slot in slots:
            arena.free(slot)
        assert arena.used_bytes == used_bytes
        assert bytes(arena.get(held)) == b"of another request"
    finally:
        arena.close()


@given(count=st.integers(1, 6000), name_bytes=st.integers(1, 400))
def test_a_request_of_any_number_of_tensors_is_sent_or_refused_but_never_stuck_at_the_socket(
    sockets: tuple[socket.socket, socket.socket], count: int, name_bytes: int
) -> None:
    arena = Arena.create(ARENA_BYTES)
    heads = tuple(wire.TensorHead("n" * name_bytes, "FP32", (1,)) for _ in range(count))
    payloads = [bytes(70_000), *([bytes(4)] * (count - 1))]
    try:
        data = wire.encode(wire.Run(1, "g", heads), payloads, arena)
    except TooLarge:
        assert arena.used_bytes == 0
        assert count * name_bytes + 40 * count + wire.INLINE_BYTES > wire.MESSAGE_BYTES // 2
    else:
        message, arrived, _named = wire.decode(carried(sockets, data), arena)
        assert isinstance(message, wire.Run)
        assert len(wire.join(message.tensors, arrived)) == count
        del arrived
    finally:
        arena.close()
