"""What a worker opens: exactly the bundle it was told to, and only when its golden answers are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny

from appliance import wire
from appliance.model import Model, allowed
from models.bundle import Blob, Manifest
from models.errors import BundleError
from models.folder import BundleFolder, pack_arrays, write_bundle

pytestmark = pytest.mark.unit


def order(folder: BundleFolder, digest: str | None = None) -> wire.Open:
    return wire.Open("blank", "onnxruntime-cpu", bundle=str(folder.path), digest=digest or folder.manifest.digest)


def rewritten(folder: BundleFolder, manifest: Manifest, *more: bytes) -> BundleFolder:
    """The folder with another manifest, whose blobs are those that were there and `more`."""
    blobs = {blob.sha256: folder.read(blob) for blob in folder.manifest.blobs()}
    write_bundle(folder.path, manifest, blobs | {Blob.of(content).sha256: content for content in more}, {})
    return BundleFolder(folder.path)


@pytest.fixture
def folder(tmp_path: Path) -> BundleFolder:
    return BundleFolder(tiny.blank_bundle(tmp_path / "blank"))


def test_a_bundle_opens_and_says_which_runtime_and_precision_will_answer(folder: BundleFolder) -> None:
    ready = Model(order(folder)).describe()
    assert ready.runtime == "onnxruntime-cpu"
    assert {name: info.precision for name, info in ready.graphs.items()} == {"det": "fp32"}


def test_a_bundle_that_was_replaced_since_the_daemon_started_is_not_served_under_the_old_name(
    folder: BundleFolder,
) -> None:
    with pytest.raises(BundleError, match="holds another bundle than when the daemon started: restart it"):
        Model(order(folder, digest="0" * 64))


@pytest.mark.parametrize(
    ("precision", "passed", "may"),
    [
        ("auto", ("int8", "fp32"), ["fp32", "int8"]),
        ("int8", ("fp32", "int8"), ["int8"]),
        ("int8", ("fp32",), ["fp32"]),
        ("fp32", ("fp32", "int8"), ["fp32"]),
    ],
)
def test_a_precision_is_served_where_it_passed_the_gate_and_float_where_it_did_not(
    folder: BundleFolder, precision: str, passed: tuple[str, ...], may: list[str]
) -> None:
    graph = folder.manifest.graphs["det"]
    assert allowed(replace(graph, variants=dict.fromkeys(passed, graph.variants["fp32"])), precision) == may


def test_of_two_precisions_that_take_the_same_time_float_serves_and_both_times_are_told(folder: BundleFolder) -> None:
    graph = folder.manifest.graphs["det"]
    both = replace(graph, variants=dict.fromkeys(("int8", "fp32"), graph.variants["fp32"]))
    opened = Model(order(rewritten(folder, replace(folder.manifest, graphs={"det": both})))).describe()
    assert opened.latency_ms["det"].keys() == {"fp32", "int8"}
    known = {"det": {"fp32": 1.0, "int8": 0.95}}
    opened = Model(replace(order(BundleFolder(folder.path)), latency_ms=known)).describe()
    assert opened.graphs["det"].precision == "fp32"
    assert opened.latency_ms == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "picture"}, r"has inputs x FP32 .*, but the manifest says picture FP32 .*: build the bundle again"),
        ({"datatype": "UINT8"}, r"says x UINT8 "),
        ({"shape": (1, 3, 32, 32)}, r"says x FP32 \[1, 3, 32, 32\]"),
    ],
)
def test_a_manifest_that_describes_another_graph_is_refused(
    folder: BundleFolder, changes: dict[str, object], sentence: str
) -> None:
    graph = folder.manifest.graphs["det"]
    spec = replace(graph.spec, inputs=(replace(graph.spec.inputs[0], **changes),))
    other = rewritten(folder, replace(folder.manifest, graphs={"det": replace(graph, spec=spec)}))
    with pytest.raises(BundleError, match=sentence):
        Model(order(other))


def test_the_layout_that_a_manifest_adds_is_no_difference(folder: BundleFolder) -> None:
    graph = folder.manifest.graphs["det"]
    spec = replace(graph.spec, inputs=(replace(graph.spec.inputs[0], layout="NCHW"),))
    Model(order(rewritten(folder, replace(folder.manifest, graphs={"det": replace(graph, spec=spec)}))))


@pytest.mark.parametrize(
    ("golden", "sentence"),
    [
        ({"y": np.ones((1, 1, 32, 32), np.float32)}, "golden answer 'y' is off by 1"),
        ({"y": np.zeros((1, 1, 32, 31), np.float32)}, r"the graph gave shape \[1, 1, 32, 32\]: build the bundle again"),
        ({"z": np.zeros((1, 1, 32, 32), np.float32)}, "the graph gave nothing: build the bundle again"),
    ],
)
def test_a_bundle_whose_golden_answers_are_not_those_of_its_graph_is_refused(
    folder: BundleFolder, golden: dict[str, np.ndarray], sentence: str
) -> None:
    graph = folder.manifest.graphs["det"]
    variant = graph.variants["fp32"]
    content = pack_arrays(golden)
    wrong = replace(variant, golden=replace(variant.golden, outputs=Blob.of(content)))
    manifest = replace(folder.manifest, graphs={"det": replace(graph, variants={"fp32": wrong})})
    with pytest.raises(BundleError, match=sentence):
        Model(order(rewritten(folder, manifest, content)))
