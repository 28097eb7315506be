"""What is open in a worker: the sessions of one bundle and its task, proven before they serve."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson

from appliance import wire
from appliance.adapters import host
from appliance.broken import BrokenSession
from appliance.core.budget import PICTURE_COPIES
from appliance.gauge import Gauge, trim
from appliance.runtime import Session, choose
from appliance.runtime.machine import time_in_turn
from models import tasks
from models.bundle import Blob, Golden, Graph, TaskSpec
from models.engine import ENGINES
from models.errors import ApplianceError, BundleError, InsufficientMemory, ModelError, NotFound
from models.folder import BundleFolder
from models.measurements import Memory, fastest
from models.spec import DTYPES, Array, ModelSpec, Tensor, TensorSpec
from models.tasks.picture import decode_picture, picture_size

T = TypeVar("T")

_TRIED_SIZES = (1, 32, 224, 320, 8, 640)
_MOST_TRIED_ELEMENTS = 2**24
"""A guess that needs more than this is no request that anybody sends, and could take all memory there is."""
_PIXEL_BYTES = 3
"""Of a decoded picture."""
_MEASURE_RUNS = 10
_MEASURE_S = 0.25
"""For all precisions of one graph together: whoever starts a daemon waits for it."""


class Model:
    """What is open in this worker: sessions by graph name, and the bundle's task."""

    def __init__(self, order: wire.Open) -> None:
        """Load and prove the model of `order`; raises BundleError when it cannot be trusted."""
        started = time.perf_counter()
        engines = [Path(order.bundle, ENGINES)] if order.bundle else []
        engines += [Path(order.engines)] if order.engines else []
        prepared = Path(order.prepared) if order.prepared else None
        self.runtime = choose(
            order.runtime,
            engines=engines,
            run_limit_bytes=order.run_limit_bytes,
            prepared=prepared,
            gpu_memory_bytes=order.gpu_memory_bytes,
            gpu_only=order.gpu_only,
            concurrency=order.concurrency,
        )
        gauge = Gauge()
        self.overhead_bytes = host.process_bytes(os.getpid())
        before_bytes = gauge.resident_bytes()
        self._max_pixels, self._run_limit_bytes = order.max_pixels, order.run_limit_bytes
        self._sessions: dict[str, Session] = {}
        self._folder: BundleFolder | None = None
        self._tried: dict[str, Array] | None = None
        self._specs: dict[str, ModelSpec] = {}
        self.precisions: dict[str, str] = {}
        self.latency_ms: dict[str, dict[str, float]] = {}
        self.unproven = ""
        if order.bundle:
            folder = BundleFolder(Path(order.bundle))
            if folder.manifest.digest != order.digest:
                msg = f"{folder.path} holds another bundle than when the daemon started: restart it to serve that one"
                raise BundleError(msg)
            self._folder = folder
            self._task = tasks.make(folder.manifest.task, folder.read_labels())
            self._open_all(folder, order)
        else:
            self._task = tasks.make(TaskSpec("tensors"), [])
            self._open_bare(Path(order.onnx), spoiled=order.spoiled)
        peak_bytes = gauge.peak_bytes()
        self.trim()
        self.memory: Memory | None = None
        if gauge.works:
            weights_bytes = max(0, gauge.resident_bytes() - before_bytes)
            self.memory = Memory(weights_bytes, max(weights_bytes, peak_bytes - before_bytes))
        self.load_s = time.perf_counter() - started

    def describe(self) -> wire.Ready:
        """What the daemon needs to know of it."""
        return wire.Ready(
            graphs={name: wire.GraphInfo(self._specs[name], self.precisions[name]) for name in self._sessions},
            runtime=self.runtime.name,
            load_s=self.load_s,
            latency_ms=self.latency_ms,
            unproven=self.unproven,
            overhead_bytes=self.overhead_bytes,
            memory=self.memory,
        )

    def trim(self) -> None:
        """Give back the memory that earlier runs have left allocated for later ones."""
        self.runtime.release()
        trim()

    def input_bytes(self, graph: str, tensors: Sequence[Tensor]) -> int:
        """The size by which a request's memory is judged: of its tensors, or of its pictures once decoded.

        Raises InsufficientMemory for pictures whose pixels alone are more than runs may take, and what
        `picture_size` raises; nothing is decoded.
        """
        if graph:
            return sum([tensor.size_bytes for tensor in tensors])
        pixels = [math.prod(picture_size(content, self._max_pixels)) for content in tensors[0].to_array()]
        largest = max(pixels, default=0) * _PIXEL_BYTES
        if 0 < self._run_limit_bytes < largest * PICTURE_COPIES:
            msg = (
                f"a picture takes {largest // 2**20} MiB once decoded, and what is made of it as much again, but runs "
                f"of this model may take {self._run_limit_bytes // 2**20} MiB: scale it down first"
            )
            raise InsufficientMemory(msg, need_bytes=largest * PICTURE_COPIES, have_bytes=self._run_limit_bytes)
        return largest

    def infer(
        self, graph: str, inputs: Sequence[Tensor], outputs: Sequence[str] | None
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Run one graph on raw tensors that the daemon has checked against its specification."""
        answers, timing_ms = self._infer(graph, {tensor.name: tensor.to_array() for tensor in inputs}, outputs)
        return [Tensor.from_array(name, array) for name, array in answers.items()], timing_ms

    def infer_together(
        self, graph: str, requests: Sequence[Sequence[Tensor]], outputs: Sequence[str] | None
    ) -> tuple[list[list[Tensor]], dict[str, float]]:
        """`infer` for several requests in one run: their tensors, alike but for the first axis, are joined along it."""
        arrays = [{tensor.name: tensor.to_array() for tensor in inputs} for inputs in requests]
        joined = {name: np.concatenate([array[name] for array in arrays]) for name in arrays[0]}
        answers, timing_ms = self._infer(graph, joined, outputs)
        counts = [len(next(iter(array.values()))) for array in arrays]
        ends = np.cumsum(counts)
        for name, array in answers.items():
            if len(array) != ends[-1]:
                msg = (
                    f"output {name!r} has {len(array)} rows for {ends[-1]} of the input, so requests cannot share a run"
                )
                raise ModelError(msg)
        parts = {name: np.split(array, ends[:-1]) for name, array in answers.items()}
        return [
            [Tensor.from_array(name, part[i]) for name, part in parts.items()] for i in range(len(requests))
        ], timing_ms

    def predict(self, pictures: Tensor, goes_on: Callable[[], None]) -> tuple[list[Tensor], dict[str, float]]:
        """Answer for each encoded picture of a BYTES tensor, as JSON; `goes_on` is called after each computed graph."""
        timing_ms = {"decode": 0.0, "inference": 0.0, "processing": 0.0}

        def run(graph: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            answers, inference_ms = _timed(lambda: run_finite(self._session(graph), inputs))
            timing_ms["inference"] += inference_ms
            goes_on()
            return answers

        def answer(content: bytes) -> bytes:
            picture_HWC, decode_ms = _timed(lambda: decode_picture(content, self._max_pixels))
            timing_ms["decode"] += decode_ms
            before_ms = timing_ms["inference"]
            result, task_ms = _timed(lambda: self._task.predict(picture_HWC, run))
            timing_ms["processing"] += task_ms - (timing_ms["inference"] - before_ms)
            return orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY)

        results = np.array([answer(content) for content in pictures.to_array()], dtype=np.object_)
        return [Tensor.from_array("result", results)], timing_ms

    def prove(self, goes_on: Callable[[], None]) -> None:
        """Answer the golden vectors again; raises BundleError or ModelError when that is not right.

        They are read again, so a folder that was damaged since shows as well. A bare file runs on zeros once more.
        """
        for name, session in self._sessions.items():
            if self._folder:
                prove(session, self._folder, self._folder.manifest.graphs[name].variants[self.precisions[name]].golden)
            elif self._tried is not None:
                run_finite(session, self._tried)
            goes_on()

    def _infer(
        self, graph: str, arrays: Mapping[str, Array], outputs: Sequence[str] | None
    ) -> tuple[Mapping[str, Array], dict[str, float]]:
        session = self._session(graph)
        answers, inference_ms = _timed(lambda: run_finite(session, arrays, outputs))
        return answers, {"inference": inference_ms}

    def break_(self, fault: str, amount: float) -> None:
        """Fault injection: break every session in that way, or make them whole again with "none"."""
        for name, session in self._sessions.items():
            whole = session.whole if isinstance(session, BrokenSession) else session
            self._sessions[name] = whole if fault == "none" else BrokenSession(whole, fault, amount)

    def _session(self, graph: str) -> Session:
        if graph not in self._sessions:
            msg = f"there is no graph {graph!r}; this bundle has {', '.join(sorted(self._sessions))}"
            raise NotFound(msg)
        return self._sessions[graph]

    def _open_all(self, folder: BundleFolder, order: wire.Open) -> None:
        """Open every graph; at once where nothing is timed: much of it is reading, hashing and running."""
        graphs = folder.manifest.graphs
        candidates = {name: _candidates(name, graph, order) for name, graph in graphs.items()}

        def open_one(name: str) -> None:
            self._open_best(folder, name, candidates[name], order)

        if not self.runtime.opens_at_once or any(len(one) > 1 for one in candidates.values()):
            for name in graphs:
                open_one(name)
            return
        with ThreadPoolExecutor(order.concurrency) as pool:
            for _ in pool.map(open_one, graphs):
                pass  # raises what opening raised

    def _open_best(self, folder: BundleFolder, name: str, candidates: Sequence[str], order: wire.Open) -> None:
        """Open a graph in the precision of `candidates` that `fastest` prefers here."""
        graph = folder.manifest.graphs[name]
        opened: dict[str, Session] = {}
        for precision in candidates:
            variant = graph.variants[precision]
            opened[precision] = self._open(folder, variant.graph, graph.spec, spoiled=order.spoiled)
            check_spec(f"graph {name!r} in {precision}", graph.spec, opened[precision].spec)
            prove(opened[precision], folder, variant.golden)
        best = candidates[0]
        if len(candidates) > 1:
            inputs = folder.read_arrays(graph.variants[best].golden.inputs)
            self.latency_ms[name] = time_in_turn(opened, inputs, _MEASURE_RUNS, _MEASURE_S)
            best = fastest(self.latency_ms[name])
        for precision in opened.keys() - {best}:
            opened[precision].close()
        self._sessions[name], self._specs[name], self.precisions[name] = opened[best], graph.spec, best

    def _open(self, folder: BundleFolder, blob: Blob, spec: ModelSpec, *, spoiled: bool) -> Session:
        few_shapes = _few_shapes(spec)
        again = None if spoiled else self.runtime.open_again(blob.sha256, threads=1, few_shapes=few_shapes)
        if again:
            return again
        content = folder.read(blob)
        if spoiled:
            content = _spoiled(content)
            blob.check(content)  # as reading it from a disk that turned the byte would have been
        return self.runtime.open(content, threads=1, few_shapes=few_shapes)

    def _open_bare(self, path: Path, *, spoiled: bool) -> None:
        """Open one ONNX file as the only graph and try to run it once on zeros."""
        try:
            content = path.read_bytes()
        except OSError as error:
            msg = f"{path} cannot be read ({error.strerror}): bring it back, or give another with --onnx NAME=FILE"
            raise BundleError(msg) from error
        session = self.runtime.open(_spoiled(content) if spoiled else content, threads=1)
        self._sessions[wire.BARE_GRAPH], self._specs[wire.BARE_GRAPH] = session, session.spec
        self.precisions[wire.BARE_GRAPH] = "as given"
        for size in _TRIED_SIZES:
            shapes = {spec.name: [size if n == -1 else n for n in spec.shape] for spec in session.spec.inputs}
            if size > 1 and sum(map(math.prod, shapes.values())) > _MOST_TRIED_ELEMENTS:
                continue
            zeros = {spec.name: _zeros(spec, shapes[spec.name]) for spec in session.spec.inputs}
            try:
                answers = session.run(zeros)
            except ApplianceError as error:
                self.unproven = f"it ran on none of the guessed sizes of its variable dimensions: {error}"
            else:
                self.unproven = ""
                self._tried = zeros if all(map(_finite, answers.values())) else None  # some divide by what is 0 here
                return
            if all(-1 not in spec.shape for spec in session.spec.inputs):
                break


def _few_shapes(spec: ModelSpec) -> bool:
    """Whether at most one dimension of each input varies, besides the first: a text line's width, not a picture's."""
    return all(sum(size == -1 for size in tensor.shape[1:]) <= 1 for tensor in spec.inputs)


def _candidates(name: str, graph: Graph, order: wire.Open) -> list[str]:
    """Precisions of `graph` to open: the one that is known to be preferred here, otherwise all that may serve."""
    candidates, known = allowed(graph, order.precision), order.latency_ms.get(name, {})
    if set(candidates) <= set(known):
        return [fastest({precision: known[precision] for precision in candidates})]
    return candidates


def allowed(graph: Graph, precision: str) -> list[str]:
    """Precisions of `graph` that may serve, sorted: `precision` if it passed the gate, otherwise those that did."""
    return [precision] if precision in graph.variants else sorted(graph.variants)


def check_spec(what: str, said: ModelSpec, found: ModelSpec) -> None:
    """Raise BundleError unless the manifest says of the tensors of a graph what the graph itself says."""
    for side, ours, its in (("input", said.inputs, found.inputs), ("output", said.outputs, found.outputs)):
        wanted, have = (sorted(f"{one.name} {one.datatype} {list(one.shape)}" for one in each) for each in (ours, its))
        if wanted != have:
            msg = (
                f"{what} has {side}s {', '.join(have)}, but the manifest says {', '.join(wanted)}: "
                "build the bundle again"
            )
            raise BundleError(msg)


def run_finite(session: Session, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
    """`session.run`; raises ModelError when it makes NaN or infinite values of inputs that hold none."""
    answers = session.run(inputs, outputs)
    wrong = next((name for name, array in answers.items() if not _finite(array)), None)
    if wrong is not None and all(map(_finite, inputs.values())):
        msg = (
            f"output {wrong!r} holds NaN or infinite values although the input holds none: the model computes nonsense"
        )
        raise ModelError(msg)
    return answers


def prove(session: Session, folder: BundleFolder, golden: Golden) -> None:
    """Check a session against its golden vector; raises BundleError for an answer outside the bundle's tolerance."""
    golden.check(run_finite(session, folder.read_arrays(golden.inputs)), folder.read_arrays(golden.outputs))


def _spoiled(content: bytes) -> bytes:
    """`content` as a disk gives it that has turned its first byte."""
    return bytes([content[0] ^ 0xFF]) + content[1:]


def _finite(array: Array) -> bool:
    """Whether all elements are finite."""
    return array.dtype.kind != "f" or np.count_nonzero(np.isfinite(array)) == array.size


def _zeros(spec: TensorSpec, shape: Sequence[int]) -> Array:
    if spec.datatype == "BYTES":
        return np.full(shape, b"", dtype=np.object_)
    return np.zeros(shape, DTYPES[spec.datatype])


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    value = call()
    return value, (time.perf_counter() - started) * 1e3
