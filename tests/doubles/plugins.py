"""The half of TensorRT's plugin interface that calls a plugin: registry, fields, and a layer through all its phases.

A plugin written in Python sees what it would see: four base classes that must each be initialized, attributes that
must be set, descriptions of tensors, addresses, a stream. A layer is checked, configured, attached, timed and
serialized when an engine is built, and created from its fields, attached and enqueued when that runs; what a plugin
raises becomes a failure. Fields keep addresses, never copies, as the real ones do.
"""
# ruff: noqa: ANN401, A002  (TensorRT's names say what they do; it is untyped)

from __future__ import annotations

import base64
import ctypes
import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PluginFieldType = enum.IntEnum(
    "PluginFieldType",
    {"FLOAT16": 0, "FLOAT32": 1, "INT8": 3, "INT32": 5, "CHAR": 6, "UNKNOWN": 8},
)
TensorRTPhase = enum.IntEnum("TensorRTPhase", {"BUILD": 0, "RUNTIME": 1})
TensorFormat = enum.IntEnum("TensorFormat", {"LINEAR": 0, "CHW2": 1})


class _Base:
    """What a Python class inherits from; the real ones crash when one of them was not initialized."""

    def __init__(self) -> None:
        self.__dict__.setdefault("_initialized", []).append(self)


class IPluginV3(_Base):
    """Base."""


class IPluginV3OneCore(_Base):
    """Base."""


class IPluginV3OneBuild(_Base):
    """Base."""


class IPluginV3OneRuntime(_Base):
    """Base."""


class IPluginCreatorV3One(_Base):
    """Base."""


class PluginField(ctypes.Structure):
    """A name, an address, a type and a number of elements, in that order in memory."""

    _fields_ = (
        ("_name", ctypes.c_char_p),
        ("_data", ctypes.c_void_p),
        ("_type", ctypes.c_int32),
        ("_length", ctypes.c_int32),
    )
    _repeats = False
    """Whether `data` repeats its first element, as that of 10.3 does with NumPy 2."""

    def __init__(self, name: str = "", data: Any = b"", type: int = PluginFieldType.UNKNOWN) -> None:
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        super().__init__(name.encode(), array.ctypes.data, int(type), array.size)

    @property
    def name(self) -> str:
        return str(self._name.decode())

    @property
    def type(self) -> int:
        return PluginFieldType(self._type)

    @property
    def size(self) -> int:
        return int(self._length)

    @property
    def data(self) -> Any:
        kind = np.int32 if self._type == PluginFieldType.INT32 else np.int8
        content = ctypes.string_at(self._data, self.size * np.dtype(kind).itemsize) if self.size else b""
        array = np.frombuffer(content, kind)
        return np.full_like(array, array[0]) if self._repeats and self.size else array


class PluginFieldCollection(list[PluginField]):
    """Fields."""


class DimsExprs(list[Any]):
    """Sizes: a number, or the input and the axis that it is the size of."""


class ExprBuilder:
    """Makes sizes."""

    def constant(self, value: int) -> int:
        return value


@dataclass
class PluginTensorDesc:
    """A tensor of known shape."""

    dims: tuple[int, ...]
    type: Any
    format: int = TensorFormat.LINEAR


@dataclass
class DynamicPluginTensorDesc:
    """A tensor whose shape varies."""

    desc: PluginTensorDesc
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class PluginRegistry:
    """Creators by name, version and namespace."""

    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        assert isinstance(creator, IPluginCreatorV3One)
        assert creator.__dict__.get("_initialized")
        assert all(isinstance(one, PluginField) for one in creator.field_names)
        key = creator.name, creator.plugin_version, plugin_namespace
        return self._creators.setdefault(key, creator) is creator

    def _find(self, name: str, version: str, namespace: str) -> Any:
        return self._creators.get((name, version, namespace))


@dataclass
class Layer:
    """A plugin among the layers of a network."""

    name: str
    plugin: Any
    inputs: list[str]
    outputs: list[str]
    shapes: list[DimsExprs] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)

    def add(self, tensors: Mapping[str, tuple[Any, DimsExprs]]) -> Iterator[tuple[str, tuple[Any, DimsExprs]]]:
        """Ask for types and shapes of the outputs, as adding a layer does."""
        plugin = self.plugin
        assert len(plugin.__dict__["_initialized"]) == 4, "a base class was not initialized"
        assert plugin.get_capability_interface(0) is plugin
        assert plugin.num_outputs == len(self.outputs)
        self.types = plugin.get_output_data_types([tensors[name][0] for name in self.inputs])
        self.shapes = plugin.get_output_shapes([tensors[name][1] for name in self.inputs], [], ExprBuilder())
        yield from zip(self.outputs, zip(self.types, self.shapes, strict=True), strict=True)

    def build(self, kinds: Sequence[Any], others: Sequence[Any], dims: Callable[[str, int], tuple[int, ...]]) -> None:
        """Check and configure it for a profile; `dims` tells a tensor's least, usual and largest shape."""
        names = [*self.inputs, *self.outputs]
        described = [
            DynamicPluginTensorDesc(PluginTensorDesc(dims(name, 1), kind), *(dims(name, which) for which in range(3)))
            for name, kind in zip(names, kinds, strict=True)
        ]
        for pos, one in enumerate(described):
            one.desc.format = TensorFormat.CHW2
            assert not self.plugin.supports_format_combination(pos, described, len(self.inputs))
            one.desc.format = TensorFormat.LINEAR
            right, one.desc.type = one.desc.type, next(kind for kind in others if kind != one.desc.type)
            assert not self.plugin.supports_format_combination(pos, described, len(self.inputs))
            one.desc.type = right
            if not self.plugin.supports_format_combination(pos, described, len(self.inputs)):
                msg = f"{self.name} does not take {right.name} for {names[pos]}"
                raise ValueError(msg)
        self.plugin.clone().configure_plugin(described[: len(self.inputs)], described[len(self.inputs) :])

    def save(self) -> dict[str, Any]:
        """What a plan keeps of it."""
        held = weakref.ref(self.plugin.get_fields_to_serialize())
        fields = held()
        assert fields is not None, "its address is kept, so the plugin must hold it"
        return {
            "name": self.name,
            "plugin": [self.plugin.plugin_name, self.plugin.plugin_version, self.plugin.plugin_namespace],
            "fields": [[one.name, int(one.type), _content(one)] for one in fields],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "shapes": [list(one) for one in self.shapes],
            "types": [one.name for one in self.types],
        }


def _content(one: PluginField) -> str:
    item = 4 if one.type == PluginFieldType.INT32 else 1
    return base64.b64encode(ctypes.string_at(one._data, one.size * item)).decode()  # noqa: SLF001


def create(registry: PluginRegistry, saved: Mapping[str, Any]) -> Any:
    """The plugin that a plan keeps, or None when nobody knows it."""
    creator = registry._find(*saved["plugin"])  # noqa: SLF001
    if creator is None:
        return None
    arrays = [np.frombuffer(base64.b64decode(content), np.uint8) for _, _, content in saved["fields"]]
    fields = [
        PluginField(name, array.view(np.int32) if kind == PluginFieldType.INT32 else array, kind)
        for (name, kind, _), array in zip(saved["fields"], arrays, strict=True)
    ]
    return creator.create_plugin(saved["name"], PluginFieldCollection(fields), TensorRTPhase.RUNTIME)
