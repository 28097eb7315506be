"""Plain data into frozen dataclasses: strict, and every refusal names the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from models import schema
from models.schema import SchemaError

pytestmark = pytest.mark.unit


@dataclass(frozen=True, slots=True)
class Wheel:
    """A part."""

    size: float
    worn: bool = False


@dataclass(frozen=True, slots=True)
class Car:
    """A whole."""

    name: str
    wheels: tuple[Wheel, ...]
    parts: Mapping[str, Wheel] = field(default_factory=dict)
    seats: int = 4
    spare: Wheel | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def test_data_becomes_the_dataclass_and_defaults_fill_the_rest() -> None:
    car = schema.load(Car, {"name": "a", "wheels": [{"size": 1.5}, {"size": 2, "worn": True}], "spare": None})
    assert car == Car("a", (Wheel(1.5), Wheel(2.0, worn=True)))
    assert isinstance(car.wheels[1].size, float)


def test_what_was_written_is_read_back_and_defaults_are_left_out() -> None:
    car = Car("a", (Wheel(1.5),), parts={"x": Wheel(1.0, worn=True)}, spare=Wheel(3.0), extra={"k": [1, {"z": None}]})
    data = schema.dump(car)
    assert data == {
        "name": "a",
        "wheels": [{"size": 1.5}],
        "parts": {"x": {"size": 1.0, "worn": True}},
        "spare": {"size": 3.0},
        "extra": {"k": [1, {"z": None}]},
    }
    assert schema.load(Car, data) == car


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "top level must be a table, not list '[]'"),
        (None, "top level must be a table, not NoneType"),
        ({"wheels": []}, "name is missing"),
        ({"name": "a", "wheels": [], "seat": 2}, "top level: unknown key 'seat'; did you mean 'seats'?"),
        ({"name": "a", "wheels": [], "qqq": 2}, "unknown key 'qqq'; known: name, wheels, parts, seats, spare, extra"),
        ({"name": "a", "wheels": [{"size": 1}, {}]}, "wheels[1].size is missing"),
        ({"name": "a", "wheels": [{"size": "1"}]}, "wheels[0].size must be float, not str '1'"),
        ({"name": "a", "wheels": [{"size": True}]}, "wheels[0].size must be float, not bool 'True'"),
        ({"name": "a", "wheels": [{"size": float("nan")}]}, "wheels[0].size must be a finite number"),
        ({"name": "a", "wheels": [{"size": float("inf")}]}, "wheels[0].size must be a finite number"),
        ({"name": "a", "wheels": [{"size": 10**400}]}, "wheels[0].size must be a number of usual size"),
        ({"name": "a", "wheels": [{"size": 1, "worn": 1}]}, "wheels[0].worn must be bool, not int '1'"),
        ({"name": "a", "wheels": {}}, "wheels must be a list, not dict"),
        ({"name": "a", "wheels": [], "parts": []}, "parts must be a table, not list"),
        ({"name": "a", "wheels": [], "parts": {"x": {"siez": 1}}}, "parts.x: unknown key 'siez'; did you mean 'size'?"),
        ({"name": "a", "wheels": [], "seats": True}, "seats must be int, not bool"),
        ({"name": "a", "wheels": [], "seats": 4.0}, "seats must be int, not float"),
        ({"name": "a", "wheels": [], "spare": 1}, "spare must be a table, not int"),
        ({"name": None, "wheels": []}, "name must be str, not NoneType"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_its_path(data: object, sentence: str) -> None:
    with pytest.raises(SchemaError) as caught:
        schema.load(Car, data)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("data", [{"k" * 100_000: 1}, {"name": ["x" * 100_000]}], ids=["key", "value"])
def test_a_refusal_does_not_repeat_a_flood(data: object) -> None:
    with pytest.raises(SchemaError) as caught:
        schema.load(Car, data)
    assert len(str(caught.value)) < 400


def test_a_refusal_can_name_where_the_data_came_from() -> None:
    with pytest.raises(SchemaError, match=r"^graphs\.rec\.size must be float"):
        schema.load(Wheel, {"size": "1"}, "graphs.rec")
