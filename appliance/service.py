"""The one room between the doors (HTTP, MQTT) and the workers: infer, predict, execute, status."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from appliance import __version__, wire
from appliance.core.command import Command, CommandResult
from appliance.core.health import State
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.supervisor import Limits, Supervisor
from models.bundle import Manifest
from models.errors import BadInput, ModelError, NotFound
from models.spec import ModelSpec, Tensor, TensorSpec, pack_bytes

PICTURES = ModelSpec(inputs=(TensorSpec("image", "BYTES", (-1,)),), outputs=(TensorSpec("result", "BYTES", (-1,)),))
"""A whole bundle seen as a model: encoded pictures in, JSON documents out."""

_REMEMBERED_COMMANDS = 1000


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Tensors for a model; `model` names a bundle, or one of its graphs as `bundle.graph`."""

    model: str
    tensors: Sequence[Tensor]
    version: str | None = None
    outputs: tuple[str, ...] | None = None
    deadline_ms: float | None = None
    priority: int = DEFAULT_PRIORITY
    source: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """What really computed an answer; every answer carries it."""

    model: str
    version: str
    runtime: str
    trust: str
    """`unverified-local` for a bundle folder given by hand, `unverified` for a bare ONNX file."""
    degraded: str | None


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The answer to an InferRequest."""

    origin: Origin
    tensors: Sequence[Tensor]
    timing_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may know of a model."""

    name: str
    version: str
    platform: str
    spec: ModelSpec
    ready: bool
    reason: str


class Bundle:
    """A bundle (or bare ONNX file) that is served, with its worker."""

    def __init__(
        self,
        order: wire.Open,
        limits: Limits,
        *,
        manifest: Manifest | None,
        on_ready: Callable[[wire.Ready], None],
    ) -> None:
        """Serve `order`; `manifest` is None for a bare ONNX file."""
        self.name, self.manifest = order.name, manifest
        self.supervisor = Supervisor(order, limits, on_ready=on_ready)
        self._has_answered = False

    @property
    def version(self) -> str:
        """Version of what is served."""
        return self.manifest.version if self.manifest else "1"

    @property
    def trust(self) -> str:
        """How far the content is vouched for."""
        return "unverified-local" if self.manifest else "unverified"

    @property
    def unready(self) -> str:
        """Why this bundle is not ready; empty when it is."""
        health, ready = self.supervisor.health, self.supervisor.ready
        if health.state is not State.READY:
            return f"{health.state.value}: {health.reason}" if health.reason else health.state.value
        if ready and ready.unproven and not self._has_answered:
            return f"not tried yet, send a request: {ready.unproven}"
        return ""

    def graphs(self) -> Mapping[str, ModelSpec]:
        """Names under which requests may ask for this bundle's graphs; a bare file goes by its own name."""
        if self.manifest:
            return {f"{self.name}.{graph}": part.spec for graph, part in self.manifest.graphs.items()}
        ready = self.supervisor.ready
        return {self.name: ready.graphs["model"].spec if ready else ModelSpec((), ())}

    def infos(self) -> list[ModelInfo]:
        """The bundle and its graphs as models."""
        names = {self.name: PICTURES, **self.graphs()}
        reason = self.unready
        ready = self.supervisor.ready
        platform = {"onnxruntime-cpu": "onnx_onnxv1"}.get(ready.runtime if ready else "", "appliance")
        return [
            ModelInfo(name, self.version, platform if name in self.graphs() else "appliance", spec, not reason, reason)
            for name, spec in names.items()
        ]

    async def infer(self, request: InferRequest, now: float) -> InferResponse:
        """Send a request to the worker and name what computed the answer."""
        graph = ""
        if request.model in self.graphs():
            graph = request.model.removeprefix(f"{self.name}.") if self.manifest else "model"
        answer = await self.supervisor.submit(
            graph,
            request.tensors,
            outputs=request.outputs,
            deadline_at=float("inf") if request.deadline_ms is None else now + request.deadline_ms / 1e3,
            priority=request.priority,
            source=request.source,
        )
        self._has_answered = True
        ready = self.supervisor.ready
        if ready is None:
            raise ModelError("an answer arrived from a worker that never became ready")
        origin = Origin(request.model, self.version, ready.runtime, self.trust, None)
        return InferResponse(origin, answer.tensors, answer.timing_ms)


class Service:
    """Everything the doors may ask for."""

    def __init__(self, bundles: Sequence[Bundle], *, device_id: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Serve `bundles`; `facts` adds what only the host or a door knows to `status`."""
        self.device_id = device_id
        self.listeners: list[Callable[[], None]] = []
        """Called on the event loop when what `status` says of a model has changed."""
        self._bundles = bundles
        self._facts = facts
        self._started = time.monotonic()
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._by_model = {info.name: bundle for bundle in bundles for info in bundle.infos()}

    def start(self) -> None:
        """Start every worker."""
        for bundle in self._bundles:
            bundle.supervisor.start(on_change=self._tell)

    async def stop(self, grace_s: float) -> None:
        """Answer what runs, refuse the rest, end the workers."""
        for bundle in self._bundles:
            await bundle.supervisor.stop(grace_s)

    @property
    def ready(self) -> bool:
        """Whether every model has proven itself."""
        return not any(bundle.unready for bundle in self._bundles)

    def models(self) -> list[ModelInfo]:
        """Every model by name."""
        return [info for bundle in self._bundles for info in bundle.infos()]

    def model(self, name: str, version: str | None = None) -> ModelInfo:
        """One model; raises NotFound."""
        self._bundle(name, version)
        return next(info for info in self.models() if info.name == name)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model on tensors; a whole bundle answers with its predict documents in a BYTES tensor.

        Raises what `models.errors` says, each with its own meaning for the caller.
        """
        response = await self._run(request)
        if request.model in self._bundle(request.model, None).graphs():
            return response
        documents = [orjson.dumps(document) for document in _documents(response)]
        result = Tensor("result", "BYTES", (len(documents),), pack_bytes(documents))
        return InferResponse(response.origin, [result], response.timing_ms)

    async def predict(self, request: InferRequest) -> dict[str, Any]:
        """Answer for the one encoded picture in `request.tensors` as a document."""
        started = time.monotonic()
        if request.model in self._bundle(request.model, request.version).graphs():
            msg = f"model {request.model!r} takes raw tensors, not pictures: use its infer endpoint"
            raise BadInput(msg)
        document = _documents(await self._run(request))[0]
        document["timing_ms"]["total"] = round((time.monotonic() - started) * 1e3, 3)
        return document

    def execute(self, command: Command) -> CommandResult:
        """Carry out an order; the same id always gets the same answer."""
        known = self._results.get(command.id)
        if known is not None:
            return known
        result = CommandResult(command.id, "done", result=self.status())
        self._results[command.id] = result
        while len(self._results) > _REMEMBERED_COMMANDS:
            self._results.popitem(last=False)
        return result

    def status(self) -> dict[str, Any]:
        """What an operator wants to know, as plain data."""
        return {
            "device_id": self.device_id,
            "appliance": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "ready": self.ready,
            "models": [_model_status(bundle) for bundle in self._bundles],
            "workers": [_worker_status(bundle) for bundle in self._bundles],
            **self._facts(),
        }

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()

    async def _run(self, request: InferRequest) -> InferResponse:
        return await self._bundle(request.model, request.version).infer(request, time.monotonic())

    def _bundle(self, name: str, version: str | None) -> Bundle:
        bundle = self._by_model.get(name)
        if bundle is None:
            msg = f"there is no model {name[:100]!r}; served are {', '.join(sorted(self._by_model)) or 'none'}"
            raise NotFound(msg)
        if version is not None and version != bundle.version:
            msg = f"model {name!r} has no version {version[:100]!r}; served is {bundle.version}"
            raise NotFound(msg)
        return bundle


def _documents(response: InferResponse) -> list[dict[str, Any]]:
    """The predict documents of a bundle's answer, one a picture."""
    origin = response.origin
    return [
        {
            "model": origin.model,
            "version": origin.version,
            "runtime": origin.runtime,
            "degraded": origin.degraded,
            "trust": origin.trust,
            **orjson.loads(result),
            "timing_ms": {part: round(spent, 3) for part, spent in response.timing_ms.items()},
        }
        for result in response.tensors[0].to_array()
    ]


def _model_status(bundle: Bundle) -> dict[str, Any]:
    ready = bundle.supervisor.ready
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.manifest.digest if bundle.manifest else None,
        "trust": bundle.trust,
        "ready": not bundle.unready,
        "reason": bundle.unready or None,
        "runtime": ready.runtime if ready else None,
        "precision": {graph: info.precision for graph, info in ready.graphs.items()} if ready else {},
        "waiting": bundle.supervisor.waiting,
        "running": bundle.supervisor.running,
    }


def _worker_status(bundle: Bundle) -> dict[str, Any]:
    health = bundle.supervisor.health
    return {
        "pid": bundle.supervisor.pid,
        "bundle": bundle.name,
        "version": bundle.version,
        "state": health.state.value,
        "restarts": health.restarts,
    }
