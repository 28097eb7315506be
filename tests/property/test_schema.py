"""Plain data and dataclasses: what was written is read back, and any other data is refused in words."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import schema
from models.bundle import (
    Accuracy,
    Blob,
    Golden,
    Graph,
    Manifest,
    Provenance,
    Source,
    Step,
    TaskSpec,
    Variant,
)
from models.errors import BundleError
from models.spec import ModelSpec, TensorSpec

pytestmark = pytest.mark.property

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAME = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
BLOB = st.builds(Blob, st.from_regex(r"[0-9a-f]{64}", fullmatch=True), st.integers(0, 2**60))
TENSORS = st.lists(
    st.builds(TensorSpec, TEXT, TEXT, st.lists(st.integers(-1, 9), max_size=3).map(tuple), TEXT), max_size=2
).map(tuple)
SETTING = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ACCURACY = st.builds(Accuracy, FINITE, FINITE, st.integers(0, 1000))
VARIANT = st.builds(Variant, BLOB, st.builds(Golden, BLOB, BLOB, FINITE, FINITE), st.none() | ACCURACY)
GRAPH = st.builds(
    Graph,
    st.builds(ModelSpec, TENSORS, TENSORS),
    st.dictionaries(NAME, VARIANT, min_size=1, max_size=2),
    st.none() | ACCURACY,
    st.dictionaries(NAME, TEXT, max_size=2),
)
PROVENANCE = st.builds(
    Provenance,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=2),
    st.dictionaries(TEXT, TEXT, max_size=2),
    st.lists(st.builds(Source, TEXT, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    st.lists(st.builds(Step, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple), TEXT), max_size=2).map(tuple),
)
MANIFEST = st.builds(
    Manifest,
    NAME,
    NAME,
    TEXT,
    st.builds(TaskSpec, NAME, st.dictionaries(TEXT, SETTING, max_size=3), st.none() | BLOB),
    st.dictionaries(NAME, GRAPH, min_size=1, max_size=2),
    PROVENANCE,
)


@given(MANIFEST)
def test_any_manifest_survives_its_canonical_bytes_with_its_identity(manifest: Manifest) -> None:
    content = manifest.to_bytes()
    back = Manifest.from_bytes(content)
    assert back.to_bytes() == content
    assert back.digest == manifest.digest
    assert back.graphs == manifest.graphs


@given(MANIFEST, st.data())
def test_a_manifest_with_any_byte_changed_is_refused_or_has_another_identity(
    manifest: Manifest, data: st.DataObject
) -> None:
    content = bytearray(manifest.to_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        changed = Manifest.from_bytes(bytes(content))
    except BundleError:
        return
    assert changed.digest != manifest.digest
    assert changed.to_bytes() == content


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(MANIFEST, PLAIN, st.data())
def test_a_manifest_with_any_value_replaced_is_refused_in_one_way_or_read(
    manifest: Manifest, odd: object, data: st.DataObject
) -> None:
    document = json.loads(manifest.to_bytes())
    at: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else data.draw(st.integers(0, len(at) - 1))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = odd
        break
    respelled = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with contextlib.suppress(schema.SchemaError, BundleError):
        schema.load(Manifest, document)
    with contextlib.suppress(BundleError):
        Manifest.from_bytes(respelled)
