"""Doubtful answers are asked about upstream where the operator allows it, and nobody waits who did not ask to."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pytest
from doubles.service import MemoryService
from support import tiny

from appliance.second_opinion import SecondOpinion
from appliance.service import InferRequest, InferResponse, Origin
from appliance.settings import SecondOpinion as Settings
from models.spec import Tensor, pack_bytes
from models.sync import Opinion, Part, Sample

pytestmark = pytest.mark.unit

PICTURE = tiny.jpeg(64, 48)
DOUBTFUL = {"text": "1O.5O", "confidence": 0.6, "box": [[10.0, 10.0], [50.0, 10.0], [50.0, 20.0], [10.0, 20.0]]}
SURE = {"text": "TOTAL", "confidence": 0.95, "box": [[10.0, 30.0], [50.0, 30.0], [50.0, 40.0], [10.0, 40.0]]}
BETTER = {"lines": [{**DOUBTFUL, "text": "10.50", "confidence": 0.97}]}


class Channel:
    """What stands between a device and upstream."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []
        self.waiting, self.held = 0, ""
        self.on_opinion: Callable[[Opinion, Callable[[], None]], None]
        self.answers: Callable[[Sample], Opinion | None] = lambda _sample: None

    def ask(self, sample: Sample) -> None:
        self.asked.append(sample)
        opinion = self.answers(sample)
        if opinion:
            self.hear(opinion)

    def hear(self, opinion: Opinion) -> list[str]:
        safe: list[str] = []
        self.on_opinion(opinion, lambda: safe.append(opinion.sample_id))
        return safe

    def why_held(self) -> str:
        return self.held


class Serving(MemoryService):
    """A service whose reader comes from a bundle."""

    def serving(self, name: str) -> Any:  # noqa: ANN401 - what is asked of it
        del name

        class Bundle:
            digest = "d" * 64

        return Bundle


class Device:
    """One that asks, with what it published."""

    def __init__(self, **config: Any) -> None:  # noqa: ANN401 - settings
        self.service, self.channel, self.published = Serving(), Channel(), list[tuple[str, dict[str, Any]]]()
        self.opinion = SecondOpinion(
            self.service,  # type: ignore[arg-type] # its double
            Settings(**{"models": frozenset({"reader"}), **config}),
            self.channel,  # type: ignore[arg-type] # its double
            self.publish,
            most_pixels=10**7,
            wall=lambda: 1.8e9,
            monotonic=lambda: self.now,
        )
        self.now = 100.0
        self.cuts = 0
        self.opinion._cut = self.cut  # type: ignore[method-assign] # noqa: SLF001 - a child a picture; see below

    async def cut(self, _picture: bytes, document: Mapping[str, Any], which: list[int]) -> list[Part]:
        self.cuts += 1
        return [Part("", {"lines": [document["lines"][i] for i in which]})]

    def publish(self, model: str, document: dict[str, Any], safe: Callable[[], None]) -> None:
        self.published.append((model, document))
        safe()

    async def answer(self, *lines: Mapping[str, Any], model: str = "reader", escalate: bool = False) -> None:
        """One answer leaves."""
        request = self.request(model, escalate=escalate)
        origin = Origin(model, "1.0", "memory", "fp32", "signed", None)
        result = Tensor("result", "BYTES", (1,), pack_bytes([orjson.dumps({"lines": lines})]))
        for mirror in self.service.mirrors:
            mirror(request, InferResponse(origin, [result], {}))
        if self.opinion._tasks:  # noqa: SLF001
            await asyncio.wait(self.opinion._tasks)  # noqa: SLF001

    @staticmethod
    def request(model: str = "reader", *, escalate: bool = False) -> InferRequest:
        picture = Tensor("image", "BYTES", (1,), pack_bytes([PICTURE]))
        return InferRequest(model, [picture], source="gate-3", escalate=escalate)

    async def wait(self, *lines: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """What a caller gets that waits."""
        document = {"model": "reader", "version": "1.0", "lines": list(lines)}
        return await self.service.second_opinion(self.request(escalate=True), document)


def opinion(sample: Sample, **changes: Any) -> Opinion:  # noqa: ANN401 - its fields
    given = {"source": sample.source, "at": sample.at, "by": "large 1", "result": BETTER, "agrees": False}
    return Opinion(sample.sample_id, sample.model, sample.version, **{**given, **changes})


def test_a_doubtful_answer_is_asked_about_and_the_better_text_is_published() -> None:
    device = Device()
    asyncio.run(device.answer(SURE, DOUBTFUL))
    (sample,) = device.channel.asked
    assert (sample.model, sample.version, sample.digest, sample.source) == ("reader", "1.0", "d" * 64, "gate-3")
    assert [part.answer for part in sample.parts] == [{"lines": [DOUBTFUL]}]
    assert device.channel.hear(opinion(sample)) == [sample.sample_id]
    ((model, document),) = device.published
    assert (model, document["second_opinion"], document["source"], document["by"]) == (
        "reader",
        True,
        "gate-3",
        "large 1",
    )
    assert (document["lines"], document["agrees"]) == (BETTER["lines"], False)
    assert {key: device.opinion.status()[key] for key in ("asked", "answered", "agreed")} == {
        "asked": 1,
        "answered": 1,
        "agreed": 0,
    }


def test_nothing_leaves_that_is_sure_or_of_a_model_that_is_not_named_or_whose_caller_waits() -> None:
    device = Device()
    asyncio.run(device.answer(SURE))
    asyncio.run(device.answer(DOUBTFUL, model="other"))
    asyncio.run(device.answer(DOUBTFUL, escalate=True))
    assert (device.channel.asked, device.cuts) == ([], 0)


def test_without_a_named_model_nothing_leaves_whoever_asks() -> None:
    device = Device(models=frozenset())
    asyncio.run(device.answer(DOUBTFUL))
    assert "second_opinion.models does not name it" in asyncio.run(device.wait(DOUBTFUL))["reason"]
    assert (device.channel.asked, device.cuts) == ([], 0)


def test_no_more_is_asked_in_an_hour_than_allowed() -> None:
    device = Device(per_hour=3)
    for _ in range(5):
        asyncio.run(device.answer(DOUBTFUL))
    assert len(device.channel.asked) == 3
    assert device.opinion.status()["left_out"] == 2
    device.now += 3601
    asyncio.run(device.answer(DOUBTFUL))
    assert len(device.channel.asked) == 4


def test_a_caller_that_waits_gets_the_opinion_with_its_answer() -> None:
    device = Device()
    device.channel.answers = opinion
    told = asyncio.run(device.wait(SURE, DOUBTFUL))
    assert (told["lines"], told["agrees"], told["by"]) == (BETTER["lines"], False, "large 1")
    assert device.channel.waiting == 0
    assert asyncio.run(device.wait(SURE)) is None


def test_a_caller_waits_no_longer_than_allowed_and_the_opinion_is_published_when_it_comes() -> None:
    device = Device(wait_s=0.05)
    told = asyncio.run(device.wait(DOUBTFUL))
    (sample,) = device.channel.asked
    assert told == {"sample_id": sample.sample_id, "reason": "none came within 0.05 s: it is published when it comes"}
    device.channel.hear(opinion(sample))
    assert len(device.published) == 1
    assert device.channel.waiting == 0


def test_a_caller_does_not_wait_where_samples_have_to() -> None:
    device = Device()
    device.channel.held = "the window 22:00-04:00 opens in 3.0 h"
    assert asyncio.run(device.wait(DOUBTFUL)) == {"reason": "the window 22:00-04:00 opens in 3.0 h"}
    assert device.channel.asked == []


def test_an_opinion_that_upstream_cannot_give_is_said_and_not_published() -> None:
    device = Device()
    device.channel.answers = lambda sample: opinion(sample, reason="the larger model is not ready", result={})
    told = asyncio.run(device.wait(DOUBTFUL))
    assert told["reason"] == "the larger model is not ready"
    assert device.published == []
    assert device.opinion.status()["unanswered"] == 1


def test_a_picture_that_cannot_be_cut_costs_no_answer() -> None:
    device = Device()

    async def failing(*_given: object) -> list[Part]:
        raise OSError("no memory")

    device.opinion._cut = failing  # type: ignore[method-assign] # noqa: SLF001
    asyncio.run(device.answer(DOUBTFUL))
    assert asyncio.run(device.wait(DOUBTFUL)) == {"reason": "no memory"}
    assert device.opinion.status()["left_out"] == 2


def test_the_picture_is_cut_by_a_child_process() -> None:
    device = Device()
    del device.opinion._cut  # type: ignore[attr-defined] # noqa: SLF001 - the real one again
    asyncio.run(device.answer(DOUBTFUL))
    (sample,) = device.channel.asked
    (part,) = sample.parts
    assert base64.b64decode(part.picture)[:3] == b"\xff\xd8\xff"
    assert (part.left, part.top) == (5, 5)
