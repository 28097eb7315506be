"""Compiling engines: which shapes they cover, what the builder asks of the library, and how a build is watched."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from doubles.tensorrt import StandInTensorRt
from onnx import helper
from support import engines, tiny

from models.bundle import TaskSpec
from models.engine import Shapes, Target
from models.errors import BundleError, ConfigError, WorkshopError
from models.folder import BundleFolder
from models.spec import Array, ModelSpec, TensorSpec
from models.tasks import shapes
from models.tasks.reading import Reading
from provisioning.cache import Cache
from provisioning.engines import Wish, builder, child, compile_bundle

pytestmark = pytest.mark.unit

PICTURE = ModelSpec((TensorSpec("x", "FP32", (-1, 3, -1, -1)),), ())
LINE = ModelSpec((TensorSpec("x", "FP32", (-1, 3, 48, -1)),), ())
ORIN = Target("tensorrt", "8.7", "10.3.0", "12.6", "36.4.3", "Orin")
LIMITS = child.Limits(time_s=60, memory_bytes=1 << 30)


def onnx_file(path: Path, operator: str = "Identity", function: bool = False) -> Path:
    """`y` [N, W] is what `operator` makes of `x`; through a model-local function if asked."""
    node = helper.make_node(operator, ["x"], ["y"], name="the-node", domain="appliance" if function else "")
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", "W"]) for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 17)]
    body = helper.make_node("Identity", ["a"], ["b"])
    functions = [helper.make_function("appliance", operator, ["a"], ["b"], [body], opsets)] if function else []
    imports = [*opsets, helper.make_opsetid("appliance", 1)]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


# Which shapes


@pytest.mark.parametrize(
    ("max_width", "buckets"),
    [
        (3200, [(320, 320), (352, 640), (672, 1280), (1312, 2560), (2592, 3200)]),
        (1280, [(320, 320), (352, 640), (672, 1280)]),
        (700, [(320, 320), (352, 640), (672, 704)]),
        (100, [(320, 320)]),
    ],
)
def test_buckets_of_widths_double_and_leave_no_gap(max_width: int, buckets: list[tuple[int, int]]) -> None:
    assert shapes.width_buckets(max_width) == buckets


def test_every_shape_that_reading_sends_has_a_profile() -> None:
    task = TaskSpec("reading", {"max_side": 1000, "max_batch": 3, "max_line_width": 1000})
    specs = {"det": PICTURE, "cls": ModelSpec((TensorSpec("x", "FP32", (-1, 3, 48, 192)),), ()), "rec": LINE}
    covered = {name: shapes.profiles(task, name, spec, {}) for name, spec in specs.items()}
    sent: dict[str, set[tuple[int, ...]]] = {name: set() for name in specs}

    def run(name: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        shape = inputs["x"].shape
        sent[name].add(shape)
        if name == "det":
            found = np.zeros((1, 1, *shape[2:]), np.float32)
            for row in range(4):  # lines of text of several lengths
                top = row * shape[2] // 4
                found[0, 0, top + 2 : top + max(shape[2] // 8, 4), : shape[3] * (row + 1) // 4] = 1
            return {"y": found}
        if name == "cls":
            return {"y": np.full((shape[0], 2), 0.99, np.float32)}
        return {name: np.zeros((shape[0], 1), kind) for name, kind in (("index", int), ("probability", np.float32))}

    reading = Reading(task.settings, ["a"])
    for height, width in ((5, 5), (20, 3000), (700, 900), (1500, 40), (64, 2000), (3000, 3000)):
        reading.predict(np.zeros((height, width, 3), np.uint8), run)
    assert all(len(found) > 1 for found in sent.values())
    for name, found in sent.items():
        for shape in found:
            assert any(shape in profile["x"] for profile in covered[name]), (name, shape)


def test_without_a_task_that_knows_sizes_go_from_one_to_those_of_the_golden_vector() -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, 16)), TensorSpec("b", "INT64", (-1, -1))), ())
    found = shapes.profiles(TaskSpec("tensors"), "g", spec, {"a": (8, 16), "b": (8, 128)})
    assert found == [{"a": Shapes((1, 16), (8, 16), (8, 16)), "b": Shapes((1, 1), (8, 128), (8, 128))}]


def test_sizes_that_the_graph_fixes_stay_as_they_are() -> None:
    spec = ModelSpec((TensorSpec("x", "FP32", (1, 3, -1, -1)),), ())
    assert shapes.profiles(TaskSpec("reading"), "rec", spec, {})[0]["x"].most[0] == 1


# What the builder asks for


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> StandInTensorRt:
    """TensorRT 10.3, stood in for."""
    return engines.install(monkeypatch)


@pytest.mark.parametrize(("version", "number"), [("10.3.0", 1), ("10.16.1", 1), ("11.4.0", 0)])
def test_networks_are_strongly_typed_whatever_number_the_flag_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, number: int
) -> None:
    trt = engines.install(monkeypatch, version=version, strongly_typed=number)
    order = engines.order(onnx_file(tmp_path / "g.onnx"), tmp_path / "g.plan", {"x": engines.ANY})
    outcome = builder.build(trt, order, dataclasses.replace(ORIN, version=version), lambda _event: None)
    assert trt.created == [1 << number]
    assert outcome.flags == ("STRONGLY_TYPED",)
    assert outcome.valid_for.version == version


def test_each_bucket_is_a_profile_of_tensorrt_and_progress_is_told(trt: StandInTensorRt, tmp_path: Path) -> None:
    profiles = ({"x": engines.FIRST}, {"x": engines.LAST})
    order = engines.order(onnx_file(tmp_path / "g.onnx"), tmp_path / "g.plan", *profiles)
    told: list[Mapping[str, object]] = []
    outcome = builder.build(trt, order, ORIN, told.append)
    plan = json.loads((tmp_path / "g.plan").read_text())
    assert [one["x"] for one in plan["profiles"]] == [[[1, 1], [2, 2], [4, 4]], [[1, 5], [2, 8], [4, 16]]]
    assert outcome.profiles == profiles
    assert outcome.memory_bytes == 1000
    assert trt.configs[0].limits == {trt.MemoryPoolType.WORKSPACE: engines.WORKSPACE_BYTES}
    assert [(event["done"], event["of"]) for event in told] == [(0, 2), (1, 2), (2, 2)]


def test_times_of_earlier_builds_are_used_and_kept_for_each_kind_of_gpu(trt: StandInTensorRt, tmp_path: Path) -> None:
    order = engines.order(
        onnx_file(tmp_path / "g.onnx"), tmp_path / "g.plan", {"x": engines.ANY}, caches=str(tmp_path / "timings")
    )
    digests = {builder.build(trt, order, ORIN, lambda _event: None).timing_cache_sha256 for _ in range(3)}
    assert trt.timings_taken == [b"", b"+", b"++"]
    assert len(digests) == 3
    (kept,) = (tmp_path / "timings").iterdir()
    assert kept.name == "tensorrt-10.3.0-sm8.7.cache"
    kept.write_bytes(b"broken")
    builder.build(trt, order, ORIN, lambda _event: None)
    assert kept.read_bytes() == b"+"


def test_another_gpu_than_the_targets_is_refused_with_both(trt: StandInTensorRt, tmp_path: Path) -> None:
    order = engines.order(onnx_file(tmp_path / "g.onnx"), tmp_path / "g.plan", {"x": engines.ANY}, sm="8.0")
    with pytest.raises(
        builder.BuildError, match=r"has compute capability 8\.0, the GPU here 8\.7: compile on a device"
    ):
        builder.build(trt, order, ORIN, lambda _event: None)


def test_tensorrt_rtx_gets_one_profile_over_all_buckets_and_the_capability_of_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trt = engines.install(monkeypatch, rtx=True, strongly_typed=0, version="1.7.1.116")
    profiles = ({"x": engines.FIRST}, {"x": engines.LAST})
    order = engines.order(onnx_file(tmp_path / "g.onnx"), tmp_path / "g.plan", *profiles, sm="8.6")
    order = dataclasses.replace(order, backend="tensorrt-rtx")
    outcome = builder.build(trt, order, None, lambda _event: None)
    assert outcome.profiles == ({"x": Shapes((1, 1), (2, 2), (4, 16))},)
    assert outcome.valid_for == Target("tensorrt-rtx", "8.6", "1.7.1.116", "", "", "")
    with pytest.raises(builder.BuildError, match=r"compiles for 8\.0, 8\.6, not for 8\.7: compile on a device of the"):
        builder.build(trt, dataclasses.replace(order, sm="8.7"), None, lambda _event: None)


def test_functions_are_inlined_before_the_parser_sees_them(trt: StandInTensorRt, tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "g.onnx", "ConvAttention", function=True)
    order = engines.order(path, tmp_path / "g.plan", {"x": engines.ANY})
    builder.build(trt, order, ORIN, lambda _event: None)  # the stand-in's parser knows Identity alone


def test_what_cannot_be_parsed_is_named(trt: StandInTensorRt, tmp_path: Path) -> None:
    order = engines.order(onnx_file(tmp_path / "g.onnx", "NonZero"), tmp_path / "g.plan", {"x": engines.ANY})
    with pytest.raises(builder.BuildError, match="Plugin not found") as caught:
        builder.build(trt, order, ORIN, lambda _event: None)
    assert caught.value.layer == "NonZero the-node"
    (tmp_path / "g.onnx").write_bytes(b"abc" * 50)
    with pytest.raises(builder.BuildError, match="it is no ONNX graph"):
        builder.build(trt, order, ORIN, lambda _event: None)


@pytest.mark.parametrize(
    ("profile", "sentence", "layer"),
    [
        ({"z": engines.ANY}, "input tensor x is missing dimensions in profile 0", "x"),
        ({"x": Shapes((4, 4), (2, 2), (1, 1))}, "Invalid optimization profiles", ""),
    ],
)
def test_what_cannot_be_built_is_told_in_the_librarys_words(
    trt: StandInTensorRt, tmp_path: Path, profile: Mapping[str, Shapes], sentence: str, layer: str
) -> None:
    order = engines.order(onnx_file(tmp_path / "g.onnx"), tmp_path / "g.plan", profile)
    with pytest.raises(builder.BuildError, match=sentence) as caught:
        builder.build(trt, order, ORIN, lambda _event: None)
    assert caught.value.layer == layer


# What cannot be wished


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"target": "tpu"}, "no target 'tpu' to compile for; known: orin-nano, orin-nx, agx-orin, a100, rtx"),
        ({"target": "cpu"}, "cpu needs no engine"),
        ({"backend": "openvino"}, "there is no backend 'openvino'; known: auto, tensorrt, tensorrt-rtx"),
        ({"precision": "int8"}, "holds no graph in int8, only fp32"),
    ],
)
def test_what_cannot_be_wished_is_refused_and_nothing_is_written(
    trt: StandInTensorRt, tmp_path: Path, wish: Mapping[str, str], sentence: str
) -> None:
    del trt
    bundle = tiny.blank_bundle(tmp_path / "blank")
    wanted = dataclasses.replace(Wish("rtx", "auto", "auto", 1 << 20, LIMITS), **wish)
    with pytest.raises(ConfigError, match=sentence):
        compile_bundle(BundleFolder(bundle), wanted, Cache(None), lambda _text, **_how: None)
    assert not (bundle / "engines").exists()


@pytest.mark.parametrize(
    ("backend", "what"), [("tensorrt", "tensorrt is not"), ("auto", "tensorrt or tensorrt-rtx is not")]
)
def test_without_a_library_the_refusal_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, what: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    wish = Wish("rtx", backend, "auto", 1 << 20, LIMITS)
    bundle = BundleFolder(tiny.blank_bundle(tmp_path / "blank"))
    with pytest.raises(ConfigError, match=f"{what} installed: TensorRT comes with JetPack"):
        compile_bundle(bundle, wish, Cache(None), lambda _text, **_how: None)


# How a build is watched


OUTCOME = builder.Outcome(ORIN, ("STRONGLY_TYPED",), ({"x": engines.ANY},), 5, "")
ORDER = engines.order(Path("g.onnx"), Path("g.plan"), {"x": engines.ANY})


def script(*lines: str) -> tuple[str, ...]:
    """A program in the place of the builder."""
    return (sys.executable, "-u", "-c", "import json, os, sys, time\n" + "\n".join(lines))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Where the log goes."""
    return tmp_path / "g.log"


def test_progress_and_outcome_come_through_and_the_log_is_kept(log: Path) -> None:
    built = child.schema.dump(OUTCOME)
    heard: list[str] = []
    result = child.run(
        ORDER,
        log,
        LIMITS,
        heard.append,
        script(
            "print(json.dumps({'phase': 'Building', 'done': 1, 'of': 3}))",
            "print('a word for the log', file=sys.stderr)",
            f"print({json.dumps({'built': built})!r})",
        ),
    )
    assert result.outcome == OUTCOME
    assert result.memory_bytes > 1 << 20
    assert heard == ["Building, step 1 of 3"]
    assert log.read_text() == "a word for the log\n"


def test_a_build_that_takes_too_long_is_stopped_with_all_its_processes(log: Path, tmp_path: Path) -> None:
    program = script(
        "import subprocess",
        "grandchild = subprocess.Popen(['sleep', '600'])",
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{grandchild.pid}}')",
        "time.sleep(600)",
    )
    started = time.monotonic()
    with pytest.raises(WorkshopError, match=r"stopped after its 2 s: give it more with --time-limit-s; the log is"):
        child.run(ORDER, log, child.Limits(2, 1 << 30), lambda _text: None, program)
    assert time.monotonic() - started < 60
    for pid in (tmp_path / "pids").read_text().split():
        until = time.monotonic() + 10  # a process that was killed may yet have to notice
        while (status := Path(f"/proc/{pid}/stat")).exists() and status.read_text().split()[2] != "Z":
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_build_that_takes_too_much_memory_is_stopped(log: Path) -> None:
    program = script("hoard = b'x' * (300 << 20)", "time.sleep(600)")
    with pytest.raises(WorkshopError, match=r"stopped at \d+ MiB of memory, allowed were 200 MiB: give it more with"):
        child.run(ORDER, log, child.Limits(60, 200 << 20), lambda _text: None, program)


@pytest.mark.parametrize(
    ("failed", "layer", "sentence"),
    [
        (
            'creator && "Plugin not found, are the plugin name, version, and namespace correct?"',
            "Frobnicate frob",
            r"layer 'Frobnicate frob': .*Plugin not found.*no such operator: write it in standard operators",
        ),
        (
            (
                "Invalid Node - adder\nITensor::getDimensions: Error Code 4: API Usage Error (adder: SUM must have "
                "same input types. But they are of types Float and Half. In validateTypes at /x.cpp:40)"
            ),
            "Add adder",
            r"^layer 'Add adder': adder: SUM must have same input types\. .* Half; its inputs differ in type: put a",
        ),
        (
            "Error Code 10: Internal Error (Could not find any implementation for node conv1. In optimizer at x:1)",
            "conv1",
            "implementation for node conv1; raise --workspace-mib, or leave this layer in float",
        ),
        (
            "Error Code 2: OutOfMemory (Requested size was 123 bytes.)",
            "",
            "free device memory, or lower --workspace-mib",
        ),
        ("Failed to convert ONNX date type to TensorRT data type.", "", "no tensors of that type: keep this graph on"),
        ("Dimension mismatch for tensor x and profile 0", "x", r"docs/engines\.md"),
        ("something new", "", "^something new; the log is"),
    ],
)
def test_a_failure_names_the_layer_and_what_likely_helps(log: Path, failed: str, layer: str, sentence: str) -> None:
    told = json.dumps({"failed": failed, "layer": layer})
    with pytest.raises(WorkshopError, match=sentence):
        child.run(ORDER, log, LIMITS, lambda _text: None, script(f"print({told!r})", "sys.exit(1)"))


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("os.kill(os.getpid(), 11)", r"the builder was ended by SIGSEGV in Building and gave no reason: read .*g\.log"),
        ("sys.exit(3)", "the builder ended with status 3 in Building and gave no reason"),
    ],
)
def test_a_builder_that_crashes_is_told_with_how_far_it_came(log: Path, end: str, sentence: str) -> None:
    program = script("print(json.dumps({'phase': 'Building', 'done': 1, 'of': 3}))", end)
    with pytest.raises(WorkshopError, match=sentence):
        child.run(ORDER, log, LIMITS, lambda _text: None, program)


def test_a_passport_says_what_it_knows_in_one_table(trt: StandInTensorRt, tmp_path: Path) -> None:
    path = engines.engine(trt, tmp_path, onnx_file(tmp_path / "g.onnx").read_bytes(), {"x": engines.ANY})
    told = json.loads(path.read_text())
    assert told["backend"] == "tensorrt"
    assert (told["sm"], told["version"], told["cuda"], told["module"]) == ("8.7", "10.3.0", "12.6", "Orin (stand-in)")
    assert (told["purpose"], told["executed"], told["flags"]) == ("serve", "never", ["STRONGLY_TYPED"])
    passport = engines.Passport.from_bytes(path.read_bytes(), "g")
    assert passport.to_bytes() == path.read_bytes()
    with pytest.raises(BundleError, match=r"made for graph [0-9a-f]{12}, the bundle holds 000000000000"):
        passport.check("0" * 64, passport.valid_for)
