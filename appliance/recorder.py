"""The flight recorder: what the last requests were, kept in memory, dumped after a fault; and their lines in the log.

A request leaves shapes, times and names here, never its content. Some requests a second, and those that failed, are
told in the log too, with a hash of what they sent: that is computed, and the line written, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from appliance.core.faults import cuda_code
from appliance.core.history import Happened
from appliance.core.trace import Trace
from appliance.service import Outcome, Service
from models.errors import BadInput
from models.folder import write_file
from models.spec import Payload, Tensor

log = structlog.get_logger()

FLIGHTS = "flights"
"""Folder in the state folder with what was dumped."""
_KEPT = 256
_DUMPS = 20
_DUMP_AFTER_S = 1.0
"""So that the requests which a dead worker held are in it, with their hashes."""
_TELL_AFTER_S = 0.25
"""What is told is gathered for so long: a thread for each line costs the loop more than the line."""
_UNTOLD = 16
"""Lines that are yet to be written; a log that stands still costs lines, and no memory."""
_UNTOLD_BYTES = 16 * 1024 * 1024
"""What those lines may keep of what was sent, until it is hashed; beyond it a line has no hash."""
_HASH_BYTES = 8
_LONGEST_REASON = 300


@dataclass(slots=True)
class Flight:
    """One request, without what it carried."""

    at: float
    """Unix seconds of its end."""
    model_id: str
    version: str
    seconds: float
    """From its arrival at the service to its answer."""
    timing_ms: Mapping[str, float]
    together: int
    inputs: Sequence[tuple[str, str, Sequence[int]]]
    """Name, datatype and shape of each tensor."""
    request_id: str
    source: str
    trace: Trace | None
    error: str = ""
    """Class of the error that it ended with; empty when it was answered."""
    reason: str = ""
    input_hash: str = ""
    """BLAKE2b-64 of its payloads; empty where it was not told in the log, or too much was to be hashed."""


def input_hash(tensors: Sequence[Tensor]) -> str:
    """BLAKE2b of 64 bits over what was sent, in its order; of one picture it is that of its file (`b2sum -l 64`)."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for tensor in tensors:
        for part in _parts(tensor):
            digest.update(part)
    return digest.hexdigest()


def _parts(tensor: Tensor) -> Iterable[Payload]:
    if tensor.datatype == "BYTES":
        with contextlib.suppress(BadInput):  # what is no list of byte strings was refused, and is told of all the same
            return tensor.to_array().flat
    return (tensor.data,)


class Recorder:
    """Follows the requests of one service."""

    def __init__(
        self, service: Service, folder: Path, *, per_s: int, export: Callable[[Flight], None] | None = None
    ) -> None:
        """Keep dumps in `folder`; tell up to `per_s` answered requests a second in the log, and as many that failed.

        `export` is shown each request that its caller traces, on the event loop; None where nobody wants that.
        """
        self._service, self._folder, self._per_s, self._export = service, folder, per_s, export
        self._ring: deque[Flight] = deque(maxlen=_KEPT)
        self._second, self._told, self._failed, self._left_out = 0, 0, 0, 0
        self._writing: set[asyncio.Future[None]] = set()
        self._untold: list[tuple[Flight, Sequence[Tensor], int]] = []
        """What is to be told in the log, what it carried, and how many before it are left out."""
        self._untold_bytes = 0
        self._telling = False
        self._dumping: asyncio.TimerHandle | None = None
        self._faults: list[Happened] = []
        service.observers.append(self._observe)
        service.flights = self.flights

    def flights(self) -> list[Flight]:
        """The last requests, the newest first."""
        return list(reversed(self._ring))

    def fault(self, happened: Happened) -> None:
        """Dump what is known soon: a worker has failed."""
        self._faults.append(happened)
        if self._dumping is None:
            self._dumping = asyncio.get_running_loop().call_later(_DUMP_AFTER_S, self._dump)

    async def finish(self) -> None:
        """Write what is still to be written."""
        self._tell_all()
        if self._dumping:
            self._dumping.cancel()
            self._dump()
        if self._writing:
            await asyncio.wait(self._writing)

    def _observe(self, outcome: Outcome) -> None:
        request, error, now = outcome.request, outcome.error, time.time()
        flight = Flight(
            now,
            outcome.model,
            outcome.version,
            outcome.seconds,
            outcome.timing_ms,
            outcome.together,
            [(tensor.name, tensor.datatype, tensor.shape) for tensor in request.tensors] if request else (),
            request.id if request else "",
            request.source if request else "",
            request.trace if request else None,
        )
        if error is not None:
            flight.error, flight.reason = type(error).__name__, str(error)[:_LONGEST_REASON]
        self._ring.append(flight)
        if self._export and flight.trace and flight.trace.sampled:
            self._export(flight)
        if self._due(now, failed=error is not None):
            left_out, self._left_out = self._left_out, 0
            tensors = request.tensors if request else ()
            size_bytes = sum([tensor.size_bytes for tensor in tensors])
            if self._untold_bytes + size_bytes > _UNTOLD_BYTES:
                tensors, size_bytes = (), 0
            self._untold_bytes += size_bytes
            self._untold.append((flight, tensors, left_out))
            self._tell_soon()

    def _due(self, now: float, *, failed: bool) -> bool:
        """Whether this request is told in the log: so many a second, and those that failed apart from the others."""
        if int(now) != self._second:
            self._second, self._told, self._failed = int(now), 0, 0
        if failed:
            self._failed += 1
        else:
            self._told += 1
        due = (self._failed if failed else self._told) <= self._per_s and len(self._untold) < _UNTOLD
        self._left_out += not due
        return due

    def _tell_soon(self) -> None:
        if self._untold and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(_TELL_AFTER_S, self._tell_all)

    def _tell_all(self) -> None:
        """Write what has gathered; the next lines gather meanwhile."""
        untold, self._untold, self._untold_bytes = self._untold, [], 0
        writing = self._in_thread(self._tell_each, untold)
        if writing:
            writing.add_done_callback(self._told_all)

    def _told_all(self, _writing: object) -> None:
        self._telling = False
        self._tell_soon()

    def _tell_each(self, untold: Sequence[tuple[Flight, Sequence[Tensor], int]]) -> None:
        for one in untold:
            self._tell(*one)

    @staticmethod
    def _tell(flight: Flight, tensors: Sequence[Tensor], left_out: int) -> None:
        flight.input_hash = input_hash(tensors) if tensors else ""
        code = cuda_code(flight.reason) if flight.error else None
        told: dict[str, Any] = {
            "request_id": flight.request_id,
            "model_id": flight.model_id,
            "version": flight.version,
            "input_hash": flight.input_hash,
            "ms": round(flight.seconds * 1e3, 3),
            "timing_ms": {part: round(spent, 3) for part, spent in flight.timing_ms.items()},
            "source": flight.source,
            "trace_id": flight.trace.trace_id if flight.trace else "",
            "error": flight.error,
            "reason": flight.reason,
            "cuda_error_code": code,
            "left_out": left_out,
        }
        say = log.warning if flight.error else log.info
        say("request", **{key: value for key, value in told.items() if value or key == "ms"})

    def _dump(self) -> None:
        self._dumping = None
        faults, self._faults = self._faults, []
        content = {"faults": faults, "status": self._service.status(), "requests": self.flights()}
        self._in_thread(self._keep, f"{faults[0].model}-{faults[0].cause}", content)

    def _keep(self, name: str, content: Mapping[str, Any]) -> None:
        path = self._folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in sorted(self._folder.glob("*.json"))[: -_DUMPS + 1]:
                old.unlink()
            write_file(path, orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), 0o600)
        except OSError as error:
            log.warning("flights_not_kept", reason=str(error))
        else:
            log.info("flights_kept", file=str(path))

    def _in_thread(self, call: Callable[..., None], *given: object) -> asyncio.Future[None] | None:
        with contextlib.suppress(RuntimeError):  # at the very end there is no thread any more
            writing = asyncio.get_running_loop().run_in_executor(None, call, *given)
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
            return writing
        return None
