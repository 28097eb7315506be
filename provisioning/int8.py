"""The steps from a float graph to its INT8 forms.

    plain -> watch -> equalise -> watch -> search [-> mark] -> quantize

All forms share what was watched. With fused operators (pass mark) there are two: `int8` leaves neck and head to their
kernels, in FP16; `int8-unfused` is for engines without these kernels and quantizes them too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from appliance.runtime import Runtime
from models import schema
from models.bundle import Quantized
from models.errors import ConfigError
from models.folder import pack_arrays, unpack_arrays
from models.spec import Array
from provisioning import calibrate
from provisioning.recipe import GraphRecipe
from provisioning.recipe import Int8 as Int8Recipe
from provisioning.steps import THREADS, Steps

UNFUSED = "int8-unfused"
_SAMPLES, _PICTURES = 16, 64
_SIDE = 320
_PIXELS = 2_000_000
"""What a search looks at: so many samples, evenly chosen, or as many as have so many pixels in all; of a page the
middle, with sides no longer than that."""
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Int8:
    """Makes the INT8 forms of one graph."""

    steps: Steps
    runtime: Runtime
    name: str
    recipe: GraphRecipe
    plain: bytes
    """The float graph before pass mark."""
    samples: Sequence[Mapping[str, Array]]
    samples_sha256: str
    """Of the pictures; what the task's settings make of them is the graph's input."""
    task_settings: object
    shape: Sequence[int]
    """Of an input, for which the multiply-accumulates are counted."""
    notes: dict[str, str]
    """What there is to say, for the report."""
    head: str = ""
    """Of a graph of role "locate", the form of its output."""
    _done: dict[str, Quantized] = field(default_factory=dict)

    def make(self, precision: str) -> tuple[bytes, Quantized]:
        """The graph in `precision`, and how it was made."""
        even, seen = self._even()
        fused = "mark" in self.recipe.passes and precision != UNFUSED
        found = json.loads(self._search("int8", even, seen, []))
        if precision == UNFUSED:
            more = json.loads(self._search(UNFUSED, even, seen, list(found["kept"])))
            found = {**more, "kept": {**found["kept"], **more["kept"]}}
        keep = list(found["kept"])

        def quantize() -> bytes:
            return _quantize(even, seen, keep, mark=fused)

        content = self._run("quantize", precision, [even, seen], [keep, fused], quantize)
        measured = self._run("share", precision, [content], list(self.shape), lambda: _shares(content, self.shape))
        int8 = self.recipe.int8
        thresholds = f"percentile {int8.percentile:g}" if int8.method == "percentile" else int8.method
        return content, schema.load(Quantized, {"thresholds": thresholds, **json.loads(measured), **_named(found)})

    def _run(
        self, step: str, precision: str, inputs: Sequence[bytes | str], settings: object, make: Callable[[], bytes]
    ) -> bytes:
        return self.steps.run(step, self.name, precision, inputs, settings, make)

    def _even(self) -> tuple[bytes, bytes]:
        """The graph with its channels evened out, and what was watched in it."""
        plain, share = self.plain, self.recipe.int8.share
        seen = self._watch(plain)
        even = self._run("equalise", "int8", [plain, seen], share, lambda: _equalise(plain, seen, share)[0])
        alone = self._run("left_alone", "int8", [plain, seen], share, lambda: _equalise(plain, seen, share)[1])
        self.notes[f"{self.name} int8: tensors not equalised"] = alone.decode() or "none"
        return even, self._watch(even)

    def _watch(self, content: bytes) -> bytes:
        int8 = self.recipe.int8
        settings = [self.recipe.role, self.task_settings, int8.method, int8.percentile, int8.pooled]
        return self._run(
            "watch",
            "int8",
            [content, self.samples_sha256],
            settings,
            lambda: _watch(content, self.samples, self.runtime, int8),
        )

    def _search(self, precision: str, even: bytes, seen: bytes, kept: list[str]) -> bytes:
        """JSON of what stays in float beside `kept`: for `int8` outside fused operators, else inside."""
        int8 = self.recipe.int8
        chosen = [int8.float_budget, int8.keep_float, kept, self.recipe.passes]
        settings = [self.recipe.role, self.head, self.task_settings, list(self.shape), *chosen]

        def search() -> bytes:
            return _search(self, precision, even, seen, kept)

        return self._run("search", precision, [even, seen, self.samples_sha256], settings, search)


def _named(found: Mapping[str, object]) -> dict[str, object]:
    return {"divergence": found["divergence"], "kept_float": found["kept"]}


def _watch(content: bytes, samples: Sequence[Mapping[str, Array]], runtime: Runtime, int8: Int8Recipe) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - onnx is slow to import and rarely needed on a second build
    from provisioning.passes import quantize  # noqa: PLC0415

    model = passes.load(content, "the graph")
    axes = quantize.expose(model, pooled=int8.pooled)
    watched = calibrate.watch(passes.save(model), axes, samples, runtime, THREADS)
    return pack_arrays(
        {f"{name}:low": one.low for name, one in watched.items()}
        | {f"{name}:high": one.high for name, one in watched.items()}
        | {f"{name}:mean": one.mean for name, one in watched.items()}
        | {f"{name}:threshold": np.array(one.threshold(int8.method, int8.percentile)) for name, one in watched.items()}
    )


def _seen(content: bytes, what: str) -> dict[str, Array]:
    """Statistic `what` of every tensor that was watched."""
    return {
        name.removesuffix(f":{what}"): array
        for name, array in unpack_arrays(content).items()
        if name.endswith(f":{what}")
    }


def _thresholds(seen: bytes) -> dict[str, float]:
    return {name: float(array) for name, array in _seen(seen, "threshold").items()}


def _equalise(content: bytes, seen: bytes, share: float) -> tuple[bytes, bytes]:
    """The equalised graph, and in words which tensors were left alone for what reason."""
    from provisioning import passes  # noqa: PLC0415 - see _watch
    from provisioning.passes import equalise  # noqa: PLC0415

    model = passes.load(content, "the graph")
    left_alone = equalise.equalise(model, _seen(seen, "low"), _seen(seen, "high"), share)
    by_reason: dict[str, list[str]] = {}
    for tensor, reason in left_alone.items():
        by_reason.setdefault(reason, []).append(tensor)
    words = "; ".join(f"{', '.join(tensors)} ({reason})" for reason, tensors in by_reason.items())
    return passes.save(model), words.encode()


def _search(int8: Int8, precision: str, even: bytes, seen: bytes, kept: list[str]) -> bytes:
    from provisioning import sensitivity  # noqa: PLC0415 - see _watch

    forced = int8.recipe.int8.keep_float
    everything = sensitivity.work(even, int8.shape)
    outside = sensitivity.work(_marked(even), int8.shape) if "mark" in int8.recipe.passes else everything
    inside = {name: macs for name, macs in everything.items() if name not in outside}
    fused = precision != UNFUSED
    counted = outside if fused else everything
    means, samples = _seen(seen, "mean"), _few(int8.samples, int8.recipe)
    role, head = int8.recipe.role, int8.head
    search = sensitivity.Search(even, role, _thresholds(seen), means, samples, int8.runtime, THREADS, head)
    targets = set(search.names)
    never = sum(macs for name, macs in counted.items() if name not in targets or name in kept)
    budget = int(int8.recipe.int8.float_budget * sum(counted.values()) - never)
    if forced is not None:
        unknown = [name for name in forced if name not in targets]
        if unknown:
            msg = (
                f"graphs.{int8.name}.int8.keep_float has {', '.join(unknown)}, "
                f"but only these can stay in float: {', '.join(sorted(targets))}"
            )
            raise ConfigError(msg)
        gains = dict.fromkeys(forced, 0.0)
        after = search.divergence({*forced, *(inside if fused else ())})
    else:
        candidates = {name: macs for name, macs in (outside if fused else inside).items() if name in targets}
        chosen = search.keep(candidates, {*kept, *(inside if fused else ())}, budget)
        gains, after = dict(chosen.gains), chosen.after
    rounded = {name: round(gain, _DIGITS) for name, gain in gains.items()}
    return json.dumps({"kept": rounded, "divergence": round(after, _DIGITS)}).encode()


def _few(samples: Sequence[Mapping[str, Array]], graph: GraphRecipe) -> list[Mapping[str, Array]]:
    """Of a large one the middle, where the graph takes any size. Of whole pictures more: each is one decision."""
    most, cut = _PICTURES if graph.samples else _SAMPLES, -1 in graph.shape[2:]
    chosen = [samples[i * len(samples) // most] for i in range(most)] if len(samples) > most else samples
    few: list[Mapping[str, Array]] = []
    pixels = 0
    for sample in chosen:
        x = _middle(sample["x"]) if cut else sample["x"]
        pixels += x.size // 3
        if few and pixels > _PIXELS:
            break
        few.append({"x": x})
    return few


def _middle(x_NCHW: Array) -> Array:
    """The middle of a page; a line, whose height is below `_SIDE`, is left whole."""
    height, width = x_NCHW.shape[2:]
    if min(height, width) <= _SIDE:
        return x_NCHW
    top, left = (height - _SIDE) // 2, (width - _SIDE) // 2
    return np.ascontiguousarray(x_NCHW[:, :, top : top + _SIDE, left : left + _SIDE])


def _marked(content: bytes) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - see _watch
    from provisioning.passes import mark  # noqa: PLC0415

    return passes.save(mark.mark(passes.load(content, "the graph")))


def _quantize(even: bytes, seen: bytes, keep_float: Sequence[str], *, mark: bool) -> bytes:
    from provisioning import passes  # noqa: PLC0415 - see _watch
    from provisioning.passes import quantize  # noqa: PLC0415

    model = passes.load(_marked(even) if mark else even, "the graph")
    return passes.save(quantize.quantize(model, _thresholds(seen), _seen(seen, "mean"), keep_float))


def _shares(content: bytes, shape: Sequence[int]) -> bytes:
    from provisioning import passes, sensitivity  # noqa: PLC0415 - see _watch
    from provisioning.passes import fused  # noqa: PLC0415

    inlined = passes.save(fused.inline(passes.load(content, "the graph")))
    shares = {"share": content, "share_of_all": inlined}
    return json.dumps(
        {name: round(sensitivity.int8_share(graph, shape), _DIGITS) for name, graph in shares.items()}
    ).encode()
