"""The manifest: canonical bytes, identity, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from models.bundle import Accuracy, Blob, Golden, Graph, Manifest, Provenance, Source, Step, TaskSpec, Variant
from models.errors import BundleError
from models.spec import ModelSpec, TensorSpec

pytestmark = pytest.mark.unit

GRAPH, INPUTS, OUTPUTS, LABELS = (Blob.of(content) for content in (b"graph", b"inputs", b"outputs", b"labels"))

MANIFEST = Manifest(
    name="reader",
    version="1.2.0",
    licence="Apache-2.0",
    task=TaskSpec("reading", settings={"thresholds": [0.3, 0.5], "größe": 48}, labels=LABELS),
    graphs={
        "rec": Graph(
            spec=ModelSpec(
                inputs=(TensorSpec("x", "FP32", (-1, 3, 48, -1), "NCHW"),),
                outputs=(TensorSpec("y", "INT32", (-1, -1)),),
            ),
            variants={"fp32": Variant(GRAPH, Golden(INPUTS, OUTPUTS, 1e-4), Accuracy(0.9, 0.02, 128))},
            left_out={"int8": "missed the limit"},
        )
    },
    provenance=Provenance(
        recipe_sha256="0" * 64,
        data_sha256={"gate": "1" * 64},
        tools={"onnx": "1.23"},
        sources=(Source("package", "1", "file.onnx", "2" * 64),),
        steps=(Step("fold", "rec", ("3" * 64,), "4" * 64),),
    ),
)


def changed(edit: Callable[[dict[str, Any]], None]) -> bytes:
    """Canonical bytes of the manifest after `edit` of its plain data."""
    data = json.loads(MANIFEST.to_bytes())
    edit(data)
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def variant(data: dict[str, Any]) -> dict[str, Any]:
    """The only variant in a manifest's plain data."""
    return data["graphs"]["rec"]["variants"]["fp32"]  # type: ignore[no-any-return]


def test_a_manifest_read_back_is_the_same_with_the_same_identity() -> None:
    back = Manifest.from_bytes(MANIFEST.to_bytes())
    assert back == MANIFEST
    assert back.digest == MANIFEST.digest


def test_the_identity_changes_with_any_content() -> None:
    others = [replace(MANIFEST, version="1.2.1"), replace(MANIFEST, licence="MIT"), replace(MANIFEST, name="other")]
    assert len({MANIFEST.digest, *(other.digest for other in others)}) == 4


def test_the_identity_does_not_depend_on_the_order_in_which_tables_were_filled() -> None:
    def reversed_keys(value: Any) -> Any:  # noqa: ANN401 - plain data
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        return value

    settings = reversed_keys(dict(MANIFEST.task.settings))
    assert replace(MANIFEST, task=replace(MANIFEST.task, settings=settings)).to_bytes() == MANIFEST.to_bytes()


def test_kernels_are_blobs_by_architecture_and_a_manifest_without_any_keeps_its_identity() -> None:
    cubin = Blob.of(b"cubin")
    manifest = replace(MANIFEST, kernels={"sm_87": {"ctc-merge64.sm_87.cubin": cubin}})
    assert cubin in manifest.blobs()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert b"kernels" not in MANIFEST.to_bytes()
    for kernels in ({"../x": {"a": cubin}}, {"sm_87": {"a/b": cubin}}):
        with pytest.raises(BundleError, match="cannot be a name"):
            replace(MANIFEST, kernels=kernels)


def test_canonical_bytes_are_compact_sorted_utf8_json_that_states_its_format() -> None:
    content = MANIFEST.to_bytes()
    assert b'"format":1' in content
    assert "größe".encode() in content
    assert (
        json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == content
    )


def test_every_blob_is_listed_once() -> None:
    rec = MANIFEST.graphs["rec"]
    twice = replace(rec, variants={**rec.variants, "int8": rec.variants["fp32"]})
    manifest = replace(MANIFEST, graphs={"rec": twice})
    assert sorted(blob.sha256 for blob in manifest.blobs()) == sorted(
        blob.sha256 for blob in (GRAPH, INPUTS, OUTPUTS, LABELS)
    )


def test_a_blob_accepts_its_own_content_and_no_other() -> None:
    GRAPH.check(b"graph")
    for content in (b"grapf", b"", b"graph "):
        with pytest.raises(BundleError, match="is damaged: fetch or build the bundle again"):
            GRAPH.check(content)


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "Upper", "ä", "a" * 65, "a b", "a\n", "+", "-x"])
@pytest.mark.parametrize("place", ["name", "version", "graphs"])
def test_a_name_that_could_not_stand_in_a_path_or_topic_is_refused(place: str, name: str) -> None:
    value = {name: MANIFEST.graphs["rec"]} if place == "graphs" else name
    with pytest.raises(BundleError, match="cannot be a name"):
        replace(MANIFEST, **{place: value})


@pytest.mark.parametrize(
    "blob", [Blob("../../etc/passwd", 1), Blob("A" * 64, 1), Blob("0" * 63, 1), Blob("0" * 64, -1)]
)
def test_a_blob_that_names_no_sha256_is_refused_before_it_becomes_a_path(blob: Blob) -> None:
    with pytest.raises(BundleError, match="that is no sha256"):
        replace(MANIFEST, task=replace(MANIFEST.task, labels=blob))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"nonsense", b'{"format":1' + b"0" * 5000 + b"}"],
    ids=["empty", "cut", "not-utf8", "deep", "text", "endless-number"],
)
def test_bytes_that_are_no_json_are_refused(content: bytes) -> None:
    with pytest.raises(BundleError, match="is not JSON"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("written", [2, "1", None, 0])
def test_a_format_from_the_future_asks_for_a_newer_appliance(written: object) -> None:
    with pytest.raises(BundleError, match=r"has format .*, this version reads 1: update the appliance"):
        Manifest.from_bytes(changed(lambda data: data.update(format=written)))


@pytest.mark.parametrize("content", [b"[]", b"1", b"null", b'"text"'])
def test_json_that_is_no_manifest_at_all_is_refused(content: bytes) -> None:
    with pytest.raises(BundleError, match="has format None"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda data: data.update(format=True), "format must be int, not bool"),
        (lambda data: data.update(nmae="x"), "unknown key 'nmae'; did you mean 'name'?"),
        (lambda data: data.pop("licence"), "licence is missing"),
        (lambda data: variant(data).pop("golden"), "graphs.rec.variants.fp32.golden is missing"),
        (lambda data: variant(data)["golden"].update(tolerance=float("nan")), "must be a finite number"),
        (lambda data: variant(data)["golden"].update(tolerance=float("inf")), "must be a finite number"),
        (lambda data: variant(data)["golden"].update(tolerance=10**400), "must be a number of usual size"),
        (lambda data: data["task"]["settings"].update(a=float("nan")), "holds what JSON cannot carry"),
        (lambda data: data.update(format=1, seats=1), "unknown key 'seats'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_the_place(
    edit: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    with pytest.raises(BundleError) as caught:
        Manifest.from_bytes(changed(edit))
    assert sentence in str(caught.value)


def indented(content: bytes) -> bytes:
    """The same JSON with white space."""
    return json.dumps(json.loads(content), sort_keys=True, indent=1).encode()


def test_half_of_a_surrogate_pair_which_json_can_escape_but_utf8_cannot_carry_is_refused() -> None:
    content = MANIFEST.to_bytes().replace(b'"Apache-2.0"', b'"\\ud800"')
    with pytest.raises(BundleError, match="holds what JSON cannot carry"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize(
    "respell",
    [
        indented,
        lambda content: content + b"\n",
        lambda content: content.replace("größe".encode(), b"gr\\u00f6\\u00dfe"),
        lambda content: content.replace(b'{"format":1', b'{"format":1,"format":1'),
        lambda content: content.replace(b'"tolerance":0.0001', b'"tolerance":1e-4'),
        lambda content: content.replace(b'"tolerance":', b'"mismatch":0.0,"tolerance":'),
    ],
    ids=["indented", "newline", "escaped", "key-twice", "number", "default-written"],
)
def test_another_spelling_of_the_same_content_is_refused_because_its_digest_would_differ(
    respell: Callable[[bytes], bytes],
) -> None:
    content = respell(MANIFEST.to_bytes())
    assert content != MANIFEST.to_bytes()
    with pytest.raises(BundleError, match=r"canonical form|does not fit"):
        Manifest.from_bytes(content)
