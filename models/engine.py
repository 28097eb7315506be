"""A compiled engine: what a plan is valid for, and the passport that lies beside it.

    engines/<target>/<graph>.plan           the plan of the float graph; of another precision <graph>.<precision>.plan
    engines/<target>/<graph>.passport.json  `Passport`, checked before a byte of the plan is deserialized
    engines/<target>/<graph>.log            what the builder said

A plan is valid for one compute capability, one version of TensorRT and one kind of module: TensorRT has no question
that could be asked before deserializing, so the answer is kept beside the plan. Pure: takes and returns values.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from models import schema
from models.bundle import Blob
from models.errors import BundleError

FORMAT = 1
ENGINES = "engines"
"""Folder of a bundle that holds a folder for each target."""
PASSPORT = ".passport.json"
"""How the name of a passport ends."""
NEVER = "never"


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of one input that an optimization profile covers; what it is tuned for is `usual`."""

    least: tuple[int, ...]
    usual: tuple[int, ...]
    most: tuple[int, ...]

    def __contains__(self, shape: object) -> bool:
        """Whether the profile takes an input of `shape`."""
        return (
            isinstance(shape, tuple)
            and len(shape) == len(self.least)
            and all(low <= size <= high for low, size, high in zip(self.least, shape, self.most, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan is valid for; a fact that is not known, or means nothing there, is empty."""

    backend: str
    sm: str
    """Compute capability, "8.7"."""
    version: str
    """Of TensorRT or TensorRT-RTX."""
    cuda: str
    l4t: str
    """Jetson's system, "36.4.3"."""
    module: str
    """Name of the module or of the GPU."""


_FACTS = {
    "backend": "backend",
    "sm": "compute capability",
    "version": "TensorRT",
    "module": "module",
    "l4t": "L4T",
    "cuda": "CUDA",
}


@dataclass(frozen=True, slots=True)
class Passport:
    """What is known of one plan. `target` is the name it was compiled under, the facts are in `valid_for`."""

    graph: str
    precision: str
    target: str
    valid_for: Target
    graph_sha256: str
    """Of the graph as the bundle holds it."""
    plan: Blob
    profiles: tuple[Mapping[str, Shapes], ...]
    memory_bytes: int
    """Device memory for activations of the hungriest profile as the builder told it; 0 when it told nothing."""
    flags: tuple[str, ...]
    plugins: Mapping[str, str]
    """Plugin that must be known before the plan is read -> sha256 of the graph whose nodes became plugins."""
    timing_cache_sha256: str
    """Of the cache of kernel timings that the build left; empty for a backend that keeps none."""
    purpose: str
    executed: str
    """`NEVER`, or what it answered rightly after it was built."""

    def to_bytes(self) -> bytes:
        """JSON for people and programs; the facts of `valid_for` stand beside the others."""
        facts = schema.dump(self.valid_for)
        data = {key: value for key, value in schema.dump(self).items() if key != "valid_for"}
        return json.dumps({**data, **facts, "format": FORMAT}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Passport:
        """Parse; raises BundleError naming the file `where` when it is no passport of a known format."""
        try:
            data = schema.load(dict, json.loads(content))
            if data.pop("format", None) != FORMAT:
                raise schema.SchemaError(f"format must be {FORMAT}")  # noqa: EM102 - told below like all others
            facts = {field.name: data.pop(field.name, None) for field in dataclasses.fields(Target)}
            return schema.load(cls, {**data, "valid_for": facts})
        except (ValueError, RecursionError) as error:
            msg = f"{where} is no passport of an engine ({error}): compile again with `provision compile`"
            raise BundleError(msg) from error

    @property
    def need_bytes(self) -> int:
        """Device memory that opening takes: weights, of which the plan mostly consists, and activations."""
        return self.plan.size_bytes + self.memory_bytes

    def check(self, graph_sha256: str, here: Target) -> None:
        """Raise BundleError with one sentence and both values unless the plan may be deserialized `here`.

        A fact that either side does not know is passed over, but never the backend, the compute capability and the
        version: a plan of TensorRT-RTX is served only where that backend is asked for. Of CUDA only the major counts.
        """
        if self.graph_sha256 != graph_sha256:
            self._refuse(f"graph {self.graph_sha256[:12]}", f"the bundle holds {graph_sha256[:12]}")
        for field, what in _FACTS.items():
            have, want = getattr(self.valid_for, field), getattr(here, field)
            same = have.split(".")[0] == want.split(".")[0] if field == "cuda" else have == want
            if not same and ((have and want) or field in {"backend", "sm", "version"}):
                self._refuse(f"{what} {have}", f"this is {want or 'unknown'}")

    def check_plan(self, plan: bytes) -> None:
        """Raise BundleError with both digests unless `plan` is the one that this passport is of."""
        have = Blob.of(plan)
        if have != self.plan:
            self._refuse(
                f"a plan {self.plan.sha256[:12]} of {self.plan.size_bytes} bytes",
                f"the file is {have.sha256[:12]} of {have.size_bytes}",
            )

    def _refuse(self, made: str, found: str) -> None:
        msg = (
            f"engine {self.graph!r} in {self.precision} was made for {made}, {found}: compile with `provision compile`"
        )
        raise BundleError(msg)


def stem(graph: str, precision: str) -> str:
    """File name, without its end, of an engine of `graph`; float has the plain name."""
    return graph if precision == "fp32" else f"{graph}.{precision}"
