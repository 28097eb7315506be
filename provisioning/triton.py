"""A bundle as a model repository of Triton, which serves its graphs by the names and tensors they have with our daemon.

    <out>/<bundle>.<graph>/config.pbtxt
    <out>/<bundle>.<graph>/<number>/model.onnx    the highest number is the newest; the one before stays to go back to

Triton counts versions; what the manifest calls a version is a parameter. The fields are those of its ModelConfig.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.bundle import Graph
from models.engine import Shapes
from models.errors import ConfigError
from models.folder import BundleFolder, write_file
from models.spec import ModelSpec, TensorSpec
from models.tasks import shapes

BATCH, QUEUE, WAIT_S = 8, 256, 10.0
"""The daemon's own limits (`limits.batch`, `queue`, `wait_s`); a test compares."""
_KEPT = 2
_CONFIG, _MODEL = "config.pbtxt", "model.onnx"


@dataclass(frozen=True, slots=True)
class Exported:
    """One model of the repository."""

    model: str
    version: int
    precision: str
    batch: int
    """Most requests that share a run; 0 where none do."""


def export(
    folder: BundleFolder, out: Path, *, precision: str = "fp32", batch: int = BATCH, gpu: bool
) -> list[Exported]:
    """Write each graph of a bundle as a model below `out`; a graph that is its newest version already stays as it is.

    Raises ConfigError for graphs that lack `precision`.
    """
    graphs = folder.manifest.graphs
    lacking = sorted(name for name, graph in graphs.items() if precision not in graph.variants)
    if lacking:
        passed = sorted(set.intersection(*(set(graph.variants) for graph in graphs.values())))
        msg = f"{', '.join(lacking)} of {folder.path} is not there in {precision}: choose {' or '.join(passed)}"
        raise ConfigError(msg)
    return [_export(folder, name, graph, out, precision, batch, gpu=gpu) for name, graph in sorted(graphs.items())]


def _export(
    folder: BundleFolder, name: str, graph: Graph, out: Path, precision: str, batch: int, *, gpu: bool
) -> Exported:
    manifest, variant = folder.manifest, graph.variants[precision]
    model, content = f"{manifest.name}.{name}", folder.read(variant.graph)
    example = {key: array.shape for key, array in folder.read_arrays(variant.golden.inputs).items()}
    place = out / model
    numbers = sorted(int(path.name) for path in place.glob("[0-9]*") if path.name.isdigit())
    newest = place / str(numbers[-1]) / _MODEL if numbers else None
    same = newest is not None and newest.is_file() and newest.read_bytes() == content
    number = numbers[-1] if same else (numbers[-1] if numbers else 0) + 1
    config = Config(model, graph.spec, _batch(graph.spec, batch), gpu)
    told = {"bundle_version": manifest.version, "bundle_digest": manifest.digest, "precision": precision}
    profiles = shapes.profiles(manifest.task, name, graph.spec, example)
    place.mkdir(parents=True, exist_ok=True)
    if not same:  # the folder of a version appears with its model in it, for servers that look
        part = place / f".{number}.new"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write_file(part / _MODEL, content)
        part.rename(place / str(number))
    write_file(place / _CONFIG, config.text(profiles, told).encode())
    for old in numbers[: len(numbers) + (not same) - _KEPT]:
        shutil.rmtree(place / str(old))
    return Exported(model, number, precision, config.batch)


def _batch(spec: ModelSpec, most: int) -> int:
    """Requests share a run where they may with our daemon; to Triton a tensor without further axes cannot be shared."""
    flat = any(len(tensor.shape) < 2 for tensor in (*spec.inputs, *spec.outputs))  # noqa: PLR2004 - batch and one more
    return most if spec.rows_are_apart and most > 1 and not flat else 0


@dataclass(frozen=True, slots=True)
class Config:
    """What config.pbtxt says of one model."""

    model: str
    spec: ModelSpec
    batch: int
    gpu: bool

    def text(self, profiles: Sequence[Mapping[str, Shapes]], told: Mapping[str, str]) -> str:
        """The file: runs are made of what waits, nobody waits for company, and each profile is run once at load."""
        return "\n".join([*self._rows(), *self._warm_up(profiles), *self._parameters(told)]) + "\n"

    def _rows(self) -> Iterator[str]:
        yield f"name: {json.dumps(self.model)}"
        yield 'backend: "onnxruntime"'
        yield f"max_batch_size: {self.batch}"
        for kind, tensors in (("input", self.spec.inputs), ("output", self.spec.outputs)):
            for tensor in tensors:
                yield f"{kind} {{ {self._tensor(tensor)} }}"
        yield "version_policy { latest { num_versions: 1 } }"
        yield f"instance_group {{ kind: {'KIND_GPU' if self.gpu else 'KIND_CPU'} count: 1 }}"
        if self.batch:
            queue = (
                f"timeout_action: REJECT default_timeout_microseconds: {round(WAIT_S * 1e6)} "
                f"allow_timeout_override: true max_queue_size: {QUEUE}"
            )
            yield f"dynamic_batching {{ max_queue_delay_microseconds: 0 default_queue_policy {{ {queue} }} }}"

    def _tensor(self, tensor: TensorSpec) -> str:
        dims = ", ".join(map(str, self._without_batch(tensor.shape)))
        return f"name: {json.dumps(tensor.name)} data_type: {_type(tensor)} dims: [ {dims} ]"

    def _warm_up(self, profiles: Sequence[Mapping[str, Shapes]]) -> Iterator[str]:
        for number, profile in enumerate(profiles):
            rows = [f"name: {json.dumps(f'profile {number}')}"]
            usual = {tensor.name: profile[tensor.name].usual for tensor in self.spec.inputs}
            together = min(self.batch, *(shape[0] for shape in usual.values())) if self.batch else 1
            rows.append(f"batch_size: {max(together, 1)}")
            for tensor in self.spec.inputs:
                dims = ", ".join(map(str, self._without_batch(usual[tensor.name])))
                data = "zero_data" if tensor.datatype == "BYTES" else "random_data"
                value = f"data_type: {_type(tensor)} dims: [ {dims} ] {data}: true"
                rows.append(f"inputs {{ key: {json.dumps(tensor.name)} value {{ {value} }} }}")
            yield f"model_warmup {{ {' '.join(rows)} }}"

    @staticmethod
    def _parameters(told: Mapping[str, str]) -> Iterator[str]:
        for key, value in told.items():
            yield f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"

    def _without_batch(self, shape: Sequence[int]) -> Sequence[int]:
        return shape[1:] if self.batch else shape


def _type(tensor: TensorSpec) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
