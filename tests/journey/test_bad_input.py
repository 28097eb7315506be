"""What the workshop is given and cannot use: one sentence each, status 1, and nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import checkpoint
from support.workshop import Workshop, reason

from models.folder import BundleFolder

pytestmark = [pytest.mark.journey, pytest.mark.long]

WHAT = f"{checkpoint.FILE} of {checkpoint.PACKAGE}"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def edited(edit: Callable[[Any], object]) -> bytes:
    """The tiny checkpoint after `edit` of its message."""
    model = onnx.load_model_from_string(checkpoint.recogniser())
    edit(model)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def constant(model: Any, name: str) -> Any:  # noqa: ANN401 - onnx has no types here
    """The tensor of one of its constant nodes."""
    return next(node for node in model.graph.node if node.output[0] == name).attribute[0].t


def hold(model: Any, name: str, array: np.ndarray[Any, Any]) -> None:  # noqa: ANN401 - see constant
    constant(model, name).CopyFrom(numpy_helper.from_array(array, name))


def external(model: Any) -> None:  # noqa: ANN401 - see constant
    tensor = helper.make_tensor("far", TensorProto.FLOAT, [1], [0.0])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    model.graph.initializer.append(tensor)


def custom(model: Any) -> None:  # noqa: ANN401 - see constant
    node = next(node for node in model.graph.node if node.op_type == "AveragePool")
    node.op_type, node.domain, node.name = "MagicPool", "acme", "pool_3"
    del node.attribute[:]
    model.opset_import.append(helper.make_opsetid("acme", 1))


def misspelt(model: Any) -> None:  # noqa: ANN401 - see constant
    next(node for node in model.graph.node if node.op_type == "AveragePool").op_type = "AveragePol"


def undefined(model: Any) -> None:  # noqa: ANN401 - see constant
    next(node for node in model.graph.node if node.op_type == "Softmax").input[0] = "nobody_makes_this"


def not_numbers(model: Any) -> None:  # noqa: ANN401 - see constant
    weights = numpy_helper.to_array(constant(model, "w2")).copy()
    weights[3, 1] = np.nan
    hold(model, "w2", weights)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (checkpoint.recogniser()[:-1000], (WHAT, "is no ONNX graph or is cut short", "install its package again")),
        (b"%PDF-1.7 not a model", (WHAT, "is no ONNX graph", "install its package again")),
        (b"", (WHAT, "is no ONNX graph", "no output or no opset")),
        (edited(external), (WHAT, "'far'", "weights.bin", "as one file")),
        (edited(lambda model: setattr(model.opset_import[0], "version", 999)), (WHAT, "opset 999", "older opset")),
        (edited(lambda model: setattr(model, "ir_version", 99)), (WHAT, "format version 99", "update onnx")),
        (edited(custom), (WHAT, "MagicPool node 'pool_3'", "domain 'acme'", "standard operators")),
        (edited(misspelt), (WHAT, "operator AveragePol", "opset 12", "standard operators")),
        (edited(undefined), (WHAT, "nobody_makes_this", "export it anew")),
        (edited(not_numbers), (WHAT, "Constant node 'w2'", "1 of 128 elements is no number", "export")),
        (edited(lambda model: hold(model, "w2", np.zeros((16, 0, 1, 1), np.float32))), (WHAT, "'w2'", "size zero")),
        (
            edited(lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 0)),
            (WHAT, "'image'", "a dimension of size 0"),
        ),
    ],
    ids=[
        "cut short", "no ONNX", "empty", "weights elsewhere", "opset of the future", "format of the future",
        "custom operator", "misspelt operator", "undefined tensor", "NaN weights", "weights of size zero",
        "input of size zero",
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_used_is_named_with_what_to_do(
    workshop: Workshop, content: bytes, said: tuple[str, ...]
) -> None:
    workshop.install(content)
    sentence = workshop.failed("build", workshop.recipe, "--out", workshop.out)
    assert all(part in sentence for part in said), sentence
    assert not Path(workshop.out).exists()
    assert not (workshop.folder / "cache" / "edge-appliance").exists()


def test_a_checkpoint_over_two_gibibytes_is_refused_before_it_is_read(workshop: Workshop) -> None:
    os.truncate(workshop.folder / "packages" / checkpoint.FILE, 2**31)  # sparse: takes no room
    sentence = workshop.failed("build", workshop.recipe, "--out", workshop.out)
    assert WHAT in sentence
    assert "2147483648 bytes, and an ONNX file can hold at most 2 GiB" in sentence
    assert not Path(workshop.out).exists()


def cut(picture: Path) -> None:
    picture.write_bytes(picture.read_bytes()[:-20])


def empty(data: Path) -> None:
    for file in (data / "lines").iterdir():
        file.unlink()


def without_gate(data: Path) -> None:
    (data / "splits.tsv").write_text("calibrate/1\tcalibrate\ngate/1\ttune\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (empty, "labels.tsv cannot be read"),
        (lambda data: (data / "lines" / "labels.tsv").write_text(""), "has no line of split 'calibrate'"),
        (without_gate, "has no line of split 'gate'"),
        (lambda data: cut(data / "lines" / "noise_calibrate1.png"), "noise_calibrate1.png cannot be used: the PNG"),
        (lambda data: (data / "lines" / "noise_gate2.png").unlink(), "noise_gate2.png cannot be read"),
    ],
    ids=["empty folder", "no labels", "nothing for the gate", "one broken picture", "one missing picture"],
)
def test_calibration_data_that_cannot_be_used_is_named(
    workshop: Workshop, damage: Callable[[Path], object], said: str
) -> None:
    damage(workshop.data)
    assert said in workshop.failed("build", workshop.recipe, "--out", workshop.out)
    assert not Path(workshop.out).exists()


def test_a_bundle_that_finds_no_room_leaves_nothing_and_an_earlier_one_stays_whole(workshop: Workshop) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))  # no file may grow past that, as on a full disk

    sentence = workshop.failed("build", workshop.recipe, "--out", workshop.out, preexec_fn=no_room)
    assert f"the bundle cannot be written into {workshop.out} (File too large): make room" in sentence
    assert not Path(workshop.out).exists()
    assert workshop.provision("build", workshop.recipe, "--out", workshop.out, "--precision", "fp32").returncode == 0
    before = {file: file.read_bytes() for file in Path(workshop.out).rglob("*") if file.is_file()}
    workshop.failed("build", workshop.recipe, "--out", workshop.out, preexec_fn=no_room)
    assert {file: file.read_bytes() for file in Path(workshop.out).rglob("*") if file.is_file()} == before
    BundleFolder(Path(workshop.out)).check_content()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing_behind(workshop: Workshop, signal_number: signal.Signals) -> None:
    with workshop.start("build", workshop.recipe, "--out", workshop.out) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # it works on the second step now
        process.send_signal(signal_number)
        out, err = process.communicate()
    ended = subprocess.CompletedProcess((), process.returncode, out, first + err)
    assert "interrupted: nothing was written" in reason(ended)
    assert not Path(workshop.out).exists()
    assert not [file for file in workshop.folder.rglob("*") if file.name.endswith(".new")]
