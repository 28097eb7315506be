"""Answers of which this device is not sure: a larger model upstream reads them again, and the better text comes back.

Nothing leaves a device whose operator has named no models. A sample waits like telemetry, behind everything else: no
camera waits for it, unless it asks to with `escalate=wait`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from appliance.service import InferRequest, InferResponse, Service, documents
from models import schema
from models.answers import doubtful, found
from models.errors import BadInput
from models.sync import Opinion, Part, Sample

if TYPE_CHECKING:
    from appliance.cloudsync import CloudSync
    from appliance.settings import SecondOpinion as Settings

log = structlog.get_logger()

_AT_ONCE = 2
"""Pictures that are being cut."""
_CUT_S = 30.0
_HOUR_S = 3600.0
_REMEMBERED = 10_000
"""Samples that were asked about and are not answered."""

Publish = Callable[[str, dict[str, Any], Callable[[], None]], None]


class SecondOpinion:
    """What one device asks upstream."""

    def __init__(
        self,
        service: Service,
        config: Settings,
        sync: CloudSync,
        publish: Publish | None,
        *,
        most_pixels: int,
        wall: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch the answers of `service`; `publish` tells opinions to the fleet, None where there is no broker."""
        self._service, self._config, self._sync, self._publish = service, config, sync, publish
        self._most_pixels, self._wall, self._monotonic = most_pixels, wall, monotonic
        self._asked_at: deque[float] = deque()
        """Of the last hour, monotonic seconds."""
        self._asked: OrderedDict[str, asyncio.Future[Opinion] | None] = OrderedDict()
        """By sample id; a future where somebody waits."""
        self._counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[str]] = set()
        self._cutting = asyncio.Semaphore(_AT_ONCE)
        service.mirrors.append(self._see)
        service.second_opinion = self.wait
        sync.on_opinion = self._heard

    def status(self) -> dict[str, Any]:
        """For operators."""
        names = ("asked", "left_out", "answered", "agreed", "unanswered")
        return {
            "models": sorted(self._config.models),
            "pictures": self._config.pictures,
            "blur": self._config.blur,
            **{name: self._counts[name] for name in names},
            "waiting": self._sync.waiting,
        }

    async def wait(self, request: InferRequest, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """What upstream says of an answer, waited for; None where nothing in it is doubtful."""
        which = doubtful(document, self._config.confidence)
        if not which:
            return None
        why_not = self._why_not(request.model) or self._sync.why_held()
        if why_not:
            return {"reason": why_not}
        self._sync.waiting += 1
        try:
            return await self._answered(request, document, which)
        finally:
            self._sync.waiting -= 1

    async def _answered(self, request: InferRequest, document: Mapping[str, Any], which: list[int]) -> dict[str, Any]:
        sample_id, until = uuid.uuid4().hex, self._monotonic() + self._config.wait_s
        self._remember(sample_id, answer := asyncio.get_running_loop().create_future())
        (picture,) = request.tensors[0].to_array()
        reason = await self._send(sample_id, bytes(picture), document, which, request.source)
        if reason:
            return {"reason": reason}
        try:
            opinion = await asyncio.wait_for(answer, max(0.0, until - self._monotonic()))
        except asyncio.TimeoutError:
            late = f"none came within {self._config.wait_s:g} s: it is published when it comes"
            return {"sample_id": sample_id, "reason": late}
        return _told(opinion)

    def _see(self, request: InferRequest, response: InferResponse) -> None:
        """An answer leaves."""
        if request.model not in self._config.models or request.escalate:
            return
        for i, document in enumerate(documents(response)):
            which = doubtful(document, self._config.confidence)
            if not which:
                continue
            if self._why_not(request.model):
                self._counts["left_out"] += 1
                continue
            self._remember(sample_id := uuid.uuid4().hex, None)
            picture = bytes(request.tensors[0].to_array()[i])  # it is only borrowed
            task = asyncio.ensure_future(self._send(sample_id, picture, document, which, request.source))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _why_not(self, model: str) -> str:
        """Why nothing is asked about an answer of `model` now; empty where it is. One that is asked is counted."""
        if model not in self._config.models:
            return f"pictures of {model} do not leave this device: second_opinion.models does not name it"
        now = self._monotonic()
        while self._asked_at and self._asked_at[0] <= now - _HOUR_S:
            self._asked_at.popleft()
        if len(self._asked_at) >= self._config.per_hour:
            return f"the {self._config.per_hour} samples of this hour were sent (second_opinion.per_hour)"
        if len(self._tasks) >= _AT_ONCE:
            return "other pictures are being cut"
        self._asked_at.append(now)
        return ""

    async def _send(
        self, sample_id: str, picture: bytes, document: Mapping[str, Any], which: list[int], source: str
    ) -> str:
        """Cut a picture and let the sample wait for upstream; why not, empty where it does."""
        try:
            sample = Sample(
                sample_id=sample_id,
                model=document["model"],
                version=document["version"],
                digest=self._service.serving(document["model"]).digest or "",
                source=source,
                at=round(self._wall(), 3),
                keep_s=self._config.keep_s,
                parts=tuple(await self._cut(picture, document, which)),
            )
        except Exception as error:  # whatever it is, the answer was given
            self._asked.pop(sample_id, None)
            self._counts["left_out"] += 1
            log.warning("no_second_opinion", model_id=document["model"], reason=str(error))
            return str(error)
        self._counts["asked"] += 1
        self._sync.ask(sample)
        return ""

    async def _cut(self, picture: bytes, document: Mapping[str, Any], which: list[int]) -> list[Part]:
        key, items = found(document)
        wanted = orjson.dumps(
            {
                "answer": {key: items},
                "doubtful": which,
                "whole": self._config.pictures == "whole",
                "blur": self._config.blur,
                "most_pixels": self._most_pixels,
            }
        )
        async with self._cutting:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "appliance.crops"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                said, problem = await asyncio.wait_for(process.communicate(wanted + b"\n" + picture), _CUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise BadInput(problem.decode(errors="replace").strip()[-300:])
        parts = [schema.load(Part, part) for part in orjson.loads(said)]
        if not parts:
            raise BadInput("what is doubtful has no place in the picture, and only crops may leave")
        return parts

    def _remember(self, sample_id: str, answer: asyncio.Future[Opinion] | None) -> None:
        self._asked[sample_id] = answer
        while len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)

    def _heard(self, opinion: Opinion, safe: Callable[[], None]) -> None:
        """Upstream has read a sample again, or says why not."""
        answer = self._asked.pop(opinion.sample_id, None)
        if answer and not answer.done():
            answer.set_result(opinion)
        if opinion.reason:
            self._counts["unanswered"] += 1
            log.warning("no_second_opinion", model_id=opinion.model, reason=opinion.reason)
        else:
            self._counts["answered"] += 1
            self._counts["agreed"] += opinion.agrees
            log.info("second_opinion", model_id=opinion.model, sample=opinion.sample_id, agrees=opinion.agrees)
        if self._publish and not opinion.reason:
            self._publish(opinion.model, {"second_opinion": True, **_told(opinion)}, safe)
        else:
            safe()


def _told(opinion: Opinion) -> dict[str, Any]:
    """An opinion for people and programs on this side."""
    told = {
        "sample_id": opinion.sample_id,
        "at": opinion.at,
        "source": opinion.source or None,
        "model": opinion.model,
        "version": opinion.version,
        "by": opinion.by,
    }
    if opinion.reason:
        return {**told, "reason": opinion.reason}
    return {**told, "agrees": opinion.agrees, **opinion.result}
