"""Finds what suffers most from INT8, and keeps that in float as far as a budget reaches.

Every operator that could be quantized is, alone, while all others compute in float; how far that moves the outputs is
its sensitivity: the mean Kullback-Leibler divergence of the output distribution from that of the float graph, in nats a
decision. A decision is one time step of a recogniser, one picture of a classifier, one pixel of a detector.
The operators are then kept in float, worst first, as long as their share of the multiply-accumulates fits the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnx_ir as ir

from appliance.runtime import Runtime, Session
from models.errors import SourceError
from models.spec import Array
from provisioning import passes
from provisioning.passes import operand, quantize, sizes

_TINY = 1e-7


def rank(
    graph: bytes,
    role: str,
    thresholds: Mapping[str, float],
    means: Mapping[str, Array],
    samples: Sequence[Mapping[str, Array]],
    runtime: Runtime,
    threads: int,
) -> dict[str, float]:
    """Sensitivity of every target of pass quantize in `graph`, the most sensitive first.

    `thresholds` and `means` are those of pass quantize; `samples` are inputs of the graph.
    """
    names = [str(node.name) for node in quantize.targets(passes.load(graph, "the graph"))]

    def answers(quantized: Collection[str]) -> list[Array]:
        model = passes.load(graph, "the graph")
        quantize.quantize(model, thresholds, means, set(names) - set(quantized))
        if role == "recognise":
            _expose_scores(model)
        session = runtime.open(passes.save(model), threads=1)
        return list(pool.map(lambda sample: _only(session, sample), samples))

    with ThreadPoolExecutor(threads) as pool:
        plain = [_log_distribution(role, one) for one in answers(())]
        found = {name: _mean_divergence(role, plain, answers((name,)), pool) for name in names}
    return dict(sorted(found.items(), key=lambda item: (-item[1], names.index(item[0]))))


def choose(sensitivity: Mapping[str, float], work: Mapping[str, int], budget: float) -> list[str]:
    """The operators to keep in float: the most sensitive of `sensitivity`, most sensitive first.

    `work` is the multiply-accumulates of all operators that count, by name; `budget` the share of their sum that may
    stay in float beside what can never be quantized. One that does not fit is passed over for the next.
    """
    total = sum(work.values())
    left = budget * total - sum(macs for name, macs in work.items() if name not in sensitivity)
    chosen = []
    for name in sorted(sensitivity, key=lambda name: -sensitivity[name]):
        if name in work and work[name] <= left:
            chosen.append(name)
            left -= work[name]
    return chosen


def work(graph: bytes, shape: Sequence[int]) -> dict[str, int]:
    """Multiply-accumulates of each convolution and product of matrices of `graph` for an input of `shape`.

    Fused operators count for nothing here: inline them first to see inside.
    """
    model = onnx.load_model_from_string(graph)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True))
    return {str(node.name): macs for node in inferred.graph if (macs := _macs(node))}


def int8_share(graph: bytes, shape: Sequence[int]) -> float:
    """Share of the multiply-accumulates of `graph` that compute on INT8: of those outside fused operators."""
    macs = work(graph, shape)
    model = passes.load(graph, "the graph")
    nodes = {str(node.name): node for node in model.graph}
    int8 = sum(macs[name] for name in macs if _reads_int8(nodes[name]))
    return int8 / max(sum(macs.values()), 1)


def _reads_int8(node: ir.Node) -> bool:
    maker = operand(node, 1).producer()
    return maker is not None and maker.op_type == "DequantizeLinear"


def _macs(node: ir.Node) -> int:
    if node.op_type not in {"Conv", "ConvTranspose", "Gemm", "MatMul"}:
        return 0
    read, weights, made = (sizes(value) for value in (operand(node, 0), operand(node, 1), node.outputs[0]))
    if min((*read, *weights, *made), default=-1) < 0:
        msg = f"the size of what {node.op_type} {node.name} computes cannot be told from the size of the input"
        raise SourceError(msg)
    if node.op_type == "Conv":
        return int(np.prod(made) * np.prod(weights[1:]))
    if node.op_type == "ConvTranspose":
        return int(np.prod(read) * np.prod(weights[1:]))
    return int(np.prod(made) * read[-1])


def _expose_scores(model: ir.Model) -> None:
    """Make the scores of all classes the only output of a recogniser that ends in pass ctc_head."""
    maker = next((node for node in model.graph if node.op_type == "ArgMax"), None)
    if maker is None:
        raise SourceError("a recogniser must end in pass ctc_head to be quantized")
    scores = operand(maker, 0)
    scores.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.clear()
    model.graph.outputs.append(scores)


def _only(session: Session, sample: Mapping[str, Array]) -> Array:
    (output,) = session.run(sample).values()
    return output


def _log_distribution(role: str, output: Array) -> Array:
    """Logarithm of the probabilities of each decision, [decisions, outcomes], FP32."""
    if role == "recognise":
        below = output - output.max(axis=-1, keepdims=True)
        below -= np.log(np.exp(below).sum(axis=-1, keepdims=True))
        return np.asarray(below.reshape(-1, output.shape[-1]))
    if role == "classify":
        return np.log(np.maximum(output, _TINY))
    text = output.reshape(-1, 1)
    return np.log(np.clip(np.concatenate([text, 1 - text], axis=1), _TINY, 1))


def _mean_divergence(role: str, plain: Sequence[Array], outputs: Sequence[Array], pool: ThreadPoolExecutor) -> float:
    def divergence(log_p: Array, output: Array) -> tuple[float, int]:
        log_q = _log_distribution(role, output)
        return float((np.exp(log_p) * (log_p - log_q)).sum(dtype=np.float64)), len(log_p)

    sums = list(pool.map(divergence, plain, outputs))
    return sum(one for one, _ in sums) / sum(count for _, count in sums)
