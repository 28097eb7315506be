"""Heads that share, asked for on the command line: the bundle, its provenance, and the sweep over all numbers."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import cv2
import numpy as np
import pytest
from support import spelled

from models.errors import ConfigError, GateFailed, SourceError
from models.folder import BundleFolder
from provisioning import samples
from provisioning.build import Built, build
from provisioning.cache import Cache
from provisioning.pack import pack
from provisioning.passes import load
from provisioning.passes.attention import find
from provisioning.recipe import RecipeFile, Samples, read
from provisioning.sharing import Sharing
from provisioning.sweep import ALL_HEADS, Swept, sweep_gqa

pytestmark = pytest.mark.unit

ZOO = Path(__file__).parents[2] / "models" / "zoo"


class Workshop:
    """A recipe of an encoder with one attention block of four heads, and its checkpoint."""

    def __init__(self, folder: Path, content: bytes) -> None:
        """Lay everything down."""
        self.folder = folder
        self.content = content
        spelled.install(folder, content)
        self.told: list[str] = []

    def recipe(self, cosine: float = 0.5) -> RecipeFile:
        """The recipe with a limit."""
        return read(spelled.recipe(self.folder / "tiny.toml", self.content, cosine))

    def build(self, wanted: Sharing | None, cosine: float = 0.5, cache: Path | None = None) -> Built:
        """Build with shared heads."""
        return build(self.recipe(cosine), self.folder, "auto", Cache(cache), self.told.append, wanted)

    def sweep(self) -> Swept:
        """Sweep all numbers of heads."""
        return sweep_gqa(self.recipe(), self.folder, "gate", Cache(None), self.told.append)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Workshop(tmp_path, spelled.encoder(alike=[(0, 2), (1, 3)]))


def test_a_bundle_with_shared_heads_passes_its_gate_and_says_how_it_was_made(
    workshop: Workshop, tmp_path: Path
) -> None:
    plain = workshop.build(None)
    built = workshop.build(Sharing(2, "subspace"), cosine=0.999)
    content, before = (one.graphs["encoder"].variants["fp32"].content for one in (built, plain))
    assert content != before
    assert [step.name for step in built.steps] == ["fetch", "attention", "normalise", "attention", "gqa", "compare"]
    assert next(step.asked for step in built.steps if step.name == "gqa") == "2 key and value heads, subspace"
    manifest = pack(built, tmp_path / "bundle")
    assert BundleFolder(tmp_path / "bundle").manifest == manifest
    assert manifest.graphs["encoder"].variants["fp32"].agreement is not None


def test_a_second_build_with_shared_heads_takes_everything_from_the_cache(workshop: Workshop, tmp_path: Path) -> None:
    first = workshop.build(Sharing(2, "subspace"), cache=tmp_path / "cache")
    workshop.told.clear()
    second = workshop.build(Sharing(2, "subspace"), cache=tmp_path / "cache")
    assert second.steps == first.steps
    assert workshop.told == ["reading samples", "6 steps done before"]


def test_sharing_that_changes_too_much_is_not_packed(workshop: Workshop) -> None:
    with pytest.raises(GateFailed, match=r"cosine of the outputs: .* the limit cosine is 99\.99%"):
        workshop.build(Sharing(1, "average"), cosine=0.9999)


def test_a_number_that_does_not_divide_the_heads_is_refused_before_anything_is_made(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"4 heads at make_attention of encoder \(tiny_.*encoder.onnx\).* 3 key"):
        workshop.build(Sharing(3, "subspace"))
    assert "encoder: normalise" not in workshop.told


def test_a_sweep_measures_every_number_of_heads_by_every_method(workshop: Workshop) -> None:
    swept = workshop.sweep()
    assert [(row.kv_heads, row.method) for row in swept.rows] == [
        (4, ALL_HEADS), (2, "subspace"), (2, "average"), (1, "subspace"), (1, "average"),
    ]  # fmt: skip
    assert swept.blocks == {"make_attention": 4}
    full, two, two_averaged, one, _ = swept.rows
    assert full.cosine == pytest.approx(1)
    assert two.cosine == pytest.approx(1, abs=1e-4)  # two heads are enough here
    assert (two_averaged.cosine or 0) < 0.999
    assert (one.error or 0) > 0.01
    assert full.parameters > two.parameters == two_averaged.parameters > one.parameters
    assert full.macs > two.macs > one.macs
    assert full.parameters - two.parameters == 2 * 2 * spelled.SIZE * (spelled.WIDTH + 1)
    assert all(row.latency_ms > 0 and row.peak_bytes > 1e7 for row in swept.rows)


def test_the_plot_of_a_sweep_is_one_picture_with_a_line_for_each_method(workshop: Workshop) -> None:
    root = ET.fromstring(workshop.sweep().to_svg())  # noqa: S314 - our own
    assert root.tag.endswith("svg")
    panels = root.findall("{*}g")
    assert all(len(panel.findall("{*}polyline")) == 2 for panel in panels)
    assert "key and value heads" in "".join(root.itertext())


def test_pictures_are_shown_whole_and_in_quarters_and_every_second_file_is_for_the_gate(tmp_path: Path) -> None:
    for name, side in (("a.jpg", 64), ("b.png", 20), ("c.jpg", 64)):
        picture = np.full((side, side, 3), (0, 0, 255), np.uint8)
        (tmp_path / name).write_bytes(cv2.imencode(Path(name).suffix, picture)[1].tobytes())
    wanted = Samples("pictures", mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5))
    calibrate, gate = (samples.load(wanted, [-1, 3, 16, 16], tmp_path, split)[0] for split in ("calibrate", "gate"))
    assert (len(calibrate), len(gate)) == (10, 1)
    assert gate[0]["x"].shape == (1, 3, 16, 16)
    np.testing.assert_allclose(gate[0]["x"][0, :, 3, 3], [1, -1, -1], atol=0.02)  # red first
    with pytest.raises(SourceError, match="two are the least"):
        samples.load(wanted, [-1, 3, 16, 16], tmp_path / "nowhere", "gate")
    with pytest.raises(ConfigError, match="no split 'tune' of unlabelled samples: choose calibrate or gate"):
        samples.load(wanted, [-1, 3, 16, 16], tmp_path, "tune")


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"a\.jpg cannot be used"):
        samples.load(Samples("pictures"), [-1, 3, 16, 16], tmp_path, "calibrate")


def test_sentences_are_the_same_each_time_and_others_for_the_gate() -> None:
    wanted = Samples("tokens", count=5, vocabulary=2000, longest=9)
    first, digest = samples.load(wanted, [-1, -1], Path(), "calibrate")
    again, _ = samples.load(wanted, [-1, -1], Path(), "calibrate")
    gate, other = samples.load(wanted, [-1, -1], Path(), "gate")
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one["input_ids"], two["input_ids"])
        assert ((one["input_ids"] > 0) == (one["attention_mask"] > 0)).all()
    assert digest != other
    assert any((one["input_ids"] != two["input_ids"]).any() for one, two in zip(first, gate, strict=True))


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_zoo_can_be_read(path: Path) -> None:
    assert read(path).recipe.name == path.stem


BLOCKS = {"ppocr-v4": 2, "ppocr-v5": 2, "ppocr-v6": 2, "vit-s-focus": 12, "minilm": 3}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BLOCKS)
def test_all_blocks_of_a_real_model_are_found_as_published_and_normalised(name: str) -> None:
    from importlib import metadata  # noqa: PLC0415

    from models.bundle import Source  # noqa: PLC0415
    from provisioning import sources  # noqa: PLC0415
    from provisioning.passes.normalise import normalise  # noqa: PLC0415

    recipe = read(ZOO / f"{name}.toml").recipe
    graph = next(graph for graph in recipe.graphs.values() if graph.role in {"recognise", "encode"})
    package = recipe.source
    try:
        metadata.version(package.package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {package.package} {package.version}, which is not installed")
    content = sources.fetch(Source(package.package, package.version, graph.file, graph.sha256))
    published = find(load(content, name))
    normalised = find(normalise(load(content, name), graph.shape))
    for found in (published, normalised):
        assert len(found.blocks) == BLOCKS[name]
        assert found.not_understood == ()
    shapes = [
        [(block.heads, block.size, round(block.scale, 5)) for block in found.blocks]
        for found in (published, normalised)
    ]
    assert shapes[0] == shapes[1]
