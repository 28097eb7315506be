"""`provision build --kv-heads` and `provision sweep gqa`, as somebody in the workshop uses them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import spelled
from support.processes import clean_environment

from models.folder import BundleFolder

pytestmark = [pytest.mark.journey, pytest.mark.long]


class Workshop:
    """A recipe of an encoder with one attention block of four heads."""

    def __init__(self, folder: Path) -> None:
        """Lay everything down."""
        self.folder = folder
        content = spelled.encoder(alike=[(0, 2), (1, 3)])
        spelled.install(folder / "packages", content)
        spelled.recipe(folder / "tiny.toml", content)

    def provision(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `provision` command to its end."""
        own = {"PYTHONPATH": str(self.folder / "packages"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        return subprocess.run(
            [str(Path(sys.executable).with_name("provision")), *arguments],
            env=clean_environment() | own,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_a_bundle_is_built_with_the_heads_that_were_asked_for(workshop: Workshop) -> None:
    built = workshop.provision("build", "tiny.toml", "--out", "bundle", "--kv-heads", "2")
    assert built.returncode == 0, built.stderr
    assert "encoder: gqa" in built.stderr
    steps = BundleFolder(workshop.folder / "bundle").manifest.provenance.steps
    assert [step.asked for step in steps if step.asked] == ["2 key and value heads, subspace"]


def test_heads_that_cannot_be_shared_end_the_build_with_one_sentence_and_nothing_written(workshop: Workshop) -> None:
    built = workshop.provision("build", "tiny.toml", "--out", "bundle", "--kv-heads", "3")
    assert built.returncode == 1
    assert built.stderr.splitlines()[-1] == (
        "provision: the 4 heads at make_attention of encoder (tiny_encoder/encoder.onnx) cannot share 3 key and value "
        "heads evenly: give --kv-heads one of 1, 2, 4"
    )
    assert not (workshop.folder / "bundle").exists()


def test_a_sweep_is_shown_printed_and_drawn(workshop: Workshop) -> None:
    shown = workshop.provision("sweep", "gqa", "tiny.toml", "--plot", "heads.svg")
    assert shown.returncode == 0, shown.stderr
    assert "encoder of tiny: 1 attention blocks, 20 of gate" in shown.stdout
    assert (workshop.folder / "heads.svg").read_text().startswith("<svg")
    printed = workshop.provision("sweep", "gqa", "tiny.toml", "--json")
    document = json.loads(printed.stdout)
    assert [(row["kv_heads"], row["method"]) for row in document["rows"]][:2] == [(4, "none"), (2, "subspace")]
    assert all({"parameters", "macs", "latency_ms", "peak_bytes", "cosine"} <= set(row) for row in document["rows"])
    refused = workshop.provision("sweep", "gqa", "tiny.toml", "--split", "tune")
    assert refused.returncode == 1
    assert "no split 'tune'" in refused.stderr
