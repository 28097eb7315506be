"""The kernels as plugins: what TensorRT asks of one, from the export of a graph to a run of the engine.

The stand-in walks a plugin through all phases; NVIDIA's own parser and base classes, which TensorRT-RTX's bindings
have, show that names, fields and text go through theirs.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from doubles import plugins as double
from doubles.tensorrt import StandInTensorRt
from onnx import helper
from support import engines, fused_graphs, tensorrt_plugin

from appliance.runtime.tensorrt import TensorRtRuntime
from kernels.launch import pack_head_for, pack_neck_for
from kernels.plugin import PLUGINS
from models.engine import Shapes
from models.errors import BundleError
from models.folder import unpack_arrays
from provisioning import passes
from provisioning.engines import builder
from provisioning.passes.plugin import plugin as export

pytestmark = pytest.mark.contract
WEIGHTS = fused_graphs.weights()
MARKED = fused_graphs.marked(WEIGHTS)
EXPORTED = passes.save(export(passes.load(MARKED, "it"), "sm_87", fused_graphs.kernels()))
PROFILE = {"x": Shapes((1, 1, 480), (2, 40, 480), (8, 400, 480))}


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> StandInTensorRt:
    """The library and the driver, stood in for."""
    return engines.install(monkeypatch)


def runtime(trt: StandInTensorRt, folder: Path) -> TensorRtRuntime:
    """The runtime over an engine of the marked graph, built from the exported one."""
    engines.engine(trt, folder, MARKED, PROFILE, exported=EXPORTED)
    trt.cuda.launches.clear()
    gc.collect()  # what the builder has run is gone
    return TensorRtRuntime("tensorrt", folder)


def lines(batch: int, steps: int) -> dict[str, np.ndarray]:
    return {"x": np.full((batch, steps, 480), 0.5, np.float32)}


def test_the_export_leaves_one_input_a_version_and_a_namespace_and_no_body() -> None:
    model = onnx.load_model_from_string(EXPORTED)
    assert not model.functions
    assert not model.graph.initializer
    assert [node.op_type for node in model.graph.node] == ["Cast", "ConvAttention", "CtcHead"]
    for node in model.graph.node[1:]:
        said = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        assert (said["plugin_version"], said["plugin_namespace"], len(node.input)) == (b"1", b"appliance", 1)
    assert [value.name for value in model.graph.output] == ["index", "probability"]


def test_weights_are_packed_once_in_the_form_that_the_kernels_read() -> None:
    found = []
    for node in onnx.load_model_from_string(EXPORTED).graph.node[1:]:
        said = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        found.append(unpack_arrays(base64.b64decode(said["payload"])))
    neck, head = found
    held = {name: WEIGHTS[name] for name in fused_graphs.SPEC.shapes()}
    for split, packed in pack_neck_for("sm_87", fused_graphs.SPEC, held).items():
        assert np.array_equal(neck[f"w{split}"], packed.w)
        assert np.array_equal(neck[f"b{split}"], packed.b)
    assert np.array_equal(head["w"], pack_head_for("sm_87", WEIGHTS["w_CK"], WEIGHTS["b_K"]))
    files = {name.removeprefix("kernel ") for one in found for name in one if name.startswith("kernel ")}
    assert files == set(fused_graphs.kernels())


@pytest.mark.parametrize("repeats", [False, True], ids=["", "fields as TensorRT 10.3 shows them to NumPy 2"])
def test_an_engine_launches_the_kernels_on_its_own_stream_between_its_own_buffers(
    trt: StandInTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    monkeypatch.setattr(double.PluginField, "_repeats", repeats)
    session = runtime(trt, tmp_path).open(MARKED, threads=1)
    answers = session.run(lines(2, 40))
    assert {name: (one.shape, str(one.dtype)) for name, one in answers.items()} == {
        "index": ((2, 40), "int64"),
        "probability": ((2, 40), "float32"),
    }
    (neck, neck_stream, grid, given), (head, head_stream, _, asked) = trt.cuda.launches
    assert (neck, grid, given[7] & 0xFFFFFFFF) == ("neck-v4-kv2-split2-short", (6, 2), 40)
    assert head.startswith("ctc-")
    assert neck_stream == head_stream in trt.cuda.streams
    assert given[3] == asked[0], "the head reads what the neck wrote"
    assert {asked[2], asked[3]} <= set(trt.cuda.memory), "and writes into the buffers that are copied back"


def test_what_a_plugin_reads_is_the_input_in_half_precision(trt: StandInTensorRt, tmp_path: Path) -> None:
    import ctypes  # noqa: PLC0415 - this test alone looks at memory

    session = runtime(trt, tmp_path).open(MARKED, threads=1)
    session.run(lines(1, 3))
    read = ctypes.string_at(trt.cuda.launches[0][3][0], 3 * 480 * 2)
    assert (np.frombuffer(read, np.float16) == 0.5).all()


def test_the_second_run_of_a_shape_is_a_captured_graph_of_the_same_launches(
    trt: StandInTensorRt, tmp_path: Path
) -> None:
    session = runtime(trt, tmp_path).open(MARKED, threads=1)
    for _ in range(3):
        session.run(lines(1, 40))
    assert trt.cuda.launched_graphs == 2
    assert len(trt.cuda.launches) == 6
    assert len({repr(launch) for launch in trt.cuda.launches}) == 2


def test_all_shapes_of_an_engine_share_the_weights_and_closing_it_gives_everything_back(
    trt: StandInTensorRt, tmp_path: Path
) -> None:
    opened = runtime(trt, tmp_path)
    before = trt.cuda.allocated_bytes()
    session = opened.open(MARKED, threads=1)
    session.run(lines(1, 40))
    buffers = sum(2 * steps * 4 * (480 + 3) for steps in (10,))
    one_shape = trt.cuda.allocated_bytes()
    session.run(lines(2, 10))
    assert trt.cuda.allocated_bytes() - one_shape <= buffers
    session.close()
    del session, opened
    gc.collect()
    assert trt.cuda.allocated_bytes() == before


def test_lines_longer_than_the_kernels_take_are_refused_when_the_engine_is_built(
    trt: StandInTensorRt, tmp_path: Path
) -> None:
    (tmp_path / "g.onnx").write_bytes(EXPORTED)
    long = {"x": Shapes((1, 1, 480), (1, 40, 480), (1, 513, 480))}
    order = engines.order(tmp_path / "g.onnx", tmp_path / "g.plan", long, plugins=True)
    here = engines.tensorrt.here(trt.__name__, trt, engines.Driver())
    with pytest.raises(builder.BuildError, match="a profile of 1 lines of 513 tokens; the kernels take 1024 of 512"):
        builder.build(trt, order, here, lambda _event: None)


def test_without_the_plugins_neither_the_graph_nor_the_plan_is_read(trt: StandInTensorRt, tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(EXPORTED)
    order = engines.order(tmp_path / "g.onnx", tmp_path / "g.plan", PROFILE)
    here = engines.tensorrt.here(trt.__name__, trt, engines.Driver())
    with pytest.raises(builder.BuildError, match="Plugin not found"):
        builder.build(trt, order, here, lambda _event: None)


def test_an_engine_that_needs_another_plugin_is_refused_by_its_name(trt: StandInTensorRt, tmp_path: Path) -> None:
    opened = runtime(trt, tmp_path)
    (path,) = tmp_path.glob("*/*.passport.json")
    path.write_text(path.read_text().replace(PLUGINS[0], "appliance::ConvAttention 2"))
    with pytest.raises(BundleError, match=r"needs the plugin appliance::ConvAttention 2; here are .*: compile with"):
        opened.open(MARKED, threads=1)


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorrt_rtx_bindings"), reason="TensorRT-RTX has no wheel for this machine"
)
def test_nvidias_own_parser_hands_the_plugin_what_the_export_wrote(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(EXPORTED)
    done = subprocess.run(
        [sys.executable, tensorrt_plugin.__file__, "tensorrt_rtx_bindings", str(tmp_path / "g.onnx")],
        capture_output=True,
        text=True,
        check=False,
        env=tensorrt_plugin.environment(),
    )
    assert done.returncode == 0, done.stderr
    payloads = {
        node.op_type: next(one.s for one in node.attribute if one.name == "payload")
        for node in onnx.load_model_from_string(EXPORTED).graph.node[1:]
    }
    assert done.stdout.splitlines() == [
        f"ConvAttention {hashlib.sha256(payloads['ConvAttention']).hexdigest()} HALF v4 2"
    ], "it has no layer for plugins, so it stops at the first"
