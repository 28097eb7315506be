"""Attention is found in every spelling, and what is not understood is said with its node and the reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from onnx import TensorProto, helper, load_model_from_string
from support import checkpoint, spelled
from support.spelled import HEADS, SIZE, SPELLINGS, Spelling

from models import schema
from models.errors import ConfigError
from provisioning import passes, sharing
from provisioning.passes.attention import Found, find
from provisioning.passes.normalise import normalise
from provisioning.sharing import Overview

pytestmark = pytest.mark.unit


def found(content: bytes) -> Found:
    return find(passes.load(content, "it"))


def overview_of(content: bytes) -> Overview:
    return schema.load(Overview, json.loads(sharing.look(content, "it")))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_block_is_found_however_it_is_spelled(spelling: str) -> None:
    layers = spelled.weights()
    content = SPELLINGS[spelling](layers=layers)
    (block,) = found(content).blocks
    assert (block.heads, block.size) == (HEADS, SIZE)
    assert block.scale == pytest.approx(spelled.SCALE)
    assert (block.mask is not None) == (spelling == "masked")
    assert block.packed == spelling.startswith(("packed", "constants"))
    for name, layer in {"q": block.q, "k": block.k, "v": block.v, "o": block.out}.items():
        np.testing.assert_array_equal(layer.w, layers[f"w{name}"])
        np.testing.assert_array_equal(layer.b, layers[f"b{name}"])


@pytest.mark.parametrize("spelling", [one for one in SPELLINGS if one != "masked"])  # it has two inputs
def test_a_block_is_found_after_normalising_as_well(spelling: str) -> None:
    content = SPELLINGS[spelling](layers=spelled.weights())
    model = normalise(passes.load(content, "it"), [-1, -1, spelled.WIDTH])
    (block,) = find(model).blocks
    assert (block.heads, block.size, round(block.scale, 6)) == (HEADS, SIZE, spelled.SCALE)


def test_the_softmax_over_classes_is_no_attention() -> None:
    assert found(checkpoint.recogniser()) == Found((), ())


def test_finding_keeps_the_numbers() -> None:
    content = spelled.packed(layers=spelled.weights())
    model = passes.load(content, "it")
    find(model)
    x = np.random.default_rng(1).normal(size=(2, 5, spelled.WIDTH)).astype(np.float32)
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - slow to import

    (before,), (after,) = (ReferenceEvaluator(one).run(None, {"x": x}) for one in (content, passes.save(model)))
    np.testing.assert_allclose(after, before, atol=1e-6)


def odd(what: str) -> bytes:
    """A block with one thing that no block may have."""
    it = Spelling(spelled.weights())
    q, k, v = (it.linear("x", name, f"{name}_all") for name in "qkv")
    if what == "function on queries":
        q = it.node("Tanh", q, made="q_bent")
    if what == "keys of another tensor":
        other = it.node("Exp", "x", made="x_other")
        k = it.linear(other, "k", "k_other")
    heads = it.heads(q, "q"), it.heads(k, "k", (0, 2, 3, 1)), it.heads(v, "v")
    scores = it.node("MatMul", heads[0], heads[1], made="scores")
    if what == "scores bent":
        scores = it.node("Tanh", scores, made="bent")
    if what == "scale computed":
        mean = it.node("ReduceMean", "x", made="mean", keepdims=0)
        scores = it.node("Mul", scores, mean, made="scaled")
    attention = it.node("Softmax", scores, made="attention", axis=2 if what == "another axis" else -1)
    if what == "attention read":
        it.outputs.append(attention)
    if what == "attention bent":
        attention = it.node("Sub", attention, it.hold("tenth", 0.1), made="less")
    it.close(attention, heads[2])
    return it.finish()


REASONS = {
    "function on queries": "its queries are no columns of a linear layer: make_q_bent makes them",
    "keys of another tensor": "queries, keys and values are not made of the same tensor",
    "scores bent": "it does not read a product of queries and keys that is scaled and masked at most",
    "scale computed": "its scale is no constant number",
    "another axis": "it does not run along the last of four axes",
    "attention read": "attention is read by others as well",
    "attention bent": "its product with the values does not reach a linear layer by Transpose and Reshape alone",
}


@pytest.mark.parametrize("what", REASONS)
def test_what_looks_like_attention_and_is_not_understood_is_named_with_the_reason(what: str) -> None:
    assert overview_of(odd(what)) == Overview({}, {"make_attention": REASONS[what]})


def test_attention_that_is_one_operator_is_named() -> None:
    tensor = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 8])
    graph = helper.make_graph(
        [helper.make_node("Attention", ["x", "x", "x"], ["y"], name="whole")],
        "one",
        [tensor],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 4, 8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    assert list(overview_of(model.SerializeToString()).not_understood) == ["whole"]


def test_attention_inside_another_operator_is_named() -> None:
    block = load_model_from_string(spelled.apart(layers=spelled.weights())).graph
    branch = helper.make_graph(block.node, "branch", [], list(block.output), list(block.initializer))
    graph = helper.make_graph(
        [helper.make_node("If", ["which"], ["z"], name="choice", then_branch=branch, else_branch=branch)],
        "outer",
        [
            helper.make_tensor_value_info("which", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "t", spelled.WIDTH]),
        ],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    overview = overview_of(content)
    assert overview.heads == {}
    assert set(overview.not_understood.values()) == {"it stands in the body of another operator or function"}


def test_a_number_of_heads_that_does_not_divide_is_refused_with_those_that_do() -> None:
    attention = {"rec (a.onnx)": Overview({"softmax7": 8}, {})}
    with pytest.raises(ConfigError, match=r"8 heads at softmax7 of rec \(a.onnx\) .* one of 1, 2, 4, 8"):
        sharing.check(attention, 3)


def test_a_model_without_attention_is_refused_with_what_looked_like_it() -> None:
    attention = {"det (a.onnx)": Overview({}, {}), "rec (b.onnx)": Overview({}, {"softmax7": "it is odd"})}
    with pytest.raises(
        ConfigError,
        match=r"no attention to convert in det \(a.onnx\), rec \(b.onnx\); softmax7 of rec \(b.onnx\) looks like it, "
        r"but it is odd: leave out --kv-heads, or take another recipe",
    ):
        sharing.check(attention, 2)
