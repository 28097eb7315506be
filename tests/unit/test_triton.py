"""A bundle as a model repository of Triton: what the files say. tests/journey/test_triton has a real server read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny

from appliance.core.limits import Limits
from models.engine import Shapes
from models.errors import ConfigError
from models.folder import BundleFolder
from models.spec import ModelSpec, TensorSpec
from provisioning import triton

pytestmark = pytest.mark.unit

LINES = ModelSpec((TensorSpec("x", "FP32", (-1, 3, 48, -1), "NCHW"),), (TensorSpec("y", "FP32", (-1, -1, 2), "NTC"),))


def test_the_limits_of_an_export_are_those_of_the_daemon() -> None:
    limits = Limits()
    assert (limits.batch, limits.queue, limits.wait_s) == (triton.BATCH, triton.QUEUE, triton.WAIT_S)


def test_a_graph_whose_rows_are_apart_gets_batches_and_a_warm_up_of_each_bucket() -> None:
    buckets = [
        {"x": Shapes((1, 3, 48, low), (4, 3, 48, high), (8, 3, 48, high))} for low, high in ((32, 320), (352, 640))
    ]
    text = triton.Config("press.rec", LINES, 8, gpu=True).text(buckets, {"precision": "fp32"})
    assert text.splitlines()[:3] == ['name: "press.rec"', 'backend: "onnxruntime"', "max_batch_size: 8"]
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 48, -1 ] }' in text
    assert 'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }' in text
    assert "kind: KIND_GPU" in text
    assert "max_queue_delay_microseconds: 0 " in text
    assert text.count("model_warmup") == 2
    assert "batch_size: 4 inputs" in text
    assert "dims: [ 3, 48, 640 ] random_data: true" in text


def test_a_graph_that_may_mix_rows_gets_none(tmp_path: Path) -> None:
    (exported,) = triton.export(BundleFolder(tiny.scale_bundle(tmp_path / "b", 2)), tmp_path / "out", gpu=False)
    text = (tmp_path / "out/scale.g/config.pbtxt").read_text()
    assert exported == triton.Exported("scale.g", 1, "fp32", 0)
    assert "dims: [ -1, -1 ]" in text
    assert "dynamic_batching" not in text
    assert 'key: "bundle_version" value { string_value: "2.0.0" }' in text


def test_a_new_version_lies_beside_the_one_before_and_the_same_one_is_not_counted_twice(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = []
    for number, scale in enumerate((2, 2, 3, 4)):
        (folder := tmp_path / str(number)).mkdir()
        bundle = BundleFolder(tiny.scale_bundle(folder / "scale", scale))
        found.append(triton.export(bundle, out, gpu=False)[0].version)
    assert found == [1, 1, 2, 3]
    assert {path.name for path in (out / "scale.g").iterdir()} == {"config.pbtxt", "2", "3"}


def test_a_precision_that_did_not_pass_is_refused_with_those_that_did(tmp_path: Path) -> None:
    bundle = BundleFolder(tiny.scale_bundle(tmp_path / "b", 2))
    with pytest.raises(ConfigError, match=r"g of .* is not there in int8: choose fp32"):
        triton.export(bundle, tmp_path / "out", precision="int8", gpu=False)
    assert not (tmp_path / "out").exists()


def test_texts_and_flat_tensors_are_told_as_triton_knows_them() -> None:
    flat = ModelSpec((TensorSpec("t", "BYTES", (-1,), "N"),), (TensorSpec("y", "FP32", (-1,), "N"),))
    text = triton.Config("m", flat, 0, gpu=False).text([{"t": Shapes((1,), (2,), (2,))}], {})
    assert "data_type: TYPE_STRING dims: [ -1 ]" in text
    assert "dims: [ 2 ] zero_data: true" in text
