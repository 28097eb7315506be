"""Keeps one worker process alive and hands it work.

Runs on the event loop and never blocks it. What to do when is decided in `core.health`, `core.schedule`
and `core.watch`; this file performs it: spawn, send, receive, prove, kill, reap, and wake up in time.

It is past 400 lines because every step is a few lines on the same state: the life, what it holds, the queue, the
health, one timer. Cut in two, each half would need most of the other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from appliance import wire
from appliance.arena import ArenaFullError, Slot
from appliance.core.faults import Fault, classify, cuda_code
from appliance.core.health import DOUBTFUL, UP, Event, Patience, Rung, State, WorkerHealth
from appliance.core.limits import Limits
from appliance.core.schedule import DEFAULT_PRIORITY, Schedule, Ticket
from appliance.core.seldom import Seldom
from appliance.core.watch import NEVER, Watch
from appliance.life import Life, StartLife
from models.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    TooLarge,
    WorkerLost,
    error_from_name,
)
from models.spec import Payload, Tensor

log = structlog.get_logger()

T = TypeVar("T")

_LINGER_S = 0.5
"""A worker that has hung up may take this long to end by itself, so that its own reason is seen."""
_LEAST_GRACE_S = 1.0
_FAILURES_S = 1.0
"""Runs that fail are logged no more often: a model that fails at every request would fill the log of a device."""
_OUTPUT_READS = 4
"""As much as a pipe holds: what a worker has left behind when it is gone."""


@dataclass(slots=True)  # not frozen, which would take five times as long to make: there is one a request
class Answer:
    """Tensors whose payloads belong to the receiver, and where the time went."""

    tensors: list[Tensor]
    timing_ms: Mapping[str, float]
    together: int = 1
    """Requests that shared the run."""


@dataclass(slots=True)
class Work:
    """What a ticket carries."""

    graph: str
    tensors: Sequence[Tensor]
    outputs: tuple[str, ...] | None
    told: Callable[[Answer | Exception], None] | None
    """Told what became of it; None once it was, and where nobody waits."""

    def end(self, result: Answer | Exception) -> None:
        """Tell whoever waits, unless that was done before."""
        told, self.told = self.told, None
        if told:
            try:
                told(result)
            except Exception:  # a fault around one answer concerns neither the worker nor other answers
                log.exception("answer_lost")


async def waited(ask: Callable[[Callable[[T | BaseException], None]], Callable[[], None]]) -> T:
    """Wait for what is told by a callback: its result, or the error, which is raised.

    `ask` is handed the callback and returns what gives the request up; that is called when the waiting is cancelled.
    """
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def told(result: T | BaseException) -> None:
        if answer.done():
            return
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    give_up = ask(told)
    try:
        return await answer
    except asyncio.CancelledError:
        give_up()
        raise


class Supervisor:
    """The daemon's end of one worker."""

    def __init__(
        self,
        ways: Sequence[wire.Open],
        limits: Limits,
        *,
        on_ready: Callable[[wire.Ready], None],
        rebuild: Callable[[wire.Open], Coroutine[None, None, None]] | None = None,
        start_life: StartLife = Life,
    ) -> None:
        """Serve one model, opened in the first of `ways`; the others are what it falls back to, in that order.

        `on_ready` is told each time a worker has proven itself. `rebuild` makes the engines of the model again,
        and raises ApplianceError when it cannot; None where there are no engines. `start_life` gives it a process.
        """
        self.name = ways[0].name
        self.ready: wire.Ready | None = None
        self.memory = ways[0].memory
        """What the model takes, as far as it was measured."""
        self._start_life = start_life
        self._ways, self._limits, self._on_ready, self._rebuild = list(ways), limits, on_ready, rebuild
        self._patience = Patience(limits.calm_s, limits.quarantine_s)
        self.health = WorkerHealth(since=NEVER, patience=self._patience)  # nothing is late before the start
        self._schedule: Schedule[Work] = Schedule(limits)
        self._pumping = False
        self._ids = itertools.count(1)
        self._shared: frozenset[str] = frozenset()
        """Graphs whose requests may share a run."""
        self._life: Life | None = None
        self._watch = self._new_watch()
        self._proof: int | None = None
        self._building: asyncio.Future[None] | None = None
        self._spoiled = self._gentle = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self._gone = asyncio.Event()
        self._on_change: Callable[[], None] = lambda: None
        self._on_measured: Callable[[], None] = lambda: None
        self._failures = Seldom(_FAILURES_S)
        self._unmeasured: set[int] = set()
        """Runs that take nobody knows how much."""
        self._quiet = asyncio.Event()
        """Set while nothing waits or runs."""
        self._quiet.set()

    @property
    def pid(self) -> int | None:
        """Process id of the present worker."""
        return self._life.process.pid if self._life else None

    @property
    def device(self) -> str:
        """The part of a GPU on which the present worker was put; empty where there was no choice."""
        return self._life.device if self._life else ""

    @property
    def waiting(self) -> int:
        """Requests that wait in the queue."""
        return len(self._schedule)

    @property
    def explores(self) -> bool:
        """Whether the worker runs something of which it is not known yet what it takes."""
        return bool(self._unmeasured)

    @property
    def running(self) -> int:
        """Requests that the worker holds."""
        return len(self._watch)

    @property
    def service_s(self) -> float | None:
        """Mean seconds that a request takes in the worker; None until one was measured."""
        return self._schedule.service_s

    def start(
        self,
        on_change: Callable[[], None],
        *,
        run_limit_bytes: int = 0,
        on_measured: Callable[[], None] = lambda: None,
        gentle: bool = False,
    ) -> None:
        """Spawn a worker, the first one or one after `stop`; `on_change` is called after each change of `health`.

        `on_measured` is called when `memory` has changed; all runs together may take `run_limit_bytes` (0: no limit).
        A `gentle` one leaves the processors to others while it loads, and is warm when it is ready.
        """
        self._loop = asyncio.get_running_loop()
        self._on_change, self._on_measured, self._gentle = on_change, on_measured, gentle
        self._ways = [replace(way, run_limit_bytes=run_limit_bytes, memory=self.memory) for way in self._ways]
        now = time.monotonic()
        self.health = replace(self.health.renewed(now), state=State.LOADING, reason="", cause=None)
        self._spawn()

    def twin(self) -> Supervisor:
        """Another worker of the same model, not started, that knows what this one has learned and counted."""
        twin = Supervisor(
            self._ways, self._limits, on_ready=self._on_ready, rebuild=self._rebuild, start_life=self._start_life
        )
        twin.ready, twin.memory = self.ready, self.memory
        twin._schedule.inherit(self._schedule)
        twin.health = replace(self.health, restarts=self.health.restarts + 1)
        return twin

    def narrow(self, narrow: bool) -> None:
        """Take less memory: half the queue, and one run at a time."""
        self._schedule.narrow(narrow)

    async def retire(self, grace_s: float) -> None:
        """Answer all that waits and runs, then see the worker gone; what is left after `grace_s` is refused."""
        until = time.monotonic() + grace_s
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), grace_s)
        await self.stop(max(until - time.monotonic(), _LEAST_GRACE_S))

    async def submit(
        self,
        graph: str,
        tensors: Sequence[Tensor],
        *,
        outputs: tuple[str, ...] | None = None,
        deadline_at: float = NEVER,
        priority: int = DEFAULT_PRIORITY,
        source: str = "",
    ) -> Answer:
        """`put` a request, and wait for its answer; raises the error that it would be told."""
        return await waited(
            lambda told: self.put(
                graph, tensors, told, outputs=outputs, deadline_at=deadline_at, priority=priority, source=source
            )
        )

    def put(
        self,
        graph: str,
        tensors: Sequence[Tensor],
        told: Callable[[Answer | Exception], None],
        *,
        outputs: tuple[str, ...] | None = None,
        deadline_at: float = NEVER,
        priority: int = DEFAULT_PRIORITY,
        source: str = "",
    ) -> Callable[[], None]:
        """Queue a request; `told` is called once on the event loop with its answer, or with an error.

        Payloads are borrowed until then. `deadline_at` is in `time.monotonic()`. The errors are NotReady, Overloaded,
        DeadlineExceeded, WorkerLost, or what the worker raised; those that refuse it at once are raised. What is
        returned gives the request up.
        """
        if self.health.state is State.STOPPED:
            raise NotReady("the appliance is stopping: retry when it is back")
        now = time.monotonic()
        if self.health.refuses:
            raise self._not_ready(now)
        size_bytes, shapes = 0, []
        for tensor in tensors:
            size_bytes += tensor.size_bytes
            shapes.append((tensor.name, tensor.shape))
        ticket = Ticket(
            next(self._ids),
            Work(graph, tensors, outputs, told),
            now,
            deadline_at,
            priority,
            source,
            bucket=(graph, outputs, *shapes),
            shares=graph in self._shared,
            size_bytes=size_bytes,
        )
        replaced = self._schedule.admit(ticket)
        self._quiet.clear()
        if replaced is not None:
            replaced.item.end(Overloaded(f"a newer frame of source {source!r} took this one's place"))
        self._pump_soon()
        return partial(self._drop, ticket)

    def _drop(self, ticket: Ticket[Work]) -> None:
        """Tell nobody of this one, and compute it only if that has begun."""
        if ticket.item.told is None:
            return
        ticket.item.told = None
        if not self._schedule.withdraw(ticket.id) and self._life:
            self._send(self._life, wire.Drop(ticket.id))

    async def stop(self, grace_s: float) -> None:
        """Refuse new work, let running work end, and see the worker gone; kill it after `grace_s`."""
        self._moved(Event.STOP)
        for ticket in self._schedule.drain():
            ticket.item.end(NotReady("the appliance is stopping: retry when it is back"))
        if self._timer:
            self._timer.cancel()
        if self._building:
            self._building.cancel()
        if self._life is None:
            return
        self._send(self._life, wire.Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), grace_s)
        except asyncio.TimeoutError:
            log.warning("worker_killed", model=self.name, why="did not stop in time")
            self._life.process.kill()
            await self._gone.wait()

    def renew(self) -> None:
        """Start the model as it was meant to be, all faults forgiven; work in hand is answered first."""
        if self.health.state is State.STOPPED:
            return
        if self._building:
            self._building.cancel()
        loading = self.health.state is State.LOADING
        self.health = self.health.renewed(time.monotonic())
        if self._life and not self._life.ended:
            self._send(self._life, wire.Stop())
            self._loop.call_later(0 if loading else self._limits.hang_s, self._life.process.kill)
        self._on_change()
        self._rearm()

    def sabotage(self, fault: str, amount: float) -> None:
        """Fault injection: break the worker (see `wire.Break`), or spoil its next load with "corrupt-plan".

        "none" makes it whole, and the model as it was meant to be. Raises NotReady when there is no worker to break.
        """
        if fault == "corrupt-plan":
            self._spoiled = True
            self.renew()
            return
        if self._life and self._attended:
            self._send(self._life, wire.Break(fault, amount))
        elif fault != "none":
            raise self._not_ready(time.monotonic())
        if fault != "none":
            return
        if self.health.degraded or self.health.refuses:
            self.renew()
        else:
            self.health = self.health.forgiven()

    def _moved(self, event: Event) -> None:
        self.health = self.health.after(event, time.monotonic())
        self._on_change()

    def _struck(self, fault: Fault, reason: str) -> None:
        """Note a fault and what will be tried against it; tell those who would wait in vain."""
        now = time.monotonic()
        code = cuda_code(reason)
        able = {rung for rung, exists in self._rungs.items() if exists}
        self.health = health = self.health.struck(fault, now, reason, able=able)
        log.warning(
            "worker_fault",
            model=self.name,
            pid=self.pid,
            fault=fault.value,
            reason=reason,
            rung=health.rung.value if health.rung else "quarantine",
            skipped=[rung.value for rung in health.missing] or None,
            in_s=None if health.state is State.READY else round(health.retry_at - now, 3),
            **({} if code is None else {"cuda_error_code": code}),
        )
        if health.reboot_wanted:
            log.error("reboot_wanted", model=self.name, reason=reason)
        if health.refuses:
            for ticket in self._schedule.drain():
                ticket.item.end(self._not_ready(now))
        self._on_change()

    @property
    def _rungs(self) -> Mapping[Rung, bool]:
        """Which rungs of the ladder exist now, besides those that exist everywhere."""
        return {
            Rung.RETRY: self._life is not None and not self._life.ended,
            Rung.REBUILD: self._rebuild is not None,
            Rung.FALL_BACK: self.health.way + 1 < len(self._ways),
        }

    def _not_ready(self, now: float) -> NotReady:
        health, what = self.health, f"model {self.name!r}"
        if health.state is State.QUARANTINED:
            wait_s = max(health.retry_at - now, 1.0)
            why = f"{what} is quarantined after {health.faults} faults ({health.reason})"
            return NotReady(f"{why}: repair it, it is tried again in {wait_s:.0f} s", wait_s)
        if health.state is State.BUILDING:
            return NotReady(f"the engine of {what} is built again after a fault ({health.reason}): retry later", 30.0)
        return NotReady(f"{what} restarts after a fault ({health.reason}): retry shortly")

    def _spawn(self) -> None:
        gentle, self._gentle = self._gentle, False  # the next one replaces a worker that is gone: that is urgent
        try:
            life = self._start_life(
                wire.arena_bytes(self._limits),
                self._ways[self.health.way].runtime,
                on_data=self._receive,
                on_end=self._hung_up,
                gentle=gentle,
            )
        except OSError as error:  # no memory, process or descriptor left: that may pass
            self._struck(Fault.CRASH, f"no worker can be started: {error.strerror}")
            self._rearm()
            return
        self._life, self._watch, self._proof = life, self._new_watch(), None
        self._unmeasured.clear()
        self._gone.clear()
        self._loop.add_reader(life.pidfd, self._reap, life)
        self._loop.add_reader(life.output, self._log_output, life)
        data = wire.encode(replace(self._ways[self.health.way], spoiled=self._spoiled, gentle=gentle))
        self._spoiled = False
        life.link.send(data, [life.requests.fd, life.answers.fd])
        self._rearm()

    def _receive(self, life: Life, data: bytes) -> None:
        try:
            for message, payloads, slots in wire.unpack(data, life.answers):
                self._handle(life, message, payloads, slots)
        except Exception:  # what a broken worker says may be anything: it can take nobody but itself
            log.exception("worker_incomprehensible", model=self.name, pid=life.process.pid)
            self._kill(life, Fault.CRASH, "it sent what cannot be understood")

    def _hung_up(self, life: Life) -> None:
        if self.health.state is not State.STOPPED:
            self._loop.call_later(_LINGER_S, life.process.kill)  # usually it is dying already
        self._disconnect(life)

    def _log_output(self, life: Life) -> None:
        """Make log lines of what libraries in the worker print, so that the log stays one of JSON lines."""
        for line in life.printed_lines():
            log.warning("worker_output", model=self.name, pid=life.process.pid, line=line)
        if life.silent:
            self._loop.remove_reader(life.output)

    def _handle(self, life: Life, message: wire.Message, payloads: Sequence[Payload], slots: Sequence[Slot]) -> None:
        if isinstance(message, (wire.Done, wire.Error, wire.Skipped)):
            self._ended(life, message, payloads, slots)
            if self._schedule:
                self._pump_soon()
            elif not self._watch:
                self._rearm()
        elif isinstance(message, wire.Progress):
            self._watch.heard(message.id, time.monotonic())
        elif isinstance(message, wire.Free):
            for slot in message.slots:
                life.requests.free(Slot(*slot))
        elif isinstance(message, wire.Unmeasured | wire.Measured):
            self._measured(message)
        elif isinstance(message, wire.Ready):
            self._became_ready(life, message)
        elif isinstance(message, wire.Failed):
            error = error_from_name(message.error, message.message)
            life.fault, life.reason = classify(error, asked=False), message.message

    def _measured(self, message: wire.Unmeasured | wire.Measured) -> None:
        if isinstance(message, wire.Unmeasured):
            self._unmeasured.add(message.id)
            return
        if self.memory:
            self.memory = self.memory.learned(message.graph, message.bucket_bytes, message.run_bytes)
        self._on_measured()

    def _became_ready(self, life: Life, message: wire.Ready) -> None:
        self.ready = message
        if message.memory:
            known = self.memory.run_bytes if self.memory else {}
            self.memory = replace(message.memory, run_bytes={**known, **message.memory.run_bytes})
        # The next worker need not measure again what this one has, and what serves already is no other way.
        self._ways = [
            replace(way, latency_ms={**way.latency_ms, **message.latency_ms})
            for i, way in enumerate(self._ways)
            if i <= self.health.way or not _serves(message, way)
        ]
        self._watch.rest(time.monotonic())
        self._moved(Event.BECAME_READY)
        log.info("model_ready", model=self.name, pid=life.process.pid, load_s=round(message.load_s, 3))
        self._on_ready(message)
        self._on_measured()
        self._shared = frozenset(name for name, graph in message.graphs.items() if graph.spec.rows_are_apart)
        self._pump()

    def _answered(self, message: wire.Done, tensors: list[Tensor]) -> None:
        now = time.monotonic()
        held = self._watch.leave(message.id, now)
        self._unmeasured.discard(message.id)
        if message.id == self._proof:
            self._proof = None
            self._moved(Event.PROVEN)
        timing_ms = {"queue": (held.began_at - held.ticket.admitted_at) * 1e3, **message.timing_ms}
        held.ticket.item.end(Answer(tensors, timing_ms, message.together))

    def _ended(
        self,
        life: Life,
        message: wire.Done | wire.Error | wire.Skipped,
        payloads: Sequence[Payload],
        slots: Sequence[Slot],
    ) -> None:
        """The worker has done with a request, in one way or another."""
        if isinstance(message, wire.Done):
            tensors = wire.join(message.tensors, life.take(payloads, slots))
            self._schedule.finished(message.id, message.took_s)
            self._answered(message, tensors)
            return
        if isinstance(message, wire.Error):
            self._run_failed(life, message)
        else:
            self._watch.leave(message.id, time.monotonic()).ticket.item.end(_late("was in the worker"))
            self._unmeasured.discard(message.id)
        self._schedule.finished(message.id)

    def _run_failed(self, life: Life, message: wire.Error) -> None:
        error = error_from_name(message.error, message.message)
        fault, now = classify(error, asked=message.id != self._proof), time.monotonic()
        self._watch.leave(message.id, now).ticket.item.end(error)
        self._unmeasured.discard(message.id)
        if message.id == self._proof:
            self._kill(life, fault, f"its golden vector was not answered rightly: {message.message}")
        elif fault is not Fault.BAD_INPUT:
            if self._failures.due(now):
                left_out = self._failures.left_out() or None
                log.error(
                    "run_failed", model=self.name, pid=life.process.pid, reason=message.message, left_out=left_out
                )
            if fault not in DOUBTFUL:
                self._kill(life, fault, message.message)
            elif self._proof is None and self.health.worth_proving(fault, now):
                self._struck(fault, message.message)
                self._prove(life)

    def _prove(self, life: Life) -> None:
        """Ask the worker to answer its golden vectors among its other work."""
        self._proof = next(self._ids)
        now = time.monotonic()
        self._watch.take(Ticket(self._proof, Work("", (), None, None), now, NEVER), now)
        self._send(life, wire.Prove(self._proof))

    def _pump_soon(self) -> None:
        """Pump once the loop has seen what else has come: requests that came together travel together."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Hand the worker as much as it should hold."""
        self._pumping = False
        life = self._life
        while life and not life.ended and self.health.state is State.READY:
            batch = self._schedule.next(time.monotonic())
            if batch is None:
                break
            if not self._hand_over(life, batch.tickets, one_run=batch.one_run):
                for ticket in batch.tickets:
                    self._hand_over(life, [ticket])
        self._rearm()

    def _hand_over(self, life: Life, tickets: Sequence[Ticket[Work]], *, one_run: bool = False) -> bool:
        """Send tickets in one packet; several that do not fit are left as they are, a single one is refused."""
        parcels = [(_run(ticket, one_run=one_run), [part.data for part in ticket.item.tensors]) for ticket in tickets]
        try:
            data = wire.pack(parcels, life.requests)
        except (ArenaFullError, TooLarge) as error:
            if len(tickets) > 1:
                return False
            full = Overloaded("too many large requests are in hand: retry shortly")
            tickets[0].item.end(full if isinstance(error, ArenaFullError) else error)
            self._schedule.finished(tickets[0].id)
            return True
        now = time.monotonic()
        for ticket in tickets:
            self._watch.take(ticket, now)
        life.link.send(data)
        return True

    def _send(self, life: Life, message: wire.Message) -> None:
        life.link.send(wire.encode(message))

    def _kill(self, life: Life, fault: Fault, reason: str) -> None:
        """End a worker that is of no use any more; whoever waits for it is told at once."""
        life.process.kill()
        self._disconnect(life)
        self._struck(fault, reason)

    def _disconnect(self, life: Life) -> None:
        """The worker's end is closed: whoever waits for it is told at once."""
        life.link.close()
        self._schedule.lost()
        for ticket in self._watch.clear():
            ticket.item.end(WorkerLost(f"the worker of {self.name!r} died while it held this request: retry"))

    def _reap(self, life: Life) -> None:
        """The process has ended: take its exit status, close its memory, decide what comes next."""
        self._loop.remove_reader(life.pidfd)
        ended_by = life.wait()
        if life.link.connected:
            life.link.read()  # its last words may still lie in the socket
        self._disconnect(life)
        for _ in range(_OUTPUT_READS):
            self._log_output(life)
        self._loop.remove_reader(life.output)
        life.close()
        if self.health.state in UP:  # otherwise it was meant to end
            self._struck(life.fault, life.reason or ended_by)
        self._life = None
        self._gone.set()
        self._on_change()
        self._rearm()

    def _rearm(self) -> None:
        """Set the one timer to the next moment at which something must happen."""
        if self._schedule or self._watch:
            self._quiet.clear()
        else:
            self._quiet.set()
        moments = [self._schedule.next_expiry(), self._watch.deadline_at]
        if self._life is None:
            moments.append(self.health.alarm_at)
        elif self._attended:
            moments += [self.health.alarm_at, self._watch.alarm_at]
        next_at = min(moments)
        if self._timer and self._timer_at <= next_at:
            return  # it will look again then, which is cheaper than a new timer for every request
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if next_at != NEVER:
            self._timer, self._timer_at = self._loop.call_later(next_at - time.monotonic(), self._tick), next_at

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        for ticket in self._schedule.expired(now):
            too_long = Overloaded(f"it waited {now - ticket.admitted_at:.3g} s, too long for its kind: retry later")
            ticket.item.end(_late("waited") if ticket.deadline_at <= now else too_long)
        for ticket in self._watch.overdue(now):
            ticket.item.end(_late("ran"))
        alarm = self.health.alarm_at <= now
        if self._life is None and alarm:
            self._begin()
        elif self._life and self._attended:
            if alarm or self._watch.hung(now):
                self._kill(self._life, Fault.HANG, "it hung and was killed")
            elif self.health.state is State.READY and self._watch.idle(now):
                self._prove(self._life)
        self._rearm()

    @property
    def _attended(self) -> bool:
        """Whether there is a worker that must be watched; not one that was told to end, or is ending."""
        return self._life is not None and not self._life.ended and self.health.state in UP

    def _begin(self) -> None:
        """Start the next worker, after its engines were built again where that is the step to take."""
        if self._building:
            self._building.cancel()  # it has taken too long
        elif self._rebuild and self.health.rung is Rung.REBUILD and self.health.state is State.WAITING:
            self._moved(Event.BUILD)
            self._building = asyncio.ensure_future(self._rebuild(self._ways[self.health.way]))
            self._building.add_done_callback(self._built)
        else:
            self._moved(Event.DUE)
            self._spawn()

    def _built(self, building: asyncio.Future[None]) -> None:
        self._building = None
        if self.health.state is not State.BUILDING:
            return  # it was given up because something else is wanted
        if building.cancelled() or building.exception():
            why = "it took too long" if building.cancelled() else building.exception()
            self._struck(Fault.PLAN_REFUSED, f"the engine could not be built again: {why}")
        else:
            self._moved(Event.DUE)
            self._spawn()
        self._rearm()

    def _new_watch(self) -> Watch[Work]:
        limits = self._limits
        return Watch(concurrency=limits.concurrency, hang_s=limits.hang_s, idle_s=limits.prove_idle_s)


def _run(ticket: Ticket[Work], *, one_run: bool) -> wire.Run:
    work = ticket.item
    deadline_at = None if ticket.deadline_at == NEVER else ticket.deadline_at
    return wire.Run(ticket.id, work.graph, wire.heads(work.tensors), work.outputs, deadline_at, one_run)


def _late(what: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"the deadline passed while the request {what}: allow more time")


def _serves(ready: wire.Ready, way: wire.Open) -> bool:
    """Whether opening the model in that way would give what is open already."""
    return ready.runtime == way.runtime and {info.precision for info in ready.graphs.values()} == {way.precision}
