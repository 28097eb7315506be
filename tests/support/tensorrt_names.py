"""Which names of TensorRT our source uses, and which versions have them.

The table is made from wheels of bindings, which `pip download --no-deps tensorrt-cu12-bindings==10.3.0` brings:

    PYTHONPATH=tests:. python tests/support/tensorrt_names.py WHEEL... > tests/data/tensorrt-api.json

They are imported with empty libraries, made by gcc, in the place of TensorRT's own: names, signatures and the
numbers of enumerations are in the bindings themselves.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from appliance.runtime.tensorrt import DATATYPES

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "tests" / "data" / "tensorrt-api.json"
SOURCES = ("appliance/runtime/tensorrt.py", "provisioning/engines/builder.py", "kernels/plugin.py")
"""Files that use the library, which they always call `trt`."""
CLASSES = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "refusal": "ParserError",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "cache": "ITimingCache",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "registry": "IPluginRegistry",
    "field": "PluginField",
    "desc": "PluginTensorDesc",
    "expr_builder": "IExprBuilder",
}
"""Variable (or attribute, with an underscore) that holds an object of the library -> its class."""
CAPABILITIES = {
    "IPluginV3": ("clone", "get_capability_interface"),
    "IPluginV3OneCore": ("plugin_name", "plugin_version", "plugin_namespace"),
    "IPluginV3OneBuild": (
        "num_outputs",
        "timing_cache_id",
        "get_output_data_types",
        "get_output_shapes",
        "supports_format_combination",
        "configure_plugin",
    ),
    "IPluginV3OneRuntime": ("enqueue", "on_shape_change", "attach_to_context", "get_fields_to_serialize", "set_tactic"),
}
"""Of a class with several bases: base -> which of its members are that base's."""
_FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
_LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")
_DESCRIBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
found = {}
for name in json.loads(sys.argv[2]):
    value, known = module, True
    for part in name.split("."):
        known = known and hasattr(value, part)
        value = getattr(value, part, None)
    if known and hasattr(type(value), "__members__"):
        found[name] = str(int(value))
    elif known:
        text = (value.__doc__ or "").strip().split(chr(10))[0]
        found[name] = text if "(" in text and "self" in text else ""
print(json.dumps({"version": module.__version__, "names": found}))
"""


def used() -> set[str]:
    """Names of the library in our source: "Class", "Class.member", "Enumeration.VALUE"."""
    return {f"DataType.{name}" for name in DATATYPES} | {
        name for source in SOURCES for name in names(ast.parse((ROOT / source).read_text(encoding="utf-8")))
    }


def names(tree: ast.Module) -> Iterator[str]:
    """Names of the library in one module; see `used`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            root = next((i for i, part in enumerate(chain) if part in {"trt", "_trt"}), None)
            if root is not None and root + 1 < len(chain) and not chain[-1].startswith("__"):
                yield ".".join(chain[root + 1 :])
            elif len(chain) > 1 and (owner := CLASSES.get(chain[-2].removeprefix("_"))):
                yield f"{owner}.{chain[-1]}"
        elif isinstance(node, ast.ClassDef):
            owners = [name[4:] for name in map(ast.unparse, node.bases) if name.startswith("trt.")]
            for member in _members(node) if owners else ():
                holder = next((one for one in owners if member in CAPABILITIES.get(one, ())), owners[0])
                yield f"{holder}.{member}"


def _members(node: ast.ClassDef) -> set[str]:
    """Public methods of a class, and the public attributes that its instances get."""
    methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    assigned = (target for part in ast.walk(node) if isinstance(part, ast.Assign) for target in part.targets)
    attributes = {one.attr for one in assigned if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"}
    return {name for name in methods | attributes if not name.startswith("_")}


def describe(module: str, wanted: set[str], **environment: str) -> tuple[str, Mapping[str, str]]:
    """Version of an installed library, and of `names` those that it has: signature, or an enumeration's number."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _DESCRIBE, module, json.dumps(sorted(wanted))],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    answer = json.loads(run.stdout)
    return answer["version"], {name: _short(text) for name, text in answer["names"].items()}


def _short(signature: str) -> str:
    """A signature without what differs between two versions of the binding generator."""
    text = re.sub(r"tensorrt\w*\.tensorrt\w*\.|typing\.|typing_extensions\.", "", signature)
    return text.replace("SupportsInt", "int").replace("Buffer", "buffer").replace("List[", "list[")


def _of_wheel(wheel: Path, wanted: set[str]) -> tuple[str, Mapping[str, str]]:
    with unpacked(wheel) as folder:
        return describe("tensorrt_bindings", wanted, LD_LIBRARY_PATH=folder, PYTHONPATH=folder)


def in_wheel(wheel: Path, arguments: list[str], environment: Callable[..., Mapping[str, str]]) -> None:
    """Run a script of ours where the bindings of `wheel` can be imported."""
    with unpacked(wheel) as folder:
        names = environment(LD_LIBRARY_PATH=folder)
        there = {**names, "PYTHONPATH": os.pathsep.join([folder, names["PYTHONPATH"]])}
        subprocess.run([sys.executable, "-X", "faulthandler", "-W", "ignore", *arguments], env=there, check=True)


@contextmanager
def unpacked(wheel: Path) -> Iterator[str]:
    """A folder with the bindings of `wheel` and an empty library in the place of TensorRT's."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        code = Path(folder, "empty.c")
        code.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in _FUNCTIONS))
        major = wheel.name.split("-")[1].split(".")[0]
        for library in _LIBRARIES:
            file = f"lib{library}.so.{major}"
            subprocess.run(
                ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", str(Path(folder, file)), str(code)],
                check=True,
            )
        yield folder


def main() -> None:
    """Write the table to standard output."""
    wanted = used()
    described = [_of_wheel(Path(wheel), wanted) for wheel in sys.argv[1:]]
    described.append(describe("tensorrt_rtx_bindings", wanted))
    columns = ["tensorrt " + version for version, _ in described[:-1]] + ["tensorrt-rtx " + described[-1][0]]
    table = {
        name: {column: found[name] for column, (_, found) in zip(columns, described, strict=True) if name in found}
        for name in sorted(wanted)
    }
    print(json.dumps({"source": "bindings wheels of these versions", "versions": columns, "names": table}, indent=1))


if __name__ == "__main__":
    main()
