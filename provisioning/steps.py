"""The steps of a build: each is done once, and recorded with digests of what went in and what came out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from models.bundle import Step
from models.errors import ApplianceError, WorkshopError
from provisioning.cache import Cache

Report: TypeAlias = Callable[[str], None]
"""Told in words what starts now."""

RUNTIME = "onnxruntime-cpu"
TOOLS = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "opencv-python")
THREADS = 2
"""Each runs its own samples on one core, so results do not depend on how many there are."""

_SHOWING = ("cli.py", "plot.py", "report.py", "verify.py")
"""Code that shows what steps have made, and makes nothing."""


class Steps:
    """Performs steps once: what was done before with the same inputs, code and tools is taken from the cache."""

    def __init__(self, cache: Cache, report: Report) -> None:
        """Tell `report` of each step before it starts, unless it was done before."""
        self.done: list[Step] = []
        self.tools = {tool: metadata.version(tool) for tool in TOOLS}
        self.done_before = 0
        self._made: dict[tuple[str, ...], bytes] = {}
        self._cache = cache
        self.report = report
        self._code = _digest_of_code()

    def run(
        self,
        name: str,
        graph: str,
        precision: str,
        inputs: Sequence[bytes | str],
        settings: object,
        make: Callable[[], bytes],
        asked: str = "",
    ) -> bytes:
        """What `make` makes of `inputs` (content, or a digest of it) and `settings`, which are plain data.

        `precision` is the one that this is done for, empty when it is for all of them; `asked` see `Step`.
        """
        digests = [one if isinstance(one, str) else hashlib.sha256(one).hexdigest() for one in inputs]
        key = _digest([name, digests, settings, self._code, self.tools])
        if (key, graph, precision) in self._made:
            return self._made[key, graph, precision]
        content = self._cache.get(key)
        if content is None:
            self.report(f"{graph} {precision}: {name}" if precision else f"{graph}: {name}")
            content = _made(make, f"{graph}: {name}")
            self._cache.put(key, content)
        else:
            self.done_before += 1
        self._made[key, graph, precision] = content
        self.done.append(Step(name, graph, tuple(digests), hashlib.sha256(content).hexdigest(), precision, asked))
        return content


def _made(make: Callable[[], bytes], what: str) -> bytes:
    """What `make` makes; a fault of a library becomes one sentence that names the step."""
    try:
        return make()
    except ApplianceError:
        raise
    except Exception as error:  # onnx, onnx_ir, onnxscript and numpy raise unrelated types on graphs they cannot take
        root = _root(error)
        reason = (str(root).strip() or "no reason given").splitlines()[0][:300]
        msg = (
            f"step {what} failed on this graph ({type(root).__name__}: {reason}): "
            "check that onnxruntime runs the checkpoint, or take the pass out of the recipe"
        )
        raise WorkshopError(msg) from error


def _root(error: BaseException) -> BaseException:
    """What an error was raised from first: libraries of passes wrap it in where it happened, again and again."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest_of_code() -> str:
    """Digest of all code that a step's result may depend on."""
    root = Path(__file__).resolve().parent
    ours = (file for file in root.rglob("*.py") if file.name not in _SHOWING)
    files = [*ours, *(root.parent / "kernels").glob("*.py"), *(root.parent / "models").rglob("*.py")]
    files += (root.parent / "appliance" / "runtime").glob("*.py")
    return _digest([hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)])
