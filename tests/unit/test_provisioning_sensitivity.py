"""What stays in float: the operators whose rounding hurts, as far as the budget reaches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pytest
from support import checkpoint

from appliance.runtime import choose
from provisioning import passes, sensitivity
from provisioning.calibrate import watch
from provisioning.passes.ctc_head import ctc_head
from provisioning.passes.normalise import normalise
from provisioning.passes.quantize import expose, quantize, targets

pytestmark = pytest.mark.unit

RUNTIME = choose("onnxruntime-cpu")
SHAPE = (1, 3, 48, 320)
# Output elements times weights for each: stem 8x24x160, depthwise 8x12x80, pointwise 16x12x80, head 40 steps.
WORK = [8 * 24 * 160 * 27, 8 * 12 * 80 * 9, 16 * 12 * 80 * 8, 40 * 16 * checkpoint.CLASSES]


class Case:
    """The tiny recogniser with statistics, of which one operator's threshold is far too small."""

    def __init__(self, broken: int | None) -> None:
        random = np.random.default_rng(8)
        samples = [{"x": random.uniform(-1, 1, (1, 3, 48, w)).astype(np.float32)} for w in (320, 352)]
        self.content = passes.save(ctc_head(normalise(passes.load(checkpoint.recogniser(), "it"), [-1, 3, 48, -1])))
        model = passes.load(self.content, "it")
        self.names = [str(node.name) for node in targets(model)]
        reads = [str(passes.operand(node, 0).name) for node in targets(model)]
        axes = expose(model)
        seen = watch(passes.save(model), axes, samples, RUNTIME, 2)
        self.thresholds = {name: one.threshold("percentile", 100) for name, one in seen.items()}
        if broken is not None:
            self.thresholds[reads[broken]] /= 20
        self.means = {name: one.mean for name, one in seen.items()}
        self.search = sensitivity.Search(self.content, "recognise", self.thresholds, self.means, samples, RUNTIME, 2)
        self.work = sensitivity.work(self.content, SHAPE)


@pytest.fixture
def _no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every divergence for real: the samples here are few."""
    monkeypatch.setattr(sensitivity, "_NOISE", 0.0)


def test_work_is_counted_from_the_sizes_of_what_is_computed() -> None:
    case = Case(None)
    assert list(case.work.values()) == WORK
    twice = sensitivity.work(case.content, (2, 3, 48, 320))
    assert {name: macs * 2 for name, macs in case.work.items()} == twice


@pytest.mark.usefixtures("_no_noise")
@pytest.mark.parametrize("broken", [0, 2, 3])
def test_the_operator_that_hurts_is_kept_in_float(broken: int) -> None:
    case = Case(broken)
    kept = case.search.keep(case.work, (), sum(WORK))
    assert next(iter(kept.gains)) == case.names[broken]
    assert kept.after < kept.before / 2
    assert kept.after == pytest.approx(case.search.divergence(kept.gains), rel=1e-3, abs=1e-7)
    assert kept == case.search.keep(case.work, (), sum(WORK))


@pytest.mark.usefixtures("_no_noise")
def test_what_the_budget_does_not_cover_is_not_kept() -> None:
    case = Case(0)
    kept = case.search.keep(case.work, (), WORK[0] - 1)
    assert case.names[0] not in kept.gains
    assert sum(case.work[name] for name in kept.gains) < WORK[0]
    assert case.search.keep(case.work, (), 0) == sensitivity.Kept({}, kept.before, kept.before)


def test_the_share_of_int8_is_that_of_the_work_and_not_of_the_operators() -> None:
    case = Case(None)
    model = passes.load(case.content, "it")
    quantize(model, case.thresholds, case.means, [case.names[0]])
    share = sensitivity.int8_share(passes.save(model), SHAPE)
    assert share == pytest.approx(1 - WORK[0] / sum(WORK))
    assert sensitivity.int8_share(case.content, SHAPE) == 0


@pytest.mark.parametrize("role", ["classify", "detect"])
def test_what_does_not_read_is_compared_by_its_probabilities(role: str) -> None:
    plain = np.array([[0.2, 0.8], [0.5, 0.5]], np.float32)
    log_p = sensitivity._log_distribution(role, plain)  # noqa: SLF001 - the formula itself
    same, count = sensitivity._divergence(role, log_p, plain)  # noqa: SLF001
    other, _ = sensitivity._divergence(role, log_p, np.array([[0.9, 0.1], [0.5, 0.5]], np.float32))  # noqa: SLF001
    assert same == pytest.approx(0, abs=1e-6)
    assert count == (2 if role == "classify" else 4)
    expected = 0.2 * np.log(0.2 / 0.9) + 0.8 * np.log(0.8 / 0.1)
    if role == "detect":  # each number is the probability of text in a pixel, so both outcomes of each count
        expected = sum(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) for p, q in ((0.2, 0.9), (0.8, 0.1)))
    assert other == pytest.approx(expected, rel=1e-4)


class Told(sensitivity.Search):
    """A search in which the divergence of each choice is told."""

    def __init__(self, told: Mapping[str, float]) -> None:
        """`told` is by the names of what is in float, side by side."""
        self._told, self._role = told, "recognise"
        self._plain = [np.zeros((1000, 2), np.float32)]

    def divergence(self, keep_float: Collection[str], stride: int = 1) -> float:
        del stride
        return self._told["".join(sorted(keep_float))]


@pytest.mark.parametrize("noise", [-0.01, 0.01])
def test_where_either_of_two_mends_the_graph_the_cheaper_one_is_kept_whatever_rounding_says(noise: float) -> None:
    told = {"": 1.0, "a": 0.1 + noise, "b": 0.1, "c": 0.9, "ab": 0.095, "bc": 0.09, "abc": 0.08}
    assert list(Told(told).keep({"a": 1000, "b": 10, "c": 1}, (), 2000).gains) == ["b"]


def test_what_stands_in_the_shadow_of_a_larger_error_is_looked_at_again_without_it() -> None:
    names = "abcdefgh"  # each but `h` seems to gain something beside `h`; of these only `g` does without it
    told = {"": 100.0, "h": 1.0, "gh": 0.1} | {name: 99.0 - i for i, name in enumerate("abcdef")} | {"g": 100.0}
    told |= {"".join(sorted((name, "h"))): 1.0 for name in "abcdef"}
    told |= {"".join(sorted((name, "g", "h"))): 0.1 for name in "abcdef"}
    assert list(Told(told).keep(dict.fromkeys(names, 1), (), 100).gains) == ["h", "g"]


def test_nothing_is_kept_for_a_divergence_that_two_time_steps_can_make() -> None:
    assert not Told({"": 0.019, "a": 0.001}).keep({"a": 1}, (), 1).gains
    assert list(Told({"": 0.021, "a": 0.001}).keep({"a": 1}, (), 1).gains) == ["a"]
