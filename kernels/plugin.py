"""The fused kernels as plugins of TensorRT 10.3 to 11: `IPluginV3` over `kernels.launch`.

    ConvAttention(x [B, T, C] FP16) -> y [B, T, 120] FP16                          fields form, kv_heads, payload
    CtcHead(x [N, T, 120] FP16) -> index [N, T] INT64, probability [N, T] FP32     field payload

all linear, channel-last. `payload` is what `neck_payload` and `head_payload` make: the weights, packed once, and the
compiled kernels of one architecture; so a plan that holds such a node needs no other file. It is text, because a parser
may end a field at its first zero. TensorRT gives no node its constant inputs on the host: hence a field, not inputs.

Whoever parses a graph with these nodes, or deserializes a plan with them, calls `register` before, with the library's
module: nothing here imports it. What a clone has on the device it shares with all clones of its plugin, one set for
each stream, made by the first run on that stream: so one run comes before a capture, as TensorRT asks anyway.
"""
# ruff: noqa: ANN401, ARG002  (TensorRT is untyped, and hands every method all that it knows)

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from kernels.launch import Driver, HeadRunner, Kernels, NeckRunner, pack_head_for, pack_neck_for
from kernels.pack import Packed
from kernels.plan import MAX_BATCH, MAX_STEPS
from kernels.reference import WIDTH, Form, Neck, Weights
from models.errors import BadInput, BundleError, ConfigError, ModelError
from models.folder import pack_arrays, unpack_arrays
from models.spec import Array

NAMESPACE = "appliance"
VERSION = "1"
CONV_ATTENTION = "ConvAttention"
CTC_HEAD = "CtcHead"
PLUGINS = tuple(f"{NAMESPACE}::{operator} {VERSION}" for operator in (CONV_ATTENTION, CTC_HEAD))
"""How an engine's passport names them."""
_FILE = "kernel "

Fields: TypeAlias = Mapping[str, bytes]


def neck_payload(arch: str, spec: Neck, weights: Weights, kernels: Kernels) -> str:
    """Field `payload` of a ConvAttention for `arch` ("sm_87")."""
    arrays: dict[str, Array] = {}
    for split, packed in pack_neck_for(arch, spec, weights).items():
        arrays |= {f"w{split}": packed.w, f"b{split}": packed.b}
    return _packed(arrays, {name: one for name, one in kernels.items() if name.startswith(_stem(spec))})


def head_payload(arch: str, w_CK: Array, b_K: Array, kernels: Kernels) -> str:
    """Field `payload` of a CtcHead for `arch`."""
    files = {name: one for name, one in kernels.items() if name.startswith("ctc-")}
    return _packed({"w": pack_head_for(arch, w_CK, b_K)}, files)


def _stem(spec: Neck) -> str:
    return f"neck-{spec.form}-kv{spec.kv_heads}-"


def _packed(arrays: Mapping[str, Array], files: Kernels) -> str:
    content = {**arrays, **{_FILE + name: np.frombuffer(file, np.uint8) for name, file in files.items()}}
    return base64.b64encode(pack_arrays(content)).decode()


def _unpacked(payload: bytes) -> tuple[dict[str, Array], Kernels]:
    arrays = unpack_arrays(base64.b64decode(payload))
    files = {name.removeprefix(_FILE): one.tobytes() for name, one in arrays.items() if name.startswith(_FILE)}
    return {name: one for name, one in arrays.items() if not name.startswith(_FILE)}, files


class _ConvAttention:
    """What a ConvAttention is but for TensorRT."""

    NAME = CONV_ATTENTION
    FIELDS: ClassVar = {"form": "CHAR", "kv_heads": "INT32", "payload": "CHAR"}
    TYPES = ("HALF",)

    def __init__(self, fields: Fields) -> None:
        form: Form = "v6" if fields["form"] == b"v6" else "v4"
        self.spec = Neck(form, int.from_bytes(fields["kv_heads"], "little"))
        self.timing_id = _stem(self.spec)
        self._fields = fields

    def shapes(self, dims: Any, constant: Callable[[int], Any]) -> list[list[Any]]:
        return [[dims[0], dims[1], constant(WIDTH)]]

    def runner(self, driver: Driver) -> NeckRunner:
        arrays, kernels = _unpacked(self._fields["payload"])
        splits = sorted(int(name[1:]) for name in arrays if name.startswith("w"))
        packed = {split: Packed(arrays[f"w{split}"], arrays[f"b{split}"]) for split in splits}
        return NeckRunner(driver, kernels, self.spec, packed)

    def run(self, runner: NeckRunner, dims: Sequence[int], inputs: list[int], outputs: list[int], stream: int) -> None:
        runner(inputs[0], outputs[0], dims[0], dims[1], stream)


class _CtcHead:
    """What a CtcHead is but for TensorRT."""

    NAME = CTC_HEAD
    FIELDS: ClassVar = {"payload": "CHAR"}
    TYPES = ("INT64", "FLOAT")

    def __init__(self, fields: Fields) -> None:
        self.timing_id = CTC_HEAD
        self._fields = fields

    def shapes(self, dims: Any, constant: Callable[[int], Any]) -> list[list[Any]]:
        return [[dims[0], dims[1]], [dims[0], dims[1]]]

    def runner(self, driver: Driver) -> HeadRunner:
        arrays, kernels = _unpacked(self._fields["payload"])
        return HeadRunner(driver, kernels, arrays["w"], max_rows=MAX_BATCH * MAX_STEPS)

    def run(self, runner: HeadRunner, dims: Sequence[int], inputs: list[int], outputs: list[int], stream: int) -> None:
        runner(inputs[0], outputs[0], outputs[1], dims[0] * dims[1], stream)


class _Shared:
    """What all clones of a plugin have in common: the operator, its fields as TensorRT takes them, and the runners."""

    def __init__(self, operator: Any, fields: Fields) -> None:
        self.operator = operator(fields)
        self.arrays = {
            name: np.frombuffer(fields[name], np.int32 if kind == "INT32" else np.int8)
            for name, kind in operator.FIELDS.items()
        }
        self._opened: dict[int, tuple[Driver, Any]] = {}
        weakref.finalize(self, _close, self._opened).atexit = False

    def run(self, dims: Sequence[int], inputs: list[int], outputs: list[int], stream: int) -> None:
        if stream not in self._opened:
            driver = Driver()
            self._opened[stream] = driver, self.operator.runner(driver)
        self.operator.run(self._opened[stream][1], dims, inputs, outputs, stream)


def _close(opened: dict[int, tuple[Driver, Any]]) -> None:
    with contextlib.suppress(ModelError):  # the context may be gone before the last plugin is
        for driver, runner in opened.values():
            driver.enter()
            runner.close()
            driver.close()


@functools.cache
def register(trt: Any) -> tuple[Any, ...]:
    """Make both plugins known to `trt`, once a process; what is returned must live as long as the registry.

    Raises ConfigError when something else has their names.
    """
    creators = tuple(_creator(trt, operator) for operator in (_ConvAttention, _CtcHead))
    registry = trt.get_plugin_registry()
    for creator in creators:
        if not registry.register_creator(creator, NAMESPACE):
            msg = f"TensorRT has a plugin {creator.name} of {NAMESPACE} that is not ours: unload what brought it"
            raise ConfigError(msg)
    return creators


def require(trt: Any, names: Collection[str]) -> None:
    """Make the plugins of an engine, named as in `PLUGINS`, known to `trt`; raises BundleError for any other."""
    if unknown := sorted(set(names) - set(PLUGINS)):
        msg = (
            f"an engine needs the plugin {unknown[0]}; here are {', '.join(PLUGINS)}: compile with `provision compile`"
        )
        raise BundleError(msg)
    if names:
        register(trt)


def _creator(trt: Any, operator: Any) -> Any:
    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc] # TensorRT is untyped
        """Makes the plugin of one operator, from the attributes of a node or from the fields in a plan."""

        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = operator.NAME
            self.plugin_namespace = NAMESPACE
            self.plugin_version = VERSION
            self._empty: dict[str, Array] = {"CHAR": np.zeros(0, np.int8), "INT32": np.zeros(0, np.int32)}
            self.field_names = _collection(
                trt, operator.FIELDS, {n: self._empty[k] for n, k in operator.FIELDS.items()}
            )

        def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
            given = {field.name: _content(trt, field) for field in field_collection}
            missing = sorted(set(operator.FIELDS) - set(given))
            if missing:
                msg = f"node {name} lacks {', '.join(missing)}: it was not written by the export of this appliance"
                raise BadInput(msg)
            return plugin(_Shared(operator, {key: given[key] for key in operator.FIELDS}))

    plugin = _plugin(trt)
    return Creator()


def _plugin(trt: Any) -> Any:  # noqa: C901 (one class of short methods)
    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        """The face of one operator. Names and arguments of methods are TensorRT's."""

        def __init__(self, shared: _Shared) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self._shared = shared
            self._types = [getattr(trt.DataType, kind) for kind in shared.operator.TYPES]
            self.plugin_name = shared.operator.NAME
            self.plugin_version = VERSION
            self.plugin_namespace = NAMESPACE
            self.num_outputs = len(self._types)
            self.timing_cache_id = shared.operator.timing_id
            self._fields = _collection(trt, shared.operator.FIELDS, shared.arrays)

        def get_capability_interface(self, type: Any) -> Any:  # noqa: A002 (its name there)
            return self

        def clone(self) -> Any:
            return Plugin(self._shared)

        def get_output_data_types(self, input_types: Any) -> list[Any]:
            return self._types

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, expr_builder: Any) -> list[Any]:
            return [trt.DimsExprs(one) for one in self._shared.operator.shapes(inputs[0], expr_builder.constant)]

        def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
            wanted = [trt.DataType.HALF] * num_inputs + self._types
            desc = in_out[pos].desc
            return bool(desc.format == trt.TensorFormat.LINEAR and desc.type == wanted[pos])

        def configure_plugin(self, inp: Any, out: Any) -> None:
            batch, steps = inp[0].max[0], inp[0].max[1]
            if batch > MAX_BATCH or steps > MAX_STEPS:
                msg = f"a profile of {batch} lines of {steps} tokens; the kernels take {MAX_BATCH} of {MAX_STEPS}"
                raise BadInput(msg)

        def on_shape_change(self, inp: Any, out: Any) -> None:
            """Nothing depends on the shape but the launch itself."""

        def attach_to_context(self, resource_context: Any) -> Any:
            return self.clone()

        def get_fields_to_serialize(self) -> Any:
            return self._fields  # TensorRT keeps its address, no copy

        def set_tactic(self, tactic: int) -> None:
            """There is one; the bindings fail where this is missing."""

        def enqueue(
            self,
            input_desc: Any,
            output_desc: Any,
            inputs: list[int],
            outputs: list[int],
            workspace: int,  # not used: scratch must rest between runs, which TensorRT's does not
            stream: int,
        ) -> None:
            self._shared.run(list(input_desc[0].dims), inputs, outputs, stream)

    return Plugin


def _collection(trt: Any, fields: Mapping[str, str], arrays: Mapping[str, Array]) -> Any:
    """Fields for TensorRT, which keeps the addresses of `arrays`, not copies."""
    kinds = {name: getattr(trt.PluginFieldType, kind) for name, kind in fields.items()}
    return trt.PluginFieldCollection([trt.PluginField(name, arrays[name], kind) for name, kind in kinds.items()])


class _RawField(ctypes.Structure):
    """nvinfer1::PluginField."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


def _content(trt: Any, field: Any) -> bytes:
    """The bytes of a field, less the zero that a parser ends text with.

    With NumPy 2 the bindings of TensorRT 10.3 (made before it) give an array that repeats the first element, of the
    right length and type. There the bytes are read where the field points: its object holds the address of the
    structure behind Python's own header, as every object of pybind11 with one base does.
    """
    data: Array = field.data
    if _reads_fields(trt):
        content = data.tobytes()
    else:
        raw = _RawField.from_address(ctypes.c_void_p.from_address(id(field) + object.__basicsize__).value or 0)
        if raw.length != field.size or raw.name != field.name.encode():
            msg = f"TensorRT {trt.__version__} hides what is in its plan from NumPy {np.__version__}: use NumPy 1"
            raise ConfigError(msg)
        content = ctypes.string_at(raw.data, raw.length * data.itemsize) if raw.length else b""
    return content.rstrip(b"\0") if field.type == trt.PluginFieldType.CHAR else content


@functools.cache
def _reads_fields(trt: Any) -> bool:
    two = np.arange(2, dtype=np.int32)
    field = trt.PluginField("two", two, trt.PluginFieldType.INT32)
    return bool(np.array_equal(field.data, two))
