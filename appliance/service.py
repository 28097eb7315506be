"""The one room between the doors (HTTP, MQTT) and the workers: infer, predict, execute, status.

Past 400 lines with `Bundle`, what it serves: the two are read together, and each door sees both.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson
import structlog

from appliance import __version__, wire
from appliance.core.budget import Admission
from appliance.core.command import CHANGING, LARGEST_BYTES, Command, CommandResult, read
from appliance.core.faults import Fault
from appliance.core.health import Rung, State, WorkerHealth, failed
from appliance.core.limits import Limits
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.core.trace import Trace
from appliance.faults import MEND, Faults, Injection
from appliance.life import Life, StartLife
from appliance.memory import UNLIMITED, Judge, Keeper, ModelState, Standing
from appliance.supervisor import Answer, Supervisor, waited
from appliance.swap import Swap, Swaps
from models.answers import items
from models.bundle import Manifest
from models.errors import (
    ApplianceError,
    BadInput,
    BundleError,
    CallerError,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    InsufficientMemory,
    ModelError,
    NotFound,
    NotReady,
    TooLarge,
    Unavailable,
)
from models.spec import ModelSpec, Tensor, TensorSpec, check_request, pack_bytes

if TYPE_CHECKING:
    from appliance.inbox import Inbox

log = structlog.get_logger()

PICTURES = ModelSpec(inputs=(TensorSpec("image", "BYTES", (-1,)),), outputs=(TensorSpec("result", "BYTES", (-1,)),))
"""A whole bundle seen as a model: encoded pictures in, JSON documents out."""

MOST_PICTURES = 16
"""In one request; more would only keep others waiting."""

_PLATFORMS = {
    "onnxruntime-cpu": "onnx_onnxv1",
    "onnxruntime-cuda": "onnx_onnxv1",
    "openvino": "onnx_onnxv1",
    "tensorrt": "tensorrt_plan",
    "tensorrt-rtx": "tensorrt_plan",
}
"""Runtime -> platform in the protocol's metadata."""

_REMEMBERED_COMMANDS = 1000
_SLOW = frozenset({"load", "unload"})
"""Orders that wait until a model is as it should be."""
_CONFIDENCE_DIGITS = 4


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class InferRequest:
    """Tensors for a model; `model` names a bundle, or one of its graphs as `bundle.graph`."""

    model: str
    tensors: Sequence[Tensor]
    version: str | None = None
    outputs: tuple[str, ...] | None = None
    deadline_ms: float | None = None
    priority: int = DEFAULT_PRIORITY
    source: str = ""
    id: str = ""
    """What its caller calls it."""
    trace: Trace | None = None
    """Where it stands in its caller's trace, if it does in any."""
    escalate: bool = False
    """Whether its caller waits for a second opinion where the answer is doubtful; pictures only."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What really computed an answer; every answer carries it."""

    model: str
    version: str
    runtime: str
    precision: str
    """Of the graph that ran; of a whole bundle each graph with its own: "cls fp32, det fp32, rec int8"."""
    trust: str
    """`signed` for a bundle from the repository, `unverified-local` for a bundle folder given by hand, `unverified` for
    a bare ONNX file."""
    degraded: str | None


_origin = lru_cache(maxsize=256)(Origin)
"""The same one for all answers that are alike."""


@dataclass(slots=True)
class InferResponse:
    """The answer to an InferRequest."""

    origin: Origin
    tensors: Sequence[Tensor]
    timing_ms: Mapping[str, float]
    together: int = 1
    """Requests that shared the run."""


@dataclass(slots=True)
class Outcome:
    """What became of a request for a served model: `seconds` from its arrival here, `error` None if answered."""

    model: str
    version: str
    seconds: float
    error: BaseException | None = None
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    together: int = 1
    """Requests that shared the run, if there was one."""
    request: InferRequest | None = None
    """Whose payloads count nowhere once it is answered: keep few, and not for long; None where nobody tells."""


Observer: TypeAlias = Callable[[Outcome], None]
"""Called on the event loop."""

Told: TypeAlias = "Callable[[InferResponse | BaseException], None]"
"""Called once on the event loop with what became of a request; CancelledError where it was given up."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may know of a model."""

    name: str
    version: str
    platform: str
    spec: ModelSpec
    ready: bool
    """Whether it answers; one that its next request loads does."""
    reason: str
    wanted: bool = True
    """Whether it should be ready; not when an operator has unloaded it."""


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model that is known here, loaded or not; `reason` says why it is not ready."""

    name: str
    version: str
    state: ModelState
    reason: str


class Bundle:
    """A bundle (or bare ONNX file) that is served, with its worker."""

    def __init__(  # noqa: PLR0913 - all that is known where it is opened
        self,
        ways: Sequence[wire.Open],
        limits: Limits,
        *,
        manifest: Manifest | None,
        on_ready: Callable[[wire.Ready], None],
        priority: int = DEFAULT_PRIORITY,
        file_bytes: int = 0,
        start_life: StartLife = Life,
        folder: Path | None = None,
        rebuild: Callable[[wire.Open], Coroutine[None, None, None]] | None = None,
    ) -> None:
        """Serve the first of `ways`, or another when that cannot be; `manifest` is None for a bare ONNX file.

        `folder` is where a next version may come. `priority` (lower is more important) decides who is unloaded for
        others; `file_bytes` are those of the graphs that will be open. `rebuild` makes its engines again.
        """
        self.priority, self.file_bytes, self.runs = priority, file_bytes, limits.concurrency
        self.queue = limits.queue
        self.used_at = 0.0
        """When a request was answered last, in monotonic seconds."""
        self.name, self.manifest, self.folder = ways[0].name, manifest, folder
        self.digest = ways[0].digest or None
        self.trust = "unverified-local" if manifest else "unverified"
        """How far the content is vouched for."""
        self.supervisor = Supervisor(ways, limits, on_ready=on_ready, rebuild=rebuild, start_life=start_life)
        self.meanwhile = ""
        """Why it is not served as it will be: its answers are `degraded` until another takes its place."""
        self._has_answered = False
        graphs = manifest.graphs if manifest else {}
        self._graphs = {f"{self.name}.{name}": name for name in graphs} if manifest else {self.name: wire.BARE_GRAPH}
        self._specs = {self.name: PICTURES, **{f"{self.name}.{name}": graph.spec for name, graph in graphs.items()}}

    @property
    def version(self) -> str:
        """Version of what is served."""
        return self.manifest.version if self.manifest else "1"

    @property
    def unready(self) -> str:
        """Why this bundle is not ready; empty when it is."""
        health, ready = self.supervisor.health, self.supervisor.ready
        if health.state is not State.READY:
            return f"{health.state.value}: {health.reason}" if health.reason else health.state.value
        if ready and ready.unproven and not self._has_answered:
            return f"not tried yet, send a request: {ready.unproven}"
        return ""

    @property
    def degraded(self) -> str | None:
        """Why it does not serve as it is meant to; None when it does."""
        return self.supervisor.health.degraded or self.meanwhile or None

    @property
    def names(self) -> Sequence[str]:
        """Names under which requests may ask for this bundle and its graphs; a bare file has one."""
        return list(self._specs)

    def spec(self, name: str) -> ModelSpec:
        """What goes in and comes out; that of a bare file is empty until it is loaded."""
        if self.manifest:
            return self._specs[name]
        ready = self.supervisor.ready
        return ready.graphs[wire.BARE_GRAPH].spec if ready else ModelSpec((), ())

    def takes_pictures(self, name: str) -> bool:
        """Whether `name` is the bundle as a whole rather than a graph with raw tensors."""
        return name not in self._graphs

    def info(self, name: str, reason: str, *, wanted: bool) -> ModelInfo:
        """What clients may know of one of `names`; `reason` is why it is not ready, empty when it is."""
        ready = self.supervisor.ready
        platform = "appliance" if self.takes_pictures(name) else _PLATFORMS.get(ready.runtime if ready else "", "")
        return ModelInfo(name, self.version, platform, self.spec(name), not reason, reason, wanted)

    def graph(self, name: str) -> str:
        """The graph that computes for one of `names`; empty for the bundle as a whole."""
        return self._graphs.get(name, "")

    def ask(
        self, request: InferRequest, now: float, told: Callable[[InferResponse | BaseException], None]
    ) -> Callable[[], None]:
        """Send a request to the worker; `told` gets the answer with the name of what computed it, or an error.

        Returns what gives the request up. Errors that refuse it at once are raised.
        """
        spec = self.spec(request.model)
        if spec.inputs:
            check_request(spec, request.tensors, request.outputs)
        if self.takes_pictures(request.model) and request.tensors[0].shape[0] > MOST_PICTURES:
            msg = f"{request.tensors[0].shape[0]} pictures are too many for one request: send {MOST_PICTURES} or fewer"
            raise TooLarge(msg)
        graph = self._graphs.get(request.model, "")
        supervisor = self.supervisor  # another may take its place before it has answered

        def answered(answer: Answer | Exception) -> None:
            told(answer if isinstance(answer, Exception) else self._response(request.model, graph, supervisor, answer))

        return supervisor.put(
            graph,
            request.tensors,
            answered,
            outputs=request.outputs,
            deadline_at=float("inf") if request.deadline_ms is None else now + request.deadline_ms / 1e3,
            priority=request.priority,
            source=request.source,
        )

    async def infer(self, request: InferRequest, now: float) -> InferResponse:
        """`ask`, and wait for the answer; raises the error that would be told."""
        return await waited(partial(self.ask, request, now))

    def _response(self, model: str, graph: str, supervisor: Supervisor, answer: Answer) -> InferResponse | Exception:
        self._has_answered = True
        self.used_at = time.monotonic()
        ready = supervisor.ready
        if ready is None:
            return ModelError("an answer arrived from a worker that never became ready")
        precision = ready.graphs[graph].precision if graph else _precisions(ready)
        degraded = supervisor.health.degraded or self.meanwhile or None
        origin = _origin(model, self.version, ready.runtime, precision, self.trust, degraded)
        return InferResponse(origin, answer.tensors, answer.timing_ms, answer.together)


Mirror: TypeAlias = Callable[[InferRequest, InferResponse], None]
"""Shown an answered request on the event loop, before the answer leaves; must be quick, and copy what it keeps."""

SecondOpinion: TypeAlias = Callable[[InferRequest, Mapping[str, Any]], Awaitable[Mapping[str, Any] | None]]


async def nobody_to_ask(_request: InferRequest, _document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where no second opinions are set up."""
    return {"reason": "nobody is there to be asked: set second_opinion.models"}


Order: TypeAlias = (
    "Callable[[Command], Mapping[str, Any] | CommandResult | Awaitable[Mapping[str, Any] | CommandResult]]"
)
"""Carries out an order on the event loop and returns its result, or the whole answer where that is not `done`; raises
ApplianceError where it cannot be done."""


class Candidate:
    """Another version of a bundle, proven and not serving yet."""

    def __init__(self, before: Bundle, fresh: Bundle, standing: Standing, swapping: asyncio.Task[Swap]) -> None:
        self.before, self.fresh, self.standing = before, fresh, standing
        self._swapping = swapping
        self.decision: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def switch(self) -> Swap:
        """Let it serve, in the place of the version before."""
        self.decision.set_result(None)
        return await self._swapping

    def refuse(self, reason: str) -> None:
        """Let it go, unless it serves."""
        if not self.decision.done():
            self.decision.set_exception(NotReady(reason))


class _Asked:
    """One request in hand, from its admission to its answer; every request passes here, however its caller waits."""

    __slots__ = ("_bundle", "_drop", "_give_back", "_request", "_service", "_started", "_told")

    def __init__(self, service: Service, bundle: Bundle, request: InferRequest, started: float, told: Told) -> None:
        self._service, self._bundle, self._request, self._started = service, bundle, request, started
        self._told: Told | None = told
        self._drop: Callable[[], None] | None = None
        self._give_back: Callable[[], None] | None = None

    def begin(self, guards: Sequence[Callable[[int], None]], keeper: Keeper) -> None:
        """Hand it to the worker, unless something refuses it."""
        request, bundle = self._request, self._bundle
        try:
            for guard in guards:
                guard(request.priority)
            graph = bundle.graph(request.model)
            if graph:  # pictures are judged by the worker, which reads their size
                input_bytes = sum([tensor.size_bytes for tensor in request.tensors])
                self._give_back = keeper.take(bundle.name, graph, input_bytes)
            self._drop = bundle.ask(request, self._started, self.end)
        except Exception as error:  # whatever it is, whoever asked is told
            self.end(error)

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        if self._drop:
            self._drop()
        self.end(asyncio.CancelledError())

    def end(self, result: InferResponse | BaseException) -> None:
        """It was answered, or will not be; only the first time counts."""
        told, self._told = self._told, None
        if told is None:
            return
        if self._give_back:
            self._give_back()
        service, request, bundle = self._service, self._request, self._bundle
        if isinstance(result, InferResponse):
            try:
                for mirror in service.mirrors:
                    mirror(request, result)
            except Exception as error:  # whoever asked is told
                result = error
        spent_s = time.monotonic() - self._started
        if isinstance(result, InferResponse):
            outcome = Outcome(request.model, bundle.version, spent_s, None, result.timing_ms, result.together, request)
        else:
            outcome = Outcome(request.model, bundle.version, spent_s, result, request=request)
        for observer in service.observers:
            try:
                observer(outcome)
            except Exception:  # noqa: PERF203 - whoever asked, and the other observers, are told all the same
                log.exception("observer_fault", model=request.model)
        told(result)


class Service:
    """Everything the doors may ask for."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        *,
        device_id: str,
        facts: Callable[[], Mapping[str, Any]],
        faults: Faults | None = None,
        keeper: Keeper | None = None,
        reread: Callable[[Bundle], Bundle | None] = lambda _bundle: None,
    ) -> None:
        """Serve `bundles`; `facts` adds what only the host or a door knows to `status`.

        `faults` injects faults; None where that is off. `keeper` decides which bundles are in memory; without one
        all are. `reread` looks, in a thread, for another version where a bundle came from, and returns it or None;
        it raises BundleError.
        """
        self.device_id = device_id
        self.listeners: list[Callable[[], None]] = []
        """Called on the event loop when what `status` says of a model has changed."""
        self.observers: list[Observer] = []
        """Told of each request for a model that is served, whatever became of it; must be quick."""
        self.mirrors: list[Mirror] = []
        self.orders: dict[str, Order] = {"status": lambda _order: self.status()}
        self.deployments: Callable[[], list[dict[str, Any]]] = list
        """Attempts to move to another version, the newest first, as plain data."""
        self.flights: Callable[[], Sequence[object]] = list
        """The last requests without what they carried, the newest first, as data for JSON."""
        self.second_opinion: SecondOpinion = nobody_to_ask
        """What upstream says of an answer whose caller waits for it; None where nothing in it is doubtful."""
        self.inbox: Inbox | None = None
        """Remembers orders across restarts, and knows whose signature counts; None where none is set up."""
        self._ordering, self._waiting = asyncio.Lock(), asyncio.Lock()
        """While orders are written down; while one is carried out that waits for a model."""
        self._carried_out: dict[str, asyncio.Event] = {}
        """Id -> set when it has ended."""
        self._bundles = list(bundles)
        self._keeper = keeper or Keeper(bundles, UNLIMITED)
        self.guards: list[Callable[[int], None]] = [self._keeper.check]
        """Raise Overloaded for a request whose priority is too low for how this machine is now."""
        self._facts, self._faults, self._reread = facts, faults, reread
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._swaps: defaultdict[str, Swaps] = defaultdict(Swaps)
        self._started = time.monotonic()
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._by_model = {name: bundle for bundle in bundles for name in bundle.names}

    def start(self) -> None:
        """Start a worker for every model that fits into memory."""
        self._keeper.start(self.tell)

    async def stop(self, grace_s: float) -> None:
        """Answer what runs, refuse the rest, end the workers."""
        await self._keeper.stop(grace_s)

    async def load(self, name: str, *, dry_run: bool = False) -> Admission:
        """Load a model and wait until it serves; with `dry_run` only say what it needs and who would go for it.

        `name` is that of a bundle or of one of its graphs, which come together. Where the bundle's folder holds
        another version than is served, that one takes its place (see `swap`); the answer then says whether memory
        holds both at once.
        Raises NotFound, InsufficientMemory when it does not fit, NotReady when it cannot be loaded.
        """
        async with self._loading[self._bundle(name).name]:
            bundle = self._bundle(name)
            try:
                fresh = await asyncio.to_thread(self._reread, bundle)
            except BundleError as error:
                raise self._refused(bundle, error) from error
            if fresh is None:
                return await self._keeper.load(bundle.name, dry_run=dry_run)
            if dry_run:
                return self._keeper.swap_admission(fresh)
            return (await self._swap(bundle, fresh)).admission

    async def swap(self, fresh: Bundle, *, only_for: Bundle | None = None) -> Swap:
        """Put `fresh` in the place of the bundle of that name, and return when it serves.

        It is loaded, warmed and proven beside the one that serves, where memory allows; then all its names change at
        once. Requests that wait or run are answered by the version that they came to. With `only_for` nothing but that
        version is replaced.
        Raises NotFound, InsufficientMemory when it would not fit even alone, NotReady when it cannot be proven; the
        version before then serves on.
        """
        async with self._loading[self._bundle(fresh.name).name]:
            before = self._bundle(fresh.name)
            if only_for is not None and before is not only_for:
                msg = f"{before.name} serves another version by now"
                raise NotReady(msg)
            return await self._swap(before, fresh)

    @contextlib.asynccontextmanager
    async def candidate(self, fresh: Bundle) -> AsyncIterator[Candidate]:
        """Load `fresh` as `swap` does, and prove it; inside it may be tried, and may be switched to.

        Unless it was, nothing of it is left. Raises as `swap` does.
        """
        proven: asyncio.Future[Candidate] = asyncio.get_running_loop().create_future()

        async def judge(standing: Standing) -> None:
            candidate = Candidate(bundle, fresh, standing, swapping)
            proven.set_result(candidate)
            await candidate.decision

        async with self._loading[self._bundle(fresh.name).name]:
            bundle = self._bundle(fresh.name)
            swapping = asyncio.ensure_future(self._swap(bundle, fresh, judge))
            try:
                either: list[asyncio.Future[Any]] = [swapping, proven]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not proven.done():
                    await swapping
                yield proven.result()
            finally:
                if proven.done():
                    proven.result().refuse("it was not taken")
                    await asyncio.wait([swapping])
                swapping.cancel()
                with contextlib.suppress(ApplianceError, asyncio.CancelledError):
                    await swapping

    async def _swap(self, bundle: Bundle, fresh: Bundle, judge: Judge | None = None) -> Swap:
        taken = sorted(name for name in fresh.names if self._by_model.get(name, bundle) is not bundle)
        if taken:
            raise self._refused(bundle, f"it brings the name {', '.join(taken)}, which another model has")

        def rebind() -> None:
            for name in bundle.names:
                del self._by_model[name]
            self._by_model.update(dict.fromkeys(fresh.names, fresh))
            self._bundles[self._bundles.index(bundle)] = fresh

        try:
            swap = await self._keeper.swap(fresh, rebind, judge)
        except InsufficientMemory as error:
            self._refused(bundle, error)
            raise
        except NotReady as error:
            raise self._refused(bundle, f"version {fresh.version} is not proven: {error}") from error
        self._swaps[bundle.name].done(swap)
        log.info(
            "model_swapped",
            model=bundle.name,
            version=fresh.version,
            before=bundle.version,
            load_s=round(swap.load_s, 3),
            switch_us=round(swap.switch_s * 1e6, 1),
            gap_s=round(swap.gap_s, 3),
        )
        self.tell()
        return swap

    def _refused(self, bundle: Bundle, reason: object) -> NotReady:
        """The error that says why another version does not take the place of `bundle`; it is counted and logged."""
        log.warning("swap_refused", model=bundle.name, version=bundle.version, reason=str(reason))
        self._swaps[bundle.name].not_done(str(reason))
        return NotReady(f"{bundle.name} stays at version {bundle.version}: {reason}")

    async def unload(self, name: str) -> None:
        """Let a model answer what it holds and free its memory; it stays unloaded until `load`. Raises NotFound."""
        await self._keeper.unload(self._bundle(name).name)

    def repository(self) -> list[RepositoryModel]:
        """Every model by name with its state, loaded or not."""
        found = []
        for bundle in self._bundles:
            state, reason = self._keeper.state(bundle.name)
            found += [RepositoryModel(name, bundle.version, state, reason) for name in bundle.names]
        return found

    @property
    def ready(self) -> bool:
        """Whether every model that is wanted has proven itself, or is loaded by its next request."""
        return not any(self._unready(bundle) for bundle in self._bundles if self._keeper.wakes(bundle.name))

    @property
    def settled(self) -> bool:
        """Whether no model is loading: each has proven itself, waits after a failure, or does not fit."""
        return not any(self._keeper.state(bundle.name)[0] is ModelState.LOADING for bundle in self._bundles)

    @property
    def failed(self) -> str:
        """Why the daemon should be started anew; empty while it does its work."""
        awake = (bundle.supervisor.health for bundle in self._bundles if self._keeper.awake(bundle.name))
        return failed(awake, time.monotonic())

    def models(self) -> list[ModelInfo]:
        """Every model by name."""
        return [self._info(bundle, name) for bundle in self._bundles for name in bundle.names]

    def model(self, name: str, version: str | None = None) -> ModelInfo:
        """One model; raises NotFound."""
        return self._info(self._bundle(name, version), name)

    def spec(self, name: str, version: str | None = None) -> ModelSpec:
        """What goes into a model and comes out; raises NotFound."""
        return self._bundle(name, version).spec(name)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model on tensors; a whole bundle answers with its predict documents in a BYTES tensor.

        Raises what `models.errors` says, each with its own meaning for the caller.
        """
        as_documents = self._bundle(request.model, request.version).takes_pictures(request.model)
        response = await self._run(request)
        if not as_documents:
            return response
        texts = [orjson.dumps(document) for document in documents(response)]
        result = Tensor("result", "BYTES", (len(texts),), pack_bytes(texts))
        return InferResponse(response.origin, [result], response.timing_ms, response.together)

    async def predict(self, request: InferRequest) -> dict[str, Any]:
        """Answer for the one encoded picture in `request.tensors` as a document."""
        started = time.monotonic()
        if not self._bundle(request.model, request.version).takes_pictures(request.model):
            msg = f"model {request.model!r} takes raw tensors, not pictures: use POST /v2/models/{request.model}/infer"
            raise BadInput(msg)
        document = documents(await self._run(request))[0]
        if request.escalate:
            document["second_opinion"] = await self.second_opinion(request, document)
        document["timing_ms"]["total"] = round((time.monotonic() - started) * 1e3, 3)
        return document

    async def order(
        self, payload: bytes, *, now: float, retained: bool = False, authorized: bool = False
    ) -> CommandResult:
        """Read an order as it came through a door, in an envelope or bare, and carry it out.

        `now` is wall time in Unix seconds. `authorized` says that the door knows whoever gives it as an administrator;
        a signature stands for that, too. Orders that change the device are taken one after the other, and those that
        load or unload a model carried out so; the others do not wait for these.
        """
        if len(payload) > LARGEST_BYTES:
            reason = f"the order has {len(payload)} bytes: {LARGEST_BYTES} are the most that is read"
            return CommandResult("", "refused", reason)
        try:
            content, signer = await self.inbox.opened(payload) if self.inbox else (payload, "")
        except Forbidden as error:
            return CommandResult("", "refused", str(error))
        if self.inbox:
            now = max(now, self.inbox.floor())
        order = read(
            content, device_id=self.device_id, now=now, retained=retained, authorized=authorized, signer=signer
        )
        if isinstance(order, CommandResult):
            return order
        if self.inbox is None or order.command not in CHANGING:
            return await self.execute(order)
        try:
            return await self._once(order, signer, self.inbox)
        except (OSError, ConfigError) as error:
            return CommandResult(order.id, "failed", f"{error}: nothing is done that is not written down")

    async def _once(self, order: Command, signer: str, inbox: Inbox) -> CommandResult:
        """Carry out an order that changes the device, unless that was done or begun before."""
        while True:
            if order.id in self._carried_out:  # given twice: the second has the answer of the first
                await self._carried_out[order.id].wait()
            async with self._ordering:
                if order.id in self._carried_out:
                    continue
                known = await inbox.known(order, signer)
                if known:
                    return known
                await inbox.received(order, signer)
                ended = self._carried_out[order.id] = asyncio.Event()
                break
        log.info("order_taken", id=order.id, command=order.command, signer=signer or None)
        try:
            async with self._waiting if order.command in _SLOW else contextlib.nullcontext():
                result = await self._execute(order)
            if result.status != "unknown":
                await inbox.done(order, signer, result)
        except OSError as error:
            reason = f"it was carried out, and what came of it cannot be written down ({error}): look at the state"
            return CommandResult(order.id, "unknown", reason)
        finally:
            del self._carried_out[order.id]
            ended.set()
        return result

    async def execute(self, command: Command) -> CommandResult:
        """Carry out an order; the same id always gets the same answer."""
        known = self._results.get(command.id)
        if known is not None:
            return known
        result = await self._execute(command)
        self._results[command.id] = result
        while len(self._results) > _REMEMBERED_COMMANDS:
            self._results.popitem(last=False)
        return result

    async def _execute(self, command: Command) -> CommandResult:
        order = self.orders.get(command.command)
        if order is None:
            reason = f"order {command.command!r} needs what is not set up here: set update.url"
            return CommandResult(command.id, "refused", reason)
        try:
            answer = order(command)
            result = await answer if isinstance(answer, Awaitable) else answer
        except (CallerError, Unavailable) as error:
            return CommandResult(command.id, "refused", str(error))
        except (ApplianceError, OSError) as error:
            return CommandResult(command.id, "failed", str(error))
        except Exception as error:
            log.exception("order_fault", id=command.id, command=command.command)
            return CommandResult(command.id, "failed", f"a fault of the appliance itself ({error}): see its log")
        return result if isinstance(result, CommandResult) else CommandResult(command.id, "done", result=result)

    async def result(self, order_id: str) -> CommandResult:
        """The answer that an order got; raises NotFound when it is not known, NotReady while it is carried out."""
        if order_id in self._carried_out:
            msg = f"order {order_id[:100]!r} is being carried out: ask again"
            raise NotReady(msg)
        found = (await self.inbox.answer(order_id) if self.inbox else None) or self._results.get(order_id)
        if found is None:
            msg = f"there is no order {order_id[:100]!r}: the last {_REMEMBERED_COMMANDS} are known"
            raise NotFound(msg)
        return found

    def serving(self, name: str) -> Bundle:
        """The bundle that answers for `name`; raises NotFound."""
        return self._bundle(name)

    def fault(self, name: str) -> str:
        """Why the worker of `name` is not as it should be; empty while it is, or while it is not wanted."""
        bundle = self._bundle(name)
        if self._keeper.asleep(bundle.name):
            return ""
        return bundle.supervisor.health.degraded or self._unready(bundle)

    def inject(self, injection: Injection) -> None:
        """Break something on purpose, or mend everything; raises NotFound where that is off, BadInput, NotReady."""
        if self._faults is None:
            raise NotFound("fault injection is off: set faults.enabled, and start the daemon again")
        if injection.fault == MEND:
            self._faults.mend([bundle.supervisor for bundle in self._bundles])
        else:
            bundle = self._bundle(injection.model) if injection.model else None
            self._faults.inject(injection, bundle.supervisor if bundle else None)

    def status(self) -> dict[str, Any]:
        """What an operator wants to know, as plain data."""
        return {
            "device_id": self.device_id,
            "appliance": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "ready": self.ready,
            "reboot_wanted": next((health.reboot_wanted for health in self._healths if health.reboot_wanted), None),
            "models": [
                _model_status(bundle, self._unready(bundle), self._swaps[bundle.name]) for bundle in self._bundles
            ],
            "workers": self.workers(),
            "workers_aside": self._keeper.aside(),
            "memory": self._keeper.status(),
            **self._facts(),
        }

    def workers(self) -> list[dict[str, Any]]:
        """What `status` says of the worker of each bundle."""
        return [_worker_status(bundle) for bundle in self._bundles]

    @property
    def waiting(self) -> int:
        """Requests that wait, for all models together."""
        return sum(bundle.supervisor.waiting for bundle in self._bundles)

    @property
    def _healths(self) -> list[WorkerHealth]:
        return [bundle.supervisor.health for bundle in self._bundles]

    def _unready(self, bundle: Bundle) -> str:
        """Why a bundle is not ready; one that its next request loads is."""
        if self._keeper.asleep(bundle.name):
            return "" if self._keeper.wakes(bundle.name) else self._keeper.state(bundle.name)[1]
        return bundle.unready

    def _info(self, bundle: Bundle, name: str) -> ModelInfo:
        return bundle.info(name, self._unready(bundle), wanted=self._keeper.wakes(bundle.name))

    def tell(self) -> None:
        """Call the listeners: something that `status` says has changed."""
        for listener in self.listeners:
            listener()

    def asked_at_once(self, name: str, version: str | None = None) -> ModelSpec | None:
        """The tensors of a graph that `ask` takes; None for one that is not loaded, and for a bundle as a whole.

        Raises NotFound.
        """
        bundle = self._bundle(name, version)
        return None if bundle.takes_pictures(name) or not self._keeper.awake(bundle.name) else bundle.spec(name)

    def ask(self, request: InferRequest, told: Told) -> Callable[[], None]:
        """`infer` for whoever waits without a coroutine, and only what `asked_at_once` knows.

        Returns what gives the request up. `told` may be called before. Raises NotFound.
        """
        asked = _Asked(self, self._bundle(request.model, request.version), request, time.monotonic(), told)
        asked.begin(self.guards, self._keeper)
        return asked.give_up

    async def _run(self, request: InferRequest) -> InferResponse:
        bundle = self._bundle(request.model, request.version)
        started = time.monotonic()

        def ask(told: Told) -> Callable[[], None]:
            asked = _Asked(self, bundle, request, started, told)
            asked.begin(self.guards, self._keeper)
            return asked.give_up

        try:
            while not self._keeper.awake(bundle.name):
                for guard in self.guards:
                    guard(request.priority)
                await self._wake(bundle, request, started)
                bundle = self._bundle(request.model, request.version)  # another version may have come
        except BaseException as error:
            _Asked(self, bundle, request, started, lambda _raised: None).end(error)
            raise
        return await waited(ask)

    async def _wake(self, bundle: Bundle, request: InferRequest, started: float) -> None:
        """Wait until a model that was unloaded is back, no longer than the request may take."""
        spent_s = time.monotonic() - started
        limit_s = None if request.deadline_ms is None else max(0.0, request.deadline_ms / 1e3 - spent_s)
        try:
            await asyncio.wait_for(self._keeper.wake(bundle.name), limit_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded("the deadline passed while the model was loaded: allow more time") from None

    def _bundle(self, name: str, version: str | None = None) -> Bundle:
        bundle = self._by_model.get(name)
        if bundle is None:
            msg = f"there is no model {name[:100]!r}; served are {', '.join(sorted(self._by_model)) or 'none'}"
            raise NotFound(msg)
        if version is not None and version != bundle.version:
            msg = f"model {name!r} has no version {version[:100]!r}; served is {bundle.version}"
            raise NotFound(msg)
        return bundle


def documents(response: InferResponse) -> list[dict[str, Any]]:
    """The predict documents of a bundle's answer, one a picture."""
    origin = response.origin
    return [
        {
            "model": origin.model,
            "version": origin.version,
            "runtime": origin.runtime,
            "precision": origin.precision,
            "degraded": origin.degraded,
            "trust": origin.trust,
            **_rounded(orjson.loads(result)),
            "timing_ms": {part: round(spent, 3) for part, spent in response.timing_ms.items()},
        }
        for result in response.tensors[0].to_array()
    ]


def _rounded(result: dict[str, Any]) -> dict[str, Any]:
    """More digits of a confidence would say nothing and only cost bytes."""
    for item in items(result):
        item["confidence"] = round(item["confidence"], _CONFIDENCE_DIGITS)
    return result


def _precisions(ready: wire.Ready) -> str:
    return ", ".join(f"{graph} {info.precision}" for graph, info in sorted(ready.graphs.items()))


def _tolerances(manifest: Manifest, ready: wire.Ready) -> dict[str, float]:
    """By graph, how far its golden answer may be off; an engine has that of the graph that it was made of."""
    return {
        graph: variants[info.precision].golden.tolerance
        for graph, info in ready.graphs.items()
        if info.precision in (variants := manifest.graphs[graph].variants)
    }


def _model_status(bundle: Bundle, unready: str, swaps: Swaps) -> dict[str, Any]:
    ready = bundle.supervisor.ready
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.digest,
        "trust": bundle.trust,
        "takes_pictures": bundle.takes_pictures(bundle.name),
        "ready": not unready,
        "reason": unready or None,
        "degraded": bundle.degraded,
        "runtime": ready.runtime if ready else None,
        "precision": {graph: info.precision for graph, info in ready.graphs.items()} if ready else {},
        "tolerance": _tolerances(bundle.manifest, ready) if ready and bundle.manifest else {},
        "waiting": bundle.supervisor.waiting,
        "running": bundle.supervisor.running,
        "concurrency": bundle.runs,
        "service_ms": None if bundle.supervisor.service_s is None else round(bundle.supervisor.service_s * 1e3, 3),
        "swaps": swaps.status(),
    }


def _worker_status(bundle: Bundle) -> dict[str, Any]:
    health = bundle.supervisor.health
    return {
        "pid": bundle.supervisor.pid,
        "device": bundle.supervisor.device or None,
        "bundle": bundle.name,
        "version": bundle.version,
        "state": health.state.value,
        "restarts": health.restarts,
        "cause": health.cause.value if health.cause else None,
        "reason": health.reason or None,
        "rung": health.rung.value if health.rung else None,
        "skipped_rungs": [rung.value for rung in health.missing],
        "faults": _by_name(health.fault_counts),
        "restarts_by_cause": _by_name(health.restart_counts),
        "rungs": _by_name(health.rung_counts),
        "recoveries": {
            cause.value: {"count": spent.count, "total_s": round(spent.total_s, 3), "last_s": round(spent.last_s, 3)}
            for cause, spent in health.recoveries.items()
        },
    }


def _by_name(counts: Mapping[Fault, int] | Mapping[Rung, int]) -> dict[str, int]:
    return {kind.value: count for kind, count in counts.items()}
