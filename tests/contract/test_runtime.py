"""Every runtime behind the hardware seam: the same promises, kept by each.

A further runtime joins by a line in `CASES`: how to make a graph that gives its one input `x`,
FP32 [any, any], back as `y`. TensorRT joins with a stand-in for its library and for the driver, onnxruntime on CUDA
with one for its provider.
Past 400 lines because what only one runtime can show stands beside what all promise.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from doubles import cuda_provider
from onnx import helper, numpy_helper
from support import engines

from appliance.runtime import Runtime, Session, choose
from appliance.runtime.onnx import OnnxRuntime
from models.errors import BadInput, BundleError, ConfigError, ModelError
from models.spec import Array, ModelSpec, Tensor, TensorSpec, check_request

pytestmark = pytest.mark.contract


def onnx_graph(*operators: str, kind: int = onnx.TensorProto.FLOAT, rank: int = 2) -> bytes:
    """A chain of operators from `x` to `y`."""
    names = ["x", *(f"between{i}" for i in range(len(operators) - 1)), "y"]
    nodes = [helper.make_node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(operators)]
    ends = [helper.make_tensor_value_info(name, kind, [None] * rank) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@dataclass(frozen=True, slots=True)
class Case:
    """One runtime by its name, with the identity in its language."""

    name: str
    identity: bytes
    layout: str = ""


OPENVINO = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="OpenVINO has no wheel for this machine")
CASES: list[Any] = [
    Case("onnxruntime-cpu", onnx_graph("Identity")),
    Case("onnxruntime-cuda", onnx_graph("Identity")),
    pytest.param(Case("openvino", onnx_graph("Identity")), marks=OPENVINO),
    Case("null", b"{}", "NC"),
    Case("tensorrt", onnx_graph("Identity")),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    """Each runtime."""
    return request.param  # type: ignore[no-any-return] # pytest leaves it untyped


@pytest.fixture
def runtime(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """The runtime as the worker gets it."""
    if case.name == "tensorrt":
        engines.engine(engines.install(monkeypatch), tmp_path, case.identity, {"x": engines.ANY})
    if case.name == "onnxruntime-cuda":
        cuda_provider.install(monkeypatch)
    return choose(case.name, engines=[tmp_path])


@pytest.fixture
def session(runtime: Runtime, case: Case) -> Iterator[Session]:
    """The identity, open."""
    opened = runtime.open(case.identity, threads=1)
    yield opened
    opened.close()


def matrix(rows: int = 2, columns: int = 3, *, start: float = 0) -> Array:
    """Distinct numbers."""
    return np.arange(start, start + rows * columns, dtype=np.float32).reshape(rows, columns)


def test_a_runtime_is_chosen_by_the_name_it_answers_to(runtime: Runtime, case: Case) -> None:
    assert runtime.name == case.name


def test_an_unknown_runtime_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConfigError,
        match=r"there is no runtime 'cuda13'; known: onnxruntime-cpu, onnxruntime-cuda, openvino, tensorrt",
    ):
        choose("cuda13")


@pytest.mark.parametrize("few_shapes", [True, False])
def test_what_is_computed_does_not_depend_on_how_memory_is_planned(
    runtime: Runtime, case: Case, few_shapes: bool
) -> None:
    opened = runtime.open(case.identity, threads=1, few_shapes=few_shapes)
    for rows in (2, 2, 5, 2):
        assert opened.run({"x": matrix(rows)})["y"].tolist() == matrix(rows).tolist()


def test_a_session_describes_what_it_takes_and_gives(session: Session, case: Case) -> None:
    x, y = TensorSpec("x", "FP32", (-1, -1), case.layout), TensorSpec("y", "FP32", (-1, -1), case.layout)
    assert session.spec == ModelSpec((x,), (y,))


def test_a_session_computes(session: Session) -> None:
    answer = session.run({"x": matrix()})
    assert answer.keys() == {"y"}
    assert answer["y"].dtype == np.float32
    assert answer["y"].tolist() == matrix().tolist()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (500, 70)])
def test_a_variable_dimension_takes_every_size(session: Session, shape: tuple[int, int]) -> None:
    assert session.run({"x": matrix(*shape)})["y"].tolist() == matrix(*shape).tolist()


def test_inputs_may_lie_in_memory_in_any_way_and_are_left_as_they_were(session: Session) -> None:
    whole = matrix(4, 6)
    read_only = np.frombuffer(bytes(whole.tobytes()), np.float32).reshape(4, 6)
    for x in (whole[::2, ::3], np.asfortranarray(whole), read_only, whole.T):
        before = x.tolist()
        assert session.run({"x": x})["y"].tolist() == before
        assert x.tolist() == before


@pytest.mark.parametrize(("asked", "given"), [(None, {"y"}), (["y"], {"y"}), (("y",), {"y"}), ([], set())])
def test_only_the_outputs_asked_for_are_given(session: Session, asked: list[str] | None, given: set[str]) -> None:
    assert session.run({"x": matrix()}, asked).keys() == given


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"z": matrix()},
        {"x": matrix(), "z": matrix()},
        {"x": matrix()[0]},
        {"x": matrix()[None]},
        {"x": matrix().astype(np.float64)},
        {"x": matrix().astype(np.int32)},
        {"x": np.array([[b"a"]], np.object_)},
    ],
    ids=["nothing", "other-name", "too-many", "flat", "deep", "double", "whole", "bytes"],
)
def test_inputs_that_do_not_fit_are_the_callers_fault_and_leave_the_session_usable(
    session: Session, inputs: dict[str, Array]
) -> None:
    with pytest.raises(BadInput):
        session.run(inputs)
    assert session.run({"x": matrix()})["y"].tolist() == matrix().tolist()


def test_an_output_that_does_not_exist_is_the_callers_fault(session: Session) -> None:
    with pytest.raises(BadInput):
        session.run({"x": matrix()}, ["y", "q"])


def test_several_threads_at_once_each_get_their_own_answer(session: Session) -> None:
    def run(i: int) -> bool:
        x = matrix(64, 64, start=i)
        return bool((session.run({"x": x})["y"] == x).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(200)))


def test_an_answer_belongs_to_the_caller(runtime: Runtime, case: Case) -> None:
    session = runtime.open(case.identity, threads=1)
    x = matrix()
    first = session.run({"x": x})["y"]
    assert not np.shares_memory(first, x)
    first[:] = -1
    second = session.run({"x": x})["y"]
    session.close()
    assert (first == -1).all()
    assert second.tolist() == matrix().tolist()


@pytest.mark.parametrize("graph", [b"", b"not a graph", b"\x00" * 1000, b"[1]", b"[" * 100_000])
def test_a_damaged_graph_is_the_bundles_fault(runtime: Runtime, graph: bytes) -> None:
    with pytest.raises(BundleError):
        runtime.open(graph, threads=1)


def test_half_a_graph_is_the_bundles_fault(runtime: Runtime, case: Case) -> None:
    with pytest.raises(BundleError):
        runtime.open(case.identity[: len(case.identity) // 2], threads=1)


def test_a_closed_session_says_so_and_may_be_closed_again(runtime: Runtime, case: Case) -> None:
    session = runtime.open(case.identity, threads=1)
    session.close()
    session.close()
    with pytest.raises(ModelError, match="the session is closed"):
        session.run({"x": matrix()})


def test_closing_one_session_leaves_another_of_the_same_graph_open(runtime: Runtime, case: Case) -> None:
    one, other = (runtime.open(case.identity, threads=1) for _ in range(2))
    one.close()
    assert other.run({"x": matrix()})["y"].tolist() == matrix().tolist()
    other.close()


def test_the_same_input_gives_the_same_bits(session: Session) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    assert len({session.run({"x": x})["y"].tobytes() for _ in range(5)}) == 1


def test_answers_fit_what_the_session_says_it_gives(session: Session) -> None:
    answers = session.run({"x": matrix()})
    check_request(
        ModelSpec(session.spec.outputs, ()), [Tensor.from_array(name, array) for name, array in answers.items()], None
    )


# What only onnxruntime can show: graphs of other types and graphs that fail.


def test_onnx_texts_go_in_and_come_out_as_utf8_bytes() -> None:
    session = OnnxRuntime().open(onnx_graph("Identity", kind=onnx.TensorProto.STRING), threads=1)
    assert session.spec.inputs[0].datatype == "BYTES"
    texts = np.array([["a", "grün"], ["", "\N{SNOWMAN}"]])
    x = np.vectorize(str.encode, otypes=[np.object_])(texts)
    y = session.run({"x": x})["y"]
    assert y.tolist() == x.tolist()
    assert Tensor.from_array("y", y).to_array().tolist() == x.tolist()


@pytest.mark.parametrize("element", [b"\xff", 1.5])
def test_onnx_refuses_elements_that_are_no_text(element: object) -> None:
    session = OnnxRuntime().open(onnx_graph("Identity", kind=onnx.TensorProto.STRING), threads=1)
    with pytest.raises(BadInput, match="'x' holds elements that are no UTF-8 text"):
        session.run({"x": np.array([[element]], np.object_)})


def test_onnx_fixed_dimensions_are_told_and_named_ones_are_variable() -> None:
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "named", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    spec = OnnxRuntime().open(model.SerializeToString(), threads=1).spec
    assert spec.inputs == (TensorSpec("x", "INT64", (-1, 3)),)


def test_onnx_a_graph_of_types_that_cannot_travel_is_refused_by_the_tensor() -> None:
    with pytest.raises(BundleError, match=r"tensor 'x' has type tensor\(bfloat16\), which cannot travel"):
        OnnxRuntime().open(onnx_graph("Identity", kind=onnx.TensorProto.BFLOAT16), threads=1)


def test_onnx_an_operator_of_a_domain_nobody_knows_is_the_bundles_fault() -> None:
    with pytest.raises(BundleError, match="onnxruntime cannot load this graph"):
        OnnxRuntime().open(onnx_graph("NoSuchOperator"), threads=1)


def test_onnx_a_graph_that_fails_on_inputs_that_fit_is_the_models_fault() -> None:
    node = helper.make_node("MatMul", ["x", "x"], ["y"])
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    graph = helper.make_graph([node], "square", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = OnnxRuntime().open(model.SerializeToString(), threads=1)
    with pytest.raises(ModelError, match="the model failed"):
        session.run({"x": matrix(2, 3)})
    assert session.run({"x": np.eye(2, dtype=np.float32)})["y"].tolist() == [[1, 0], [0, 1]]


# What only onnxruntime on CUDA can show: it says when there is no card, or not all of a graph runs there.


def test_cuda_is_refused_where_the_installed_onnxruntime_knows_none() -> None:
    with pytest.raises(ConfigError, match="the installed onnxruntime knows no CUDA: put onnxruntime-gpu in its place"):
        choose("onnxruntime-cuda")


@pytest.mark.parametrize("run_limit_bytes", [0, 2**28])
def test_cuda_never_takes_the_cpu_for_the_card_in_silence(
    monkeypatch: pytest.MonkeyPatch, run_limit_bytes: int
) -> None:
    cuda_provider.install(monkeypatch, works=False)
    with pytest.raises(ConfigError, match="cannot use a card here, and would compute on the CPU"):
        choose("onnxruntime-cuda", run_limit_bytes=run_limit_bytes).open(onnx_graph("Identity"), threads=1)


def test_cuda_leaves_nodes_to_the_cpu_unless_that_was_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_provider.install(monkeypatch, without_kernel=["Det"])
    for operator, gpu_only in (("Det", False), ("Abs", True)):
        choose("onnxruntime-cuda", gpu_only=gpu_only).open(onnx_graph(operator), threads=1)
    with pytest.raises(BundleError, match="assigned to the default CPU EP"):
        choose("onnxruntime-cuda", gpu_only=True).open(onnx_graph("Det"), threads=1)


@pytest.mark.parametrize(
    ("run_limit_bytes", "gpu_memory_bytes", "limit"),
    [(0, 0, None), (2**30, 0, "1073741824"), (2**30, 2**28, "268435456"), (0, 2**28, "268435456")],
)
def test_cuda_takes_no_more_of_the_card_than_the_smaller_limit(
    monkeypatch: pytest.MonkeyPatch, run_limit_bytes: int, gpu_memory_bytes: int, limit: str | None
) -> None:
    onnxruntime = cuda_provider.install(monkeypatch)
    runtime = choose("onnxruntime-cuda", run_limit_bytes=run_limit_bytes, gpu_memory_bytes=gpu_memory_bytes)
    runtime.open(onnx_graph("Identity"), threads=1)
    assert onnxruntime.preloaded
    assert {options.get("gpu_mem_limit") for options in (*onnxruntime.given, *onnxruntime.arenas)} == {limit}
    assert {options["device_id"] for options in onnxruntime.given} == {"0"}


# What only OpenVINO can show: what it would compute in fewer bits than asked, and functions, which it does not know.


@OPENVINO
def test_openvino_loads_no_telemetry() -> None:
    script = """
import sys
from appliance.runtime import choose
choose("openvino")
sys.exit(any("telemetry" in name for name in sys.modules))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@OPENVINO
@pytest.mark.parametrize("kind", ["DOUBLE", "UINT64", "UINT32", "STRING", "BFLOAT16"])
def test_openvino_refuses_graphs_of_types_that_it_would_cut_or_cannot_give(kind: str) -> None:
    with pytest.raises(BundleError, match=r"tensor 'x' has type \w+, which openvino cannot serve without loss"):
        choose("openvino").open(onnx_graph("Identity", kind=getattr(onnx.TensorProto, kind)), threads=1)


@OPENVINO
def test_openvino_refuses_whole_numbers_that_it_would_cut_to_32_bits() -> None:
    session = choose("openvino").open(onnx_graph("Identity", kind=onnx.TensorProto.INT64), threads=1)
    with pytest.raises(BadInput, match="input 'x' holds numbers over 32 bits, which openvino would cut"):
        session.run({"x": np.array([[2**40]])})
    assert session.run({"x": np.array([[-(2**31), 2**31 - 1]])})["y"].tolist() == [[-(2**31), 2**31 - 1]]


@OPENVINO
def test_openvino_runs_graphs_with_functions_of_our_own() -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("appliance", 1)]
    double = helper.make_function(
        "appliance", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opsets[:1]
    )
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    nodes = [helper.make_node("Double", ["x"], ["y"], domain="appliance")]
    graph = helper.make_graph(nodes, "double", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=opsets, functions=[double], ir_version=8)
    session = choose("openvino").open(model.SerializeToString(), threads=1)
    assert session.run({"x": matrix()})["y"].tolist() == (2 * matrix()).tolist()


@OPENVINO
def test_openvino_says_that_the_model_failed_and_runs_again() -> None:
    node = helper.make_node("MatMul", ["x", "x"], ["y"])
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    graph = helper.make_graph([node], "square", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = choose("openvino", concurrency=2).open(model.SerializeToString(), threads=1)
    with pytest.raises(ModelError, match="the model failed"):
        session.run({"x": matrix(2, 3)})
    assert session.run({"x": np.eye(2, dtype=np.float32)})["y"].tolist() == [[1, 0], [0, 1]]


@OPENVINO
def test_openvino_adds_without_overflow_what_is_quantized() -> None:
    def quantized(name: str, kind: int) -> list[onnx.NodeProto]:
        ends = [name, "scale", "zero_u8" if kind == onnx.TensorProto.UINT8 else "zero_i8"]
        return [
            helper.make_node("QuantizeLinear", ends, [f"{name}_q"]),
            helper.make_node("DequantizeLinear", [f"{name}_q", *ends[1:]], [f"{name}_d"]),
        ]

    constants = [
        numpy_helper.from_array(np.full((8, 64, 1, 1), 127, np.float32), "w"),
        numpy_helper.from_array(np.float32(1), "scale"),
        numpy_helper.from_array(np.uint8(0), "zero_u8"),
        numpy_helper.from_array(np.int8(0), "zero_i8"),
    ]
    nodes = [
        *quantized("x", onnx.TensorProto.UINT8),
        *quantized("w", onnx.TensorProto.INT8),
        helper.make_node("Conv", ["x_d", "w_d"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 4) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "quantized", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = choose("openvino").open(model.SerializeToString(), threads=1)
    y_NCHW = session.run({"x": np.full((1, 64, 4, 4), 255, np.float32)})["y"]
    assert (y_NCHW == 64 * 127 * 255).all()


def test_openvino_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ConfigError, match=r"openvino cannot be loaded .*: install edge-appliance\[openvino\]"):
        choose("openvino")


def test_null_takes_the_time_it_was_told_and_no_impossible_one() -> None:
    runtime = choose("null")
    for graph in (b'{"delay_s": -1}', b'{"delay_s": "soon"}', b'{"delay_s": NaN}', b'{"delay_s": Infinity}'):
        with pytest.raises(BundleError, match="not a null graph"):
            runtime.open(graph, threads=1)


@pytest.mark.parametrize("run_limit_bytes", [0, 2**30])
def test_memory_that_runs_have_left_allocated_can_be_given_back_between_runs(
    runtime: Runtime, case: Case, run_limit_bytes: int
) -> None:
    limited = choose(case.name, run_limit_bytes=run_limit_bytes) if case.name != "tensorrt" else runtime
    session = limited.open(case.identity, threads=1)
    for _ in range(2):
        assert session.run({"x": matrix(500, 70)})["y"].tolist() == matrix(500, 70).tolist()
        limited.release()
    session.close()
    limited.release()
