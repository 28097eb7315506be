"""A bundle on disk: written whole or not at all, and checked each time it is read."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models import folder as folder_module
from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.errors import BundleError
from models.folder import MANIFEST, BundleFolder, blob_path, pack_arrays, unpack_arrays, write_bundle, write_file
from models.measurements import Measurements
from models.spec import Array, ModelSpec

pytestmark = pytest.mark.unit

MEASURED = Measurements({"cpu": "a"}, {"rec": {"fp32": 5.5, "int8": 3.25}})
ARRAYS = {"b/y": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1, 2], np.int64)}


def packed(
    graph: bytes = b"graph", golden: bytes | None = None, labels: bytes = "a\n ß\nc".encode()
) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest, and the content of its blobs by sha256."""
    contents = (graph, pack_arrays(ARRAYS) if golden is None else golden, b"outputs", labels)
    blobs = [Blob.of(content) for content in contents]
    manifest = Manifest(
        name="reader",
        version="1",
        licence="MIT",
        task=TaskSpec("tensors", labels=blobs[3]),
        graphs={
            "rec": Graph(ModelSpec((), ()), {"fp32": Variant(blobs[0], Golden(blobs[1], blobs[2], tolerance=0.1))})
        },
        provenance=Provenance("0" * 64, {}, {}, (), ()),
    )
    return manifest, {blob.sha256: content for blob, content in zip(blobs, contents, strict=True)}


def golden_of(folder: BundleFolder) -> Blob:
    """The blob that holds the golden inputs."""
    return folder.manifest.graphs["rec"].variants["fp32"].golden.inputs


def test_a_written_bundle_reads_back_with_its_identity_blobs_labels_and_arrays(tmp_path: Path) -> None:
    manifest, blobs = packed()
    write_bundle(tmp_path / "made" / "here", manifest, blobs, {})
    folder = BundleFolder(tmp_path / "made" / "here")
    assert folder.manifest.digest == manifest.digest
    assert folder.read(manifest.graphs["rec"].variants["fp32"].graph) == b"graph"
    assert folder.read_labels() == ["a", " ß", "c"]
    arrays = folder.read_arrays(golden_of(folder))
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert (arrays[name] == array).all()


def test_labels_that_are_no_text_are_the_bundles_fault(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(labels=b"\xff"), {})
    with pytest.raises(BundleError, match="are not UTF-8 text: build the bundle again"):
        BundleFolder(tmp_path).read_labels()


def test_a_bundle_without_labels_has_none(tmp_path: Path) -> None:
    manifest, blobs = packed()
    write_bundle(tmp_path, replace(manifest, task=TaskSpec("tensors")), blobs, {})
    assert BundleFolder(tmp_path).read_labels() == []


def test_the_same_bundle_is_the_same_files_wherever_it_is_written(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_bundle(tmp_path / name, *packed(), {"cpu": MEASURED})

    def files(folder: Path) -> Mapping[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert len(files(tmp_path / "one")) == 6


def test_packed_arrays_are_the_same_bytes_in_any_order() -> None:
    assert pack_arrays(ARRAYS) == pack_arrays(dict(reversed(ARRAYS.items())))


def test_a_tensor_may_have_any_name_that_numpy_uses_itself() -> None:
    arrays = {name: np.full(2, i) for i, name in enumerate(("file", "args", "kwds", "allow_pickle", "arr_0"))}
    have = unpack_arrays(pack_arrays(arrays))
    assert have.keys() == arrays.keys()
    assert all((have[name] == array).all() for name, array in arrays.items())


def test_a_new_bundle_in_an_old_folder_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(b"old graph"), {"cpu": Measurements({}, {}), "orin-nx": MEASURED})
    write_bundle(tmp_path, *packed(b"new graph"), {"cpu": MEASURED})
    folder = BundleFolder(tmp_path)
    assert {path.name for path in (tmp_path / "blobs" / "sha256").iterdir()} == {
        blob.sha256 for blob in folder.manifest.blobs()
    }
    assert folder.measurements("cpu") == MEASURED
    assert folder.measurements("orin-nx") is None


def test_a_folder_without_its_manifest_is_no_bundle_and_says_how_to_make_one(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(), {})
    (tmp_path / MANIFEST).unlink()
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BundleError, match=r"is no bundle: manifest\.json cannot be read .*`provision build`"):
            BundleFolder(path)


def test_content_that_is_not_what_the_manifest_names_is_never_written(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(b"old graph"), {})
    manifest, blobs = packed(b"new graph")
    damaged = {sha256: content + b"!" for sha256, content in blobs.items()}
    with pytest.raises(BundleError, match="is damaged"):
        write_bundle(tmp_path, manifest, damaged, {})
    folder = BundleFolder(tmp_path)
    folder.check_content()
    assert folder.manifest == packed(b"old graph")[0]


@pytest.mark.parametrize("fails_at", range(6))
def test_a_disk_that_fills_up_at_any_file_leaves_the_old_bundle_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    write_bundle(tmp_path, *packed(b"old", labels=b"old"), {"cpu": MEASURED})
    manifest, blobs = packed(b"new", pack_arrays({}), b"new labels")
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) > fails_at:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_file(path, content)

    monkeypatch.setattr(folder_module, "write_file", write)
    if fails_at < 5:  # graph, golden inputs and labels are new, then come measurements and manifest
        with pytest.raises(OSError, match="No space left"):
            write_bundle(tmp_path, manifest, blobs, {"cpu": MEASURED})
    else:
        write_bundle(tmp_path, manifest, blobs, {"cpu": MEASURED})
    folder = BundleFolder(tmp_path)
    folder.check_content()
    assert (folder.manifest == manifest) == (fails_at >= 5)


@pytest.mark.parametrize("fails_at", range(8))
@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_a_new_bundle_whose_writing_is_cut_short_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, fault: BaseException | type[BaseException]
) -> None:
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) > fails_at:
            raise fault
        write_file(path, content)

    monkeypatch.setattr(folder_module, "write_file", write)
    reports = {"report.html": b"<html>", "report.json": b"{}"}
    manifest, blobs = packed()
    with pytest.raises((KeyboardInterrupt, OSError)):  # at one of four blobs, measurements, two reports, the manifest
        write_bundle(tmp_path / "made" / "here", manifest, blobs, {"cpu": MEASURED}, reports)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_bundle_whose_writing_is_interrupted_after_its_manifest_stands_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None
) -> None:
    if old:
        write_bundle(tmp_path, *packed(old), {})
    manifest, blobs = packed(b"new")
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if (tmp_path / MANIFEST).exists() and (tmp_path / MANIFEST).read_bytes() == manifest.to_bytes():
            raise KeyboardInterrupt

    monkeypatch.setattr(folder_module.os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path, manifest, blobs, {})
    folder = BundleFolder(tmp_path)
    assert folder.manifest == manifest
    folder.check_content()


def test_two_builds_do_not_write_into_one_folder(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(b"old"), {})
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="another build is writing into it"):
        write_bundle(tmp_path, *packed(b"new"), {})
    os.close(held)
    BundleFolder(tmp_path).check_content()
    write_bundle(tmp_path, *packed(b"new"), {})


def test_what_is_not_a_bundles_own_stays_in_its_folder(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(b"old"), {})
    others = [tmp_path / "measurements" / "mine.csv", tmp_path / "blobs" / "sha256" / "deep" / "x", tmp_path / "notes"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("precious")
    write_bundle(tmp_path, *packed(b"new"), {})
    assert [other.read_text() for other in others] == ["precious"] * 3


def test_a_report_of_an_earlier_bundle_does_not_outlive_it(tmp_path: Path) -> None:
    write_bundle(tmp_path, *packed(b"old"), {}, {"report.html": b"old", "report.json": b"{}"})
    write_bundle(tmp_path, *packed(b"new"), {}, {"report.html": b"new"})
    assert (tmp_path / "report.html").read_bytes() == b"new"
    assert not (tmp_path / "report.json").exists()


def test_a_damaged_blob_of_an_earlier_bundle_is_written_again(tmp_path: Path) -> None:
    manifest, blobs = packed()
    write_bundle(tmp_path, manifest, blobs, {})
    blob_path(tmp_path, golden_of(BundleFolder(tmp_path))).write_bytes(b"damaged")
    write_bundle(tmp_path, manifest, blobs, {})
    BundleFolder(tmp_path).check_content()


def test_a_file_that_cannot_be_replaced_leaves_no_other_behind(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "state", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_damaged_blob_is_refused_when_it_is_read_not_when_the_bundle_is_opened(tmp_path: Path) -> None:
    manifest, blobs = packed()
    write_bundle(tmp_path, manifest, blobs, {})
    graph = manifest.graphs["rec"].variants["fp32"].graph
    blob_path(tmp_path, graph).write_bytes(b"grapf")
    folder = BundleFolder(tmp_path)
    with pytest.raises(BundleError, match=f"blob {graph.sha256[:12]} is damaged"):
        folder.read(graph)
    blob_path(tmp_path, graph).unlink()
    with pytest.raises(BundleError, match=r"cannot be read .*: fetch or build it again"):
        folder.read(graph)


def pickled() -> bytes:
    """An npz file that would run code when it is opened carelessly."""
    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([object], dtype=object))
    return buffer.getvalue()


def one_array(array: Array) -> bytes:
    """An npy file, which is no npz file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"no arrays", pack_arrays(ARRAYS)[:-40], pickled(), one_array(np.zeros(2))],
    ids=["empty", "text", "cut", "pickle", "npy"],
)
def test_a_golden_vector_that_holds_no_arrays_is_a_damaged_bundle(tmp_path: Path, content: bytes) -> None:
    write_bundle(tmp_path, *packed(golden=content), {})
    folder = BundleFolder(tmp_path)
    with pytest.raises(BundleError, match="holds no arrays"):
        folder.read_arrays(golden_of(folder))


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[1]", b"\xff", b'{"machine": {}}', b"[" * 100_000],
    ids=lambda content: repr(content)[:20],
)
def test_measurements_that_are_missing_or_unusable_are_none(tmp_path: Path, content: bytes | None) -> None:
    write_bundle(tmp_path, *packed(), {"cpu": MEASURED})
    path = tmp_path / "measurements" / "cpu.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert BundleFolder(tmp_path).measurements("cpu") is None


def test_a_replaced_file_holds_the_new_content_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for content in (b"long old content", b"new"):
        write_file(path, content)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_into_a_missing_folder_fails_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "missing" / "state", b"new")
    assert list(tmp_path.iterdir()) == []
