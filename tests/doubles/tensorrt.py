"""A TensorRT in Python: parses, builds, deserializes and runs graphs that give inputs back, and refuses as it does.

A plan is JSON. Names, argument orders and None or False for failure are TensorRT's; tests/unit/test_tensorrt_api.py
holds the names against a table. Work goes through the stand-in driver, so nothing is computed before the stream is
waited for. What it cannot show is anything about speed, precision, or what real kernels do.
Past 400 lines because the library is one thing whose parts know each other; plugins are in a file of their own.
"""
# ruff: noqa: ANN401, SLF001  (TensorRT's names say what they do; it is untyped; parts of one double know each other)

from __future__ import annotations

import ctypes
import enum
import functools
import json
import math
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import onnx

from doubles import plugins
from doubles.cuda import StandInCuda

ITEM_BYTES = {"FLOAT": 4, "HALF": 2, "INT8": 1, "INT32": 4, "INT64": 8, "UINT8": 1, "BOOL": 1, "BF16": 2}
KINDS = {1: "FLOAT", 10: "HALF", 3: "INT8", 6: "INT32", 7: "INT64", 2: "UINT8", 9: "BOOL", 16: "BF16"}
"""ONNX element type -> name in DataType."""
DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64}
ACTIVATION_BYTES = 1000
_PLUGIN_NAMES = (
    "IPluginV3",
    "IPluginV3OneCore",
    "IPluginV3OneBuild",
    "IPluginV3OneRuntime",
    "IPluginCreatorV3One",
    "PluginField",
    "PluginFieldCollection",
    "PluginFieldType",
    "DimsExprs",
    "TensorFormat",
)


class StandInTensorRt(ModuleType):
    """The module `tensorrt`, or `tensorrt_rtx` with `rtx`. `strongly_typed` is the number of that flag's bit."""

    def __init__(
        self, cuda: StandInCuda, version: str = "10.3.0", *, strongly_typed: int = 1, rtx: bool = False
    ) -> None:
        super().__init__("tensorrt_rtx" if rtx else "tensorrt")
        self.__spec__ = ModuleSpec(self.__name__, None)
        self.__version__ = version
        self.cuda = cuda
        self.created: list[int] = []
        """Flags that networks were created with."""
        self.configs: list[Config] = []
        self.capturable = True
        self.logger: Any = None
        self.timings_taken: list[bytes] = []
        self.NetworkDefinitionCreationFlag = enum.IntEnum(
            "NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": strongly_typed}
        )
        self.MemoryPoolType = enum.Enum("MemoryPoolType", ["WORKSPACE"])
        self.TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
        self.DataType = enum.Enum("DataType", list(ITEM_BYTES))
        self.ExecutionContextAllocationStrategy = enum.Enum("Strategy", ["STATIC", "USER_MANAGED"])
        self.ILogger, self.IProgressMonitor = ILogger, IProgressMonitor
        self.registry = plugins.PluginRegistry()
        for one in _PLUGIN_NAMES:
            setattr(self, one, getattr(plugins, one))
        if rtx:
            self.ComputeCapability = enum.Enum("ComputeCapability", ["NONE", "SM80", "SM86"])

    def say(self, severity: int, text: str) -> None:
        self.logger.log(severity, text)

    def get_plugin_registry(self) -> plugins.PluginRegistry:
        return self.registry

    def Builder(self, logger: Any) -> Builder:  # noqa: N802
        self.logger = self.logger or logger  # the first of a process stays
        return Builder(self)

    def OnnxParser(self, network: Network, _logger: Any) -> OnnxParser:  # noqa: N802
        return OnnxParser(self, network)

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        self.logger = self.logger or logger
        return Runtime(self)


class ILogger:
    """Base of loggers."""


class IProgressMonitor:
    """Base of monitors."""


class Network:
    """Tensors of a graph, and, where it has plugins, its layers."""

    def __init__(self) -> None:
        self.io: list[dict[str, Any]] = []
        self.layers: list[plugins.Layer | tuple[str, str, str]] = []
        """A plugin, or operator, input and output of anything else."""
        self.tensors: dict[str, tuple[Any, plugins.DimsExprs]] = {}


class ParserError:
    """Why a graph cannot be parsed."""

    def __init__(self, operator: str, name: str) -> None:
        self._operator, self._name = operator, name

    def desc(self) -> str:
        return 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'

    def node_name(self) -> str:
        return self._name

    def node_operator(self) -> str:
        return self._operator


class OnnxParser:
    """Knows Identity, Cast, and the plugins that are registered."""

    def __init__(self, trt: StandInTensorRt, network: Network) -> None:
        self._trt, self._network = trt, network
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse(self, content: bytes) -> bool:
        graph = onnx.load_model_from_string(content).graph
        self._errors = []
        for mode, values in (("INPUT", graph.input), ("OUTPUT", graph.output)):
            for value in values:
                kind = value.type.tensor_type
                shape = [size.dim_value or -1 for size in kind.shape.dim]
                self._network.io.append(
                    {"name": value.name, "mode": mode, "dtype": KINDS[kind.elem_type], "shape": shape}
                )
                if mode == "INPUT":
                    sizes = plugins.DimsExprs([value.name, axis] for axis in range(len(shape)))
                    self._network.tensors[value.name] = self._trt.DataType[KINDS[kind.elem_type]], sizes
        for node in graph.node:
            self._add(node)
        return not self._errors

    def _add(self, node: onnx.NodeProto) -> None:
        """Add a layer; a plugin is looked up by the version and namespace that its node names."""
        network, attributes = self._network, {one.name: one for one in node.attribute}
        if node.op_type in {"Identity", "Cast"}:
            kind, sizes = network.tensors.get(node.input[0], (None, plugins.DimsExprs()))
            if node.op_type == "Cast":
                kind = self._trt.DataType[KINDS[attributes["to"].i]]
            network.layers.append((node.op_type, node.input[0], node.output[0]))
            network.tensors[node.output[0]] = kind, sizes
            return
        named = [attributes.pop(key).s.decode() for key in ("plugin_version", "plugin_namespace") if key in attributes]
        creator = self._trt.registry._find(node.op_type, *named) if len(named) == 2 else None
        if creator is None:
            self._errors.append(ParserError(node.op_type, node.name))
            return
        held = {name: _held(one) for name, one in attributes.items()}  # text ends with a zero, as RTX 1.7's was seen to
        fields = plugins.PluginFieldCollection(plugins.PluginField(name, *one) for name, one in held.items())
        plugin = creator.create_plugin(node.name, fields, plugins.TensorRTPhase.BUILD)
        layer = plugins.Layer(node.name, plugin, list(node.input), list(node.output))
        network.tensors.update(layer.add(network.tensors))
        network.layers.append(layer)


def _held(attribute: onnx.AttributeProto) -> tuple[Any, int]:
    if attribute.type == onnx.AttributeProto.STRING:
        return np.frombuffer(attribute.s + b"\0", np.int8), plugins.PluginFieldType.CHAR
    return np.array([attribute.i], np.int32), plugins.PluginFieldType.INT32


class Profile:
    """Shapes by input."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, low: Sequence[int], usual: Sequence[int], high: Sequence[int]) -> None:
        self.shapes[name] = [list(low), list(usual), list(high)]


class TimingCache:
    """Bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content + b"+"


class Config:
    """How to build."""

    progress_monitor: Any = None
    num_compute_capabilities = 0

    def __init__(self, trt: StandInTensorRt) -> None:
        self._trt = trt
        self.profiles: list[Profile] = []
        self.limits: dict[Any, int] = {}
        self.capabilities: dict[int, Any] = {}
        self.cache: TimingCache | None = None

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.limits[pool] = size

    def add_optimization_profile(self, profile: Profile) -> int:
        if any(low > high for one in profile.shapes.values() for low, _, high in zip(*one, strict=True)):
            self._trt.say(1, "Error Code 4: API Usage Error (Invalid optimization profiles. In isValid at p.cpp:367)")
            self._trt.say(
                1, "Error Code 3: API Usage Error (Parameter check failed. In addOptimizationProfile at b.cpp:5)"
            )
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def set_compute_capability(self, capability: Any, index: int) -> bool:
        self.capabilities[index] = capability
        return True

    def create_timing_cache(self, content: bytes) -> TimingCache | None:
        return None if content == b"broken" else TimingCache(content)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self._trt.timings_taken.append(cache.content)
        self.cache = cache
        return True

    def get_timing_cache(self) -> TimingCache | None:
        return self.cache


class Builder:
    """Makes plans."""

    def __init__(self, trt: StandInTensorRt) -> None:
        self._trt = trt

    def create_network(self, flags: int) -> Network:
        self._trt.created.append(flags)
        return Network()

    def create_builder_config(self) -> Config:
        self._trt.configs.append(Config(self._trt))
        return self._trt.configs[-1]

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        for tensor in network.io:
            unbounded = tensor["mode"] == "INPUT" and any(
                tensor["name"] not in profile.shapes for profile in config.profiles
            )
            if unbounded:
                text = (
                    f"Dynamic input tensor {tensor['name']} is missing dimensions in profile 0. In validate at n.cpp:4"
                )
                self._trt.say(1, f"IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error ({text})")
                return None
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        assert all(monitor.step_complete("Building Engine", step) for step in range(2))
        monitor.phase_finish("Building Engine")
        try:
            layers = [self._built(network, layer, config) for layer in network.layers]
        except Exception as error:
            self._trt.say(1, f"Error Code 10: Internal Error (Could not find any implementation: {error})")
            return None
        self._trt.say(3, f"Total Activation Memory: {ACTIVATION_BYTES} bytes")
        plan = {
            "version": self._trt.__version__,
            "io": network.io,
            "profiles": [profile.shapes for profile in config.profiles],
            "layers": layers if any(isinstance(one, plugins.Layer) for one in network.layers) else [],
        }
        return json.dumps(plan).encode()

    def _built(self, network: Network, layer: plugins.Layer | tuple[str, str, str], config: Config) -> Any:
        if not isinstance(layer, plugins.Layer):
            return [*layer, network.tensors[layer[1]][0].name, network.tensors[layer[2]][0].name]
        kinds = [network.tensors[name][0] for name in (*layer.inputs, *layer.outputs)]
        for profile in config.profiles:
            dims = functools.partial(_dims, network.tensors, profile.shapes)
            layer.build(kinds, list(self._trt.DataType), dims)
            _time(self._trt.cuda, layer, kinds, dims)
        return layer.save()


def _dims(tensors: Any, shapes: Any, name: str, which: int) -> tuple[int, ...]:
    """Least, usual or largest shape of a tensor within a profile."""
    sizes = tensors[name][1]
    return tuple(one if isinstance(one, int) else shapes[one[0]][which][one[1]] for one in sizes)


def _time(cuda: StandInCuda, layer: plugins.Layer, kinds: Sequence[Any], dims: Any) -> None:
    """Run a plugin once on its usual shapes, as the builder does to learn its speed."""
    described = [
        plugins.PluginTensorDesc(dims(name, 1), kind)
        for name, kind in zip((*layer.inputs, *layer.outputs), kinds, strict=True)
    ]
    stream = ctypes.c_int()
    cuda.on_cuStreamCreate(ctypes.byref(stream), 0)
    attached = layer.plugin.clone().attach_to_context(None)
    memory = [np.zeros(math.prod(one.dims) * ITEM_BYTES[one.type.name] + 16, np.uint8) for one in described]
    _enqueue(attached, described, [_aligned(one) for one in memory], len(layer.inputs), stream.value)
    cuda.on_cuStreamSynchronize(stream)


def _aligned(memory: Any) -> int:
    return -(-int(memory.ctypes.data) // 16) * 16


def _enqueue(plugin: Any, described: list[Any], addresses: list[int], inputs: int, stream: int) -> None:
    plugin.set_tactic(0)
    plugin.on_shape_change(described[:inputs], described[inputs:])
    plugin.enqueue(described[:inputs], described[inputs:], addresses[:inputs], addresses[inputs:], 0, stream)


class Runtime:
    """Reads plans of its own version."""

    def __init__(self, trt: StandInTensorRt) -> None:
        self._trt = trt

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        try:
            data = json.loads(plan)
            fits = data["version"] == self._trt.__version__
        except (ValueError, KeyError):
            self._trt.say(1, "Error Code 1: Serialization (Magic tag does not match)")
            return None
        if not fits:
            self._trt.say(1, "Error Code 6: API Usage Error (The engine plan file is not compatible with this version)")
            return None
        saved = [layer for layer in data["layers"] if isinstance(layer, dict)]
        made = {layer["name"]: plugins.create(self._trt.registry, layer) for layer in saved}
        if None in made.values():
            self._trt.say(1, "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Cannot find plugin)")
            return None
        return Engine(self._trt, data, made)


class Engine:
    """Each output is the input at the same place; with plugins, what the layers make of the inputs."""

    def __init__(self, trt: StandInTensorRt, data: dict[str, Any], made: dict[str, Any]) -> None:
        self.trt = trt
        self._layers, self._plugins = data["layers"], made
        self.io = {tensor["name"]: tensor for tensor in data["io"]}
        self.profiles = data["profiles"]
        self.activation_bytes = ACTIVATION_BYTES

    @property
    def num_io_tensors(self) -> int:
        return len(self.io)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return self.activation_bytes

    def get_tensor_name(self, index: int) -> str:
        return list(self.io)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode[self.io[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.trt.DataType[self.io[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.io[name]["shape"])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        return list(self.profiles[profile][name])

    def create_execution_context(self, strategy: Any) -> Context:
        assert strategy == self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self)


class Context:
    """State of one way to run; every step that TensorRT asks for must have been taken."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._attached = {name: one.clone().attach_to_context(None) for name, one in engine._plugins.items()}
        self._inner: dict[str, Any] = {}
        self._profile = -1
        self._scratch_bytes = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory in self._engine.trt.cuda.memory
        self._scratch_bytes = size

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream in self._engine.trt.cuda.streams
        self._profile = profile
        return profile < len(self._engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.profiles[self._profile][name]
        self._shapes[name] = shape
        return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))

    def infer_shapes(self) -> list[str]:
        return [name for name in self._inputs() if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> list[int]:
        for layer in self._engine._layers:
            outputs = layer["outputs"] if isinstance(layer, dict) else [layer[2]]
            if name in outputs and not isinstance(layer, dict):
                return self.get_tensor_shape(layer[1])
            if name in outputs:
                sizes = layer["shapes"][outputs.index(name)]
                return [one if isinstance(one, int) else self._shapes[one[0]][one[1]] for one in sizes]
        return list(self._shapes[name if name in self._shapes else self._twin(name)])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in self._engine.io and memory in self._engine.trt.cuda.memory

    def execute_async_v3(self, stream: int) -> bool:
        trt = self._engine.trt
        if self._scratch_bytes < self._engine.activation_bytes or set(self._addresses) != set(self._engine.io):
            trt.say(1, "IExecutionContext::enqueueV3: Error Code 3: API Usage Error (no memory or address is set)")
            return False
        if trt.cuda.is_capturing(stream) and not trt.capturable:
            trt.cuda.broken.add(stream)
            trt.say(1, "Error Code 1: Cuda Runtime (operation not permitted when stream is capturing)")
            return False
        if self._engine._layers:
            return self._run(stream)
        for name in self._outputs():
            source, target, size = self._addresses[self._twin(name)], self._addresses[name], self._size_bytes(name)
            trt.cuda.enqueue(stream, lambda to=target, of=source, n=size: ctypes.memmove(to, of, n))
        return True

    def _run(self, stream: int) -> bool:
        trt = self._engine.trt
        kinds = {name: tensor["dtype"] for name, tensor in self._engine.io.items()}
        try:
            for layer in self._engine._layers:
                if isinstance(layer, dict):
                    kinds |= dict(zip(layer["outputs"], layer["types"], strict=True))
                    names = [*layer["inputs"], *layer["outputs"]]
                    described = [
                        plugins.PluginTensorDesc(tuple(self.get_tensor_shape(name)), trt.DataType[kinds[name]])
                        for name in names
                    ]
                    addresses = [self._address(name, kinds[name]) for name in names]
                    _enqueue(self._attached[layer["name"]], described, addresses, len(layer["inputs"]), stream)
                else:
                    _, given, made, kind, wanted = layer
                    kinds[made] = wanted
                    ends = (given, kind), (made, wanted)
                    numbers = [
                        (self._address(*end), math.prod(self.get_tensor_shape(end[0])), DTYPES[end[1]]) for end in ends
                    ]
                    trt.cuda.enqueue(stream, functools.partial(_cast, *numbers))
        except Exception as error:
            trt.say(1, f"IExecutionContext::enqueueV3: Error Code 1: Plugin ({error})")
            return False
        return True

    def _address(self, name: str, kind: str) -> int:
        """Of a bound tensor, or of one between layers."""
        if name in self._addresses:
            return self._addresses[name]
        size = math.prod(self.get_tensor_shape(name)) * ITEM_BYTES[kind] + 16
        if name not in self._inner or self._inner[name].size != size:
            self._inner[name] = np.zeros(size, np.uint8)
        return _aligned(self._inner[name])

    def _size_bytes(self, name: str) -> int:
        return math.prod(self.get_tensor_shape(name)) * ITEM_BYTES[self._engine.io[name]["dtype"]]

    def _inputs(self) -> list[str]:
        return [name for name, tensor in self._engine.io.items() if tensor["mode"] == "INPUT"]

    def _outputs(self) -> list[str]:
        return [name for name in self._engine.io if name not in self._inputs()]

    def _twin(self, name: str) -> str:
        return self._inputs()[self._outputs().index(name)]


def _cast(given: tuple[int, int, Any], made: tuple[int, int, Any]) -> None:
    """Turn numbers at one address into those of another type at another."""
    address, count, kind = given
    numbers = np.frombuffer(ctypes.string_at(address, count * np.dtype(kind).itemsize), kind).astype(made[2])
    ctypes.memmove(made[0], numbers.tobytes(), numbers.nbytes)
