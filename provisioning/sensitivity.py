"""Finds what suffers most from INT8, and keeps that in float as far as a budget reaches.

How far a graph is from float is the mean Kullback-Leibler divergence of its output distribution from that of the float
graph, in nats a decision; a decision is one time step of a recogniser, one picture of a classifier, one pixel of a
detector of text, one class of one candidate of a detector of objects. Starting with everything in INT8, each operator
alone is put back into float, and ranked by what that takes off the divergence: in its place among the others, because
errors amplify each other. (Ranking by an operator's own error in an otherwise float graph misjudged PP-OCRv4: see
docs/quantization.md.) That ranking takes every fourth sample; the first few are then measured on all of them, the best
of these (or one nearly as good that costs less) is kept in float, and so on until the budget of multiply-accumulates
is spent, no gain is worth it, or what is left is noise. All are ranked anew when little of the divergence is left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from appliance.runtime import Runtime, Session
from models.errors import SourceError
from models.spec import Array
from models.tasks import detection
from models.tasks.classification import probabilities
from provisioning import passes
from provisioning.passes import operand, quantize, sizes

WORKING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose multiply-accumulates count."""
_TINY = 1e-7
_STRIDE = 4
"""The first ranking looks at every so many of the samples."""
_AGAIN = 4
"""Candidates that are measured again before each choice: the gains of the others are taken as they were, ..."""
_STALE = 0.25
"""... until so little of the divergence is left: beside an error that drowns everything, gains say nothing."""
_NOISE = 20.0
"""Nats over all time steps of a recogniser at which a search ends: two or three of them have fallen the other way,
between two characters, and they do and undo that with any change of the rounding."""
_NEARLY = 0.75
"""Of those that take off nearly as much as the best the one with the least arithmetic is kept. Where two operators
spoil the same, either mends it: which one mends more is a matter of rounding."""
_WORTH = 0.2
"""A choice has to take this share off the divergence that is left. Less is within what other samples, or another
processor, would say."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays in float, and what that does."""

    gains: Mapping[str, float]
    """Operator -> nats that it took off the divergence when it was chosen, in that order."""
    before: float
    """Divergence with all candidates in INT8."""
    after: float
    """Divergence with the chosen ones in float."""


class Search:
    """A float graph with samples, ready to be compared with INT8 forms of itself."""

    def __init__(
        self,
        graph: bytes,
        role: str,
        thresholds: Mapping[str, float],
        means: Mapping[str, Array],
        samples: Sequence[Mapping[str, Array]],
        runtime: Runtime,
        threads: int,
        head: str = "",
    ) -> None:
        """`thresholds` and `means` are those of pass quantize; `samples` are inputs of `graph`.

        `head` is the form of the output of a graph of role "locate".
        """
        self._head = head
        self._role, self._samples, self._threads = role, samples, threads
        model = passes.load(graph, "the graph")
        self.names = quantize.switch(model, thresholds, means)
        if role == "recognise":
            _expose_scores(model)
        self._session = runtime.open(passes.save(model), threads=1)
        self._plain = [_log_distribution(role, one, head) for one in self._answers(self.names, 1)]

    def keep(self, candidates: Mapping[str, int], kept: Collection[str], budget: int) -> Kept:
        """Choose among `candidates` (operator -> its multiply-accumulates), `kept` being in float already.

        `budget` is the multiply-accumulates that the choice may come to.
        """
        candidates = {name: macs for name, macs in candidates.items() if macs <= budget}
        before = left = self.divergence(kept)
        gains: dict[str, float] = {}
        gain: dict[str, float] = {}
        ranked = math.inf
        while not self._is_noise(left):
            fit = [name for name in candidates if name not in gains and candidates[name] <= budget]
            if left < ranked * _STALE:
                ranked = left
                roughly = self.divergence({*kept, *gains}, _STRIDE)
                gain = {name: roughly - self.divergence({*kept, *gains, name}, _STRIDE) for name in fit}
            again = sorted(fit, key=lambda name: -gain[name])[:_AGAIN]
            gain |= {name: left - self.divergence({*kept, *gains, name}) for name in again}
            most = max((gain[name] for name in again), default=0.0)
            if most <= _WORTH * left:
                return Kept(gains, before, left)
            nearly = [name for name in fit if name in again and gain[name] >= _NEARLY * most]
            best = min(nearly, key=lambda name: candidates[name])
            gains[best] = gain[best]
            left -= gain[best]
            budget -= candidates[best]
        return Kept(gains, before, left)

    def _is_noise(self, divergence: float) -> bool:
        return self._role == "recognise" and divergence * sum(map(len, self._plain)) <= _NOISE

    def divergence(self, keep_float: Collection[str], stride: int = 1) -> float:
        """Divergence with all but `keep_float` in INT8, on every `stride`-th sample."""
        outputs = self._answers(keep_float, stride)
        with ThreadPoolExecutor(self._threads) as pool:
            compare = partial(_divergence, self._role, head=self._head)
            sums = list(pool.map(compare, self._plain[::stride], outputs))
        return sum(one for one, _ in sums) / sum(count for _, count in sums)

    def _answers(self, keep_float: Collection[str], stride: int) -> list[Array]:
        flags = {quantize.SWITCH: np.array([name in keep_float for name in self.names])}
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda sample: _only(self._session, {**sample, **flags}), self._samples[::stride]))


def work(graph: bytes, shape: Sequence[int]) -> dict[str, int]:
    """Multiply-accumulates of each convolution and product of matrices of `graph` for inputs of `shape`.

    Fused operators count for nothing here: inline them first to see inside.
    """
    model = onnx.load_model_from_string(graph)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            dim.dim_value = size
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True))
    return {str(node.name): macs for node in inferred.graph if (macs := macs_of(node))}


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


def macs_of(node: ir.Node) -> int:
    """Multiply-accumulates of one operator, whose tensors have known sizes; raises SourceError when they have not."""
    if node.op_type not in WORKING:
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


def _log_distribution(role: str, output: Array, head: str = "") -> Array:
    """Logarithm of the probabilities of each decision, [decisions, outcomes], FP32."""
    if role == "recognise":
        below = output - output.max(axis=-1, keepdims=True)
        below -= np.log(np.exp(below).sum(axis=-1, keepdims=True))
        return np.asarray(below.reshape(-1, output.shape[-1]))
    if role == "classify":
        return np.asarray(np.log(np.maximum(probabilities(output), _TINY)))
    there = (detection.scores(output, head) if role == "locate" else output).reshape(-1, 1)
    return np.asarray(np.log(np.clip(np.concatenate([there, 1 - there], axis=1), _TINY, 1)))


def _divergence(role: str, log_p: Array, output: Array, head: str = "") -> tuple[float, int]:
    """Sum of the divergences of all decisions, and how many these are."""
    log_q = _log_distribution(role, output, head)
    return float((np.exp(log_p) * (log_p - log_q)).sum(dtype=np.float64)), len(log_p)
