"""What a version must show: figures in, a verdict out."""

from __future__ import annotations

import numpy as np
import pytest

from appliance.core import gates
from appliance.core.gates import Rules, Tally
from models.errors import BadInput, ModelError, Overloaded, WorkerLost
from models.spec import Tensor

pytestmark = pytest.mark.unit

RULES = Rules()


def tally(ms: float, count: int, *errors: Exception) -> Tally:
    found = Tally()
    for _ in range(count):
        found.count(ms / 1e3, None)
    for error in errors:
        found.count(0.001, error)
    return found


def test_the_95th_percentile_is_one_that_was_measured() -> None:
    assert gates.p95([float(value) for value in range(1, 101)]) == 95
    assert gates.p95([7.0]) == 7


def test_memory_that_would_not_fit_is_told_with_both_figures() -> None:
    assert gates.memory(10, 10).reason == ""
    assert gates.memory(11, 10).reason == "it needs 11 bytes of memory and 10 would be free"


def test_a_graph_may_be_slower_by_the_ratio_and_what_a_neighbour_makes() -> None:
    within = {"det": ([10.0] * 20, [16.9] * 20), "rec": ([10.0] * 20, [5.0] * 20)}
    assert gates.latency(within, RULES).reason == ""
    judged = gates.latency(within | {"det": ([10.0] * 20, [17.1] * 20)}, RULES)
    assert judged.reason == "det takes 17.1 ms where 10.0 ms were taken before (P95)"
    assert judged.figures["rec.new_p95_ms"] == 5


def test_a_version_that_agrees_too_rarely_is_refused_and_one_that_nobody_asked_is_not() -> None:
    assert gates.shadow(10.0, 20, RULES).reason == ""
    assert gates.shadow(9.0, 20, RULES).reason == "it agrees with the version before in 45% of live answers"
    assert gates.shadow(0.0, 0, RULES).reason == ""


@pytest.mark.parametrize(
    ("before", "new", "agreement"),
    [
        ([[0.1, 0.9], [0.8, 0.2]], [[0.2, 0.7], [0.6, 0.4]], 1.0),
        ([[0.1, 0.9], [0.8, 0.2]], [[0.9, 0.1], [0.8, 0.2]], 0.5),
        ([[0.1, 0.9]], [[0.1, 0.8, 0.1]], 0.0),
    ],
)
def test_floats_agree_in_the_largest_of_each_row(
    before: list[list[float]], new: list[list[float]], agreement: float
) -> None:
    one, other = (Tensor.from_array("y", np.array(rows, np.float32)) for rows in (before, new))
    assert gates.agreement([one], [other]) == agreement


def test_whole_numbers_agree_element_by_element_and_a_missing_output_in_none() -> None:
    one = Tensor.from_array("y", np.array([1, 2, 3, 4]))
    assert gates.agreement([one], [Tensor.from_array("y", np.array([1, 2, 3, 0]))]) == 0.75
    assert gates.agreement([one], [Tensor.from_array("z", np.array([1, 2, 3, 4]))]) == 0


def test_texts_agree_by_how_many_both_have() -> None:
    assert gates.lines_agreement(["a", "b"], ["b", "a"]) == 1
    assert gates.lines_agreement(["a", "b"], ["a"]) == pytest.approx(2 / 3)
    assert gates.lines_agreement([], []) == 1
    assert gates.lines_agreement(["a"], []) == 0


def test_a_trial_ends_early_when_requests_fail_by_the_fault_of_the_version() -> None:
    faults = [ModelError("x"), WorkerLost("x"), ModelError("x")]
    judged = gates.trial(tally(5, 50), tally(5, 10, *faults), RULES, over=False)
    assert judged
    assert judged.reason == "3 of 13 requests failed on trial"
    callers = [BadInput("x"), Overloaded("x"), BadInput("x")]
    assert gates.trial(tally(5, 50), tally(5, 10, *callers), RULES, over=False) is None


def test_a_trial_that_is_over_is_judged_by_latency_where_enough_was_asked() -> None:
    judged = gates.trial(tally(5, 50), tally(30, 50), RULES, over=True)
    assert judged
    assert judged.reason == "requests take 30.0 ms on trial and took 5.0 ms before (P95)"
    for before, new in ((50, 10), (10, 50), (0, 0)):
        quiet = gates.trial(tally(5, before), tally(20, new), RULES, over=True)
        assert quiet
        assert quiet.reason == ""
