"""What a runtime makes of a graph is kept, and never believed without a look."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from appliance.runtime import choose
from appliance.runtime.prepared import Prepared

pytestmark = pytest.mark.unit

X = np.linspace(-2, 2, 16, dtype=np.float32).reshape(4, 4)


def graph(scale: float = 1.0) -> bytes:
    """`y` is a chain of products and sums of `x` [any, 4], of which some can be fused; `scale` makes it another."""
    chance = np.random.default_rng(3)
    weights = [numpy_helper.from_array(chance.normal(size=(4, 4)).astype(np.float32), f"w{i}") for i in range(3)]
    bias = numpy_helper.from_array(np.full(4, scale, np.float32), "bias")
    nodes = []
    for i in range(3):
        nodes.append(helper.make_node("MatMul", ["x" if i == 0 else f"r{i - 1}", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Add", [f"m{i}", "bias"], [f"a{i}"]))
        nodes.append(helper.make_node("Relu", [f"a{i}"], ["y" if i == 2 else f"r{i}"]))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 4]) for name in ("x", "y")]
    made = helper.make_model(
        helper.make_graph(nodes, "chain", ends[:1], ends[1:], [*weights, bias]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return bytes(made.SerializeToString())


@pytest.fixture(
    params=[
        "onnxruntime-cpu",
        pytest.param(
            "openvino",
            marks=pytest.mark.skipif(
                not importlib.util.find_spec("openvino"), reason="OpenVINO has no wheel for this machine"
            ),
        ),
    ]
)
def by(request: pytest.FixtureRequest) -> str:
    """Each runtime that keeps something."""
    return str(request.param)


def answer(by: str, content: bytes, folder: Path | None = None) -> bytes:
    """What a fresh runtime makes of `X`: with what was kept of a graph if it can, as the worker does."""
    runtime = choose(by, prepared=folder)
    session = runtime.open_again(name(content), threads=1) or runtime.open(content, threads=1)
    return bytes(session.run({"x": X})["y"].tobytes())


def name(content: bytes) -> str:
    """By which a graph goes."""
    return hashlib.sha256(content).hexdigest()


def kept(folder: Path) -> Path:
    """The only file there."""
    (path,) = folder.iterdir()
    return path


def test_a_graph_opened_again_is_what_was_kept_of_it_and_answers_the_same_to_the_bit(by: str, tmp_path: Path) -> None:
    content, folder = graph(), tmp_path / "prepared"
    want = answer(by, content)
    assert answer(by, content, folder) == want
    before = kept(folder).read_bytes()
    assert answer(by, content, folder) == want
    assert kept(folder).read_bytes() == before
    answer(by, graph(2.0), tmp_path / "other")
    with Prepared(folder, by).making(name(content)) as path:
        path.write_bytes(kept(tmp_path / "other").read_bytes())
    assert answer(by, content, folder) == answer(by, graph(2.0)) != want


@pytest.mark.parametrize("damage", [b"", b"no graph"], ids=["empty", "another"])
def test_what_was_damaged_is_made_again(by: str, tmp_path: Path, damage: bytes) -> None:
    content, folder = graph(), tmp_path / "prepared"
    want = answer(by, content, folder)
    path, whole = kept(folder), kept(folder).read_bytes()
    path.write_bytes(damage)
    assert answer(by, content, folder) == want
    made = Prepared(folder, by).find(name(content))
    assert made
    assert made.read_bytes() not in {b"", damage}
    assert by == "openvino" or made.read_bytes() == whole  # OpenVINO numbers what it makes anew each time


def test_what_the_runtime_does_not_take_is_made_again(by: str, tmp_path: Path) -> None:
    content, folder = graph(), tmp_path / "prepared"
    with Prepared(folder, by).making(name(content)) as path:
        path.write_bytes(b"no graph, though kept with care")
    assert answer(by, content, folder) == answer(by, content)
    assert len(kept(folder).read_bytes()) > 100


def test_where_nothing_can_be_kept_a_graph_is_opened_all_the_same(by: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert answer(by, graph(), tmp_path / "file" / "prepared") == answer(by, graph())


def read(prepared: Prepared, number: int) -> bytes | None:
    """What is found under a number."""
    path = prepared.find(str(number))
    return path.read_bytes() if path else None


def test_no_more_than_32_are_kept_and_those_not_opened_for_longest_go(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path, "onnxruntime-cpu")
    for number in range(34):
        with prepared.making(str(number)) as path:
            path.write_bytes(b"made of %d" % number)
        for known in tmp_path.iterdir():  # clocks of file systems are too coarse for so many at once
            if known.stat().st_mtime > 100:
                os.utime(known, (number, number))
        assert read(prepared, 0) == b"made of 0"
    assert len(list(tmp_path.iterdir())) == 32
    assert [read(prepared, number) for number in (1, 2, 3, 33)] == [None, None, b"made of 3", b"made of 33"]


def test_what_another_worker_deletes_meanwhile_costs_nobody_what_was_made(
    tmp_path: Path,
) -> None:
    prepared = Prepared(tmp_path, "onnxruntime-cpu")
    (tmp_path / "deleted.meanwhile").symlink_to(tmp_path / "nothing")  # listed, and not there any more when looked at
    with prepared.making("1") as path:
        path.write_bytes(b"made of 1")
    assert read(prepared, 1) == b"made of 1"
