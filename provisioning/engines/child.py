"""Watches the process that builds: its progress, its time and its memory; what it says is kept in a log.

Memory is what the process holds in RAM, read from /proc, because RLIMIT_AS counts addresses, of which CUDA reserves
more than any machine has. Device memory is bounded by the workspace limit of the builder itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import schema
from models.errors import WorkshopError
from provisioning.engines.builder import Order, Outcome

BUILDER = (sys.executable, "-m", "provisioning.engines.builder")
_TICK_S = 0.05
_MIB = 2**20
_INNER = re.compile(r"Error Code \d+: [^(]*\((.+?)\.? In \S+ at \S+\)")
"""What TensorRT says, between the kind of error and the line of its source."""
_REMEDIES = (
    (
        r"unsupported op|no importer|plugin not found|not found in plugin registry|not registered",
        "this version has no such operator: write it in standard operators of opset 17, or use a newer TensorRT",
    ),
    (
        r"out of memory|outofmemory|memoryallocation",
        "free device memory, or lower --workspace-mib",
    ),
    (
        r"could not find any implementation|no valid tactic",
        "raise --workspace-mib, or leave this layer in float",
    ),
    (
        r"strongly typed|same (input )?type|type mismatch|incompatible type",
        "its inputs differ in type: put a Cast before one of them",
    ),
    (r"data?e? type", "TensorRT has no tensors of that type: keep this graph on onnxruntime, or cast it"),
    (r"profile|kMIN|kMAX|kOPT", "the profile and the graph disagree about shapes: see docs/engines.md"),
    (r"no ONNX graph|failed to parse", "the graph is damaged: build the bundle again"),
)
"""What a builder says -> what likely helps; the first that matches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one build may take."""

    time_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Built:
    """A build that worked, and what it took."""

    outcome: Outcome
    seconds: float
    cpu_s: float
    memory_bytes: int
    """The most RAM that it was seen to hold."""


def run(
    order: Order, log: Path, limits: Limits, progress: Callable[[str], None], command: Sequence[str] = BUILDER
) -> Built:
    """Build `order` in a child; raises WorkshopError with the layer, the likely remedy and where the log is.

    `progress` is told in words how far it is. The child is dead when this returns.
    """
    started_at, before_s = time.monotonic(), _cpu_s()
    last: dict[str, Any] = {}
    peak_bytes = 0
    with log.open("wb") as file, _child([*command, json.dumps(schema.dump(order))], file.fileno()) as (child, events):
        for line in _lines(events):
            if line:
                last = json.loads(line)
                if "phase" in last:
                    progress(f"{last['phase']}, step {last['done']} of {last['of']}")
            peak_bytes = max(peak_bytes, _resident_bytes(child.pid))
            stop = _over(limits, time.monotonic() - started_at, peak_bytes)
            if stop:
                msg = f"{stop}; the log is {log}"
                raise WorkshopError(msg)
        status = child.wait()
    if "built" not in last:
        raise WorkshopError(_reason(last, status, log))
    outcome = schema.load(Outcome, last["built"])
    return Built(outcome, time.monotonic() - started_at, _cpu_s() - before_s, peak_bytes)


@contextmanager
def _child(command: Sequence[str], log: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The child and a pipe of its events; both are gone at the end, whatever happens."""
    events, theirs = os.pipe()
    try:
        with subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=log, start_new_session=True
        ) as child:
            os.close(theirs)
            try:
                yield child, events
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    finally:
        os.close(events)


def _lines(pipe: int) -> Iterator[bytes]:
    """Lines from `pipe` until its end, and an empty one whenever nothing came for a moment."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], _TICK_S)[0]:
            yield b""
            continue
        content = os.read(pipe, 65536)
        if not content:
            return
        *lines, rest = (rest + content).split(b"\n")
        yield from lines


def _resident_bytes(pid: int) -> int:
    """RAM that a process holds; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _cpu_s() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _over(limits: Limits, seconds: float, resident_bytes: int) -> str:
    if seconds > limits.time_s:
        return f"the build was stopped after its {limits.time_s:g} s: give it more with --time-limit-s"
    if resident_bytes > limits.memory_bytes:
        return (
            f"the build was stopped at {resident_bytes // _MIB} MiB of memory, allowed were "
            f"{limits.memory_bytes // _MIB} MiB: give it more with --memory-limit-mib"
        )
    return ""


def _reason(last: dict[str, Any], status: int, log: Path) -> str:
    """Why a build failed, in one sentence."""
    if "failed" not in last:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        where = f" in {last['phase']}" if "phase" in last else ""
        return f"the builder {how}{where} and gave no reason: read {log}"
    told = re.sub(r"\s+", " ", str(last["failed"])).strip()
    inner = _INNER.search(told)
    said = (inner[1] if inner else told).rstrip(".")[:400]
    layer = f"layer {last['layer']!r}: " if last["layer"] else ""
    remedy = next((help_ for pattern, help_ in _REMEDIES if re.search(pattern, said, re.IGNORECASE)), "")
    return f"{layer}{said}" + (f"; {remedy}" if remedy else "") + f"; the log is {log}"
