"""The TensorRT runtime with stand-ins for library and driver: what it refuses, and what it leaves behind."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from doubles.tensorrt import Context, StandInTensorRt
from onnx import helper
from support import engines

from appliance.runtime import choose
from appliance.runtime.tensorrt import TensorRtRuntime, TensorRtSession
from models.errors import BadInput, BundleError, ConfigError, ModelError
from models.spec import Array, ModelSpec, TensorSpec

pytestmark = pytest.mark.unit

PROFILES = ({"x": engines.FIRST}, {"x": engines.LAST})


def graph(kind: int = onnx.TensorProto.FLOAT, size: int | str = "W") -> bytes:
    """`y` is `x` [N, `size`]."""
    ends = [helper.make_tensor_value_info(name, kind, ["N", size]) for name in ("x", "y")]
    made = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    return bytes(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def matrix(rows: int, columns: int, start: int = 0) -> Array:
    """Distinct numbers."""
    return np.arange(start, start + rows * columns, dtype=np.float32).reshape(rows, columns)


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> StandInTensorRt:
    """The library and the driver, stood in for."""
    return engines.install(monkeypatch)


@pytest.fixture
def passport(trt: StandInTensorRt, tmp_path: Path) -> Path:
    """An engine of `graph()` with two profiles."""
    return engines.engine(trt, tmp_path, graph(), *PROFILES)


@pytest.fixture
def runtime(passport: Path, tmp_path: Path) -> TensorRtRuntime:
    """The runtime over that engine."""
    del passport
    return TensorRtRuntime("tensorrt", tmp_path)


@pytest.fixture
def session(runtime: TensorRtRuntime) -> TensorRtSession:
    """That engine, open."""
    return runtime.open(graph(), threads=1)


def change(path: Path, **facts: object) -> None:
    """Write other facts into a passport."""
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize(
    ("fact", "value", "sentence"),
    [
        ("sm", "8.0", "was made for compute capability 8.0, this is 8.7"),
        ("version", "10.16.1", "was made for TensorRT 10.16.1, this is 10.3.0"),
        ("backend", "tensorrt-rtx", "was made for backend tensorrt-rtx, this is tensorrt"),
        ("cuda", "13.2", "was made for CUDA 13.2, this is 12.6"),
        ("module", "AGX Orin", r"was made for module AGX Orin, this is Orin \(stand-in\)"),
    ],
)
def test_an_engine_for_something_else_is_refused_with_both_values_before_it_is_read(
    runtime: TensorRtRuntime, passport: Path, fact: str, value: str, sentence: str
) -> None:
    change(passport, **{fact: value})
    passport.with_name("g.plan").unlink()
    with pytest.raises(BundleError, match=sentence):
        runtime.open(graph(), threads=1)


def test_a_minor_version_of_cuda_and_what_is_not_known_do_not_matter(runtime: TensorRtRuntime, passport: Path) -> None:
    change(passport, cuda="12.2", l4t="36.4.3", module="")
    assert runtime.open(graph(), threads=1).run({"x": matrix(1, 1)})["y"].tolist() == [[0]]


def test_of_several_engines_the_one_for_this_machine_is_opened(
    runtime: TensorRtRuntime, passport: Path, tmp_path: Path
) -> None:
    for target, sm in (("a100", "8.0"), ("rtx", "8.6")):
        (tmp_path / target).mkdir()
        other = tmp_path / target / passport.name
        other.write_bytes(passport.read_bytes())
        change(other, sm=sm)
    (tmp_path / "a100" / "broken.passport.json").write_text("{")
    assert runtime.open(graph(), threads=1).run({"x": matrix(1, 1)})["y"].tolist() == [[0]]


def test_another_graph_has_no_engine(runtime: TensorRtRuntime) -> None:
    with pytest.raises(BundleError, match=r"there is no engine of graph [0-9a-f]{12} in .*`provision compile`"):
        runtime.open(graph(size=7), threads=1)


def test_a_bare_file_has_no_engine(trt: StandInTensorRt) -> None:
    del trt
    with pytest.raises(BundleError, match="a bare ONNX file cannot have one"):
        choose("tensorrt").open(graph(), threads=1)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 2}', '{"format": 1, "sm": "8.7"}'])
def test_a_damaged_passport_is_told_by_its_file(runtime: TensorRtRuntime, passport: Path, content: str) -> None:
    passport.write_text(content)
    with pytest.raises(BundleError, match=r"g\.passport\.json is no passport of an engine"):
        runtime.open(graph(), threads=1)


def test_a_plan_that_is_not_the_one_of_the_passport_is_never_deserialized(
    runtime: TensorRtRuntime, passport: Path
) -> None:
    passport.with_name("g.plan").write_bytes(b"something else")
    with pytest.raises(BundleError, match=r"made for a plan [0-9a-f]{12} of \d+ bytes, the file is [0-9a-f]{12} of 14"):
        runtime.open(graph(), threads=1)


def test_a_missing_plan_is_told(runtime: TensorRtRuntime, passport: Path) -> None:
    passport.with_name("g.plan").unlink()
    with pytest.raises(BundleError, match=r"g\.plan cannot be read \(No such file"):
        runtime.open(graph(), threads=1)


def test_what_the_library_refuses_to_load_is_told_in_its_own_words(trt: StandInTensorRt, passport: Path) -> None:
    runtime = TensorRtRuntime("tensorrt", passport.parent.parent)
    trt.__version__ = "10.3.0.1"
    with pytest.raises(BundleError, match=r"cannot load .*g\.plan: .*not compatible with this version"):
        runtime.open(graph(), threads=1)


def test_the_need_for_memory_is_told_without_opening_and_checked_before(
    runtime: TensorRtRuntime, trt: StandInTensorRt, passport: Path
) -> None:
    plan_bytes = passport.with_name("g.plan").stat().st_size
    assert runtime.need_bytes(graph()) == plan_bytes + 1000
    trt.cuda.total_bytes = plan_bytes + 999
    change(passport, memory_bytes=5 << 20)
    with pytest.raises(BundleError, match="needs 5 MiB of device memory, 0 MiB are free: unload another model"):
        runtime.open(graph(), threads=1)


def test_shapes_outside_of_every_profile_are_the_callers_fault(session: TensorRtSession) -> None:
    with pytest.raises(BadInput, match=r"have shapes x \[3, 17\].*compiled for x \[1, 1\] to \[4, 4\] or x \[1, 5\]"):
        session.run({"x": matrix(3, 17)})
    assert session.run({"x": matrix(3, 16)})["y"].tolist() == matrix(3, 16).tolist()


def test_from_the_second_run_of_a_shape_on_a_captured_graph_runs(
    session: TensorRtSession, trt: StandInTensorRt
) -> None:
    for i in range(5):
        for rows in (1, 2):
            x = matrix(rows, 8, start=i)
            assert session.run({"x": x})["y"].tolist() == x.tolist()
        assert trt.cuda.launched_graphs == 2 * i


def test_an_engine_that_cannot_be_captured_runs_without(session: TensorRtSession, trt: StandInTensorRt) -> None:
    trt.capturable = False
    for i in range(4):
        assert session.run({"x": matrix(2, 3, start=i)})["y"].tolist() == matrix(2, 3, start=i).tolist()
    assert trt.cuda.launched_graphs == 0


def test_many_shapes_do_not_pile_up(session: TensorRtSession, trt: StandInTensorRt) -> None:
    most = 0
    for _ in range(3):
        for rows in range(1, 5):
            for columns in range(5, 17):
                session.run({"x": matrix(rows, columns)})
                most = max(most, len(trt.cuda.memory))
    assert most == 1 + 16 * 2  # activations, and input and output of the last sixteen shapes


def test_all_that_a_session_took_is_given_back(runtime: TensorRtRuntime, trt: StandInTensorRt) -> None:
    session = runtime.open(graph(), threads=1)
    for rows in (1, 2, 1, 2, 1):
        session.run({"x": matrix(rows, 8)})
    session.close()
    assert (trt.cuda.memory, trt.cuda.graphs, trt.cuda.streams) == ({}, {}, {})


def test_memory_of_earlier_shapes_is_given_back_on_demand_and_the_session_goes_on(
    runtime: TensorRtRuntime, trt: StandInTensorRt
) -> None:
    session = runtime.open(graph(), threads=1)
    before = trt.cuda.allocated_bytes()
    for rows in (1, 2, 1, 2):
        session.run({"x": matrix(rows, 8)})
    runtime.release()
    assert (trt.cuda.allocated_bytes(), trt.cuda.graphs) == (before, {})
    assert session.run({"x": matrix(2, 8)})["y"].tolist() == matrix(2, 8).tolist()
    session.close()
    runtime.release()


def test_a_context_that_refuses_gives_back_what_it_took(session: TensorRtSession, trt: StandInTensorRt) -> None:
    before = trt.cuda.allocated_bytes()
    trt.cuda.total_bytes = before + 40
    with pytest.raises(ModelError, match="cuMemAlloc_v2 failed: CUDA error 2"):
        session.run({"x": matrix(2, 4)})
    assert trt.cuda.allocated_bytes() == before
    assert session.run({"x": matrix(1, 4)})["y"].tolist() == matrix(1, 4).tolist()


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"])
def test_an_error_of_the_driver_carries_its_code(session: TensorRtSession, trt: StandInTensorRt, name: str) -> None:
    session.run({"x": matrix(1, 4)})
    trt.cuda.fail = name
    with pytest.raises(ModelError, match=rf"{name} failed: CUDA error 700 \(CUDA_ERROR_STAND_IN\)"):
        session.run({"x": matrix(1, 4)})


def test_a_run_that_the_library_refuses_is_told_in_its_words(
    session: TensorRtSession, trt: StandInTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_context: Context, _stream: int) -> bool:
        trt.say(1, "Error Code 1: Myelin (no kernel image)")
        return False

    monkeypatch.setattr(Context, "execute_async_v3", refuse)
    with pytest.raises(ModelError, match=r"the engine does not run: Error Code 1: Myelin \(no kernel image\)"):
        session.run({"x": matrix(1, 4)})


def test_every_datatype_that_both_know_goes_through(trt: StandInTensorRt, tmp_path: Path) -> None:
    for kind in ("FLOAT16", "INT8", "INT32", "INT64", "UINT8", "BOOL"):
        content = graph(getattr(onnx.TensorProto, kind))
        engines.engine(trt, tmp_path / kind, content, {"x": engines.FIRST})
        session = TensorRtRuntime("tensorrt", tmp_path / kind).open(content, threads=1)
        x = np.array([[1, 0, 1]]).astype(kind.lower())
        answer = session.run({"x": x})["y"]
        assert (answer.dtype, answer.tolist()) == (x.dtype, x.tolist())
        session.close()


def test_a_type_that_cannot_travel_is_the_bundles_fault(trt: StandInTensorRt, tmp_path: Path) -> None:
    content = graph(onnx.TensorProto.BFLOAT16)
    engines.engine(trt, tmp_path, content, {"x": engines.FIRST})
    with pytest.raises(BundleError, match="tensor 'x' has type BF16, which cannot travel"):
        TensorRtRuntime("tensorrt", tmp_path).open(content, threads=1)
    assert trt.cuda.memory == {}


def test_fixed_dimensions_are_told(trt: StandInTensorRt, tmp_path: Path) -> None:
    content = graph(size=7)
    engines.engine(trt, tmp_path, content, {"x": engines.Shapes((1, 7), (2, 7), (4, 7))})
    spec = TensorRtRuntime("tensorrt", tmp_path).open(content, threads=1).spec
    assert spec == ModelSpec((TensorSpec("x", "FP32", (-1, 7)),), (TensorSpec("y", "FP32", (-1, 7)),))


def test_a_profile_that_asks_for_tensorrt_rtx_gets_its_engines_and_no_others(
    monkeypatch: pytest.MonkeyPatch, passport: Path, tmp_path: Path
) -> None:
    trt = engines.install(monkeypatch, version="1.7.1.116", rtx=True)
    runtime = choose("tensorrt-rtx", engines=[tmp_path])
    assert runtime.name == "tensorrt-rtx"
    with pytest.raises(BundleError, match="made for backend tensorrt, this is tensorrt-rtx"):
        runtime.open(graph(), threads=1)
    plan = json.loads(passport.with_name("g.plan").read_text()) | {"version": trt.__version__}
    content = json.dumps(plan).encode()
    passport.with_name("g.plan").write_bytes(content)
    blob = {"sha256": engines.Blob.of(content).sha256, "size_bytes": len(content)}
    change(passport, backend="tensorrt-rtx", version=trt.__version__, purpose="build-check", plan=blob)
    assert runtime.open(graph(), threads=1).run({"x": matrix(1, 2)})["y"].tolist() == [[0, 1]]


def test_without_the_library_the_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"tensorrt cannot be loaded \(.*\): install it, or choose another runtime"):
        choose("tensorrt")


def test_without_a_driver_the_choice_is_refused(trt: StandInTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    del trt
    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(ModelError, match="no CUDA driver on this machine"):
        choose("tensorrt")
