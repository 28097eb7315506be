"""The parity report: two bundles on the same samples, kept beside the one that devices are to run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import checkpoint, tiny
from support.workshop import Workshop
from typer.testing import CliRunner

from models.bundle import Step
from models.errors import BundleError
from models.folder import BundleFolder
from models.measurements import Answering, Parity
from provisioning.cli import app
from provisioning.pack import pack

pytestmark = pytest.mark.unit

DIGEST = "0" * 64


def compared(**device: int | str) -> Parity:
    ours = Answering("ppocr-v4", "1.1.0", DIGEST, **{"precision": "int8"} | device)  # type: ignore[arg-type]
    return Parity(ours, Answering("ppocr-v4", "1.1.0", DIGEST, "fp32"), "exact match", -0.4, "435 lines", "cpu", {})


def test_the_sentence_names_precision_shared_heads_and_points() -> None:
    said = str(replace(compared(kv_heads=2), interval_points=(-1.2, 0.4), agreement=0.971))
    assert said == (
        "INT8, 2 KV heads on the device against float upstream: -0.4 points of exact match "
        "(95 % interval -1.2 to +0.4, 435 lines); both read the same on 97.1%"
    )
    assert "against float ppocr-v4 1.0.0 upstream" in str(
        replace(compared(), upstream=Answering("ppocr-v4", "1.0.0", DIGEST, "fp32"))
    )


def provision(*arguments: str) -> str:
    return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout


def test_bundles_of_tensors_are_compared_on_golden_inputs_and_the_report_is_kept(tmp_path: Path) -> None:
    ours, theirs = (tiny.scale_bundle(tmp_path / f"v{scale}", scale) for scale in (2, 1))
    assert BundleFolder(ours).parity() is None
    said = provision("parity", str(ours), str(theirs))
    assert "float on the device against float scale 1.0.0 upstream: +0.0 points of likeness of outputs" in said
    kept = BundleFolder(ours).parity()
    assert kept is not None
    assert (kept.device.version, kept.upstream.version, kept.points) == ("2.0.0", "1.0.0", 0.0)
    nothing = tiny.scale_bundle(tmp_path / "v0", 0)
    assert "-100.0 points" in provision("parity", str(nothing), str(theirs))


def test_a_report_does_not_speak_for_another_bundle_that_is_put_in_its_place(tmp_path: Path) -> None:
    ours = tiny.scale_bundle(tmp_path / "v1", 1)
    provision("parity", str(ours))
    kept = (ours / "measurements" / "parity.json").read_bytes()
    tiny.scale_bundle(ours, 3)
    assert not (ours / "measurements" / "parity.json").exists()
    (ours / "measurements" / "parity.json").write_bytes(kept)
    assert BundleFolder(ours).parity() is None


def test_bundles_without_a_graph_in_common_are_refused(tmp_path: Path) -> None:
    ours, theirs = tiny.scale_bundle(tmp_path / "v1", 1), tiny.scale_bundle(tmp_path / "v2", 2, ["other"])
    with pytest.raises(BundleError, match="no graph of the same name"):
        provision("parity", str(ours), str(theirs))


def test_readers_are_compared_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(tmp_path)
    monkeypatch.syspath_prepend(str(workshop.folder / "packages"))
    built = workshop.build()
    asked = Step("gqa", "rec", (), DIGEST, asked="2 key and value heads, subspace")
    pack(replace(built, steps=(*built.steps, asked)), Path(workshop.out))
    data = checkpoint.labelled(tmp_path / "more", {"calibrate": 1, "gate": 5})
    given = ("--precision", "int8", "--data", str(data), "--json")
    found = json.loads(provision("parity", workshop.out, *given))
    assert found["device"]["kv_heads"] == 2
    assert (found["device"]["precision"], found["upstream"]["precision"]) == ("int8", "fp32")
    assert found["on"] == "5 lines"
    assert 0 <= found["agreement"] <= 1
    low, high = found["interval_points"]
    assert low <= found["points"] <= high
