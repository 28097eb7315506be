"""The plugins on NVIDIA's own base classes and fields, as bindings have them, without a GPU.

    python tests/support/tensorrt_plugin.py tensorrt_rtx_bindings GRAPH.onnx

parses a graph with TensorRT-RTX's parser, which finds a registered plugin and creates it, but has no layer to put it
into: so this ends after the first. With wheels of TensorRT's bindings, whose library is stood in for by an empty one,

    PYTHONPATH=tests:. python tests/support/tensorrt_plugin.py WHEEL...

fields are filled and read back, and a plugin is created from them, cloned and asked.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
_KEPT: list[Any] = []
"""Plugins belong to TensorRT: one that Python takes away itself is deleted twice by the bindings of 10.3."""


def environment(**more: str) -> dict[str, str]:
    """For a process that runs this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT), *sys.path]), **more}


def ask(trt: Any, plugin: Any) -> list[str]:  # noqa: ANN401 - the library is untyped
    """A plugin's types, and what its fields hold, after all that can be done without a GPU."""
    described = trt.DynamicPluginTensorDesc()
    described.desc.format = trt.TensorFormat.LINEAR
    described.desc.type = trt.DataType.HALF
    assert plugin.supports_format_combination(0, [described], 1)
    described.desc.type = trt.DataType.FLOAT
    assert not plugin.supports_format_combination(0, [described], 1)
    described.max = trt.Dims([8, 400, 480])
    plugin.configure_plugin([described], [])
    _KEPT.extend([plugin, plugin.clone()])
    _KEPT.append(_KEPT[-1].attach_to_context(None))
    twin = _KEPT[-1]
    assert (twin.plugin_name, twin.plugin_version, twin.plugin_namespace) == (plugin.plugin_name, "1", "appliance")
    fields = {one.name: one for one in twin.get_fields_to_serialize()}
    assert {name: one.size > 0 for name, one in fields.items()} == dict.fromkeys(fields, True)
    return [kind.name for kind in twin.get_output_data_types([trt.DataType.HALF])]


def parse(name: str, graph: Path) -> None:
    """Parse `graph` with the library `name`, and tell what the first plugin was given."""
    import importlib  # noqa: PLC0415 - the other half of this file runs where packages differ

    from appliance.runtime.tensorrt import logger  # noqa: PLC0415
    from kernels import plugin  # noqa: PLC0415

    trt = importlib.import_module(name)
    shared = plugin._Shared  # noqa: SLF001 - where every plugin comes by

    def tell(operator: Any, fields: Any) -> Any:  # noqa: ANN401 - as above
        made = plugin._plugin(trt)(shared(operator, fields))  # noqa: SLF001
        told = ask(trt, made)
        said = [fields[one].decode() for one in ("form",) if one in fields]
        said += [str(int.from_bytes(fields[one], "little")) for one in ("kv_heads",) if one in fields]
        print(operator.NAME, hashlib.sha256(fields["payload"]).hexdigest(), *told, *said, flush=True)
        os._exit(0)

    plugin._Shared = tell  # type: ignore[assignment,misc] # noqa: SLF001
    log = logger(trt, lambda _severity, _text: None)
    plugin.register(trt)
    network = trt.Builder(log).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    trt.OnnxParser(network, log).parse(graph.read_bytes())
    sys.exit("no plugin was created")


def fill(name: str, graph: Path) -> None:
    """Create the plugins of `graph` from fields made here, as a library without a parser needs it."""
    import importlib  # noqa: PLC0415 - see parse

    import numpy as np  # noqa: PLC0415
    import onnx  # noqa: PLC0415

    from kernels import plugin  # noqa: PLC0415

    trt = importlib.import_module(name)
    for operator in (plugin._ConvAttention, plugin._CtcHead):  # noqa: SLF001
        node = next(one for one in onnx.load(graph).graph.node if one.op_type == operator.NAME)
        held = {one.name: one for one in node.attribute if one.name in operator.FIELDS}
        arrays = {
            key: np.frombuffer(one.s + b"\0", np.int8) if one.s else np.array([one.i], np.int32)
            for key, one in held.items()
        }
        kinds = {key: getattr(trt.PluginFieldType, operator.FIELDS[key]) for key in held}
        fields = [trt.PluginField(key, arrays[key], kinds[key]) for key in held]
        creator = plugin._creator(trt, operator)  # noqa: SLF001
        made = creator.create_plugin("it", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)
        _KEPT.append(made)
        again = creator.create_plugin("it", made.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
        read = again._shared.arrays["payload"].tobytes()  # noqa: SLF001
        assert read == held["payload"].s, "the payload did not come through"
        print(trt.__version__, operator.NAME, *ask(trt, again), f"{len(read)} bytes", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1].endswith(".whl"):
        from support.tensorrt_names import in_wheel

        for wheel in sys.argv[1:-1]:
            in_wheel(Path(wheel), [__file__, "tensorrt_bindings", sys.argv[-1]], environment)
    elif sys.argv[1] == "tensorrt_bindings":
        fill(sys.argv[1], Path(sys.argv[2]))
    else:
        parse(sys.argv[1], Path(sys.argv[2]))
