"""Statistics of tensors of any size, added up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioning.calibrate import METHODS, Watched

pytestmark = pytest.mark.unit


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(-6, 6)), min_size=2, max_size=5), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_parts_of_any_width_and_size_add_up_to_the_whole(parts: list[tuple[int, float]], seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = [(random.normal(size=(1, 3, 2, width)) * 4.0**power).astype(np.float32) for width, power in parts]
    whole = Watched.of(np.concatenate(tensors, axis=3), 1)
    first, *others = (Watched.of(tensor, 1) for tensor in tensors)
    total = sum(others, first)
    np.testing.assert_array_equal(total.low, whole.low)
    np.testing.assert_array_equal(total.high, whole.high)
    np.testing.assert_allclose(total.mean, whole.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(total.counts, whole.counts)
    assert total.exponent == whole.exponent


@pytest.mark.parametrize("percentile", [50, 90, 99, 99.9])
def test_a_threshold_leaves_just_the_rest_above_it(percentile: float) -> None:
    x = np.random.default_rng(0).normal(size=(1, 4, 50, 100)).astype(np.float32)
    threshold = Watched.of(x, 1).threshold("percentile", percentile)
    assert (np.abs(x) <= threshold).mean() * 100 >= percentile
    assert threshold == pytest.approx(np.percentile(np.abs(x), percentile), rel=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_a_threshold_never_passes_the_largest_element(method: str) -> None:
    x = np.linspace(-3, 2, 1000, dtype=np.float32).reshape(1, 2, 5, 100)
    assert Watched.of(x, 1).threshold(method, 100) <= 3
    assert Watched.of(x, 1).threshold("percentile", 100) == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_of_zeros_has_statistics_too(method: str) -> None:
    seen = Watched.of(np.zeros((1, 2, 3, 4), np.float32), 1)
    assert seen.threshold(method, 99.99) == 0
    assert (seen + Watched.of(np.ones((1, 2, 3, 4), np.float32), 1)).threshold("percentile", 100) == 1


def rounded(x: np.ndarray, threshold: float) -> np.ndarray:
    """What INT8 with that threshold makes of `x`."""
    step = threshold / 127
    return np.clip(np.round(x / step), -128, 127) * step


def test_least_squared_error_is_least() -> None:
    x = np.random.default_rng(1).standard_t(4, size=(1, 4, 100, 100)).astype(np.float32)
    best = Watched.of(x, 1).threshold("mse", 0)
    errors = [np.square(rounded(x, scale * best) - x).mean() for scale in (0.6, 0.8, 1, 1.3, 1.8)]
    assert min(errors) == errors[2]


def test_one_far_element_does_not_decide_where_information_or_error_count() -> None:
    x = np.random.default_rng(2).normal(size=(1, 4, 100, 100)).astype(np.float32)
    x[0, 0, 0, 0] = 60
    seen = Watched.of(x, 1)
    assert seen.threshold("percentile", 100) == 60
    assert seen.threshold("mse", 0) < 55
    assert seen.threshold("entropy", 0) < 30
