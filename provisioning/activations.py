"""Runs samples through a graph and hands out what flows through some of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import onnx_ir as ir
from onnx_ir.passes import common

from appliance.runtime import Runtime
from models.spec import Array
from provisioning import passes


def collector(
    samples: Sequence[Mapping[str, Array]], runtime: Runtime, threads: int
) -> Callable[[ir.Model, Sequence[str]], Iterator[Mapping[str, Array]]]:
    """A function of a model and names of tensors that yields, for each of `samples` in order, those tensors."""

    def collect(model: ir.Model, names: Sequence[str]) -> Iterator[Mapping[str, Array]]:
        watched = passes.load(passes.save(model), "the graph")
        inputs = {value.name for value in watched.graph.inputs}
        wanted = [name for name in names if name not in inputs]
        if not wanted:
            yield from samples
            return
        computed = {value.name: value for node in watched.graph for value in node.outputs}
        watched.graph.outputs.clear()
        watched.graph.outputs.extend(computed[name] for name in wanted)
        common.RemoveUnusedNodesPass()(watched)  # what comes after is not run
        session = runtime.open(passes.save(watched), threads=1)
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(lambda one: {**one, **session.run(one, wanted)}, samples)

    return collect
