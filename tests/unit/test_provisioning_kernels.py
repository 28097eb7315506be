"""Fused kernels on their way: compiled as a step of a build, packed as blobs, and put into an engine as plugins."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from doubles.tensorrt import StandInTensorRt
from support import engines, fused_graphs

from kernels.launch import Kernels
from kernels.plan import source_digest
from kernels.plugin import PLUGINS
from kernels.reference import Neck
from models.engine import Target
from models.errors import ConfigError
from models.folder import BundleFolder
from provisioning import engines as engines_module
from provisioning import passes
from provisioning.cache import Cache
from provisioning.compiled import archs_of, compile_kernels
from provisioning.engines import Wish, builder, child, compile_bundle
from provisioning.passes.plugin import plugin as export
from provisioning.steps import Steps

pytestmark = pytest.mark.unit
MARKED = fused_graphs.marked(fused_graphs.weights())
LIMITS = child.Limits(time_s=60, memory_bytes=1 << 30)
ORIN = Target("tensorrt", "8.7", "10.3.0", "12.6", "36.4.3", "Orin")


class Compiler(ModuleType):
    """`kernels.compile` where Triton is not: writes what only the stand-in driver takes, and remembers for what."""

    def __init__(self) -> None:
        super().__init__("kernels.compile")
        self.asked: list[tuple[str, list[Neck]]] = []

    def compile_all(self, arch: str, specs: Sequence[Neck], out: Path) -> None:
        self.asked.append((arch, list(specs)))
        for name, content in fused_graphs.kernels(arch).items():
            (out / name).write_bytes(content)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In the place of the real one."""
    made = Compiler()
    monkeypatch.setitem(sys.modules, "kernels.compile", made)
    monkeypatch.delattr("kernels.compile", raising=False)
    return made


def steps(cache: Path | None = None) -> Steps:
    return Steps(Cache(cache), lambda _text: None)


def test_kernels_are_compiled_once_for_each_architecture_and_for_the_necks_that_the_graphs_have(
    compiler: Compiler, tmp_path: Path
) -> None:
    for _ in range(2):
        done = steps(tmp_path)
        archs = archs_of(["orin-nx", "orin-nano", "a100"])
        made = compile_kernels(done, {"det": [], "rec": [MARKED, MARKED]}, archs)
        assert {arch: set(files) for arch, files in made.items()} == {
            arch: set(fused_graphs.kernels(arch)) for arch in ("sm_80", "sm_87")
        }
        assert [step.name for step in done.done] == ["kernels", "kernels"]
    assert compiler.asked == [("sm_80", [Neck("v4", 2)]), ("sm_87", [Neck("v4", 2)])]


def test_without_a_target_nothing_is_compiled(compiler: Compiler) -> None:
    assert compile_kernels(steps(), {"rec": [MARKED]}, []) == {}
    assert not compiler.asked


def test_what_cannot_be_compiled_is_told(compiler: Compiler) -> None:
    with pytest.raises(ConfigError, match="no target 'tpu' to compile kernels for; known: orin-nano, orin-nx"):
        archs_of(["orin-nx", "tpu"])
    with pytest.raises(ConfigError, match=r"no graph of the recipe has a fused operator .*put 'mark' into a graph's"):
        compile_kernels(steps(), {"rec": []}, ["sm_87"])
    assert not compiler.asked


def test_without_triton_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels.compile", None)
    with pytest.raises(ConfigError, match=r"cannot be compiled here .*pip install 'edge-appliance\[kernels\]'"):
        compile_kernels(steps(), {"rec": [MARKED]}, ["sm_87"])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install '.[kernels]')")
def test_the_real_compilers_kernels_fit_into_a_bundle_and_into_the_nodes_of_its_graph(tmp_path: Path) -> None:
    made = compile_kernels(steps(), {"rec": [MARKED]}, ["sm_87"])["sm_87"]
    assert set(made) == {
        f"{name.removesuffix('.cubin')}.{kind}"
        for name in fused_graphs.kernels()
        if name.endswith(".cubin")
        for kind in ("cubin", "ptx", "json")
    }
    folder = BundleFolder(fused_graphs.bundle(tmp_path / "end", MARKED, made))
    folder.check_content()
    listed = folder.manifest.kernels["sm_87"]
    metadata = {name: json.loads(folder.read(blob)) for name, blob in listed.items() if name.endswith(".json")}
    for name, told in metadata.items():
        assert told["cubin_sha256"] == listed[name.replace(".json", ".cubin")].sha256
        assert told["ptx_sha256"] == listed[name.replace(".json", ".ptx")].sha256
        assert told["source_digest"] == source_digest()
    exported = passes.save(export(passes.load(MARKED, "it"), "sm_87", made))
    assert sum(len(content) for content in made.values()) < len(exported) < 8 << 20


class Ordered:
    """In the place of the process that builds: keeps the order and the graph that it names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: list[builder.Order] = []
        self.graphs: list[onnx.ModelProto] = []
        monkeypatch.setattr(engines_module.child, "run", self.run)

    def run(self, order: builder.Order, *_: Any) -> child.Built:  # noqa: ANN401 - those of the real one
        self.orders.append(order)
        self.graphs.append(onnx.load(order.graph))
        Path(order.plan).write_bytes(b"plan")
        return child.Built(builder.Outcome(ORIN, ("STRONGLY_TYPED",), order.profiles, 0, ""), 1, 1, 1)


def compiled(folder: Path, files: Kernels, target: str = "orin-nx") -> Path:
    bundle = fused_graphs.bundle(folder / "end", MARKED, files)
    wish = Wish(target, "tensorrt", "auto", 1 << 20, LIMITS)
    compile_bundle(BundleFolder(bundle), wish, Cache(None), lambda _text, **_how: None)
    return bundle / "engines" / target


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Ordered:
    """TensorRT seems to be installed, and builds nothing."""
    engines.install(monkeypatch)
    return Ordered(monkeypatch)


def test_on_a_device_whose_kernels_the_bundle_holds_marked_nodes_become_plugins(
    ordered: Ordered, tmp_path: Path
) -> None:
    out = compiled(tmp_path, fused_graphs.kernels())
    assert ordered.orders[0].plugins
    assert [node.op_type for node in ordered.graphs[0].graph.node] == ["Cast", "ConvAttention", "CtcHead"]
    passport = json.loads((out / "rec.passport.json").read_bytes())
    assert set(passport["plugins"]) == set(PLUGINS)
    assert sorted(path.name for path in out.iterdir()) == ["rec.passport.json", "rec.plan"]


@pytest.mark.parametrize(("files", "target"), [({}, "orin-nx"), (fused_graphs.kernels(), "a100")])
def test_elsewhere_the_graph_stays_as_it_is(ordered: Ordered, tmp_path: Path, files: Kernels, target: str) -> None:
    out = compiled(tmp_path, files, target)
    assert not ordered.orders[0].plugins
    assert {one.name for one in ordered.graphs[0].functions} == {"ConvAttention", "CtcHead"}
    assert json.loads((out / "rec.passport.json").read_bytes())["plugins"] == {}


def test_where_onnx_is_missing_the_engine_is_built_without_plugins_and_that_is_said(
    ordered: Ordered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = fused_graphs.bundle(tmp_path / "end", MARKED, fused_graphs.kernels())
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "provisioning.passes.plugin", None)
    monkeypatch.delattr("provisioning.passes.plugin", raising=False)
    wish = Wish("orin-nx", "tensorrt", "auto", 1 << 20, LIMITS)
    compile_bundle(BundleFolder(bundle), wish, Cache(None), lambda text, **_how: said.append(text))
    assert not ordered.orders[0].plugins
    assert any("without the fused kernels" in text for text in said)


def test_the_double_of_tensorrt_builds_what_was_ordered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trt: StandInTensorRt = engines.install(monkeypatch)
    kept = Ordered(monkeypatch)
    bundle = fused_graphs.bundle(tmp_path / "end", MARKED, fused_graphs.kernels())
    wish = Wish("orin-nx", "tensorrt", "auto", 1 << 20, LIMITS)
    compile_bundle(BundleFolder(bundle), wish, Cache(None), lambda _text, **_how: None)
    path = tmp_path / "again.onnx"
    path.write_bytes(kept.graphs[0].SerializeToString())
    order = engines.order(path, tmp_path / "again.plan", *kept.orders[0].profiles, plugins=True)
    builder.build(trt, order, ORIN, lambda _event: None)
    assert {entry.split("-")[0] for entry, *_ in trt.cuda.launches} == {"neck", "ctc"}, "the builder timed both"
