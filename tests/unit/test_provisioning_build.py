"""A whole build of a tiny checkpoint, in memory and onto disk."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support import checkpoint
from support.workshop import Workshop

from appliance.runtime import Session, choose
from appliance.runtime.machine import machine
from models.errors import ConfigError, GateFailed, SourceError, WorkshopError
from models.folder import BundleFolder
from provisioning import build as building
from provisioning import pack as packing
from provisioning.cache import Cache
from provisioning.data import load
from provisioning.gate import Gate, Verdict
from provisioning.pack import check_folder, pack
from provisioning.steps import THREADS
from provisioning.verify import verify

pytestmark = pytest.mark.unit

RUNTIME = choose("onnxruntime-cpu")


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return Workshop(tmp_path)


def test_a_build_makes_every_precision_and_says_how_well_each_reads(workshop: Workshop) -> None:
    built = workshop.build()
    graph = built.graphs["rec"]
    assert set(graph.variants) == {"fp32", "int8"}
    assert all(variant.accuracy for variant in graph.variants.values())
    assert graph.left_out == {}
    assert graph.original is not None
    assert graph.original.lines == 4
    assert built.labels.split("\n") == [*checkpoint.LETTERS, " "]


def test_every_step_starts_from_what_an_earlier_one_made(workshop: Workshop) -> None:
    steps = {step.name: step for step in workshop.build().steps}
    assert list(steps) == [
        "fetch", "labels", "normalise", "ctc_head", "read", "watch", "equalise", "left_alone", "search", "quantize",
        "share",
    ]  # fmt: skip
    assert steps["normalise"].inputs == (steps["fetch"].output,) == steps["labels"].inputs
    assert steps["ctc_head"].inputs == (steps["normalise"].output,)


def test_the_manifest_says_what_computes_on_int8_and_what_was_kept_in_float(workshop: Workshop, tmp_path: Path) -> None:
    rec = pack(workshop.build(), tmp_path / "bundle").graphs["rec"]
    assert rec.variants["fp32"].quantized is None
    searched = rec.variants["int8"].quantized
    assert searched is not None
    assert searched.thresholds == "percentile 99.99"
    assert searched.share == searched.share_of_all > 0.95
    assert 0 <= searched.divergence < 0.1
    assert BundleFolder(tmp_path / "bundle").manifest.graphs["rec"] == rec


def test_what_stays_in_float_can_be_forced(workshop: Workshop) -> None:
    forced = '"recognise"\n        int8 = {method = "mse", keep_float = ["Conv_0"]}'
    quantized = workshop.build(**{'"recognise"': forced}).graphs["rec"].variants["int8"].quantized
    assert quantized is not None
    assert list(quantized.kept_float) == ["Conv_0"]
    assert quantized.thresholds == "mse"
    assert quantized.share == pytest.approx(1 - 829440 / (829440 + 69120 + 122880 + 6400), abs=0.02)


def test_an_operator_that_is_not_there_cannot_be_kept_in_float(workshop: Workshop) -> None:
    forced = '"recognise"\n        int8 = {keep_float = ["Conv_0", "Conv_99"]}'
    with pytest.raises(ConfigError, match=r"graphs.rec.int8.keep_float has Conv_99, .* can stay in float: Conv_0,"):
        workshop.build(**{'"recognise"': forced})


def test_every_digest_can_be_followed_from_the_bundle_to_its_sources_and_data(
    workshop: Workshop, tmp_path: Path
) -> None:
    manifest = pack(workshop.build(), tmp_path / "bundle")
    known = {source.sha256 for source in manifest.provenance.sources} | set(manifest.provenance.data_sha256.values())
    for step in manifest.provenance.steps:
        assert set(step.inputs) <= known, step
        known.add(step.output)
    assert {variant.graph.sha256 for variant in manifest.graphs["rec"].variants.values()} <= known
    assert set(manifest.provenance.data_sha256) == {"calibrate", "gate"}
    assert "onnxruntime" in manifest.provenance.tools


def test_the_manifest_keeps_every_limit_with_what_was_measured(workshop: Workshop, tmp_path: Path) -> None:
    built = workshop.build(**{"gate.exact_drop = 0.5": "gate.exact_drop = 0.5\n        gate.cer_drop = 1.0"})
    manifest = pack(built, tmp_path / "bundle")
    for variant in manifest.graphs["rec"].variants.values():
        assert [(check.name, check.limit, check.met) for check in variant.checks] == [
            ("exact_drop", 0.5, True), ("cer_drop", 1.0, True),
        ]  # fmt: skip
    assert BundleFolder(tmp_path / "bundle").manifest == manifest


def test_a_missed_limit_of_the_error_rate_leaves_a_precision_out(workshop: Workshop) -> None:
    with pytest.raises(GateFailed, match=r"the character error rate rose by .*, the limit cer_drop is -100\.00"):
        workshop.build(**{"gate.exact_drop = 0.5": "gate.exact_drop = 0.5\n        gate.cer_drop = -1"})


def test_the_report_lies_beside_the_manifest_and_outside_its_digest(workshop: Workshop, tmp_path: Path) -> None:
    manifest = pack(workshop.build(), tmp_path / "bundle")
    page = (tmp_path / "bundle" / "report.html").read_text()
    report = json.loads((tmp_path / "bundle" / "report.json").read_text())
    assert manifest.digest in page
    assert set(report["lines"]) == {"rec fp32", "rec int8"}
    assert [one["graph"] for one in report["limits"]] == ["rec fp32", "rec int8"]
    assert "(HardSwish reads it)" in report["notes"]["rec int8: tensors not equalised"]
    assert report["latency_ms"]["rec"].keys() == {"original", "fp32", "int8"}
    (tmp_path / "bundle" / "report.html").unlink()
    BundleFolder(tmp_path / "bundle").check_content()


class Counting:
    """onnxruntime, and what it opened."""

    name, opens_at_once = RUNTIME.name, RUNTIME.opens_at_once

    def __init__(self) -> None:
        """Nothing is open yet."""
        self.opened: list[bytes] = []

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> Session:
        self.opened.append(graph)
        return RUNTIME.open(graph, threads=threads, few_shapes=few_shapes)


def test_gate_and_packing_open_each_graph_once(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Counting()
    monkeypatch.setattr(building, "choose", lambda _: runtime)
    built = workshop.build()
    pack(built, tmp_path / "bundle")
    graphs = [built.graphs["rec"].published, *(variant.content for variant in built.graphs["rec"].variants.values())]
    assert [runtime.opened.count(graph) for graph in graphs] == [1, 1, 1]


def test_a_fault_of_a_library_inside_a_step_names_the_graph_and_the_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("provisioning.passes.normalise.normalise", broken)
    with pytest.raises(WorkshopError, match=r"step rec: normalise failed .*RuntimeError: first line\)"):
        workshop.build()


def test_two_builds_are_the_same_to_the_byte(workshop: Workshop, tmp_path: Path) -> None:
    first = pack(workshop.build(), tmp_path / "first")
    second = pack(workshop.build(cache=tmp_path / "cache"), tmp_path / "second")
    third = pack(workshop.build(cache=tmp_path / "cache"), tmp_path / "third")
    assert first.to_bytes() == second.to_bytes() == third.to_bytes()
    assert str(tmp_path) not in first.to_bytes().decode()


def test_a_second_build_takes_everything_from_the_cache(workshop: Workshop, tmp_path: Path) -> None:
    workshop.build(cache=tmp_path / "cache")
    workshop.reports.clear()
    workshop.build(cache=tmp_path / "cache")
    assert workshop.reports == ["reading labelled data", "14 steps done before"]


def test_a_corrupt_entry_of_the_cache_is_made_again(workshop: Workshop, tmp_path: Path) -> None:
    before = workshop.build(cache=tmp_path / "cache")
    for entry in (tmp_path / "cache").iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    assert workshop.build(cache=tmp_path / "cache").steps == before.steps


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file")
    cache.put("key", b"content")
    assert cache.get("key") is None


def test_the_cache_follows_the_base_directory_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Cache.of_user().put("key", b"content")
    assert (tmp_path / "edge-appliance" / "key").exists()
    assert Cache.of_user().get("key") == b"content"


def test_a_gate_that_nothing_passes_fails_the_build_with_every_reason(workshop: Workshop) -> None:
    with pytest.raises(
        GateFailed, match=r"rec has no precision left: fp32: exact match fell .*; int8: exact match fell"
    ):
        workshop.build(**{"exact_drop = 0.5": "exact_drop = -1"})


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_forced_precision_is_the_only_one(workshop: Workshop, precision: str) -> None:
    assert set(workshop.build(precision).graphs["rec"].variants) == {precision}


def failing(*precisions: str) -> Callable[..., Verdict]:
    """A judgement by which only `precisions` miss the gate."""
    return lambda _gate, precision, *_: Verdict("it reads badly" if precision in precisions else "")


def test_float_is_packed_where_a_forced_precision_misses_its_gate(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "judge", failing("int8"))
    graph = workshop.build("int8").graphs["rec"]
    assert set(graph.variants) == {"fp32"}
    assert graph.left_out == {"int8": "it reads badly"}


def test_a_forced_precision_fails_only_when_float_misses_the_gate_as_well(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "judge", failing("int8", "fp32"))
    with pytest.raises(GateFailed, match="int8: it reads badly; fp32: it reads badly"):
        workshop.build("int8")


def test_a_precision_that_the_recipe_lacks_cannot_be_forced(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match="no graph of the recipe has int8, only fp32"):
        workshop.build("int8", **{', "int8"': ""})


def test_a_checkpoint_that_is_no_graph_is_one_clear_error(workshop: Workshop) -> None:
    workshop.install(b"not a graph")
    with pytest.raises(SourceError, match="is no ONNX graph"):
        workshop.build()


def test_labels_that_are_not_in_the_checkpoint_are_one_clear_error(workshop: Workshop) -> None:
    with pytest.raises(SourceError, match="no labels under 'letters' in its metadata"):
        workshop.build(**{'"character"': '"letters"'})


def test_golden_vectors_are_answers_of_the_very_graphs(workshop: Workshop, tmp_path: Path) -> None:
    pack(workshop.build(), tmp_path / "bundle")
    folder = BundleFolder(tmp_path / "bundle")
    graph = folder.manifest.graphs["rec"]
    assert [(tensor.name, tensor.shape, tensor.layout) for tensor in graph.spec.inputs] == [
        ("x", (-1, 3, 48, -1), "NCHW")
    ]
    assert [(tensor.name, tensor.layout) for tensor in graph.spec.outputs] == [("index", "NT"), ("probability", "NT")]
    for variant in graph.variants.values():
        inputs = folder.read_arrays(variant.golden.inputs)
        assert inputs["x"].shape == (1, 3, 48, 320)
        answer = RUNTIME.open(folder.read(variant.graph), threads=1).run(inputs)
        for name, known in folder.read_arrays(variant.golden.outputs).items():
            np.testing.assert_array_equal(answer[name], known)
    assert folder.read_labels() == [*checkpoint.LETTERS, " "]
    measured = folder.measurements("cpu")
    assert measured is not None
    assert measured.machine == machine()
    assert measured.latency_ms["rec"].keys() == {"fp32", "int8"}
    assert measured.memory is not None
    assert 0 <= measured.memory.weights_bytes <= measured.memory.load_peak_bytes
    assert 0 < measured.memory.load_peak_bytes < 2**30


def test_a_checkpoint_that_answers_no_numbers_is_refused(workshop: Workshop) -> None:
    model = onnx.load_model_from_string(checkpoint.recogniser())
    (variance,) = (node for node in model.graph.node if node.output == ["variance"])
    variance.attribute[0].t.CopyFrom(numpy_helper.from_array(np.full(8, -1, np.float32)))
    workshop.install(model.SerializeToString())
    with pytest.raises(SourceError, match=r"rec\.onnx answers with NaN or infinity on the calibration data"):
        workshop.build()


def test_labels_that_do_not_fit_the_classes_are_refused(workshop: Workshop) -> None:
    model = onnx.load_model_from_string(checkpoint.recogniser())
    helper.set_model_props(model, {"character": "\n".join("abcdefghij")})
    workshop.install(model.SerializeToString())
    with pytest.raises(SourceError, match=r"tells 9 characters and a blank apart, but has 11 labels"):
        workshop.build()


def test_labels_with_line_ends_of_windows_are_the_same_labels(workshop: Workshop) -> None:
    model = onnx.load_model_from_string(checkpoint.recogniser())
    helper.set_model_props(model, {"character": "\r\n".join(checkpoint.LETTERS)})
    workshop.install(model.SerializeToString())
    assert workshop.build().labels.split("\n") == [*checkpoint.LETTERS, " "]


def test_a_second_build_with_other_labels_reads_anew(workshop: Workshop, tmp_path: Path) -> None:
    workshop.build("fp32", tmp_path / "cache")
    workshop.reports.clear()
    model = onnx.load_model_from_string(workshop.content)
    helper.set_model_props(model, {"character": "\n".join("ABCxyzuv")})
    workshop.install(model.SerializeToString())
    workshop.build("fp32", tmp_path / "cache")
    assert {"rec original: read", "rec fp32: read"} <= set(workshop.reports)


def test_a_bundle_is_verified_against_the_checkpoint_it_was_made_of(workshop: Workshop, tmp_path: Path) -> None:
    pack(workshop.build(), tmp_path / "bundle")
    split = load(tmp_path / "data", "all")
    report = verify(BundleFolder(tmp_path / "bundle"), split, "fp32", RUNTIME, THREADS, workshop.reports.append).result
    assert report["agreement"] == 1.0
    assert report["original"] == report["packed"]
    assert report["original"]["lines"] == 7


@pytest.mark.parametrize("name", ["nothing", "empty", "torn"])
def test_a_bundle_may_be_written_where_nothing_else_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn" / "blobs" / "sha256").mkdir(parents=True)
    for file in (f"blobs/sha256/.{'a' * 64}.new", f"blobs/sha256/{'b' * 64}", ".report.html.new", ".manifest.json.new"):
        (tmp_path / "torn" / file).touch()
    check_folder(tmp_path / name)


def test_a_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    (tmp_path / "results" / "measurements").mkdir(parents=True)
    (tmp_path / "results" / "measurements" / "precious.csv").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "my web app"}')
    for path in (tmp_path, tmp_path / "letter.txt", tmp_path / "results", tmp_path / "app"):
        with pytest.raises(ConfigError, match="exists and is no bundle"):
            check_folder(path)


def test_a_folder_below_a_file_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ConfigError, match=r"letter\.txt is no folder: give an empty or a new folder"):
        check_folder(tmp_path / "letter.txt" / "deep" / "bundle")


def test_a_bundle_that_cannot_be_written_is_one_sentence(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    monkeypatch.setattr(packing, "write_bundle", full)
    with pytest.raises(WorkshopError, match=r"bundle cannot be written into .*/bundle \(No space left on device\)"):
        pack(workshop.build(), tmp_path / "bundle")
