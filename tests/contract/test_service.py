"""The double of the service has the face of the real one, so the doors are tested against what they will see."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from doubles.service import MemoryService

from appliance.core.command import Command
from appliance.service import InferRequest, Outcome, Service
from models.errors import NotFound

pytestmark = pytest.mark.contract

Either = Service | MemoryService


@pytest.fixture(params=["real", "double"])
def service(request: pytest.FixtureRequest) -> Either:
    """Each implementation; the real one serves nothing, because workers are journeys."""
    if request.param == "double":
        return MemoryService()
    return Service([], device_id="real", facts=dict)


def public(kind: type) -> dict[str, inspect.Signature | None]:
    """Public names of a class with the signatures of its methods."""
    return {
        name: inspect.signature(member) if inspect.isfunction(member) else None
        for name, member in vars(kind).items()
        if not name.startswith("_")
    }


def test_the_double_has_the_methods_of_the_real_one_with_the_same_signatures() -> None:
    assert public(MemoryService) == public(Service)


def test_the_double_is_asynchronous_where_the_real_one_is() -> None:
    def asynchronous(kind: type) -> set[str]:
        return {
            name
            for name, member in vars(kind).items()
            if not name.startswith("_") and inspect.iscoroutinefunction(member)
        }

    assert asynchronous(MemoryService) == asynchronous(Service)


def test_the_double_reports_the_keys_of_the_real_one() -> None:
    assert MemoryService().status().keys() == Service([], device_id="real", facts=dict).status().keys()


def test_a_model_that_is_not_served_is_refused_by_its_name(service: Either) -> None:
    with pytest.raises(NotFound, match="there is no model 'missing'"):
        service.model("missing")


def test_one_order_has_one_answer(service: Either) -> None:
    first = asyncio.run(service.execute(Command("a", "status")))
    assert (first.id, first.status, first.result["device_id"]) == ("a", "done", service.device_id)
    assert asyncio.run(service.execute(Command("a", "status"))) is first
    assert asyncio.run(service.execute(Command("b", "status"))) is not first


def test_nothing_listens_before_a_door_does(service: Either) -> None:
    assert service.listeners == []


def test_nobody_is_told_of_requests_for_models_that_are_not_served(service: Either) -> None:
    told: list[Outcome] = []
    service.observers.append(told.append)
    with pytest.raises(NotFound):
        asyncio.run(service.infer(InferRequest("missing", [])))
    assert told == []
