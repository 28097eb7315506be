"""A candidate beside the version that serves: the same inputs to both, and what comes of it.

Nobody waits for a candidate's answers, and of live requests it gets a bounded share.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import orjson

from appliance.core import gates
from appliance.core.gates import Judged, Rules
from appliance.service import Bundle, Candidate, InferRequest, InferResponse, Service
from models.answers import said
from models.errors import ApplianceError, Overloaded
from models.folder import BundleFolder
from models.spec import Tensor

_ROUNDS = 3
"""Of comparing latency, until one is good: a version that is slower is slower each time, and a neighbour's load must
not condemn one."""
_RUNS = 20
"""Of each graph on each version, by turns, so that both meet the same neighbours."""
_LEAST_PRIORITY = 10
_LARGEST_BYTES = 8 * 2**20
"""Of a live request that is kept for the candidate."""
_AT_A_TIME = 2
"""Live requests that the candidate answers."""


def memory(candidate: Candidate) -> Judged:
    """Whether what was measured of it as it loaded and proved itself fits beside the other models."""
    return gates.memory(candidate.standing.need_bytes, candidate.standing.have_bytes)


async def latency(candidate: Candidate, folder: BundleFolder, rules: Rules) -> Judged:
    """Run the golden inputs on both versions where both have the graph; `folder` is the candidate's."""
    if not candidate.standing.beside or not candidate.before.manifest or not candidate.fresh.manifest:
        return Judged("", {"compared": 0.0})
    judged = Judged()
    for _ in range(_ROUNDS):
        judged = gates.latency(await _timed(candidate, folder), rules)
        if not judged.reason:
            break
    return judged


async def _timed(candidate: Candidate, folder: BundleFolder) -> dict[str, tuple[list[float], list[float]]]:
    """By graph, milliseconds of the runs of both versions."""
    before, fresh = candidate.before, candidate.fresh
    graphs = fresh.manifest.graphs if fresh.manifest else {}
    theirs_by_name = before.manifest.graphs if before.manifest else {}
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for name, graph in graphs.items():
        theirs = theirs_by_name.get(name)
        if theirs is None or theirs.spec.inputs != graph.spec.inputs:
            continue
        golden = next(iter(graph.variants.values())).golden
        arrays = await asyncio.to_thread(folder.read_arrays, golden.inputs)
        tensors = [Tensor.from_array(key, array) for key, array in arrays.items()]
        pairs[name] = ([], [])
        for _ in range(_RUNS):
            for bundle, spent_ms in zip((before, fresh), pairs[name], strict=True):
                try:
                    answer = await bundle.supervisor.submit(name, tensors, priority=_LEAST_PRIORITY)
                except ApplianceError as error:
                    if bundle is fresh:
                        raise
                    msg = f"the version that serves cannot be compared with now: {error}"
                    raise Overloaded(msg) from error
                spent_ms.append(answer.timing_ms["inference"])  # without waiting: only one of them has other work
    return pairs


async def shadow(service: Service, candidate: Candidate, requests: int, limit_s: float, rules: Rules) -> Judged:
    """Let the candidate answer `requests` live requests too, for `limit_s` at most, and compare."""
    if not candidate.standing.beside or not requests:
        return gates.shadow(0.0, 0, rules)
    names = set(candidate.before.names) & set(candidate.fresh.names)
    tasks: set[asyncio.Task[float | None]] = set()
    shares: list[float] = []
    enough = asyncio.Event()

    def mirror(request: InferRequest, response: InferResponse) -> None:
        size_bytes = sum([tensor.size_bytes for tensor in request.tensors])
        busy = len(tasks) >= min(_AT_A_TIME, requests - len(shares))
        if request.model not in names or busy or size_bytes > _LARGEST_BYTES:
            return
        asked = replace(request, tensors=_owned(request.tensors), version=None, deadline_ms=None, source="")
        task = asyncio.ensure_future(_agreement(candidate.fresh, asked, _owned(response.tensors)))
        tasks.add(task)
        task.add_done_callback(done)

    def done(task: asyncio.Task[float | None]) -> None:
        tasks.discard(task)
        share = None if task.cancelled() else task.result()
        if share is not None:
            shares.append(share)
            if len(shares) >= requests:
                enough.set()

    service.mirrors.append(mirror)
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(enough.wait(), limit_s)
    finally:
        service.mirrors.remove(mirror)
        for task in list(tasks):
            task.cancel()
    return gates.shadow(sum(shares), len(shares), rules)


def _owned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies: payloads are only borrowed until a request is answered."""
    return [replace(tensor, data=bytes(tensor.data)) for tensor in tensors]


async def _agreement(fresh: Bundle, request: InferRequest, answered: Sequence[Tensor]) -> float | None:
    """How far the candidate's answer is the one that was given; None when it had no time for it."""
    try:
        response = await fresh.infer(request, time.monotonic())
    except Overloaded:
        return None
    except ApplianceError:
        return 0.0
    if not fresh.takes_pictures(request.model):
        return gates.agreement(answered, response.tensors)
    pairs = zip(answered[0].to_array(), response.tensors[0].to_array(), strict=True)
    return float(np.mean([gates.lines_agreement(_texts(one), _texts(other)) for one, other in pairs]))


def _texts(document: bytes) -> list[str]:
    return [text for text, _ in said(orjson.loads(document))]
