"""The daemon: builds everything, starts it in order, stops it in reverse. The only file that sees everything.

Past 400 lines with how bundles are opened, at the start and for a swap: that takes the settings, the store and the
memory, which meet only here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from appliance import __version__, hardware, settings, wire
from appliance.adapters import host, http
from appliance.adapters.access import Gate, gate_before
from appliance.adapters.bodies import Bodies
from appliance.adapters.http1 import Http1
from appliance.adapters.live import Live, following
from appliance.adapters.metrics import Metrics
from appliance.adapters.notify import feed_watchdog, notify, watchdog_s
from appliance.adapters.store import Store
from appliance.adapters.straight import Straight
from appliance.adapters.tls import Listening
from appliance.adapters.tokens import TokenFile
from appliance.adapters.traces import Exporter
from appliance.board import Board
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.engines import MEANWHILE, Engines
from appliance.faults import Faults, Switch
from appliance.fleet import broker_of, fleet_of
from appliance.identity import upkept
from appliance.lag import watched_loop
from appliance.machine_memory import MachineMemory, Notebook
from appliance.orders import Orders, changed_by_order
from appliance.recorder import FLIGHTS, Recorder
from appliance.runtime.machine import machine
from appliance.service import Bundle, Service
from appliance.spare import Spare
from appliance.start import configure_log
from appliance.updates import Updates
from models.bundle import check_name
from models.errors import BundleError, ConfigError
from models.folder import BundleFolder
from models.measurements import Measurements, known_on, memory_on
from models.targets import BACKENDS

log = structlog.get_logger()

_SWITCH_S = 0.001
"""A thread that reads a bundle's manifest lets the event loop go on after so long; Python's own choice is 5 ms."""
PREPARED = "prepared"
"""Folder in the state folder with graphs as the runtime has optimised them."""
_LEAST_GRACE_S = 1.0
"""What a worker always gets to end by itself."""
_FEEDS = 3
"""How often systemd's watchdog is fed in the time it waits."""
_FLOAT = "fp32"
_EVERYWHERE = "onnxruntime-cpu"
"""The runtime that needs no accelerator, driver or compiled plan."""


async def run(config: settings.Settings, spare: Spare) -> int:
    """Serve until SIGTERM or SIGINT; 0 then. The first model gets the worker of `spare`, which may be on its way.

    Each part is started and notes how it stops; whatever happens, they stop in reverse. Raises ApplianceError where
    the daemon cannot run.
    """
    async with contextlib.AsyncExitStack() as stack:
        tls = _door(config.http)
        store = Store(config.state_dir)
        stack.callback(store.close)
        given, config = config, changed_by_order(config, store)
        listener = stack.enter_context(_listen(config.http.host, config.http.port))
        device_id = config.device_id or store.device_id()
        configure_log(sys.stderr.isatty(), device_id=device_id)
        lag = stack.enter_context(watched_loop())
        started_at, board = (clock := host.WallClock())(), Board()
        suits, because = await asyncio.to_thread(hardware.suited)

        def facts() -> dict[str, Any]:
            return {
                "clock": {
                    "synced": config.clock.assume_synced or host.clock_synced(),
                    "assumed": config.clock.assume_synced,
                    "started_at": round(started_at),
                    "now": round(clock()),
                },
                "profile": {"name": config.profile, "suits": suits, "because": because},
                "memory_bytes": host.memory_bytes(),
                "device": board.status(),
                "event_loop": lag.status(),
                "update": updates.status(),
                **fleet.status(),
                "compiling": engines.status(),
                "identity": upkeep.status(),
                "recent_faults": live.recent_faults(),
                "faults_enabled": config.faults.enabled,
            }

        switches: dict[str, Switch] = {"clock-step": clock.step, "disk-full": store.pretend_full}
        faults = Faults(switches) if config.faults.enabled else None
        memory = MachineMemory(config, spare, store)
        updates = stack.enter_context(contextlib.closing(Updates(config, clock)))
        engines = Engines(config, lambda holder, terms: keeper.lease(holder, terms))  # noqa: PLW0108 - there is no keeper yet
        open_bundle = partial(_open_bundle, config=config, store=store, memory=memory, updates=updates, engines=engines)
        upkeep = await stack.enter_async_context(upkept(config, clock, tls.load if tls else None))
        bundles = _bundles(config, memory, lambda folder: updates.present(folder, open_bundle))
        keeper = memory.keeper(bundles)
        service = Service(
            bundles,
            device_id=device_id,
            facts=facts,
            faults=faults,
            keeper=keeper,
            reread=partial(_reread, open_bundle=open_bundle),
        )
        fleet = stack.enter_context(fleet_of(config, service, updates, clock))
        switches |= fleet.switches
        recorder = Recorder(
            service,
            config.state_dir / FLIGHTS,
            per_s=config.log.requests_per_s,
            export=_exporter(stack, config.traces.endpoint, device_id),
        )
        live = stack.enter_context(following(service, recorder.fault))
        service.orders |= Orders(service, given, store, now=clock, parts=(updates, fleet)).by_name()
        metrics, bodies = Metrics(service), _bodies(config.http)
        gate = gate_before(http.build(service, metrics, live, bodies, clock), config.http, TokenFile(config.state_dir))
        app: ASGIApp = gate
        if config.role == "upstream":
            app = await stack.enter_async_context(
                _home(gate, config, device_id, metrics, now=clock, ended=lambda: live.ended)
            )
        server = _server(app, config, tls, Straight(gate, service, bodies))
        _stop_by_signal(server, live)
        _watch_over(stack, service, board)
        service.listeners.append(readiness := _Readiness(service))
        service.start()
        readiness()
        stack.push_async_callback(_stop_service, server, service, recorder, config.shutdown_grace_s)
        fleet.start(stack)
        _say_serving(listener, config, service)
        updates.start(service, open_bundle, engines)
        stack.push_async_callback(updates.stop)
        _make_engines(stack, engines, service, open_bundle)
        sys.setswitchinterval(_SWITCH_S)
        gc.freeze()  # what is there now stays: no collection, at which every request would wait, need look at it
        await server.serve(sockets=[listener])
        log.info("stopping")
        notify("STOPPING=1")
    return 0


def _home(
    gate: Gate,
    config: settings.Settings,
    name: str,
    metrics: Metrics,
    *,
    now: Callable[[], float],
    ended: Callable[[], bool],
) -> contextlib.AbstractAsyncContextManager[ASGIApp]:
    """The fleet's home, with the doors of `gate` behind its own; raises ConfigError where its libraries are missing."""
    try:
        from appliance.upstream.home import home  # noqa: PLC0415 - a device has no database of a fleet
    except ModuleNotFoundError as error:
        msg = f"role upstream needs {error.name}: install edge-appliance[upstream], or choose --role device"
        raise ConfigError(msg) from error
    broker = broker_of(config.mqtt)
    return home(gate, config, broker=broker, name=name, registry=metrics.registry, now=now, ended=ended)


def _exporter(stack: contextlib.AsyncExitStack, endpoint: str, device_id: str) -> Exporter | None:
    """Who sends spans of requests, where that is wished for."""
    if not endpoint:
        return None
    exporter = Exporter(endpoint, device_id)
    stack.push_async_callback(asyncio.to_thread, exporter.close)
    return exporter


async def _stop_service(server: _Server, service: Service, recorder: Recorder, grace_s: float) -> None:
    # What answering took is no longer there for the workers: the whole stop fits into the grace period.
    left_s = server.stop_at + grace_s - time.monotonic()
    await service.stop(max(left_s, _LEAST_GRACE_S) if server.should_exit else _LEAST_GRACE_S)
    await recorder.finish()
    log.info("stopped")


def _stop_by_signal(server: _Server, live: Live) -> None:
    def stop() -> None:
        server.stop()
        live.end()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _watch_over(stack: contextlib.AsyncExitStack, service: Service, board: Board) -> None:
    """Look at the machine, and feed systemd's watchdog where it waits for that, until `stack` is left."""
    service.guards.append(board.check)
    watching = asyncio.get_running_loop().create_task(board.watch(service.tell))
    stack.callback(watching.cancel)
    hungry_s = watchdog_s()
    if hungry_s is not None:
        feeding = asyncio.get_running_loop().create_task(feed_watchdog(hungry_s / _FEEDS, lambda: service.failed))
        stack.callback(feeding.cancel)


def _make_engines(
    stack: contextlib.AsyncExitStack, engines: Engines, service: Service, open_bundle: Callable[[Path], Bundle]
) -> None:
    """Make engines of what is served without them, where this device makes some, until `stack` is left."""

    def served_without() -> set[Bundle]:
        served = {service.serving(info.name) for info in service.models()}
        return {bundle for bundle in served if bundle.meanwhile}

    async def serve_anew(bundle: Bundle) -> None:
        if bundle.folder:
            await service.swap(await asyncio.to_thread(open_bundle, bundle.folder), only_for=bundle)

    if engines.makes:
        making = asyncio.get_running_loop().create_task(engines.catch_up(served_without, serve_anew))
        stack.callback(making.cancel)


def _say_serving(listener: socket.socket, config: settings.Settings, service: Service) -> None:
    if not service.models():
        log.warning("no_models", why="nothing is served: give a bundle with --bundle, or an ONNX file with --onnx")
    address, port = listener.getsockname()[:2]
    scheme = "https" if config.http.tls_certificate else "http"
    log.info("serving", http=f"{scheme}://{address}:{port}", version=__version__, state_dir=str(config.state_dir))


class _Readiness:
    """Tells systemd once that the start is over: every model has proven itself, or has said why it cannot."""

    def __init__(self, service: Service) -> None:
        self._service, self._told = service, False

    def __call__(self) -> None:
        if not self._told and self._service.settled:
            self._told = True
            notify("READY=1")


class _Server(uvicorn.Server):
    """uvicorn, with our signals: its own handling ends the process by the signal instead of with status 0."""

    stop_at = float("inf")
    """When it was told to stop first, in monotonic seconds."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Take no new connections, answer what runs, then return from `serve`."""
        self.stop_at = min(self.stop_at, time.monotonic())
        self.should_exit = True


def _server(app: ASGIApp, config: settings.Settings, tls: Listening | None, straight: Straight) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=partial(Http1, silence_s=config.http.silence_s, straight=straight),  # type: ignore[arg-type] # called, no more
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # whoever sends them could pass for any address, and so for any client
            server_header=False,
            date_header=False,  # boards without a battery begin in 1970, and HTTP asks such a server for none
            lifespan="off",
            timeout_graceful_shutdown=int(config.shutdown_grace_s) or 1,
            ssl_context_factory=(lambda *_uvicorns: tls.context) if tls else None,
        )
    )


def _bodies(http: settings.Http) -> Bodies:
    return Bodies(each_bytes=http.body_limit_bytes, all_bytes=http.bodies_limit_bytes)


def _bundles(config: settings.Settings, memory: MachineMemory, open_bundle: Callable[[Path], Bundle]) -> list[Bundle]:
    limits = config.of_a_model
    found = [open_bundle(path) for path in config.bundles]
    for name, path in config.onnx.items():
        check_name(name)
        if not path.is_file():
            msg = f"{path} is no file: give --onnx NAME=FILE an ONNX file"
            raise ConfigError(msg)
        order = wire.Open(
            name=name,
            runtime=_EVERYWHERE if config.runtime in BACKENDS else config.runtime,  # there can be no engine of it
            onnx=str(path.resolve()),
            concurrency=limits.concurrency,
            idle_trim_s=config.memory.idle_trim_s,
            **_card(config),
        )
        found.append(
            Bundle(
                [order],
                limits,
                manifest=None,
                on_ready=lambda _ready: None,
                priority=config.memory.priorities.get(name, DEFAULT_PRIORITY),
                file_bytes=path.stat().st_size,
                start_life=memory.start_life,
            )
        )
    names = [name for bundle in found for name in bundle.names]
    if len(set(names)) != len(names):
        msg = f"two models go by the same name: {', '.join(sorted(names))}"
        raise ConfigError(msg)
    unknown = sorted(set(config.memory.priorities) - {bundle.name for bundle in found})
    if unknown:
        msg = f"memory.priorities names {', '.join(unknown)}, which is not served: use the names of bundles"
        raise ConfigError(msg)
    if not found:
        log.warning("no_models", why="nothing is served: give a bundle with --bundle, or an ONNX file with --onnx")
    return found


def _open_bundle(
    path: Path, config: settings.Settings, store: Store, memory: MachineMemory, updates: Updates, engines: Engines
) -> Bundle:
    limits = config.of_a_model
    folder = BundleFolder(path)
    manifest = folder.manifest
    digest = manifest.digest
    here = machine(runtime=config.runtime)
    passed = {precision for graph in manifest.graphs.values() for precision in graph.variants}
    if config.precision != "auto" and config.precision not in passed:
        msg = f"{path} holds no graph in {config.precision}: choose auto or {', '.join(sorted(passed))}"
        raise BundleError(msg)
    measured = (store.measurements(digest), folder.measurements("cpu"))
    known = Measurements(here, known_on(here, *measured), memory_on(here, *measured))
    notebook = memory.notebooks[digest] = Notebook(store, digest, known)
    order = wire.Open(
        name=manifest.name,
        runtime=config.runtime,
        bundle=str(path.resolve()),
        engines=str(engines.folder(digest)),
        prepared=str(config.state_dir.resolve() / PREPARED),
        digest=digest,
        precision=config.precision,
        concurrency=limits.concurrency,
        latency_ms=known.latency_ms,
        max_pixels=limits.picture_pixels,
        idle_trim_s=config.memory.idle_trim_s,
        memory=known.memory,
        **_card(config),
    )
    ways, waits = _ways(order, passed), engines.missing(digest, path)
    bundle = Bundle(
        [way for way in ways if way.runtime == _EVERYWHERE] if waits else ways,
        limits,
        manifest=manifest,
        on_ready=notebook.latency,
        priority=config.memory.priorities.get(manifest.name, DEFAULT_PRIORITY),
        file_bytes=sum(
            max(variant.graph.size_bytes for variant in graph.variants.values()) for graph in manifest.graphs.values()
        ),
        start_life=memory.start_life,
        folder=path,
        rebuild=engines.remake if engines.makes else None,
    )
    bundle.meanwhile = MEANWHILE if waits else ""
    if updates.trusts(path, digest):
        bundle.trust = "signed"
    return bundle


def _card(config: settings.Settings) -> dict[str, Any]:
    """What a worker must know of the card that it runs on."""
    requires = config.gpu.policy == "require" and config.runtime == "onnxruntime-cuda"
    return {"gpu_only": requires, "gpu_memory_bytes": config.gpu.memory_bytes}


def _reread(bundle: Bundle, open_bundle: Callable[[Path], Bundle]) -> Bundle | None:
    """What the folder of `bundle` holds now; None where that is what it serves. Raises BundleError."""
    if bundle.folder is None or BundleFolder(bundle.folder).manifest.digest == bundle.digest:
        return None
    found = open_bundle(bundle.folder)
    if found.name != bundle.name:
        msg = f"{bundle.folder} holds {found.name!r} now: put {bundle.name!r} there, or start the daemon anew"
        raise BundleError(msg)
    return found


def _ways(order: wire.Open, precisions: set[str]) -> list[wire.Open]:
    """How a bundle may be opened: as ordered, then in float where that is another way, then without an accelerator."""
    ways = [order]
    if order.precision != _FLOAT and {_FLOAT} < precisions:
        ways.append(replace(order, precision=_FLOAT))
    if order.runtime != _EVERYWHERE and not order.gpu_only:
        ways.append(replace(order, precision=_FLOAT if _FLOAT in precisions else order.precision, runtime=_EVERYWHERE))
    return ways


def _door(http: settings.Http) -> Listening | None:
    """The files of TLS; None for plain HTTP."""
    if http.tls_certificate is None:
        return None
    return Listening(http.tls_certificate, http.tls_key, http.client_ca, http.client_crl)


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()  # whoever reads our address in the log may connect at once
    except OSError as error:
        listener.close()
        msg = f"cannot listen on {address}:{port} ({error.strerror}): stop its user, or choose with --http HOST:PORT"
        raise ConfigError(msg) from error
    return listener
