"""Another processor rounds otherwise. What that may change of a build is tried by moving what the runtime computes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.workshop import Workshop

from appliance.runtime import Session, choose
from models.spec import Array, ModelSpec
from provisioning import build as building
from provisioning.build import Built, BuiltGraph
from provisioning.cache import Cache
from provisioning.recipe import read

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
RUNTIME = choose("onnxruntime-cpu")
NOISE = 1e-7
"""Relative; half of the last bit of float32 is 6e-8."""


class PerturbedSession:
    """A session each of whose float outputs is off by up to `NOISE`, the same way for the same input."""

    def __init__(self, session: Session, seed: int) -> None:
        """Wrap `session`."""
        self.spec: ModelSpec = session.spec
        self._session = session
        self._seed = seed

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        shown = hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in inputs.values())).digest()
        random = np.random.default_rng([self._seed, *shown])
        return {
            name: (array * (1 + random.uniform(-NOISE, NOISE, array.shape))).astype(array.dtype)
            if array.dtype == np.float32
            else array
            for name, array in self._session.run(inputs, outputs).items()
        }

    def close(self) -> None:
        self._session.close()


class PerturbedRuntime:
    """onnxruntime on a processor that rounds otherwise."""

    name, opens_at_once = RUNTIME.name, RUNTIME.opens_at_once

    def __init__(self, seed: int) -> None:
        """Choose the noise by `seed`."""
        self._seed = seed

    def open(self, graph: bytes, *, threads: int, few_shapes: bool = True) -> Session:
        return PerturbedSession(RUNTIME.open(graph, threads=threads, few_shapes=few_shapes), self._seed)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def here(workshop: Workshop) -> Built:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(workshop.folder / "packages"))
        return workshop.build()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rounding_of_another_processor_changes_no_decision_and_weights_by_next_to_nothing(
    workshop: Workshop, here: Built, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(workshop.folder / "packages"))
    monkeypatch.setattr(building, "choose", lambda _: PerturbedRuntime(seed))
    there = workshop.build()
    graph, other = here.graphs["rec"], there.graphs["rec"]
    assert_same_decisions(graph, other)
    assert graph.verdicts == other.verdicts
    assert_alike(graph.variants["int8"].content, other.variants["int8"].content, constants=1e-5, moved=0.0)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_rounding_of_another_processor_moves_next_to_nothing_of_the_real_recogniser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = read(ROOT / "models" / "zoo" / "ppocr-v4.toml")
    alone = replace(file, recipe=replace(file.recipe, graphs={"rec": file.recipe.graphs["rec"]}))
    built = []
    for runtime in (RUNTIME, PerturbedRuntime(1)):
        monkeypatch.setattr(building, "choose", lambda _, runtime=runtime: runtime)
        built.append(building.build(alone, file.default_data, "auto", Cache(None), lambda _: None).graphs["rec"])
    assert_same_decisions(*built)
    contents = [graph.variants["int8"].content for graph in built]
    assert_alike(contents[0], contents[1], constants=1e-3, moved=1e-5)


def assert_same_decisions(graph: BuiltGraph, other: BuiltGraph) -> None:
    """The same precisions pass and fail, and the float graph is the same to the byte."""
    assert list(graph.variants) == list(other.variants)
    assert graph.left_out.keys() == other.left_out.keys()
    assert graph.variants["fp32"].content == other.variants["fp32"].content


def assert_alike(content: bytes, other: bytes, *, constants: float, moved: float) -> None:
    """The same operators; float constants within a share of the tensor's largest; few INT8 weights one step off.

    Statistics move by the noise. A constant made of their difference moves by more: where the middle of a
    channel's range is far from 0, the noise of the middle is divided by the width of the range. A weight at the border
    of two steps may take the other one, and the bias of its channel then takes that back.
    """
    one, two = onnx.load_model_from_string(content), onnx.load_model_from_string(other)
    assert [node.SerializeToString() for node in one.graph.node] == [
        node.SerializeToString() for node in two.graph.node
    ]
    steps = total = 0
    for a, b in zip(one.graph.initializer, two.graph.initializer, strict=True):
        have, want = (numpy_helper.to_array(tensor).astype(np.float64) for tensor in (a, b))
        off = np.abs(have - want).max(initial=0.0)
        if a.data_type == onnx.TensorProto.INT8:
            assert off <= 1, a.name
            steps, total = steps + int((have != want).sum()), total + have.size
        else:
            assert off <= constants * np.abs(want).max(initial=0.0), a.name
    assert steps <= moved * total
