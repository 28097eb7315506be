"""The fused operators as functions: what they compute is what the kernels' reference defines, wherever they are."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import onnx_ir as ir
import pytest
from onnx import checker, load_model_from_string
from support import checkpoint

from appliance.runtime import choose
from kernels.reference import WIDTH, Form, Neck, linear_ctc_head, neck
from models.errors import SourceError
from models.spec import Array
from provisioning import passes
from provisioning.passes import attention, fused, gqa
from provisioning.passes.ctc_head import ctc_head
from provisioning.passes.mark import mark
from provisioning.passes.normalise import normalise

pytestmark = pytest.mark.unit
RUNTIME = choose("onnxruntime-cpu")
RNG = np.random.default_rng()
REAL = {
    "v4": ("rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
    "v6": ("rapidocr", "rapidocr/models/PP-OCRv6_rec_small.onnx"),
}


def weights_of(spec: Neck) -> dict[str, Array]:
    """Random weights that keep the size of what flows."""
    return {
        name: RNG.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])) if name.endswith(".w") else RNG.random(shape)
        for name, shape in spec.shapes().items()
    }


def calling(function: ir.Function, weights: list[Array], attributes: dict[str, str | int], outputs: int) -> ir.Model:
    """A graph of one node that calls `function` on its input `x` and constant weights."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "t", "c"]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": passes.OPSET}, name="one")
    model = ir.Model(graph, ir_version=passes.IR_VERSION)
    held = [passes.initializer(model, f"w{i}", array) for i, array in enumerate(weights)]
    node = ir.node(function.name, [x, *held], attributes, domain=fused.DOMAIN, num_outputs=outputs, name="call")
    kinds = [ir.DataType.FLOAT] if outputs == 1 else [ir.DataType.INT64, ir.DataType.FLOAT]
    for i, (value, kind) in enumerate(zip(node.outputs, kinds, strict=True)):
        value.name, value.type = f"y{i}", ir.TensorType(kind)
        value.shape = ir.Shape(["b", "t", WIDTH] if outputs == 1 else ["b", "t"])
    graph.append(node)
    graph.outputs.extend(node.outputs)
    fused.declare(model, function)
    return model


def answers(model: ir.Model, x: Array) -> list[Array]:
    content = passes.save(model)
    checker.check_model(load_model_from_string(content), full_check=True)
    return list(RUNTIME.open(content, threads=1).run({"x": x.astype(np.float32)}).values())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["v4", "v6"])
def test_the_neck_computes_what_its_kernel_computes(form: Form, kv_heads: int, dtype: type[np.generic]) -> None:
    spec = Neck(form, kv_heads)
    stored = {name: array.astype(dtype) for name, array in weights_of(spec).items()}
    model = calling(
        fused.conv_attention(spec), [stored[name] for name in spec.shapes()], {"form": form, "kv_heads": kv_heads}, 1
    )
    x = RNG.standard_normal((2, 11, spec.channels)).astype(np.float32)
    expected = neck(spec, stored, x)
    for one in (model, fused.inline(passes.load(passes.save(model), "it"))):
        (found,) = answers(one, x)
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_head_computes_what_its_kernel_computes() -> None:
    w, b = RNG.standard_normal((WIDTH, 77)).astype(np.float32), RNG.standard_normal(77).astype(np.float32)
    x = RNG.standard_normal((3, 9, WIDTH)).astype(np.float32)
    index, probability = answers(calling(fused.ctc_head(), [w, b], {}, 2), x)
    expected_index, expected = linear_ctc_head(x, w, b)
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(probability, expected, rtol=1e-4)


def test_inlining_leaves_standard_operators_with_constant_weights() -> None:
    spec = Neck("v4", 2)
    weights = weights_of(spec)
    held = [weights[name].astype(np.float16) for name in spec.shapes()]
    model = fused.inline(calling(fused.conv_attention(spec), held, {"form": "v4", "kv_heads": 2}, 1))
    assert not model.functions
    assert set(model.opset_imports) == {""}
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)
    for node in model.graph:
        assert not node.domain
        assert node.op_type != "Cast"
        if node.op_type == "Conv":
            assert passes.held(node, 1).dtype == np.float32


def test_a_recogniser_without_such_a_neck_is_refused_with_the_node_that_differs() -> None:
    model = ctc_head(normalise(passes.load(checkpoint.recogniser(), "it"), [-1, 3, 48, -1]))
    before = passes.save(model)
    with pytest.raises(SourceError, match=r"MatMul MatMul_\d+ stands where Add is expected; take 'mark' out"):
        mark(model)
    assert passes.save(model) == before


@pytest.fixture(scope="module", params=["v4", "v6"])
def real(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    """Form and normalised graph of a published recogniser, with its head."""
    package, file = REAL[request.param]
    content = metadata.distribution(package).locate_file(file).read_bytes()  # type: ignore[attr-defined]
    return request.param, passes.save(normalise(passes.load(content, file), [-1, 3, 48, -1]))


def read(content: bytes, x: Array) -> dict[str, Array]:
    return RUNTIME.open(content, threads=1).run({"x": x})


@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_marking_and_inlining_a_published_recogniser_keeps_what_it_computes(
    real: tuple[str, bytes], kv_heads: int
) -> None:
    form, content = real
    plain = passes.load(content, form)
    if kv_heads < 8:
        gqa.convert(plain, attention.find(plain), kv_heads, "average", lambda *_: ())
    before = passes.save(ctc_head(plain))
    marked = mark(passes.load(before, form))
    (call,) = (node for node in marked.graph if node.op_type == fused.CONV_ATTENTION)
    assert call.attributes["form"].as_string() == form
    assert call.attributes["kv_heads"].as_int() == kv_heads
    assert {node.op_type for node in marked.graph}.isdisjoint({"Softmax", "ArgMax", "MatMul"})
    after = passes.save(marked)
    checker.check_model(load_model_from_string(after), full_check=True)
    inlined = fused.inline(passes.load(after, form))
    assert not inlined.functions
    x = RNG.uniform(-1, 1, (2, 3, 48, 352)).astype(np.float32)
    expected = read(before, x)
    for one in (after, passes.save(inlined)):
        found = read(one, x)
        np.testing.assert_array_equal(found["index"], expected["index"])
        np.testing.assert_allclose(found["probability"], expected["probability"], atol=1e-5)


@pytest.mark.long
def test_a_neck_with_other_numbers_than_its_weights_say_is_refused(real: tuple[str, bytes]) -> None:
    form, content = real
    model = ctc_head(passes.load(content, form))
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    cooler = ir.node("Mul", [softmax.inputs[0], passes.initializer(model, "cooler", np.array(0.5, np.float32))])
    cooler.outputs[0].name = "cooler_out"
    model.graph.insert_before(softmax, cooler)
    softmax.replace_input_with(0, cooler.outputs[0])
    with pytest.raises(SourceError, match="stands where MatMul is expected"):
        mark(model)
