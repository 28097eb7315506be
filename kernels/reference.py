"""The operators of this package in numpy float64: the definition that every implementation is measured against.

Axes in names: N batch, T time steps, K classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.spec import Array


def ctc_head(logits_NTK: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Best class [N, T] of each time step, and its probability [N, T].

        index_nt       = argmax_k z_ntk                                  (the first of equal ones)
        probability_nt = max_k softmax(z_nt)_k = 1 / sum_k exp(z_ntk - max_j z_ntj)

    which is greedy decoding's first half (Graves et al. 2006, "Connectionist Temporal Classification",
    section 3.2: best path decoding) with the softmax spelled so that exp never overflows.
    """
    z_NTK = np.asarray(logits_NTK, np.float64)
    best = z_NTK.max(axis=-1, keepdims=True)
    return z_NTK.argmax(axis=-1), 1 / np.exp(z_NTK - best).sum(axis=-1)


def ctc_head_of_softmax(probabilities_NTK: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The same of a graph whose last operator is a softmax: its largest element and where that stands."""
    p_NTK = np.asarray(probabilities_NTK, np.float64)
    return p_NTK.argmax(axis=-1), p_NTK.max(axis=-1)
