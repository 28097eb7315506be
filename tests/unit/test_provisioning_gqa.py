"""Heads that share keys and values: exact where they can be, close where they cannot, and written without copies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx import checker, load_model_from_string
from support import spelled
from support.spelled import HEADS, SIZE, SPELLINGS, WIDTH, Spelling

from appliance.runtime import choose
from models.spec import Array
from provisioning import passes
from provisioning.activations import collector
from provisioning.passes.attention import find
from provisioning.passes.gqa import convert
from provisioning.sharing import METHODS, divisors

pytestmark = pytest.mark.unit

RUNTIME = choose("onnxruntime-cpu")


def samples(count: int, seed: int = 0, *, mask: tuple[int, ...] = ()) -> list[dict[str, Array]]:
    """Tokens of different number; of the last ones a mask keeps everybody off."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        steps = int(random.integers(5, 20))
        one = {"x": random.normal(0.3, 1, (1, steps, WIDTH)).astype(np.float32)}
        if mask:
            one["mask"] = np.where(random.uniform(size=(1, *mask, 1, steps)) < 0.2, -1e4, 0).astype(np.float32)
            one["mask"][..., 0] = 0
        made.append(one)
    return made


def converted(content: bytes, kv_heads: int, method: str, seen: list[dict[str, Array]]) -> bytes:
    model = passes.load(content, "it")
    found = find(model)
    assert found.blocks
    assert not found.not_understood
    return passes.save(convert(model, found, kv_heads, method, collector(seen, RUNTIME, 2)))


def error(content: bytes, other: bytes, seen: list[dict[str, Array]]) -> float:
    """Root of the mean square of the difference of y over samples."""
    one, two = (RUNTIME.open(graph, threads=1) for graph in (content, other))
    squares = [((one.run(sample)["y"] - two.run(sample)["y"]) ** 2).mean() for sample in seen]
    return float(np.sqrt(np.mean(squares)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_heads_that_differ_by_a_change_of_basis_share_without_any_error(spelling: str) -> None:
    content = SPELLINGS[spelling](layers=spelled.weights(alike=[(0, 2), (1, 3)]))
    mask = (1,) if spelling == "masked" else ()
    shared = converted(content, 2, "subspace", samples(40, mask=mask))
    assert error(content, shared, samples(5, seed=9, mask=mask)) < 2e-3


def test_equal_neighbours_are_averaged_without_any_error() -> None:
    layers = spelled.weights()
    for name in ("wk", "bk", "wv", "bv"):
        heads = layers[name].reshape(-1, HEADS, SIZE)
        heads[:, 1], heads[:, 3] = heads[:, 0], heads[:, 2]
    content = spelled.apart(layers=layers)
    assert error(content, converted(content, 2, "average", []), samples(5)) < 1e-5


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_fitted_heads_come_closer_than_the_average(kv_heads: int) -> None:
    content = spelled.packed(layers=spelled.weights(seed=3))
    by_method = {
        method: error(content, converted(content, kv_heads, method, samples(60)), samples(20, seed=9))
        for method in METHODS
    }
    assert by_method["subspace"] < by_method["average"]


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_of_its_own_follows_each_head_into_its_group(method: str) -> None:
    it = Spelling(spelled.weights(alike=[(0, 3), (1, 2)]))
    q, k, v = (it.linear("x", name, f"{name}_all") for name in "qkv")
    scores = it.node("MatMul", it.heads(q, "q"), it.heads(k, "k", (0, 2, 3, 1)), made="scores")
    each = it.hold("each", np.random.default_rng(0).normal(size=(HEADS, 1, 1)) * np.ones((1, 1, 5)))
    scores = it.node("Add", scores, each, made="masked")
    it.close(it.node("Softmax", scores, made="attention", axis=-1), it.heads(v, "v"))
    content = it.finish()
    seen = [{"x": one["x"][:, :5]} for one in samples(40)]
    shared = converted(content, 2, method, seen)
    assert (error(content, shared, seen[:5]) < 2e-3) == (method == "subspace")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_keys_and_values_are_computed_for_the_shared_heads_and_never_repeated(spelling: str) -> None:
    content = SPELLINGS[spelling](layers=spelled.weights())
    model = load_model_from_string(converted(content, 2, "average", []))
    checker.check_model(model, full_check=True)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 17)]
    operators = Counter(node.op_type for node in model.graph.node)
    assert not {"Expand", "Tile", "Gather", "Concat", "ConstantOfShape", "Slice"} & set(operators)
    widths = sum(
        array.dims[1] for array in model.graph.initializer if list(array.dims)[:1] == [WIDTH] and len(array.dims) == 2
    )
    assert widths == WIDTH + 2 * 2 * SIZE + WIDTH  # queries, keys and values of two heads, and the layer behind


def test_a_block_that_has_the_wanted_number_of_heads_stays_as_it_is() -> None:
    content = spelled.apart(layers=spelled.weights())
    model = passes.load(content, "it")
    find(model)
    assert converted(content, HEADS, "subspace", []) == passes.save(model)


def test_converting_twice_gives_the_same_bytes() -> None:
    content = spelled.packed(layers=spelled.weights())
    assert converted(content, 2, "subspace", samples(9)) == converted(content, 2, "subspace", samples(9))


def test_weights_in_half_precision_stay_in_half_precision() -> None:
    it = Spelling({name: array.astype(np.float16) for name, array in spelled.weights().items()})
    it.node("Cast", "x", made="half", to=int(ir.DataType.FLOAT16))
    layers = []
    for name in "qkv":
        product = it.node("MatMul", "half", it.hold(f"w{name}", it.layers[f"w{name}"], np.float16), made=f"{name}_all")
        layers.append(it.heads(product, name, (0, 2, 3, 1) if name == "k" else (0, 2, 1, 3)))
    attention = it.node("Softmax", it.node("MatMul", *layers[:2], made="scores"), made="attention", axis=-1)
    turned = it.node("Transpose", it.node("MatMul", attention, layers[2], made="context"), made="t", perm=[0, 2, 1, 3])
    flat = it.node("Reshape", turned, it.hold("flat_shape", [0, -1, WIDTH], np.int64), made="flat")
    y = it.node("MatMul", flat, it.hold("wo", it.layers["wo"], np.float16), made="y_half")
    it.node("Cast", y, made="y", to=int(ir.DataType.FLOAT))
    shared = load_model_from_string(converted(it.finish(), 2, "average", []))
    assert {one.data_type for one in shared.graph.initializer} <= {int(ir.DataType.FLOAT16), int(ir.DataType.INT64)}
    assert RUNTIME.open(shared.SerializeToString(), threads=1).run(samples(1)[0])["y"].dtype == np.float32


def test_the_numbers_of_heads_that_can_be_shared_are_the_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
