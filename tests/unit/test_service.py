"""The service over a worker that answers from memory: what answers name, and who is told of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from appliance import wire
from appliance.core.health import State, WorkerHealth
from appliance.core.limits import Limits
from appliance.core.pressure import Bounds
from appliance.memory import Keeper, ModelState, Rules
from appliance.service import Bundle, InferRequest, Outcome, Service
from appliance.supervisor import Answer
from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.errors import ApplianceError, BadInput, InsufficientMemory, NotReady, Overloaded
from models.spec import ModelSpec, Tensor, TensorSpec, pack_bytes

pytestmark = pytest.mark.unit

SPEC = ModelSpec((TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),))
PRECISIONS = {"rec": "int8", "det": "fp32", "cls": "fp32"}
LINE = {"text": "TOTAL", "confidence": 0.98765432, "box": [[0, 0]] * 4}
PICTURE = Tensor("image", "BYTES", (1,), pack_bytes([b"\xff\xd8"]))
X = Tensor.from_array("x", np.zeros(3, np.float32))


class Reader:
    """A supervisor whose worker has read the same line in every picture; graphs give their input back."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.fault = fault
        self.health = WorkerHealth(State.READY)
        self.ready = wire.Ready({name: wire.GraphInfo(SPEC, kind) for name, kind in PRECISIONS.items()}, "r", 0, {})
        self.pid, self.waiting, self.running = 1, 0, 0
        self.memory, self.service_s, self.device = None, None, ""

    def put(
        self,
        graph: str,
        tensors: Sequence[Tensor],
        told: Callable[[Answer | BaseException], None],
        **_how: Any,  # noqa: ANN401 - ignored
    ) -> Callable[[], None]:
        if isinstance(self.fault, asyncio.CancelledError):  # whoever asks leaves before the answer
            task = asyncio.current_task()
            assert task
            task.cancel()
            return lambda: None
        if self.fault:
            raise self.fault
        lines = Tensor("result", "BYTES", (1,), pack_bytes([orjson.dumps({"lines": [LINE]})]))
        told(Answer(list(tensors) if graph else [lines], {"inference": 1.0}))
        return lambda: None


def served(fault: BaseException | None = None) -> Service:
    """A service of the bundle `shop`."""
    blob = Blob.of(b"")
    variants = {kind: Variant(blob, Golden(blob, blob, tolerance=0.1)) for kind in ("fp32", "int8")}
    manifest = Manifest(
        name="shop",
        version="1.0.0",
        licence="Apache-2.0",
        task=TaskSpec("reading"),
        graphs={name: Graph(SPEC, variants) for name in PRECISIONS},
        provenance=Provenance("0" * 64, {}, {}, (), ()),
    )
    bundle = Bundle([wire.Open("shop", "r")], Limits(), manifest=manifest, on_ready=lambda _ready: None)
    bundle.supervisor = Reader(fault)  # type: ignore[assignment] # all of it that a service uses
    return Service([bundle], device_id="d", facts=dict)


def test_a_predict_answer_names_the_precision_of_every_graph_of_its_bundle() -> None:
    answer = asyncio.run(served().predict(InferRequest("shop", [PICTURE])))
    assert answer["precision"] == "cls fp32, det fp32, rec int8"


def test_an_infer_answer_names_the_precision_of_the_graph_that_ran() -> None:
    service = served()
    for name, precision in PRECISIONS.items():
        assert asyncio.run(service.infer(InferRequest(f"shop.{name}", [X]))).origin.precision == precision


def test_confidences_travel_with_four_digits_however_the_bundle_is_asked() -> None:
    service = served()
    predicted = asyncio.run(service.predict(InferRequest("shop", [PICTURE])))
    inferred = orjson.loads(asyncio.run(service.infer(InferRequest("shop", [PICTURE]))).tensors[0].to_array()[0])
    for document in (predicted, inferred):
        assert document["lines"] == [{**LINE, "confidence": 0.9877}]


def test_a_model_of_tensors_says_where_it_takes_them() -> None:
    with pytest.raises(BadInput, match=r"use POST /v2/models/shop\.rec/infer"):
        asyncio.run(served().predict(InferRequest("shop.rec", [PICTURE])))


def test_status_says_which_models_take_pictures() -> None:
    assert [model["takes_pictures"] for model in served().status()["models"]] == [True]
    bare = Bundle([wire.Open("bare", "r")], Limits(), manifest=None, on_ready=lambda _ready: None)
    bare.supervisor = SimpleNamespace(**vars(Reader()))  # type: ignore[assignment] # all of it that status uses
    status = Service([bare], device_id="d", facts=dict).status()
    assert [model["takes_pictures"] for model in status["models"]] == [False]


@pytest.mark.parametrize(
    ("fault", "tensors"),
    [(None, [X]), (Overloaded("full"), [X]), (None, [PICTURE]), (asyncio.CancelledError(), [X])],
    ids=["answered", "refused", "wrong", "given up"],
)
def test_an_observer_is_told_what_became_of_a_request(fault: BaseException | None, tensors: list[Tensor]) -> None:
    service = served(fault)
    told: list[Outcome] = []
    service.observers.append(told.append)
    raised: BaseException | None = None
    try:
        asyncio.run(service.infer(InferRequest("shop.rec", tensors)))
    except (ApplianceError, asyncio.CancelledError) as error:
        raised = error
    (outcome,) = told
    assert (outcome.model, outcome.version) == ("shop.rec", "1.0.0")
    assert 0 <= outcome.seconds < 60
    assert type(outcome.error) is type(raised)
    assert (outcome.error is None) == (fault is None and tensors == [X])
    assert bool(outcome.timing_ms) == (outcome.error is None)


@pytest.mark.parametrize("fault", [None, Overloaded("full")], ids=["answered", "refused"])
def test_an_observer_that_fails_keeps_no_answer_back_and_nothing_from_the_others(fault: Exception | None) -> None:
    service = served(fault)
    told: list[Outcome] = []
    answers: list[object] = []

    def fails(_outcome: Outcome) -> None:
        raise ZeroDivisionError

    service.observers += [fails, told.append]
    service.ask(InferRequest("shop.rec", [X]), answers.append)
    assert (len(answers), len(told)) == (1, 1)
    assert isinstance(answers[0], Overloaded) == bool(fault)


def test_a_model_that_does_not_fit_is_unavailable_says_why_and_is_no_fault_of_the_daemon() -> None:
    bundle = Bundle([wire.Open("bare", "null")], Limits(), manifest=None, on_ready=lambda _ready: None)
    keeper = Keeper([bundle], Rules(total_bytes=1000, bounds=Bounds(low_bytes=0, calm_bytes=0)))
    service = Service([bundle], device_id="d", facts=dict, keeper=keeper)

    async def scenario() -> None:
        settled = asyncio.Event()
        service.listeners.append(lambda: settled.set() if service.settled else None)
        service.start()
        await asyncio.wait_for(settled.wait(), 10)
        (model,) = service.repository()
        assert model.state is ModelState.UNAVAILABLE
        assert "bare needs" in model.reason
        assert service.ready  # its next request tries again
        assert service.failed == ""
        admission = await service.load("bare", dry_run=True)
        assert (admission.fits, admission.have_bytes, admission.would_evict) == (False, 1000, ())
        for attempt in (service.load("bare"), service.infer(InferRequest("bare", [X]))):
            with pytest.raises(InsufficientMemory, match="bare needs"):
                await attempt
        await service.unload("bare")
        with pytest.raises(NotReady, match="unloaded by request"):
            await service.infer(InferRequest("bare", [X]))
        assert service.model("bare").wanted is False
        await service.stop(1)

    asyncio.run(scenario())
