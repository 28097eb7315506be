"""The reference itself, held against second spellings; and the arithmetic of packing and planning."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kernels import plan
from kernels.pack import pack_head, pack_neck
from kernels.plan import (
    ARCHS,
    MAX_BATCH,
    MAX_STEPS,
    head_variants,
    neck_scratch,
    neck_variants,
    phase_programs,
    plan_head,
    plan_neck,
    tiles_of,
)
from kernels.reference import HEADS, Neck, attention, convolve, linear_ctc_head, neck, normalise, swish
from models.errors import BadInput

pytestmark = pytest.mark.unit
RNG = np.random.default_rng()
SPECS = [Neck(form, kv) for form in ("v4", "v6") for kv in (1, 2, 4, 8)]


def weights_of(spec: Neck) -> dict[str, np.ndarray]:
    return {
        name: RNG.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])) if name.endswith(".w") else RNG.random(shape)
        for name, shape in spec.shapes().items()
    }


def test_convolution_is_the_sum_over_taps_with_zero_padding() -> None:
    x, w = RNG.standard_normal((2, 5, 3)), RNG.standard_normal((3, 3, 4))
    spelled = np.zeros((2, 5, 4))
    for t in range(5):
        for j in range(3):
            if 0 <= t + j - 1 < 5:
                spelled[:, t] += x[:, t + j - 1] @ w[j]
    np.testing.assert_allclose(convolve(x, w), spelled)


def test_grouped_attention_equals_full_attention_with_repeated_heads() -> None:
    q, k, v = RNG.standard_normal((1, 6, 120)), RNG.standard_normal((1, 6, 30)), RNG.standard_normal((1, 6, 30))
    full_k, full_v = (np.repeat(e.reshape(1, 6, 2, 15), HEADS // 2, 2).reshape(1, 6, 120) for e in (k, v))
    np.testing.assert_allclose(attention(q, k, v), attention(q, full_k, full_v))


def test_swish_and_normalise_stand_extreme_values() -> None:
    np.testing.assert_allclose(swish(np.array([-1e5, 0.0, 1e5])), [0, 0, 1e5])
    assert np.isfinite(normalise(np.zeros((1, 1, 120)), np.ones(120), np.ones(120), 1e-5)).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tokens_far_away_matter_only_through_attention(spec: Neck) -> None:
    weights = weights_of(spec)
    x = RNG.standard_normal((2, 12, spec.channels))
    both, alone = neck(spec, weights, x), neck(spec, weights, x[:1])
    np.testing.assert_allclose(both[:1], alone, err_msg="images of a batch do not see each other")
    for block in range(2):
        weights[f"block{block}.o.w"] = np.zeros((120, 120))
    changed = x.copy()
    changed[:, 11] += 1
    near = neck(spec, weights, x)[:, :7] - neck(spec, weights, changed)[:, :7]
    assert np.abs(near).max() < 1e-12


def test_float32_reference_is_the_float64_one_rounded() -> None:
    spec = Neck("v4", 2)
    weights, x = weights_of(spec), RNG.standard_normal((1, 9, 480))
    exact, rounded = neck(spec, weights, x), neck(spec, weights, x, np.float32)
    assert rounded.dtype == np.float32
    assert np.linalg.norm(exact - rounded) < 1e-5 * np.linalg.norm(exact)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    spec = Neck("v4", 2)
    weights = weights_of(spec)
    with pytest.raises(BadInput, match="3 key/value heads"):
        Neck("v4", 3)
    with pytest.raises(BadInput, match=r"lack \['conv1\.w'\]"):
        spec.check({name: value for name, value in weights.items() if name != "conv1.w"})
    with pytest.raises(BadInput, match="needs \\[batch, time, 480\\]"):
        neck(spec, weights, np.zeros((1, 3, 384)))
    with pytest.raises(BadInput, match="does not fit FP16"):
        pack_neck(spec, weights | {"conv5.w": weights["conv5.w"] * 1e9}, 1, 64, 128)
    with pytest.raises(BadInput, match="120 channels"):
        pack_head(np.zeros((64, 10)), np.zeros(10), 64)
    with pytest.raises(BadInput, match="does not fit 64 channels"):
        linear_ctc_head(np.zeros((1, 64)), np.zeros((120, 5)), np.zeros(5))


def test_padded_classes_never_win() -> None:
    w = pack_head(RNG.standard_normal((120, 70)), RNG.standard_normal(70), 64).reshape(2, 128, 64)
    x = np.concatenate([RNG.standard_normal(120), [1], np.zeros(7)])
    scores = (x @ w.astype(np.float64)).ravel()
    assert scores[70:].max() < -60000
    assert scores[:70].min() > -1000


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("resident", "multiprocessors"), [({1: 264, 2: 264}, 132), ({1: 8, 2: 8}, 8), ({1: 0}, 8)])
def test_every_shape_has_a_plan_that_fits(spec: Neck, resident: dict[int, int], multiprocessors: int) -> None:
    for steps in (1, 14, 40, 64, 65, 511, MAX_STEPS):
        for batch in (1, 5, 33, MAX_BATCH):
            plan = plan_neck(spec, batch, steps, resident, multiprocessors)
            programs = plan.images * plan.tiles * plan.split
            assert plan.images >= 1
            assert plan.tiles == tiles_of(spec, steps)
            assert programs <= (resident[plan.split] if plan.phases == (-1,) else phase_programs(resident[1]))
    with pytest.raises(BadInput, match="513 tokens"):
        plan_neck(spec, 1, 513, resident, multiprocessors)


def test_scratch_of_usual_lines_fits_the_l2_of_an_orin_nx() -> None:
    for split in (1, 2):
        assert neck_scratch(Neck("v4", 2), split, tiles_of(Neck("v4"), 40), 8).total < 2 * 2**20


@pytest.mark.parametrize("multiprocessors", [8, 16, 132])
def test_every_count_of_tokens_has_a_plan_for_the_head(multiprocessors: int) -> None:
    for rows in (1, 40, 64, 65, 320, 1280, 5000, MAX_STEPS * MAX_BATCH):
        for chunks in (1, 7, 52, 104):
            plan = plan_head(rows, chunks, 2 * multiprocessors, multiprocessors)
            assert 1 <= plan.programs <= min(chunks, 64)
            if plan.form == "exchange":
                assert plan.programs * plan.tiles <= 2 * multiprocessors
                assert plan.programs * (128 // plan.slots) >= 64, "all rows are merged"
                assert plan.programs <= plan.slots


def test_the_source_digest_sees_code_and_not_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in plan.SOURCES:
        (tmp_path / name).write_text((Path(plan.__file__).with_name(name)).read_text())
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "plan.py"))
    first = plan.source_digest()
    path = tmp_path / "pack.py"
    path.write_text("# a remark\n" + path.read_text().replace('"""One attention block', '"""One block of attention'))
    assert plan.source_digest() == first
    path.write_text(path.read_text().replace("WIDE = 128", "WIDE = 64"))
    assert plan.source_digest() != first


@pytest.mark.parametrize("arch", ARCHS)
def test_variants_have_names_of_their_own(arch: str) -> None:
    names = [v.name for v in (*neck_variants(arch, Neck("v4", 2)), *head_variants(arch))]
    assert len(set(names)) == len(names) == 15
    assert all(dataclasses.is_dataclass(v) for v in head_variants(arch))
