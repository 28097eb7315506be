"""Classification: says which class a whole picture belongs to.

The graph is called "cls". It has one input `x`, FP32 [N, 3, H, W] or another layout of the settings, and one output,
a score for each class, FP32 [N, K]: logits, or probabilities where the graph ends in a softmax.
Axes in names: N batch, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.errors import ModelError
from models.spec import Array
from models.tasks import Run, fit
from models.tasks.lines import load_settings

_SUM = 0.01
"""Half precision lets a sum of probabilities be off by so much."""


@dataclass(frozen=True, slots=True)
class ClassificationSettings(fit.FitSettings):
    """Settings of the task."""

    max_classes: int = 5
    """Of an answer, the likeliest ones."""


class Classification:
    """A bundle that says what a picture shows."""

    def __init__(self, settings: Mapping[str, Any], labels: Sequence[str]) -> None:
        """Take the settings and labels of a bundle; raises BundleError when the settings do not fit."""
        self._settings = load_settings(ClassificationSettings, settings)
        fit.check(self._settings)
        self._labels = labels

    def predict(self, picture_HWC: Array, run: Run) -> dict[str, Any]:
        """`{"classes": [{"label", "confidence"}]}`, likeliest first."""
        (scores,) = run("cls", {"x": fit.prepare(picture_HWC, self._settings)}).values()
        (confidences,) = probabilities(scores)
        likeliest = np.argsort(-confidences, kind="stable")[: self._settings.max_classes].tolist()
        names = named(self._labels, len(confidences))
        return {"classes": [{"label": names[i], "confidence": float(confidences[i])} for i in likeliest]}


def named(labels: Sequence[str], classes: int) -> Sequence[str]:
    """Names of all classes, their numbers where a bundle has no labels; raises ModelError when too few have one."""
    if not labels:
        return [str(number) for number in range(classes)]
    if len(labels) != classes:
        msg = (
            f"the graph answers with {classes} classes, but the bundle has {len(labels)} labels: "
            "graph and labels do not belong together, build the bundle again"
        )
        raise ModelError(msg)
    return labels


def check_finite(values: Array) -> None:
    """Raise ModelError when a graph has answered with NaN or infinity."""
    if not np.isfinite(values).all():
        raise ModelError("the graph answers with NaN or infinity: build the bundle again, with a higher precision")


def probabilities(scores: Array) -> Array:
    """Probability of each class, FP32 [N, K], of scores [N, K] or [N, K, 1, 1].

    Rows that are no probabilities (below zero, or with another sum than one) are taken for logits.
    Raises ModelError when the largest of a row is not finite.
    """
    scores_NK = scores.reshape(len(scores), -1).astype(np.float32)
    largest_N = scores_NK.max(axis=1)
    check_finite(largest_N)
    sums = scores_NK.sum(axis=1)
    if scores_NK.min(initial=0.0) >= 0 and np.all(np.abs(sums - 1) < _SUM):
        return scores_NK
    shares = np.exp(scores_NK - largest_N[:, None])
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
