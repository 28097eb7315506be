"""Reads labelled lines with a graph and compares: with the labels, and pairwise with the graph as published.

Exact match and character error rate are those of `models.tasks.text`, on normalised texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from appliance.runtime import Runtime, Session
from kernels.reference import ctc_head_of_softmax
from models import schema
from models.bundle import Accuracy, Agreement
from models.errors import BundleError
from models.folder import BundleFolder
from models.measurements import fastest
from models.spec import Array
from models.tasks import lines as lines_task
from models.tasks import text
from provisioning import sources
from provisioning.data import Line

_RESAMPLES = 2000
_POINT = 0.01
_DIGITS = 6


def verify(
    folder: BundleFolder, lines: Sequence[Line], precision: str, runtime: Runtime, threads: int
) -> dict[str, Any]:
    """Read `lines` with a bundle's recogniser and with the checkpoint it was made of, and compare.

    `precision` "auto" takes the fastest, as it was measured where the bundle was built. Raises BundleError when the
    bundle is damaged or holds no recogniser in that precision, SourceError when the checkpoint is not installed.
    """
    manifest = folder.manifest
    folder.check_content()
    name = next((name for name, graph in manifest.graphs.items() if graph.original), None)
    if name is None:
        msg = f"{folder.path} holds no graph that was measured on labelled lines: build the bundle again"
        raise BundleError(msg)
    variants = manifest.graphs[name].variants
    if precision == "auto":
        measured = folder.measurements("cpu")
        latency_ms = measured.latency_ms.get(name, {}) if measured else {}
        precision = fastest({one: latency_ms.get(one, math.inf) for one in variants})
    if precision not in variants:
        reason = manifest.graphs[name].left_out.get(precision, "it was not asked for")
        msg = f"{folder.path} holds no {precision} of {name} ({reason}); it holds {', '.join(variants)}"
        raise BundleError(msg)
    fetched = {step.output for step in manifest.provenance.steps if (step.name, step.graph) == ("fetch", name)}
    source = next((source for source in manifest.provenance.sources if source.sha256 in fetched), None)
    if source is None:
        msg = f"{folder.path} does not say which checkpoint {name} was made of: build the bundle again"
        raise BundleError(msg)
    labels = folder.read_labels()
    original = read_lines(sources.fetch(source), lines, labels, runtime, threads)
    packed = read_lines(folder.read(variants[precision].graph), lines, labels, runtime, threads)
    return {"graph": name, "precision": precision} | compare(lines, original, packed)


def read_lines(graph: bytes, lines: Sequence[Line], labels: Sequence[str], runtime: Runtime, threads: int) -> list[str]:
    """What `graph` reads on each line. It ends in a CTC head, or in the softmax of a checkpoint as published.

    A checkpoint is measured as its publishers measure it: width kept, padded to at least 320 and no further.
    """
    session = runtime.open(graph, threads=1)
    published = {tensor.name for tensor in session.spec.outputs} != {"index", "probability"}

    def read(line: Line) -> str:
        x_NCHW = lines_task.prepare(line.picture)
        if published:
            height, width = line.picture.shape[:2]
            content = -(-lines_task.HEIGHT * width // height)
            x_NCHW = x_NCHW[:, :, :, : max(content, lines_task.MIN_WIDTH)]
        best_class, probability = _decoded(session, np.ascontiguousarray(x_NCHW), published)
        return lines_task.decode(best_class[0], probability[0], labels)[0]

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(read, lines))


def _decoded(session: Session, x_NCHW: Array, published: bool) -> tuple[Array, Array]:
    outputs = _run(session, x_NCHW)
    if published:
        (softmax,) = outputs.values()
        return ctc_head_of_softmax(softmax)
    return outputs["index"], outputs["probability"]


def accuracy(lines: Sequence[Line], read: Sequence[str]) -> Accuracy:
    """Exact match and character error rate of what was `read`."""
    exact, cer = text.exact_and_cer(_pairs(lines, read))
    return Accuracy(round(exact, _DIGITS), round(cer, _DIGITS), len(lines))


def _pairs(lines: Sequence[Line], read: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (text.normalise(line.text, text.source_of(line.file)), text.normalise(one, text.source_of(line.file)))
        for line, one in zip(lines, read, strict=True)
    ]


def compare(lines: Sequence[Line], original: Sequence[str], packed: Sequence[str]) -> dict[str, Any]:
    """The report that `provision verify --json` prints; shares between 0 and 1.

    `agreement` is the share of lines on which both read the same normalised text. `interval` is the 95 % interval of
    packed minus original, by the bootstrap over lines (Efron 1979) with a fixed seed: lines are drawn in
    pairs, because both read the same ones. `resolved` tells whether the lines are enough to see one point:
    one standard error of the difference of exact match is below 0.01.
    """
    one, other = _pairs(lines, original), _pairs(lines, packed)
    samples = _resampled_differences(one, other)
    low, high = np.percentile(samples, [2.5, 97.5], axis=0).round(_DIGITS).tolist()
    sources = [text.source_of(line.file) for line in lines]
    by_source = {}
    for source in sorted(set(sources)):
        chosen = [i for i, its in enumerate(sources) if its == source]
        by_source[source] = {
            name: schema.dump(accuracy([lines[i] for i in chosen], [read[i] for i in chosen]))
            for name, read in (("original", original), ("packed", packed))
        }
    return {
        "original": schema.dump(accuracy(lines, original)),
        "packed": schema.dump(accuracy(lines, packed)),
        "agreement": round(float(np.mean([a[1] == b[1] for a, b in zip(one, other, strict=True)])), _DIGITS),
        "interval": {"exact": [low[0], high[0]], "cer": [low[1], high[1]]},
        "resolved": bool(samples[:, 0].std() < _POINT),
        "by_source": by_source,
    }


def _resampled_differences(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> Array:
    """Differences (exact, CER) of `other` minus `one` [resamples, 2], each over lines drawn with replacement."""
    wrong = np.array([[label != read for label, read in pairs] for pairs in (one, other)], np.float64)
    distance = np.array([[text.edit_distance(label, read) for label, read in pairs] for pairs in (one, other)])
    length = np.array([len(label) for label, _ in one])
    drawn = np.random.default_rng(0).integers(len(one), size=(_RESAMPLES, len(one)))
    exact = (wrong[0] - wrong[1])[drawn].mean(axis=1)
    cer = (distance[1] - distance[0])[drawn].sum(axis=1) / np.maximum(length[drawn].sum(axis=1), 1)
    return np.stack([exact, cer], axis=1)


def same_class(original: Session, packed: Session, inputs: Sequence[Mapping[str, Array]]) -> Agreement:
    """Share of samples that get the same class from both."""
    same = np.concatenate([_only(original, one).argmax(axis=1) == _only(packed, one).argmax(axis=1) for one in inputs])
    return Agreement(round(float(same.mean()), _DIGITS), f"{same.sum()} of {same.size} line pictures")


def overlap(original: Session, packed: Session, inputs: Sequence[Mapping[str, Array]], threshold: float) -> Agreement:
    """Intersection over union of the areas above `threshold` in the maps of both, over all samples."""
    both = either = 0
    for one in inputs:
        a, b = _only(original, one) > threshold, _only(packed, one) > threshold
        both += int((a & b).sum())
        either += int((a | b).sum())
    return Agreement(round(both / either, _DIGITS) if either else 1.0, f"{len(inputs)} pictures")


def _only(session: Session, inputs: Mapping[str, Array]) -> Array:
    (output,) = _run(session, inputs["x"]).values()
    return output


def _run(session: Session, x_NCHW: Array) -> dict[str, Array]:
    """All outputs; a checkpoint as published may call its input anything."""
    return session.run({session.spec.inputs[0].name: x_NCHW})
