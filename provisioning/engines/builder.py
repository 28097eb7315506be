"""Builds one plan, in a process of its own: `python -m provisioning.engines.builder ORDER`, JSON of an `Order`.

One path for TensorRT 10.3 to 11 and for TensorRT-RTX: the network is always strongly typed, precision is explicit in
the graph (Q/DQ), flags are made from the enumerations' own numbers, which differ between versions, and what only one
of them has is recognised by its name. Standard error is the log; standard output carries events, a JSON object a line:

    {"phase": "...", "done": 3, "of": 40}    progress
    {"built": {...}}                         the last line of a build that worked: `Outcome`
    {"failed": "...", "layer": "..."}        the last line of one that did not
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.runtime import tensorrt
from kernels import plugin
from kernels.launch import Driver
from models import schema
from models.engine import Shapes, Target
from models.errors import ApplianceError

Tell = Callable[[Mapping[str, object]], None]

_ERROR, _INFO = 1, 3
_PR_SET_PDEATHSIG = 1
_LAYER = re.compile(r"\b(?:for )?(?:node|layer|tensor)s?[ :]+['\"]?([^\s'\",;]+)", re.IGNORECASE)
_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True)
class Order:
    """What to build."""

    backend: str
    graph: str
    """ONNX file."""
    plan: str
    """File to write."""
    sm: str
    profiles: tuple[Mapping[str, Shapes], ...]
    workspace_bytes: int
    timing_caches: str
    """Folder of what is known about the speed of kernels, a file for each GPU and version."""
    plugins: bool = False
    """Whether the graph has nodes that only `kernels.plugin` computes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a plan after it was built."""

    valid_for: Target
    flags: tuple[str, ...]
    profiles: tuple[Mapping[str, Shapes], ...]
    memory_bytes: int
    timing_cache_sha256: str


class BuildError(Exception):
    """The builder refused; `layer` says where, if that is known."""

    def __init__(self, reason: str, layer: str = "") -> None:
        super().__init__(reason)
        self.layer = layer


class Heard:
    """What the builder said, as far as it is needed after: all of it goes to the log."""

    def __init__(self) -> None:
        self.error = ""
        self.memory_bytes = 0

    def __call__(self, severity: int, text: str) -> None:
        """Take one message."""
        if severity <= _INFO:
            print(f"[{'FEWI'[severity]}] {text}", file=sys.stderr, flush=True)
        if severity <= _ERROR and not self.error:
            self.error = text  # the first is the cause, those after it follow from it
        if found := _MEMORY.search(text):
            self.memory_bytes = max(self.memory_bytes, int(found[1]))


def build(trt: Any, order: Order, here: Target | None, tell: Tell) -> Outcome:  # noqa: ANN401 - whichever module it is
    """Build `order` with TensorRT or TensorRT-RTX, whichever `trt` is, and write the plan; raises BuildError.

    `here` is this machine's GPU; None for TensorRT-RTX, which compiles for GPUs that are not here.
    """
    if here and here.sm != order.sm:
        msg = f"the target has compute capability {order.sm}, the GPU here {here.sm}: compile on a device of the target"
        raise BuildError(msg)
    heard = Heard()
    log = tensorrt.logger(trt, heard)
    if order.plugins:
        plugin.register(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt.OnnxParser(network, log), Path(order.graph).read_bytes(), heard)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, order.workspace_bytes)
    config.progress_monitor = _monitor(trt, tell)
    timings = None
    profiles = order.profiles if here else (_joined(order.profiles),)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, one in shapes.items():
            profile.set_shape(name, one.least, one.usual, one.most)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(heard.error or f"its inputs cannot have the shapes {schema.dump(shapes)}")
    if here is None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(_capability(trt, order.sm), 0)
    elif order.timing_caches:
        timings = Path(order.timing_caches) / f"tensorrt-{here.version}-sm{here.sm}.cache"
        _use_timings(config, timings)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        named = _LAYER.search(heard.error)
        raise BuildError(heard.error or "the builder gave no plan and no reason", named[1] if named else "")
    Path(order.plan).write_bytes(plan)
    return Outcome(
        valid_for=here or Target(order.backend, order.sm, str(trt.__version__), "", "", ""),
        flags=("STRONGLY_TYPED",),
        profiles=profiles,
        memory_bytes=heard.memory_bytes,
        timing_cache_sha256=_keep_timings(config, timings) if timings else "",
    )


def _parse(parser: Any, content: bytes, heard: Heard) -> None:  # noqa: ANN401 - TensorRT is untyped
    if parser.parse(_plain(content)):
        return
    if not parser.num_errors:
        raise BuildError(heard.error or "the parser refused the graph and gave no reason")
    refusal = parser.get_error(0)
    layer = f"{refusal.node_operator()} {refusal.node_name()}".strip()
    raise BuildError(refusal.desc() or heard.error, layer)


def _plain(content: bytes) -> bytes:
    """The graph with its model-local functions inlined, so that no parser's habit is relied on.

    A device has no onnx: there the parser's own inlining must do, which TensorRT-RTX's was seen to have.
    """
    try:
        import onnx  # noqa: PLC0415 - see above
        from onnx import inliner  # noqa: PLC0415
    except ImportError:
        return content
    try:
        model = onnx.load_model_from_string(content)
        return bytes(inliner.inline_local_functions(model).SerializeToString()) if model.functions else content
    except Exception as error:  # protobuf and the inliner raise unrelated types
        msg = f"it is no ONNX graph ({type(error).__name__})"
        raise BuildError(msg) from error


def _joined(profiles: tuple[Mapping[str, Shapes], ...]) -> Mapping[str, Shapes]:
    """One profile over all: TensorRT-RTX chooses its kernels when it sees a shape, and builds each profile anew."""
    first, last = profiles[0], profiles[-1]
    return {name: Shapes(first[name].least, first[name].usual, last[name].most) for name in first}


def _capability(trt: Any, sm: str) -> Any:  # noqa: ANN401 - TensorRT is untyped
    known = {name for name in trt.ComputeCapability.__members__ if name.startswith("SM")}
    wanted = "SM" + sm.replace(".", "")
    if wanted not in known:
        listed = ", ".join(sorted((f"{name[2:-1]}.{name[-1]}" for name in known), key=float))
        msg = f"TensorRT-RTX {trt.__version__} compiles for {listed}, not for {sm}: compile on a device of the target"
        raise BuildError(msg)
    return getattr(trt.ComputeCapability, wanted)


def _use_timings(config: Any, path: Path) -> None:  # noqa: ANN401 - TensorRT is untyped
    """Times of earlier builds make this one faster and its choice of kernels the same; it goes on without them."""
    kept = path.read_bytes() if path.exists() else b""
    for content in (kept, b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, False):
            return


def _keep_timings(config: Any, path: Path) -> str:  # noqa: ANN401 - TensorRT is untyped
    cache = config.get_timing_cache()
    if cache is None:
        return ""
    content = bytes(cache.serialize())
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)
    return hashlib.sha256(content).hexdigest()


def _monitor(trt: Any, tell: Tell) -> Any:  # noqa: ANN401 - TensorRT is untyped
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # TensorRT is untyped
        """Tells of each step of each phase."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self._steps[phase_name] = num_steps
            tell({"phase": phase_name, "done": 0, "of": num_steps})

        def step_complete(self, phase_name: str, step: int) -> bool:
            tell({"phase": phase_name, "done": step + 1, "of": self._steps.get(phase_name, 0)})
            return True  # go on: whoever wants to stop it ends this process

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()


def main() -> int:
    """Build what the command line orders; the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would read the result
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native libraries print to standard output when they please

    def tell(event: Mapping[str, object]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    order = schema.load(Order, json.loads(sys.argv[1]))
    try:
        trt = tensorrt.module(order.backend)
        here = None
        if order.backend == "tensorrt":
            here = tensorrt.here(order.backend, trt, Driver())
        tell({"built": schema.dump(build(trt, order, here, tell))})
    except BuildError as error:
        tell({"failed": str(error), "layer": error.layer})
        return 1
    except ApplianceError as error:
        tell({"failed": str(error), "layer": ""})
        return 1
    except OSError as error:
        tell({"failed": f"{error.filename or 'the plan'} cannot be used ({error.strerror}): make room", "layer": ""})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
