"""`provision compile` with the real TensorRT-RTX, which builds engines where there is no GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import attention, tiny
from support.daemon import StartDaemon, binary_floats
from support.processes import clean_environment, eventually, marked, new_mark

from models.engine import Shapes
from models.errors import WorkshopError
from provisioning.engines import child
from provisioning.engines.builder import Order

pytestmark = pytest.mark.journey

LONGEST_BUILD_S = 10.0
ZOO = Path(__file__).parents[2] / "models" / "zoo"
SHARED_HEADS = {"minilm": "6", "ppocr-v4": "2", "ppocr-v5": "4", "ppocr-v6": "2", "vit-s-focus": "3"}
RTX = pytest.mark.skipif(
    not importlib.util.find_spec("tensorrt_rtx_bindings"), reason="TensorRT-RTX has no wheel for this machine"
)
CAPABILITIES = {"a100": "8.0", "rtx": "8.6"}


def provision(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("provision")), *map(str, arguments)],
        env=clean_environment() | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def compiled(bundle: Path, target: str, *arguments: str) -> list[dict[str, Any]]:
    """Engines of `bundle` for `target`, as the command tells them."""
    done = provision("compile", bundle, "--target", target, "--backend", "tensorrt-rtx", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    engines: list[dict[str, Any]] = json.loads(done.stdout)["engines"]
    return engines


def check(bundle: Path, target: str, engine: dict[str, Any]) -> None:
    """What is on disk is what was told, and says what it is."""
    plan, passport = Path(engine["plan"]), engine["passport"]
    assert plan.parent == bundle / "engines" / target
    assert passport == json.loads(plan.with_suffix(".passport.json").read_text())
    content = plan.read_bytes()
    assert passport["plan"] == {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    assert (bundle / "blobs" / "sha256" / passport["graph_sha256"]).exists()
    assert (passport["backend"], passport["purpose"], passport["executed"]) == ("tensorrt-rtx", "build-check", "never")
    assert (passport["target"], passport["sm"], passport["flags"]) == (target, CAPABILITIES[target], ["STRONGLY_TYPED"])
    assert "Engine generation completed" in plan.with_suffix(".log").read_text()


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    """A tiny bundle of one graph."""
    return tiny.blank_bundle(tmp_path / "blank")


@RTX
@pytest.mark.parametrize("target", CAPABILITIES)
def test_a_bundle_is_compiled_for_a_gpu_that_is_not_here(blank: Path, target: str) -> None:
    (engine,) = compiled(blank, target)
    check(blank, target, engine)
    names = {path.name for path in (blank / "engines" / target).iterdir()}
    assert names == {"det.plan", "det.passport.json", "det.log"}


@RTX
def test_a_table_tells_what_was_compiled_and_that_it_was_never_executed(blank: Path) -> None:
    done = provision("compile", blank, "--target", "rtx")
    assert done.returncode == 0, done.stderr
    assert "det" in done.stdout
    assert "never executed, and not served unless asked for" in done.stdout
    assert "det fp32: compiling for rtx with tensorrt-rtx" in done.stderr


@RTX
def test_no_orin_engine_comes_out_of_tensorrt_rtx(blank: Path) -> None:
    done = provision("compile", blank, "--target", "orin-nano", "--backend", "tensorrt-rtx")
    assert done.returncode == 1
    assert "graph det in fp32 could not be compiled for orin-nano" in done.stderr
    assert "not for 8.7: compile on a device of the target" in done.stderr
    assert not list(blank.glob("engines/orin-nano/*.p*"))
    assert not list(blank.glob("engines/orin-nano/.*"))


@RTX
def test_an_engine_that_was_there_stays_when_the_next_build_fails(blank: Path) -> None:
    compiled(blank, "rtx")
    before = {path: path.read_bytes() for path in (blank / "engines" / "rtx").glob("*.p*")}
    done = provision("compile", blank, "--target", "rtx", "--memory-limit-mib", "20")
    assert done.returncode == 1
    assert "allowed were 20 MiB: give it more with --memory-limit-mib; the log is" in done.stderr
    assert {path: path.read_bytes() for path in (blank / "engines" / "rtx").glob("*.p*")} == before


@RTX
def test_an_interrupted_build_ends_its_child_and_leaves_the_earlier_engine(blank: Path) -> None:
    out, mark, said = blank / "engines" / "rtx", new_mark(), ""
    out.mkdir(parents=True)
    program = [str(Path(sys.executable).with_name("provision")), "compile", str(blank), "--target", "rtx"]
    for _ in range(5):  # a build takes half a second, and may be over before it is interrupted
        for path in out.iterdir():
            path.unlink()
        (out / "det.plan").write_bytes(b"the earlier one")
        with subprocess.Popen(program, env=clean_environment(mark), stderr=subprocess.PIPE, text=True) as process:
            eventually((out / "det.log").exists, "the build has begun")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        if process.returncode:
            break
    assert process.returncode == 1
    assert "interrupted while compiling det in fp32: engines finished before it stay" in said
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".log"} == {
        "det.plan": b"the earlier one"
    }
    eventually(lambda: not marked(mark), "nothing of it runs any more")


@RTX
def test_a_disk_without_room_is_told_and_leaves_nothing_half_written(blank: Path) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    done = subprocess.run(
        [str(Path(sys.executable).with_name("provision")), "compile", str(blank), "--target", "rtx"],
        env=clean_environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=no_room,
    )
    assert done.returncode == 1
    assert "cannot be used (File too large): make room" in done.stderr
    assert [path.name for path in (blank / "engines" / "rtx").iterdir()] == ["det.log"]


def test_a_damaged_graph_is_told_before_anything_is_compiled(blank: Path) -> None:
    for blob in (blank / "blobs" / "sha256").iterdir():
        blob.write_bytes(blob.read_bytes()[:-1])
    done = provision("compile", blank, "--target", "rtx")
    assert done.returncode == 1
    assert "is damaged: fetch or build the bundle again" in done.stderr
    assert not list(blank.glob("engines/rtx/*"))


@RTX
@pytest.mark.parametrize("sm", CAPABILITIES.values())
def test_shared_heads_int8_and_half_precision_in_a_function_compile(tmp_path: Path, sm: str) -> None:
    (tmp_path / "g.onnx").write_bytes(attention.graph())
    x = Shapes((1, attention.CHANNELS, 1, 1), (4, attention.CHANNELS, 1, 40), (8, attention.CHANNELS, 1, 400))
    order = Order("tensorrt-rtx", str(tmp_path / "g.onnx"), str(tmp_path / "g.plan"), sm, ({"x": x},), 1 << 30, "")
    phases: list[str] = []
    built = child.run(order, tmp_path / "g.log", child.Limits(60, 2 << 30), phases.append)
    assert built.outcome.valid_for.sm == sm
    assert built.outcome.memory_bytes > 0
    assert (tmp_path / "g.plan").stat().st_size > 10_000
    assert phases
    assert built.cpu_s < LONGEST_BUILD_S


@RTX
def test_a_device_without_onnx_compiles_as_well(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(attention.graph())
    x = Shapes((1, attention.CHANNELS, 1, 40), (1, attention.CHANNELS, 1, 40), (1, attention.CHANNELS, 1, 40))
    order = Order("tensorrt-rtx", str(tmp_path / "g.onnx"), str(tmp_path / "g.plan"), "8.6", ({"x": x},), 1 << 30, "")
    without = (
        "import sys; sys.modules['onnx'] = None; from provisioning.engines import builder; sys.exit(builder.main())"
    )
    child.run(order, tmp_path / "g.log", child.Limits(60, 2 << 30), lambda _text: None, (sys.executable, "-c", without))
    assert (tmp_path / "g.plan").stat().st_size > 10_000


@RTX
def test_a_graph_that_cannot_be_parsed_names_its_node(tmp_path: Path) -> None:
    content = attention.graph().replace(b"Sigmoid", b"Sigmund")
    (tmp_path / "g.onnx").write_bytes(content)
    x = Shapes((1, attention.CHANNELS, 1, 1), (4, attention.CHANNELS, 1, 40), (8, attention.CHANNELS, 1, 400))
    order = Order("tensorrt-rtx", str(tmp_path / "g.onnx"), str(tmp_path / "g.plan"), "8.6", ({"x": x},), 1 << 30, "")
    with pytest.raises(
        WorkshopError, match=r"layer 'Sigmund.*': .*Plugin not found.*this version has no such operator"
    ):
        child.run(order, tmp_path / "g.log", child.Limits(60, 2 << 30), lambda _text: None)
    assert "Sigmund" in (tmp_path / "g.log").read_text()


@RTX
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", CAPABILITIES)
def test_every_graph_of_the_reading_bundle_compiles_in_every_precision_within_ten_seconds(
    reading_bundle: Path, tmp_path: Path, target: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(reading_bundle, bundle, copy_function=os.link)
    engines = compiled(bundle, target)
    graphs = json.loads((bundle / "manifest.json").read_text())["graphs"]
    made = [(engine["passport"]["graph"], engine["passport"]["precision"]) for engine in engines]
    assert sorted(made) == sorted((name, one) for name, graph in graphs.items() for one in graph["variants"])
    assert {precision for _, precision in made} == {"fp32", "int8", "int8-unfused"}
    for engine in engines:
        check(bundle, target, engine)
        # Of the processor: what a neighbour does to the clock says nothing about the build.
        assert engine["cpu_s"] < LONGEST_BUILD_S


@RTX
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHARED_HEADS)
def test_every_model_of_the_zoo_compiles_with_heads_that_share_keys_and_values(name: str, tmp_path: Path) -> None:
    recipe = (ZOO / f"{name}.toml").read_text()
    package = re.search(r'^package = "(.+)"$', recipe, re.MULTILINE)
    assert package is not None
    try:
        metadata.version(package[1])
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package[1]} is not installed: it is large, docs/gqa.md says how to get it")
    own = tmp_path / f"{name}.toml"
    # What passes its gate is another test's matter: here everything has to become an engine.
    own.write_text(re.sub(r"^gate\.(\w+) = \S+", widest, recipe, flags=re.MULTILINE))
    bundle = tmp_path / name
    data = ZOO.parents[1] / "tests" / "data" / "ocr"
    built = provision("build", own, "--kv-heads", SHARED_HEADS[name], "--data", data, "--out", bundle)
    assert built.returncode == 0, built.stderr
    for target in CAPABILITIES:
        engines = compiled(bundle, target)
        graphs = json.loads((bundle / "manifest.json").read_text())["graphs"]
        made = [(engine["passport"]["graph"], engine["passport"]["precision"]) for engine in engines]
        assert sorted(made) == sorted((name, one) for name, graph in graphs.items() for one in graph["variants"])
        for engine in engines:
            check(bundle, target, engine)
            assert engine["cpu_s"] < LONGEST_BUILD_S


def widest(limit: re.Match[str]) -> str:
    """A gate that lets anything through."""
    return f"gate.{limit[1]} = {1.0 if limit[1].endswith('drop') else 0.0}"


@RTX
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU, which may run the engines")
def test_a_daemon_compiles_what_it_serves_meanwhile_and_says_why_it_cannot_run_it(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    bundle = tiny.scale_bundle(tmp_path / "scale", 2)
    bare = tiny.linear_model(tmp_path / "linear.onnx")
    daemon = start_daemon(
        *("--bundle", str(bundle), "--onnx", f"linear={bare}"),
        APPLIANCE_RUNTIME="tensorrt-rtx",
        APPLIANCE_ENGINES__TARGET="rtx",
    ).wait_serving()
    daemon.wait_ready()
    assert "appliance-degraded" not in daemon.infer("linear", np.ones((1, 16), np.float32)).headers
    x = np.ones((1, 4), np.float32)

    def degraded() -> str:
        answer = daemon.infer("scale.g", x)
        assert np.array_equal(binary_floats(answer), 2 * x)
        assert answer.headers["appliance-runtime"] == "onnxruntime-cpu"
        return str(answer.headers["appliance-degraded"])

    assert degraded() == "its engines are being made"
    reason = eventually(lambda: (said := degraded()) != "its engines are being made" and said, "it was tried", 60)
    assert "scale stays at version" in reason
    digest = daemon.status()["models"][0]["digest"]
    (passport,) = (daemon.state_dir / "engines" / digest / "rtx").glob("*.passport.json")
    assert json.loads(passport.read_text())["purpose"] == "build-check"
    assert not (bundle / "engines").exists()
