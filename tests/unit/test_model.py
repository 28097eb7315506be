"""What a worker opens: exactly the bundle it was told to, and only when its golden answers are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny

from appliance import wire
from appliance.model import Model
from models.bundle import Blob
from models.errors import BundleError
from models.folder import BundleFolder, pack_arrays, write_bundle

pytestmark = pytest.mark.unit


def order(folder: BundleFolder, digest: str | None = None) -> wire.Open:
    return wire.Open("blank", "onnxruntime-cpu", bundle=str(folder.path), digest=digest or folder.manifest.digest)


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
    blobs = {blob.sha256: folder.read(blob) for blob in folder.manifest.blobs()}
    write_bundle(folder.path, manifest, blobs | {Blob.of(content).sha256: content}, {})
    with pytest.raises(BundleError, match=sentence):
        Model(order(BundleFolder(folder.path)))
