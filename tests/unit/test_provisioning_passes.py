"""Graph surgery: every pass keeps the numbers, and leaves the form that the next one relies on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, checker, helper, load_model_from_string, numpy_helper
from onnx.reference import ReferenceEvaluator
from support import checkpoint

from appliance.runtime import choose
from kernels.reference import ctc_head as reference
from kernels.reference import ctc_head_of_softmax
from models.errors import SourceError
from models.spec import Array
from provisioning import passes
from provisioning.calibrate import watch
from provisioning.passes.ctc_head import ctc_head
from provisioning.passes.equalise import equalise
from provisioning.passes.normalise import normalise
from provisioning.passes.quantize import SWITCH, expose, quantize, switch, targets

pytestmark = pytest.mark.unit

SHAPE = [-1, 3, 48, -1]
RUNTIME = choose("onnxruntime-cpu")


def pixels(width: int, seed: int = 0) -> Array:
    """A line of noise with a plain area behind it."""
    x = np.zeros((1, 3, 48, width), np.float32)
    x[..., : width // 2] = np.random.default_rng(seed).uniform(-1, 1, (1, 3, 48, width // 2))
    return x


def outputs(content: bytes, x: Array) -> dict[str, Array]:
    """All outputs of a graph with one input."""
    session = RUNTIME.open(content, threads=1)
    return session.run({session.spec.inputs[0].name: x})


def normalised() -> ir.Model:
    return normalise(passes.load(checkpoint.recogniser(), "it"), SHAPE)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize(
    "content", [b"", b"no graph at all", checkpoint.recogniser()[:2500], checkpoint.recogniser()[:-1]]
)
def test_what_is_no_whole_graph_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(SourceError, match="the checkpoint is no ONNX graph"):
        passes.load(content, "the checkpoint")


def test_normalising_leaves_only_what_computes() -> None:
    model = normalised()
    checker.check_model(load_model_from_string(passes.save(model)), full_check=True)
    assert operators(model) == {
        "Conv": 3, "HardSwish": 2, "Mul": 2, "Add": 2, "AveragePool": 1,
        "Reshape": 1, "Transpose": 1, "MatMul": 1, "Softmax": 1,
    }  # fmt: skip
    assert model.opset_imports == {"": passes.OPSET}
    assert model.ir_version == passes.IR_VERSION
    assert (model.graph.inputs[0].name, model.graph.outputs[0].name) == ("x", "y")
    assert passes.sizes(model.graph.inputs[0]) == (-1, 3, 48, -1)


@pytest.mark.parametrize("width", [320, 488])
def test_normalising_keeps_the_numbers(width: int) -> None:
    (before,) = outputs(checkpoint.recogniser(), pixels(width)).values()
    (after,) = outputs(passes.save(normalised()), pixels(width)).values()
    assert after.shape == (1, width // 8, checkpoint.CLASSES)
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_normalising_gives_the_same_bytes_however_often_it_ran_before() -> None:
    assert passes.save(normalised()) == passes.save(normalised())


def test_a_graph_that_does_not_fit_its_recipe_is_refused() -> None:
    with pytest.raises(SourceError, match="one input with 2 axes"):
        normalise(passes.load(checkpoint.recogniser(), "it"), [-1, 3])


def test_a_bias_behind_a_transposed_convolution_moves_inside_and_lets_batch_norm_follow() -> None:
    random = np.random.default_rng(1)
    held = {
        "w": random.normal(size=(4, 6, 2, 2)), "b": random.normal(size=(1, 6, 1, 1)), "gamma": random.normal(size=6),
        "beta": random.normal(size=6), "mean": random.normal(size=6), "variance": random.uniform(1, 2, 6),
    }  # fmt: skip
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("ConvTranspose", ["in", "w"], ["t"], kernel_shape=[2, 2], strides=[2, 2]),
                helper.make_node("Add", ["t", "b"], ["s"]),
                helper.make_node("BatchNormalization", ["s", "gamma", "beta", "mean", "variance"], ["out"]),
            ],
            "up",
            [helper.make_tensor_value_info("in", TensorProto.FLOAT, ["n", 4, "h", "w"])],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 6, "a", "b"])],
            [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()],
        ),
        opset_imports=[helper.make_opsetid("", 12)],
        ir_version=7,
    )
    content = model.SerializeToString()
    folded = normalise(passes.load(content, "it"), [-1, 4, -1, -1])
    assert operators(folded) == {"ConvTranspose": 1}
    x = random.normal(size=(1, 4, 5, 7)).astype(np.float32)
    np.testing.assert_allclose(outputs(passes.save(folded), x)["y"], outputs(content, x)["out"], atol=1e-5)


def test_the_head_answers_what_the_reference_defines() -> None:
    x = np.concatenate([pixels(320, seed) for seed in range(3)])
    content = passes.save(ctc_head(normalised()))
    checker.check_model(load_model_from_string(content), full_check=True)
    answer = outputs(content, x)
    (softmax,) = outputs(checkpoint.recogniser(), x).values()
    index, probability = ctc_head_of_softmax(softmax)
    assert answer["index"].dtype == np.int64
    np.testing.assert_array_equal(answer["index"], index)
    np.testing.assert_allclose(answer["probability"], probability, atol=1e-5)


def test_the_reference_is_the_maximum_of_a_softmax_and_does_not_overflow() -> None:
    logits = np.random.default_rng(0).normal(0, 50, (2, 3, 9)) + 2000
    softmax = np.exp(logits - logits.max(axis=-1, keepdims=True))
    softmax /= softmax.sum(axis=-1, keepdims=True)
    for ours, other in zip(reference(logits), ctc_head_of_softmax(softmax), strict=True):
        np.testing.assert_allclose(ours, other)


def test_the_head_needs_a_softmax_at_the_end() -> None:
    with pytest.raises(SourceError, match="must end in one Softmax"):
        ctc_head(ctc_head(normalised()))


def watched(model: ir.Model) -> dict[str, Array]:
    """Low, high, mean and threshold of what the quantizable operators of a copy of `model` read."""
    copy = passes.load(passes.save(model), "it")
    axes = expose(copy)
    samples = [{"x": pixels(width, width)} for width in (320, 352, 480)]
    seen = watch(passes.save(copy), axes, samples, RUNTIME, 2)
    return {name: (one.low, one.high, one.mean, one.threshold("percentile", 100)) for name, one in seen.items()}


def equalised() -> tuple[ir.Model, dict[str, str]]:
    model = normalised()
    seen = watched(model)
    low, high = ({name: one[i] for name, one in seen.items()} for i in (0, 1))
    return model, equalise(model, low, high)


def test_equalising_keeps_the_numbers_and_the_operators() -> None:
    before, (after, _) = normalised(), equalised()
    assert operators(before) == operators(after)
    x = pixels(400)
    np.testing.assert_allclose(outputs(passes.save(after), x)["y"], outputs(passes.save(before), x)["y"], atol=1e-5)


def test_after_equalising_every_channel_uses_its_part_of_the_scale() -> None:
    model, left_alone = equalised()
    seen = watched(model)
    depthwise, pointwise = (passes.operand(node, 0).name for node in model.graph if node.op_type == "Conv"
                            and passes.operand(node, 0).name != "x")  # fmt: skip
    low, high, *_ = seen[depthwise]
    np.testing.assert_allclose(np.maximum(-low, high), np.maximum(-low, high).max(), rtol=1e-4)
    low, high, *_ = seen[pointwise]
    np.testing.assert_allclose(low, -high, rtol=1e-3)  # centred
    assert set(left_alone.values()) == {"HardSwish reads it", "Reshape reads it"}


def test_a_sum_of_two_tensors_is_left_alone_and_said_so() -> None:
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Add", ["x", "x"], ["twice"]),
                helper.make_node("Conv", ["twice", "w"], ["y"], kernel_shape=[1, 1]),
            ],
            "sum",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 3, 3])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 3, 3])],
            [numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    reasons = equalise(passes.load(model.SerializeToString(), "it"), {}, {})
    assert reasons == {
        "twice": "it is joined with the input of the graph",
        "y": "its weights or its bias are not constant",
    }


def quantized(keep_float: Sequence[str] = ()) -> ir.Model:
    model, _ = equalised()
    seen = watched(model)
    thresholds = {name: float(one[3]) for name, one in seen.items()}
    return quantize(model, thresholds, {name: one[2] for name, one in seen.items()}, keep_float)


def test_every_quantized_operator_reads_int8_and_nothing_else_does() -> None:
    model = quantized()
    checker.check_model(load_model_from_string(passes.save(model)), full_check=True)
    assert operators(model)["QuantizeLinear"] == 4
    for node in model.graph:
        if node.op_type in {"Conv", "MatMul"}:
            makers = [passes.operand(node, i).producer() for i in (0, 1)]
            assert [maker.op_type if maker else None for maker in makers] == ["DequantizeLinear"] * 2
            assert all(passes.constant(value) is not None for value in node.inputs[2:])  # the bias stays in float
        elif node.op_type == "QuantizeLinear":
            assert {user.op_type for user, _ in node.outputs[0].uses()} == {"DequantizeLinear"}
        elif node.op_type == "DequantizeLinear":
            assert {user.op_type for user, _ in node.outputs[0].uses()} <= {"Conv", "MatMul"}
            zeros = passes.held(node, 2)
            assert zeros.dtype == np.int8
            assert not zeros.any()


def test_weights_are_stored_in_int8_with_a_scale_for_each_output_channel() -> None:
    model = quantized()
    before = {node.name: passes.held(node, 1) for node in equalised()[0].graph if node.op_type in {"Conv", "MatMul"}}
    for node in model.graph:
        if node.name in before:
            restored = passes.operand(node, 1).producer()
            assert restored is not None
            whole, scales = passes.held(restored, 0), passes.held(restored, 1)
            axis = restored.attributes["axis"].as_int()
            assert whole.dtype == np.int8
            assert axis == (0 if node.op_type == "Conv" else 1)
            assert np.abs(whole).max() == 127
            along = np.expand_dims(scales, tuple(i for i in range(whole.ndim) if i != axis))
            assert (np.abs(whole * along - before[node.name]) <= along * 0.501).all()


def test_int8_stays_close_to_float() -> None:
    x = pixels(320, 9)
    difference = outputs(passes.save(quantized()), x)["y"] - outputs(passes.save(normalised()), x)["y"]
    assert np.abs(difference).max() < 0.05


def test_operators_stay_in_float_by_name_and_store_half_the_bytes() -> None:
    (first, *_) = targets(normalised())
    model = quantized([str(first.name)])
    checker.check_model(load_model_from_string(passes.save(model)), full_check=True)
    assert operators(model)["QuantizeLinear"] == 3
    (kept,) = (node for node in model.graph if node.name == first.name)
    assert passes.operand(kept, 0).name == "x"
    wide = passes.operand(kept, 1).producer()
    assert wide is not None
    assert passes.held(wide, 0).dtype == np.float16


def test_weights_that_half_precision_cannot_hold_are_refused() -> None:
    model = normalised()
    node = targets(model)[0]
    node.replace_input_with(1, passes.initializer(model, "huge", passes.held(node, 1) * np.float32(1e6)))
    with pytest.raises(SourceError, match="which FP16 cannot"):
        quantize(model, {}, {}, [str(one.name) for one in targets(model)])


def residual() -> ir.Model:
    """A stream, gated by what is pooled from it, to which two convolutions add, and which two others read."""
    random = np.random.default_rng(4)
    loud = np.geomspace(0.05, 20, 6).reshape(-1, 1, 1, 1)
    held = {
        "w0": random.normal(size=(6, 3, 1, 1)) * loud, "b0": random.normal(size=6),
        "wg": random.normal(size=(6, 6, 1, 1)), "bg": random.normal(size=6),
        "w1": random.normal(size=(4, 6, 1, 1)), "b1": random.normal(size=4), "half": np.array(0.5),
        "w2": random.normal(size=(6, 4, 1, 1)), "b2": random.normal(size=6), "w3": random.normal(size=(6, 1, 3, 3)),
        "b3": random.normal(size=6), "w4": random.normal(size=(2, 6, 1, 1)), "b4": random.normal(size=2),
    }  # fmt: skip
    depthwise = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "group": 6}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w0", "b0"], ["a"]),
            helper.make_node("ReduceMean", ["a"], ["pooled"], axes=[2, 3], keepdims=1),
            helper.make_node("Conv", ["pooled", "wg", "bg"], ["gate"]),
            helper.make_node("HardSigmoid", ["gate"], ["opened"]),
            helper.make_node("Mul", ["a", "opened"], ["stream"]),
            helper.make_node("Conv", ["stream", "w1", "b1"], ["c"]),
            helper.make_node("Erf", ["c"], ["e"]),
            helper.make_node("Mul", ["e", "half"], ["h"]),
            helper.make_node("Conv", ["h", "w2", "b2"], ["more"]),
            helper.make_node("Add", ["stream", "more"], ["sum"]),
            helper.make_node("Conv", ["sum", "w3", "b3"], ["d"], **depthwise),
            helper.make_node("Conv", ["d", "w4", "b4"], ["y"]),
        ],
        "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 8, 8])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", passes.OPSET)], ir_version=8)
    return normalise(passes.load(model.SerializeToString(), "it"), [1, 3, 8, 8])


def test_a_residual_stream_is_evened_out_for_all_that_read_it() -> None:
    random = np.random.default_rng(6)
    samples = [{"x": random.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    before, after = residual(), residual()
    copy = residual()
    axes = expose(copy)
    seen = watch(passes.save(copy), axes, samples, RUNTIME, 2)
    left_alone = equalise(after, {n: one.low for n, one in seen.items()}, {n: one.high for n, one in seen.items()})
    assert set(left_alone.values()) == {"HardSigmoid reads it", "Erf reads it", "it is an output of the graph"}
    for sample in samples:
        one, other = (outputs(passes.save(model), sample["x"])["y"] for model in (before, after))
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
    copy = passes.load(passes.save(after), "it")
    axes = expose(copy)
    even = watch(passes.save(copy), axes, samples, RUNTIME, 2)
    (depthwise,) = (str(passes.operand(n, 0).name) for n in after.graph if n.op_type == "Conv" and passes.group(n) > 1)

    def spread(name: str, of: dict[str, object]) -> float:
        one = of[name]
        loudest = np.maximum(-one.low, one.high)  # type: ignore[attr-defined]
        return float(loudest.max() / loudest.min())

    assert spread(depthwise, even) < spread(depthwise, seen) / 4


def in_a_row() -> ir.Model:
    """Two convolutions with nothing between them, all of whose weights are positive: sums get as large as can be."""
    random = np.random.default_rng(5)
    held = {
        "w0": random.uniform(0.5, 1, (8, 3, 3, 3)), "b0": random.normal(size=8),
        "w1": random.uniform(0.5, 1, (8, 8, 3, 3)), "b1": random.normal(size=8),
    }  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w0", "b0"], ["a"], kernel_shape=[3, 3]),
            helper.make_node("Conv", ["a", "w1", "b1"], ["y"], kernel_shape=[3, 3]),
        ],
        "row",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 8, 8])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", passes.OPSET)], ir_version=8)
    return normalise(passes.load(model.SerializeToString(), "it"), [1, 3, 12, 12])


def test_the_runtime_computes_int8_as_it_is_written_whatever_the_processor_has_instructions_for() -> None:
    model, x = in_a_row(), np.random.default_rng(6).uniform(0, 1, (1, 3, 12, 12)).astype(np.float32)
    names = list(expose(copy := passes.load(passes.save(model), "it")))
    seen = watch(passes.save(copy), dict.fromkeys(names, 1), [{"x": x}], RUNTIME, 1)
    thresholds = {name: one.threshold("percentile", 100) for name, one in seen.items()}
    content = passes.save(quantize(model, thresholds, {name: one.mean for name, one in seen.items()}))
    definition = load_model_from_string(content)
    definition.opset_import[0].version = 19  # Q and DQ mean the same there, and onnx has them in its reference
    (expected,) = ReferenceEvaluator(definition).run(None, {"x": x})
    np.testing.assert_allclose(outputs(content, x)["y"], expected, rtol=2e-3)


@pytest.mark.parametrize("kept", [(), (0,), (1, 3)])
def test_a_graph_with_a_switch_computes_what_the_graph_made_for_that_choice_does(kept: Sequence[int]) -> None:
    model, _ = equalised()
    seen = watched(model)
    thresholds, means = {n: float(one[3]) for n, one in seen.items()}, {n: one[2] for n, one in seen.items()}
    content = passes.save(model)
    plain, chosen = passes.load(content, "it"), passes.load(content, "it")
    names = switch(model, thresholds, means)
    checker.check_model(load_model_from_string(passes.save(model)), full_check=True)
    quantize(chosen, thresholds, means, [names[i] for i in kept])
    flags = np.array([i in kept for i in range(len(names))])
    x, session = pixels(320, 9), RUNTIME.open(passes.save(model), threads=1)
    switched = session.run({"x": x, SWITCH: flags})["y"]
    np.testing.assert_allclose(switched, outputs(passes.save(chosen), x)["y"], atol=2e-3)  # float weights: FP16 there
    everything = session.run({"x": x, SWITCH: np.ones(len(names), np.bool_)})["y"]
    np.testing.assert_allclose(everything, outputs(passes.save(plain), x)["y"], atol=1e-5)


def test_what_reads_a_pooled_vector_is_quantized_only_when_that_is_asked_for() -> None:
    random = np.random.default_rng(6)
    x = random.normal(size=(1, 3, 8, 8)).astype(np.float32)
    counted = {}
    for pooled in (False, True):
        model, copy = residual(), residual()
        axes = expose(copy, pooled=pooled)
        seen = watch(passes.save(copy), axes, [{"x": x}], RUNTIME, 1)
        means = {name: one.mean for name, one in seen.items()}
        quantize(model, {name: one.threshold("percentile", 100) for name, one in seen.items()}, means)
        gate = next(node for node in model.graph if node.outputs[0].uses()[0][0].op_type == "HardSigmoid")
        maker = passes.operand(gate, 0).producer()
        counted[pooled] = operators(model)["QuantizeLinear"], maker.op_type if maker else ""
    assert counted[True] == (counted[False][0] + 1, "DequantizeLinear")
    assert counted[False][1] == "ReduceMean"
