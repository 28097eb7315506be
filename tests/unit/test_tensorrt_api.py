"""Every name of TensorRT that our source uses exists in every version that a target may have.

The table comes from the bindings of those versions (see tests/support/tensorrt_names.py), so this holds where no
TensorRT can be installed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from typing import Any

import pytest
from doubles import plugins
from doubles import tensorrt as double
from support import tensorrt_names

pytestmark = pytest.mark.unit

DATA = json.loads(tensorrt_names.TABLE.read_text(encoding="utf-8"))
TABLE: dict[str, dict[str, str]] = DATA["names"]
ONLY_RTX = {"ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"}
"""What makes TensorRT-RTX compile for GPUs that are not here; used only with that backend."""
REMOVED_OR_RENUMBERED = ("FP16", "INT8", "int8_calibrator", "EXPLICIT_BATCH", "max_workspace_size", "execute_async_v2")


def test_the_table_is_of_the_versions_of_the_target_matrix() -> None:
    assert [version.rsplit(".", 1)[0] for version in DATA["versions"]] == [
        "tensorrt 10.3",
        "tensorrt 10.16.1",
        "tensorrt 11.4.0",
        "tensorrt-rtx 1.7.1",
    ]


@pytest.mark.parametrize("name", sorted(tensorrt_names.used()))
def test_a_name_that_we_use_is_in_every_version(name: str) -> None:
    assert name in TABLE, "write the table anew, as tests/support/tensorrt_names.py says"
    expected = DATA["versions"][-1:] if name in ONLY_RTX else DATA["versions"]
    assert list(TABLE[name]) == expected


def test_the_table_holds_nothing_that_we_do_not_use() -> None:
    assert set(TABLE) == tensorrt_names.used()


def test_names_are_found_in_every_form_in_which_the_source_has_them() -> None:
    source = """
log = trt.Builder(trt.ILogger)
self._engine.get_tensor_name(0)
config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1)
class Monitor(trt.IProgressMonitor):
    def step_complete(self): ...
    def _own(self): ...
"""
    assert set(tensorrt_names.names(ast.parse(source))) == {
        "Builder",
        "ILogger",
        "ICudaEngine.get_tensor_name",
        "IBuilderConfig.set_memory_pool_limit",
        "MemoryPoolType",
        "MemoryPoolType.WORKSPACE",
        "IProgressMonitor",
        "IProgressMonitor.step_complete",
    }


def test_nothing_is_used_that_a_later_version_took_away() -> None:
    assert not [name for name in TABLE if name.split(".")[-1] in REMOVED_OR_RENUMBERED and "DataType" not in name]


def test_the_flag_of_strong_typing_has_another_number_in_11_so_no_literal_may_stand_for_it() -> None:
    numbers = TABLE["NetworkDefinitionCreationFlag.STRONGLY_TYPED"]
    assert set(numbers.values()) == {"0", "1"}
    builder = (tensorrt_names.ROOT / tensorrt_names.SOURCES[1]).read_text(encoding="utf-8")
    assert "1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)" in builder


@pytest.mark.parametrize(
    ("stand_in", "real"),
    [
        (double.Builder, "Builder"),
        (double.Config, "IBuilderConfig"),
        (double.Profile, "IOptimizationProfile"),
        (double.TimingCache, "ITimingCache"),
        (double.OnnxParser, "OnnxParser"),
        (double.ParserError, "ParserError"),
        (double.Runtime, "Runtime"),
        (double.Engine, "ICudaEngine"),
        (double.Context, "IExecutionContext"),
        (plugins.PluginRegistry, "IPluginRegistry"),
        (plugins.PluginField, "PluginField"),
        (plugins.ExprBuilder, "IExprBuilder"),
    ],
)
def test_the_stand_in_has_what_the_real_one_has_and_takes_as_many_arguments(stand_in: type, real: str) -> None:
    ours = {name for name in vars(stand_in) if not name.startswith("_")}
    table = {name.split(".")[1]: row for name, row in TABLE.items() if name.startswith(f"{real}.")}
    assert set(table) <= ours
    assert ours <= set(table)
    for name, row in table.items():
        signature = next((text for text in row.values() if "(self" in text), "")
        wanted = [part for part in _arguments(signature) if "=" not in part]
        method: Any = vars(stand_in)[name]
        if signature and callable(method):
            assert len(wanted) <= method.__code__.co_argcount, name


def _arguments(signature: str) -> list[str]:
    inside = signature.split("(", 1)[-1].split(")", maxsplit=1)[0]
    return [part for part in inside.split(", ") if part]


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorrt_rtx_bindings"), reason="TensorRT-RTX has no wheel for this machine"
)
def test_the_table_says_of_the_installed_library_what_it_says_itself() -> None:
    version, names = tensorrt_names.describe("tensorrt_rtx_bindings", tensorrt_names.used())
    column = f"tensorrt-rtx {version}"
    assert column in DATA["versions"]
    assert names == {name: row[column] for name, row in TABLE.items() if column in row}
