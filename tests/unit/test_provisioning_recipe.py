"""Recipes are read strictly, and the one that ships fits its own rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import checkpoint

from models.errors import ConfigError
from provisioning.recipe import read

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", ["ppocr-v4", "ppocr-v6"])
def test_the_recipes_that_ship_can_be_read(name: str) -> None:
    file = read(ROOT / "models" / "zoo" / f"{name}.toml")
    assert {name: graph.role for name, graph in file.recipe.graphs.items()} == {
        "det": "detect", "cls": "classify", "rec": "recognise",
    }  # fmt: skip
    assert file.default_data == ROOT / "tests" / "data" / "ocr"
    assert file.default_data.is_dir()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("licence", "license", "unknown key 'license'; did you mean 'licence'"),
        ("exact_drop", "exact_drops", "graphs.rec.gate: unknown key 'exact_drops'; did you mean 'exact_drop'"),
        ("exact_drop", "overlap", "graphs.rec.gate.exact_drop is missing, the limit of role 'recognise'"),
        ("exact_drop = 0.5", "exact_drop = 0.5\n        gate.found_drop = 0.1", "found_drop needs graphs of all roles"),
        ('version = "1.0.0"', "version = 1", "version must be str"),
        ('role = "recognise"', 'role = "read"', "graphs.rec.role has 'read'; known: detect, classify, recognise"),
        ('"int8"', '"int4"', "graphs.rec.precisions has 'int4'; known: fp32, int8, int8-unfused"),
        ('"int8"', '"int8-unfused"', "'int8-unfused', which needs the pass 'mark'"),
        (
            '"normalise", "ctc_head"',
            '"normalise", "mark", "ctc_head"',
            "must stand in the order normalise, ctc_head, mark",
        ),
        ('"recognise"', '"recognise"\nint8.method = "max"', "int8.method has 'max'; known: percentile, entropy, mse"),
        ('"normalise", ', "", "needs a precision and 'normalise' as its first pass"),
        ('name = "', 'name = "A ', "name: 'A "),
        ("[graphs.rec]", '[graphs."rec.int8"]', "a graph's name has no dot"),
        ('kind = "', 'kind = "speech', "task: task 'speech"),
        ('"int8"', '"int8", "int8"', "graphs.rec.precisions names one twice"),
        ("exact_drop = 0.5", "exact_drop = 50", "limits are shares between -1 and 1"),
        (
            "exact_drop = 0.5",
            "exact_drop = 0.5\n        gate.overlap = 0.9",
            "can have exact_drop and cer_drop, not",
        ),
        ('"recognise"', '"recognise"\nint8.percentile = 0', "int8.percentile must be above 0 and at most 100"),
        ('"recognise"', '"recognise"\nint8.share = 9', "int8: shares are between 0 and 1"),
        ("[graphs.rec]", "[graphs.rec", "cannot be used"),
        ("[graphs.rec]", f"[graphs.rec]\nx = {'[' * 5000}", "cannot be used"),
        ('sha256 = "', 'sha256 = ["', "cannot be used"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = checkpoint.recipe(tmp_path / "tiny.toml", b"", **{old: new})
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert reason in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_recogniser_without_its_ctc_head_is_refused_with_its_recipe(tmp_path: Path) -> None:
    path = checkpoint.recipe(tmp_path / "tiny.toml", b"", **{', "ctc_head"': ""})
    with pytest.raises(ConfigError, match=r"tiny\.toml: graphs\.rec\.passes needs 'ctc_head'"):
        read(path)


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read \(No such file"):
        read(tmp_path / "none.toml")
