"""`appliance.service.Service` without workers: the model `echo` and the bundle `reader`, both at version 1.0."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from appliance.core.budget import Admission, refusal
from appliance.core.command import Command, CommandResult, read
from appliance.faults import Injection
from appliance.memory import ModelState, Standing
from appliance.service import (
    PICTURES,
    Bundle,
    Candidate,
    InferRequest,
    InferResponse,
    Mirror,
    ModelInfo,
    Observer,
    Order,
    Origin,
    Outcome,
    RepositoryModel,
    SecondOpinion,
    Told,
    nobody_to_ask,
)
from appliance.swap import Swap, Swaps
from models.errors import BadInput, NotFound, NotReady
from models.spec import ModelSpec, Tensor, TensorSpec, check_request

ECHO = ModelSpec(
    inputs=(TensorSpec("x", "FP32", (-1, 2)),),
    outputs=(TensorSpec("y", "FP32", (-1, 2)), TensorSpec("sum", "FP32", (-1,))),
)


MODEL_BYTES = 100
TIMING_MS = {"queue": 5.0, "decode": 2.0, "inference": 10.0, "processing": 1.0}
UNLOADED = "unloaded by request"


class MemoryService:
    """Answers at once: `echo` gives its input and the sum of each row, `reader` the length of each picture."""

    def __init__(self, *, fault: Exception | None = None, unready: Mapping[str, str] | None = None) -> None:
        """Raise `fault` for every request that names a model rightly; `unready` says why a model is not ready."""
        self.device_id = "memory"
        self.listeners: list[Callable[[], None]] = []
        self.observers: list[Observer] = []
        self.mirrors: list[Mirror] = []
        self.second_opinion: SecondOpinion = nobody_to_ask
        self.inbox = None
        self.orders: dict[str, Order] = {"status": lambda _order: self.status()}
        self.deployments: Callable[[], list[dict[str, Any]]] = list
        self.flights: Callable[[], Sequence[object]] = list
        self.requests: list[InferRequest] = []
        self._fault = fault
        self._unready = unready or {}
        self._results: dict[str, CommandResult] = {}
        self._loaded = {"echo": True, "reader": True}
        self.budget_bytes = 2 * MODEL_BYTES
        """For both; less makes one of them not fit."""

    def start(self) -> None:
        """Nothing needs to be started."""

    def tell(self) -> None:
        """Call the listeners."""
        for listener in self.listeners:
            listener()

    async def stop(self, grace_s: float) -> None:
        """Nothing needs to be stopped."""

    async def load(self, name: str, *, dry_run: bool = False) -> Admission:
        """Load a model, if its size fits beside those that are loaded; raises NotFound, InsufficientMemory."""
        bundle = self.model(name).name
        have_bytes = self.budget_bytes - MODEL_BYTES * sum(self._loaded.values())
        if self._loaded[bundle]:
            return Admission(True, MODEL_BYTES, have_bytes, ())
        admission = Admission(have_bytes >= MODEL_BYTES, MODEL_BYTES, have_bytes, ())
        if not dry_run:
            if not admission.fits:
                raise refusal(name, admission)
            self._loaded[bundle] = True
        return admission

    async def swap(self, fresh: Bundle, *, only_for: Bundle | None = None) -> Swap:  # noqa: ARG002
        """There is one version of each model; raises NotFound, NotReady."""
        name = self.model(fresh.name).name
        msg = f"{name} stays at version 1.0: it is made of memory"
        raise NotReady(msg)

    @contextlib.asynccontextmanager
    async def candidate(self, fresh: Bundle) -> AsyncIterator[Candidate]:
        """There is one version of each model; raises NotFound, NotReady."""
        await self.swap(fresh)
        yield Candidate(fresh, fresh, Standing(0, 0, beside=True), asyncio.ensure_future(self.swap(fresh)))

    async def unload(self, name: str) -> None:
        """Unload a model; raises NotFound."""
        self._loaded[self.model(name).name] = False

    def repository(self) -> list[RepositoryModel]:
        """Both models, loaded or not."""
        states = {"": ModelState.READY, UNLOADED: ModelState.UNAVAILABLE}
        return [
            RepositoryModel(info.name, info.version, states.get(info.reason, ModelState.LOADING), info.reason)
            for info in self.models()
        ]

    @property
    def ready(self) -> bool:
        """Whether every model that is loaded is ready."""
        return not self._unready

    @property
    def settled(self) -> bool:
        """Whether no model is loading; nothing ever loads in memory."""
        return True

    @property
    def failed(self) -> str:
        """Why the daemon should be started anew: memory never fails."""
        return ""

    def models(self) -> list[ModelInfo]:
        """Both models."""
        return [self._info("echo", "onnx_onnxv1", ECHO), self._info("reader", "appliance", PICTURES)]

    def model(self, name: str, version: str | None = None) -> ModelInfo:
        """One model; raises NotFound."""
        for info in self.models():
            if info.name == name and version in {None, info.version}:
                return info
        msg = f"there is no model {name!r} in version {version or 'any'}"
        raise NotFound(msg)

    def spec(self, name: str, version: str | None = None) -> ModelSpec:
        """What goes into a model and comes out; raises NotFound."""
        return self.model(name, version).spec

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model on tensors."""
        return self._answer(request)

    def _answer(self, request: InferRequest) -> InferResponse:
        spec = self._admit(request)
        arrays = self._compute(request)
        names = request.outputs or [tensor.name for tensor in spec.outputs]
        if set(names) - set(arrays):
            msg = f"there is no output among {names} but {', '.join(arrays)}"
            raise BadInput(msg)
        origin = Origin(request.model, "1.0", "memory", "fp32", "unverified-local", None)
        return InferResponse(origin, [Tensor.from_array(name, arrays[name]) for name in names], TIMING_MS)

    async def predict(self, request: InferRequest) -> dict[str, Any]:
        """The document about one picture."""
        if request.model == "echo":
            raise BadInput("model 'echo' takes raw tensors, not pictures: use POST /v2/models/echo/infer")
        self._admit(request)
        document: dict[str, Any] = orjson.loads(self._compute(request)["result"][0])
        if request.escalate:
            document["second_opinion"] = await self.second_opinion(request, document)
        return document

    async def order(
        self, payload: bytes, *, now: float, retained: bool = False, authorized: bool = False
    ) -> CommandResult:
        """Read an order and carry it out; nobody signs for memory."""
        order = read(payload, device_id=self.device_id, now=now, retained=retained, authorized=authorized)
        return order if isinstance(order, CommandResult) else await self.execute(order)

    async def execute(self, command: Command) -> CommandResult:
        """Carry out an order; the same id always gets the same answer."""
        if command.id not in self._results:
            order = self.orders.get(command.command)
            if order is None:
                reason = f"order {command.command!r} needs what is not set up here"
                self._results[command.id] = CommandResult(command.id, "refused", reason)
            else:
                answer = order(command)
                result = await answer if isinstance(answer, Awaitable) else answer
                done = CommandResult(command.id, "done", result=result) if isinstance(result, Mapping) else result
                self._results[command.id] = done
        return self._results[command.id]

    async def result(self, order_id: str) -> CommandResult:
        """The answer that an order got; raises NotFound."""
        if order_id not in self._results:
            msg = f"there is no order {order_id!r}"
            raise NotFound(msg)
        return self._results[order_id]

    def serving(self, name: str) -> Bundle:
        """Models that are made of memory come from no bundle; raises NotFound."""
        msg = f"there is no model {name!r} from a bundle"
        raise NotFound(msg)

    def fault(self, name: str) -> str:
        """Why a model is not as it should be; raises NotFound."""
        return self.model(name).reason

    def inject(self, injection: Injection) -> None:
        """Nothing can be broken in memory."""
        del injection
        raise NotFound("fault injection is off: set faults.enabled, and start the daemon again")

    def status(self) -> dict[str, Any]:
        """The same keys as the real service."""
        return {
            "device_id": self.device_id,
            "appliance": "0",
            "uptime_s": 1.0,
            "ready": self.ready,
            "reboot_wanted": None,
            "models": [
                {
                    "name": info.name,
                    "version": info.version,
                    "digest": None,
                    "trust": "unverified-local",
                    "takes_pictures": info.name == "reader",
                    "ready": info.ready,
                    "reason": info.reason or None,
                    "degraded": None,
                    "runtime": "memory" if info.ready else None,
                    "precision": {},
                    "waiting": 0,
                    "running": 0,
                    "concurrency": 2,
                    "tolerance": {},
                    "service_ms": None,
                    "swaps": Swaps(beside=2, load_s=1.5, switch_s=1e-5, longest_switch_s=7e-6).status(),
                }
                for info in self.models()
            ],
            "memory": {
                "budget_bytes": self.budget_bytes,
                "leased_bytes": MODEL_BYTES * sum(self._loaded.values()),
                "available_bytes": None,
                "nvmap_bytes": None,
                "stall_percent": None,
                "step": "normal",
                "evictions": 3,
                "idle_unloads": 0,
                "recycles": 1,
                "spare_pid": None,
                "models": [
                    {
                        "name": model.name,
                        "state": model.state.value,
                        "reason": model.reason or None,
                        "priority": 5,
                        "need_bytes": MODEL_BYTES,
                        "lease_bytes": {"weights": MODEL_BYTES} if self._loaded[model.name] else {},
                        "used_bytes": 90 if self._loaded[model.name] else None,
                        "peak_bytes": 95,
                        "predicted_bytes": MODEL_BYTES,
                    }
                    for model in self.repository()
                ],
            },
            "workers_aside": [],
            "workers": self.workers(),
        }

    def workers(self) -> list[dict[str, Any]]:
        """The same keys as the real service."""
        return [
            {
                "pid": None,
                "bundle": "reader",
                "version": "1.0",
                "state": "ready",
                "restarts": 2,
                "cause": None,
                "reason": None,
                "rung": None,
                "skipped_rungs": [],
                "faults": {"crash": 2, "hang": 1},
                "restarts_by_cause": {"crash": 2},
                "rungs": {"restart": 3},
                "recoveries": {"crash": {"count": 2, "total_s": 1.5, "last_s": 0.5}},
            }
        ]

    @property
    def waiting(self) -> int:
        """Memory answers at once."""
        return 0

    def _info(self, name: str, platform: str, spec: ModelSpec) -> ModelInfo:
        reason = self._unready.get(name, "") if self._loaded[name] else UNLOADED
        return ModelInfo(name, "1.0", platform, spec, not reason, reason, wanted=self._loaded[name])

    def asked_at_once(self, name: str, version: str | None = None) -> ModelSpec | None:
        """The tensors of `echo`, while it is loaded; raises NotFound."""
        spec = self.spec(name, version)
        return spec if name == "echo" and self._loaded[name] else None

    def ask(self, request: InferRequest, told: Told) -> Callable[[], None]:
        """Answer at once; raises NotFound."""
        self.model(request.model, request.version)
        result: InferResponse | Exception
        try:
            result = self._answer(request)
        except Exception as error:  # whatever it is, whoever asked is told
            result = error
        told(result)
        return lambda: None

    def _admit(self, request: InferRequest) -> ModelSpec:
        """Remember the request and return what its model takes and gives; raises what the request deserves."""
        spec = self.model(request.model, request.version).spec
        if not self._loaded[request.model]:
            msg = f"model {request.model!r} is not loaded ({UNLOADED}): load it first"
            raise NotReady(msg)
        for observer in self.observers:
            timing_ms = {} if self._fault else TIMING_MS
            observer(Outcome(request.model, "1.0", 0.02, self._fault, timing_ms, request=request))
        if self._fault:
            raise self._fault
        check_request(spec, request.tensors, request.outputs)
        # Payloads are only borrowed until the answer.
        owned: Sequence[Tensor] = [replace(tensor, data=bytes(tensor.data)) for tensor in request.tensors]
        self.requests.append(replace(request, tensors=owned))
        return spec

    @staticmethod
    def _compute(request: InferRequest) -> dict[str, Any]:
        array = request.tensors[0].to_array()
        if request.model == "echo":
            return {"y": array, "sum": array.sum(axis=1)}
        documents = [
            orjson.dumps(
                {"model": "reader", "version": "1.0", "runtime": "memory", "degraded": None, "bytes": len(item)}
            )
            for item in array
        ]
        result = np.empty(len(documents), dtype=np.object_)
        result[:] = documents
        return {"result": result}
