"""Read plain data (from JSON or TOML) into frozen dataclasses and write it back.

Strict on purpose: unknown keys are refused with the nearest known name, missing keys and wrong
types are named by their path ("graphs.rec.inputs[0].shape"). Pure, and without dependencies,
because a worker process and the trust decisions of an update both read manifests through it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

T = TypeVar("T")


class SchemaError(ValueError):
    """Data does not fit the dataclass; the message starts with the path of the offending value."""


def load(kind: type[T], data: object, at: str = "") -> T:
    """Build a `kind` from plain data; raises SchemaError naming the path of what does not fit."""
    return typing.cast("T", _load(kind, data, at))


def dump(value: object) -> Any:  # noqa: ANN401 - plain JSON data has no narrower type
    """Plain data (dicts, lists, scalars) of a dataclass; fields that equal their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: dump(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return value


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _load(kind: Any, data: object, at: str) -> object:  # noqa: ANN401 - any type expression
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in {Union, types.UnionType}:
        if data is None and type(None) in arguments:
            return None
        return _load(next(option for option in arguments if option is not type(None)), data, at)
    if origin is tuple:
        if not isinstance(data, list):
            raise SchemaError(_message(at, "a list", data))
        return tuple(_load(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise SchemaError(_message(at, "a table", data))
        return {key: _load(arguments[1], item, f"{at}.{key}" if at else key) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _load_dataclass(kind, data, at)
    return _load_scalar(kind, data, at)


@functools.cache
def _described(kind: Any) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:  # noqa: ANN401 - any dataclass
    return typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}


def _load_dataclass(kind: Any, data: object, at: str) -> object:  # noqa: ANN401 - any dataclass
    if not isinstance(data, dict):
        raise SchemaError(_message(at, "a table", data))
    hints, fields = _described(kind)
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(fields)}"
            msg = f"{at or 'top level'}: unknown key {key[:60]!r}{hint}"
            raise SchemaError(msg)
    values = {}
    for name, field in fields.items():
        path = f"{at}.{name}" if at else name
        if name in data:
            values[name] = _load(hints[name], data[name], path)
        elif _default(field) is dataclasses.MISSING:
            msg = f"{path} is missing"
            raise SchemaError(msg)
    return kind(**values)


def _load_scalar(kind: type, data: object, at: str) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError as error:
            raise SchemaError(_message(at, "a number of usual size", data)) from error
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise SchemaError(_message(at, kind.__name__, data))
    if isinstance(data, float) and not math.isfinite(data):
        raise SchemaError(_message(at, "a finite number", data))
    return data


def _message(at: str, wanted: str, data: object) -> str:
    return f"{at or 'top level'} must be {wanted}, not {type(data).__name__} {str(data)[:60]!r}"
