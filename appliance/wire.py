"""Messages between the daemon and a worker, over one SOCK_SEQPACKET pair.

A message is a dataclass below and a list of payloads; a packet holds one or more messages. Small payloads
(64 KiB a packet) travel in the packet, larger ones in the sender's arena, named by a slot that the receiver gives
back with `Free`. A SEQPACKET socket keeps packets whole, so there is no framing and no partial read.

    daemon -> worker    Open (first, with the two arenas), Run (those of a packet are one batch), Prove, Drop, Free,
                        Break, Stop
    worker -> daemon    Ready (once), Progress, Unmeasured, Measured, Done or Error or Skipped (once a Run or Prove),
                        Free, Failed (at last)
"""

from __future__ import annotations

import array
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

import orjson

from appliance.arena import Arena, Slot
from appliance.core.limits import Limits
from appliance.core.schedule import DEPTH
from models import schema
from models.errors import TooLarge
from models.measurements import Memory
from models.spec import ModelSpec, Payload, Tensor

INLINE_BYTES = 64 * 1024
MESSAGE_BYTES = 192 * 1024  # under Linux's default socket buffer, which bounds one message
BARE_GRAPH = "model"
_LENGTH = struct.Struct("<I")


def arena_bytes(limits: Limits) -> int:
    """Size of each of the two arenas of a worker."""
    # Each thread of the worker answers a run before it frees its memory, so that many more may be in use.
    return (DEPTH + 1) * limits.concurrency * (limits.body_bytes + INLINE_BYTES)


@dataclass(frozen=True, slots=True)
class Open:
    """Load a model: a bundle folder, or one bare ONNX file."""

    name: str
    runtime: str
    bundle: str = ""
    onnx: str = ""
    precision: str = "auto"
    concurrency: int = 1
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Graph -> precision -> measured latency on this machine, when it is already known."""
    max_pixels: int = 64_000_000
    digest: str = ""
    """Identity that the bundle must have: another one may have been written into the folder since."""
    spoiled: bool = False
    """Fault injection: read one byte of each graph wrongly."""
    run_limit_bytes: int = 0
    """All runs together may take so much memory; 0 is no limit."""
    idle_trim_s: float = 5.0
    """After so long without work, memory that runs have left allocated is given back."""
    memory: Memory | None = None
    """What was measured here before; the rest will be measured."""
    gentle: bool = False
    """Others serve meanwhile: load and prove on a thread of low priority, and once more when memory is given back, so
    that the first request meets a warm model."""
    gpu_only: bool = False
    """The CPU may compute no part of a graph in place of a GPU."""
    gpu_memory_bytes: int = 0
    """All runs together may take so much memory of a card; 0 is no limit."""
    engines: str = ""
    """Folder with engines of the bundle that this device has made."""
    prepared: str = ""
    """Folder for what graphs are made into as they are opened; empty where nothing is to be kept."""


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class TensorHead:
    """A tensor without its payload."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class Run:
    """Work: `graph` "" is the bundle's task on the pictures of tensor `image`."""

    id: int
    graph: str
    tensors: tuple[TensorHead, ...]
    outputs: tuple[str, ...] | None = None
    deadline_at: float | None = None
    """Monotonic seconds, which daemon and worker share; from then on nobody waits for the answer."""
    one_run: bool = False
    """Whether all of this packet is computed in one run, each tensor joined along its first axis."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for the answer of this Run any more: skip it unless it has begun."""

    id: int


@dataclass(frozen=True, slots=True)
class Prove:
    """Answer the golden vectors again, among the other work; Done without tensors when they were right."""

    id: int


@dataclass(frozen=True, slots=True)
class Free:
    """The receiver has finished with these slots of the sender's arena: (offset, length, generation)."""

    slots: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Break:
    """Fault injection: be broken from now on: crash, hang, slow, leak, nan, cuda-error, or none for whole."""

    fault: str
    amount: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish the work in hand, then exit 0."""


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """One graph as it was opened."""

    spec: ModelSpec
    precision: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and has answered a golden vector rightly (a bare file: has run once)."""

    graphs: Mapping[str, GraphInfo]
    """A bare file has one, `BARE_GRAPH`."""
    runtime: str
    load_s: float
    latency_ms: Mapping[str, Mapping[str, float]]
    unproven: str = ""
    """Why a bare file could not be run once at load; empty when it could."""
    overhead_bytes: int | None = None
    """What the process took before it held a model."""
    memory: Memory | None = None
    """None where the kernel does not let it be measured."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The model cannot be loaded, or the worker cannot go on; it exits."""

    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A run goes on: its worker has not hung, however long it takes."""

    id: int


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A run begins of which it is not known what it takes: until it is answered the lease says nothing."""

    id: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run took above the weights; told once for each graph and size class."""

    graph: str
    bucket_bytes: int
    run_bytes: int


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class Done:
    """An answer, with the milliseconds spent in each part, and the seconds that its run took in all."""

    id: int
    tensors: tuple[TensorHead, ...]
    timing_ms: Mapping[str, float]
    took_s: float = 0.0
    together: int = 1
    """Requests that shared the run."""


@dataclass(frozen=True, slots=True)
class Error:
    """A refusal or a failure of one run."""

    id: int
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A run was not computed, or its answer not sent: its deadline has passed, or it was dropped."""

    id: int


Message: TypeAlias = (
    Open
    | Run
    | Prove
    | Drop
    | Free
    | Break
    | Stop
    | Ready
    | Failed
    | Progress
    | Unmeasured
    | Measured
    | Done
    | Error
    | Skipped
)
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
Parcel: TypeAlias = "tuple[Message, Sequence[Payload]]"
"""A message to send, with its payloads."""


def encode(message: Message, payloads: Sequence[Payload] = (), arena: Arena | None = None) -> bytes:
    """A packet of one message; see `pack`."""
    return pack([(message, payloads)], arena)


def pack(parcels: Sequence[Parcel], arena: Arena | None = None) -> bytes:
    """A packet; large payloads are copied into new slots of `arena`.

    Raises ArenaFullError, or TooLarge for a packet that no socket would take; the arena is then as it was.
    """
    inline: list[Payload] = []
    inline_bytes = 0
    slots: list[Slot] = []
    described = []
    try:
        for message, payloads in parcels:
            places: list[int | tuple[int, int, int]] = []
            for payload in payloads:
                length = memoryview(payload).nbytes
                if arena is not None and inline_bytes + length > INLINE_BYTES:
                    slot = arena.put(payload)
                    slots.append(slot)
                    places.append((slot.offset, slot.length, slot.generation))
                else:
                    inline.append(payload)
                    inline_bytes += length
                    places.append(length)
            described.append((type(message).__name__, _body(message), places))
        head = orjson.dumps(described)
        if _LENGTH.size + len(head) + inline_bytes > MESSAGE_BYTES:
            msg = f"names and shapes of these tensors take {len(head)} bytes, more than fits in a message: send fewer"
            raise TooLarge(msg)  # noqa: TRY301 - the arena is put back as it was below
    except BaseException:
        for slot in slots:
            assert arena is not None  # noqa: S101 - slots exist only with an arena
            arena.free(slot)
        raise
    return b"".join((_LENGTH.pack(len(head)), head, *inline))


def unpack(data: bytes, arena: Arena | None = None) -> list[tuple[Message, list[Payload], list[Slot]]]:
    """The messages of a packet, each with its payloads (views of `data` or of the peer's `arena`) and slots to free."""
    (length,) = _LENGTH.unpack_from(data)
    view = memoryview(data)
    at = _LENGTH.size + length
    messages: list[tuple[Message, list[Payload], list[Slot]]] = []
    for kind, body, places in orjson.loads(view[_LENGTH.size : at]):
        payloads: list[Payload] = []
        slots: list[Slot] = []
        for place in places:
            if isinstance(place, int):
                payloads.append(view[at : at + place])
                at += place
            else:
                assert arena is not None  # noqa: S101 - the peer uses an arena only after passing it
                slot = Slot(*place)
                payloads.append(arena.get(slot))
                slots.append(slot)
        messages.append((_message(kind, body), payloads, slots))
    return messages


def decode(data: bytes, arena: Arena | None = None) -> tuple[Message, list[Payload], list[Slot]]:
    """The message of a packet that holds only one; see `unpack`."""
    (message,) = unpack(data, arena)
    return message


def _body(message: Message) -> Message | Sequence[Any]:
    """What is written of a message; the two that come with every request as lists, five times as fast."""
    if isinstance(message, (Run, Done)):
        heads = [(head.name, head.datatype, head.shape) for head in message.tensors]
        if isinstance(message, Run):
            return message.id, message.graph, heads, message.outputs, message.deadline_at, message.one_run
        return message.id, heads, message.timing_ms, message.took_s, message.together
    return message


def _message(kind: str, body: Any) -> Message:  # noqa: ANN401 - JSON
    # The two that come with every request are read by hand, twenty times as fast.
    if kind == "Run":
        number, graph, heads, outputs, deadline_at, one_run = body
        return Run(number, graph, _heads(heads), None if outputs is None else tuple(outputs), deadline_at, one_run)
    if kind == "Done":
        number, heads, timing_ms, took_s, together = body
        return Done(number, _heads(heads), timing_ms, took_s, together)
    return schema.load(_KINDS[kind], body)


def _heads(described: Sequence[tuple[str, str, Sequence[int]]]) -> tuple[TensorHead, ...]:
    return tuple([TensorHead(name, datatype, tuple(shape)) for name, datatype, shape in described])


def heads(tensors: Sequence[Tensor]) -> tuple[TensorHead, ...]:
    """Tensors without their payloads."""
    return tuple([TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors])


def join(tensor_heads: Sequence[TensorHead], payloads: Sequence[Payload]) -> list[Tensor]:
    """Tensors from their heads and payloads."""
    return [
        Tensor(head.name, head.datatype, head.shape, payload)
        for head, payload in zip(tensor_heads, payloads, strict=True)
    ]


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send a message together with file descriptors, which the receiver gets as its own copies."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def receive_with_fds(sock: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive a message and up to `count` file descriptors, closed on exec."""
    size = socket.CMSG_SPACE(count * array.array("i").itemsize)
    data, ancillary, _flags, _address = sock.recvmsg(MESSAGE_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
