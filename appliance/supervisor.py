"""Keeps one worker process alive and hands it work.

Runs on the event loop and never blocks it. What to do when is decided in `core.health`, `core.schedule`
and `core.watch`; this file performs it: spawn, send, receive, kill, reap, and wake up in time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from appliance import wire
from appliance.arena import ArenaFullError, Slot
from appliance.core.health import Event, State, WorkerHealth
from appliance.core.limits import Limits
from appliance.core.schedule import DEFAULT_PRIORITY, Schedule, Ticket
from appliance.core.watch import NEVER, Watch
from appliance.life import Life
from models.errors import (
    CallerError,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    TooLarge,
    WorkerLost,
    error_from_name,
)
from models.spec import Tensor

log = structlog.get_logger()

_OUTPUT_READS = 4
"""As much as a pipe holds: what a worker has left behind when it is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tensors whose payloads belong to the receiver, and where the time went."""

    tensors: list[Tensor]
    timing_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What a ticket carries."""

    graph: str
    tensors: Sequence[Tensor]
    outputs: tuple[str, ...] | None
    answer: asyncio.Future[Answer]


class Supervisor:
    """The daemon's end of one worker."""

    def __init__(self, order: wire.Open, limits: Limits, *, on_ready: Callable[[wire.Ready], None]) -> None:
        """Serve the model of `order`; `on_ready` is told each time a worker has proven itself."""
        self.name = order.name
        self.ready: wire.Ready | None = None
        self.health = WorkerHealth()
        self._order, self._limits, self._on_ready = order, limits, on_ready
        self._schedule: Schedule[Work] = Schedule(capacity=limits.queue)
        self._in_flight = 2 * limits.concurrency  # one batch computes while the next is decoded
        self._ids = itertools.count(1)
        self._life: Life | None = None
        self._watch = self._new_watch()
        self._timer: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the present worker."""
        return self._life.process.pid if self._life else None

    @property
    def waiting(self) -> int:
        """Requests that wait in the queue."""
        return len(self._schedule)

    @property
    def running(self) -> int:
        """Requests that the worker holds."""
        return len(self._watch)

    def start(self, on_change: Callable[[], None]) -> None:
        """Spawn the first worker; `on_change` is called after each change of `health`."""
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self.health = WorkerHealth(since=time.monotonic())
        self._spawn()

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
        """Queue a request and wait for its answer; payloads are borrowed until then.

        `deadline_at` is in `time.monotonic()`. Raises NotReady, Overloaded, DeadlineExceeded,
        WorkerLost, or what the worker raised.
        """
        if self.health.state is State.STOPPED:
            raise NotReady("the appliance is stopping: retry when it is back")
        if self.health.state is State.WAITING and self.health.faults > 1:
            raise self._not_ready()
        now = time.monotonic()
        answer: asyncio.Future[Answer] = self._loop.create_future()
        work = Work(graph, tensors, outputs, answer)
        ticket = Ticket(next(self._ids), work, now, deadline_at, priority, source)
        replaced = self._schedule.admit(ticket)
        if replaced is not None:
            _refuse(replaced, Overloaded(f"a newer frame of source {source!r} took this one's place"))
        self._pump()
        try:
            return await answer
        except asyncio.CancelledError:
            self._schedule.withdraw(ticket.id)
            raise

    async def stop(self, grace_s: float) -> None:
        """Refuse new work, let running work end, and see the worker gone; kill it after `grace_s`."""
        self._moved(Event.STOP)
        for ticket in self._schedule.drain():
            _refuse(ticket, NotReady("the appliance is stopping: retry when it is back"))
        if self._timer:
            self._timer.cancel()
        if self._life is None:
            return
        self._send(self._life, wire.Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), grace_s)
        except asyncio.TimeoutError:
            log.warning("worker_killed", model=self.name, why="did not stop in time")
            self._life.process.kill()
            await self._gone.wait()

    def _moved(self, event: Event, reason: str = "") -> None:
        self.health = self.health.after(event, time.monotonic(), reason)
        self._on_change()

    def _not_ready(self) -> NotReady:
        return NotReady(f"model {self.name!r} restarts after a fault ({self.health.reason}): retry shortly")

    def _spawn(self) -> None:
        # Each thread of the worker answers a run before it frees its memory, so that many more may be in use.
        most = self._in_flight + self._limits.concurrency
        try:
            life = Life(
                most * (self._limits.body_bytes + wire.INLINE_BYTES), on_data=self._receive, on_end=self._hung_up
            )
        except OSError as error:  # no memory, process or descriptor left: that may pass
            reason = f"no worker can be started: {error.strerror}"
            self._moved(Event.EXITED, reason)
            log.warning("worker_not_started", model=self.name, reason=reason)
            self._rearm()
            return
        self._life, self._watch = life, self._new_watch()
        self._gone.clear()
        self._loop.add_reader(life.pidfd, self._reap, life)
        self._loop.add_reader(life.output, self._log_output, life)
        data, _slots = wire.encode(self._order)
        life.link.send(data, [life.requests.fd, life.answers.fd])
        self._rearm()

    def _receive(self, life: Life, data: bytes) -> None:
        try:
            self._handle(life, data)
        except Exception:  # what a broken worker says may be anything: it can take nobody but itself
            log.exception("worker_incomprehensible", model=self.name, pid=life.process.pid)
            self._kill(life, "it sent what cannot be understood")

    def _hung_up(self, life: Life) -> None:
        if self.health.state is not State.STOPPED:
            life.process.kill()  # usually it is dying already; what hung up must not linger
        self._disconnect(life)

    def _log_output(self, life: Life) -> None:
        """Make log lines of what libraries in the worker print, so that the log stays one of JSON lines."""
        for line in life.printed_lines():
            log.warning("worker_output", model=self.name, pid=life.process.pid, line=line)
        if life.silent:
            self._loop.remove_reader(life.output)

    def _handle(self, life: Life, data: bytes) -> None:
        message, payloads, slots = wire.decode(data, life.answers)
        if isinstance(message, wire.Done):
            held = self._watch.leave(message.id, time.monotonic())
            # Copied out at once, so the worker's arena never fills up with answers.
            tensors = wire.join(message.tensors, [bytes(payload) for payload in payloads])
            if slots:
                self._send(life, wire.Free(tuple((slot.offset, slot.length, slot.generation) for slot in slots)))
            timing_ms = {"queue": (held.began_at - held.ticket.admitted_at) * 1e3, **message.timing_ms}
            if not held.ticket.item.answer.done():
                held.ticket.item.answer.set_result(Answer(tensors, timing_ms))
            self._pump()
        elif isinstance(message, wire.Error):
            self._run_failed(life, message)
            self._pump()
        elif isinstance(message, wire.Progress):
            self._watch.heard(message.id, time.monotonic())
        elif isinstance(message, wire.Free):
            for slot in message.slots:
                life.requests.free(Slot(*slot))
        elif isinstance(message, wire.Ready):
            self.ready = message
            # The next worker need not measure again what this one has.
            self._order = replace(self._order, latency_ms={**self._order.latency_ms, **message.latency_ms})
            self._moved(Event.BECAME_READY)
            log.info("model_ready", model=self.name, pid=life.process.pid, load_s=round(message.load_s, 3))
            self._on_ready(message)
            self._pump()
        elif isinstance(message, wire.Failed):
            life.reason = message.message

    def _run_failed(self, life: Life, message: wire.Error) -> None:
        error = error_from_name(message.error, message.message)
        if not isinstance(error, CallerError):
            log.error("run_failed", model=self.name, pid=life.process.pid, reason=message.message)
        _refuse(self._watch.leave(message.id, time.monotonic()).ticket, error)

    def _pump(self) -> None:
        """Hand the worker as much as it should hold."""
        life = self._life
        while life and not life.ended and self.health.state is State.READY and len(self._watch) < self._in_flight:
            now = time.monotonic()
            ticket = self._schedule.next(now)
            if ticket is None:
                break
            work = ticket.item
            run = wire.Run(ticket.id, work.graph, wire.heads(work.tensors), work.outputs)
            try:
                data, _slots = wire.encode(run, [tensor.data for tensor in work.tensors], life.requests)
            except ArenaFullError:
                _refuse(ticket, Overloaded("too many large requests are in hand: retry shortly"))
                continue
            except TooLarge as error:
                _refuse(ticket, error)
                continue
            self._watch.take(ticket, now)
            life.link.send(data)
        self._rearm()

    def _send(self, life: Life, message: wire.Message) -> None:
        data, _slots = wire.encode(message)
        life.link.send(data)

    def _kill(self, life: Life, reason: str) -> None:
        """End a worker that is of no use any more; whoever waits for it is told at once."""
        life.reason = reason
        life.process.kill()
        self._disconnect(life)

    def _disconnect(self, life: Life) -> None:
        """The worker's end is closed: whoever waits for it is told at once."""
        life.link.close()
        for ticket in self._watch.clear():
            _refuse(ticket, WorkerLost(f"the worker of {self.name!r} died while it held this request: retry"))

    def _reap(self, life: Life) -> None:
        """The process has ended: take its exit status, close its memory, decide what comes next."""
        self._loop.remove_reader(life.pidfd)
        reason = life.wait()
        if life.link.connected:
            life.link.read()  # its last words may still lie in the socket
            reason = life.reason or reason
        self._disconnect(life)
        for _ in range(_OUTPUT_READS):
            self._log_output(life)
        self._loop.remove_reader(life.output)
        life.close()
        self._life = None
        self._gone.set()
        self._moved(Event.EXITED, reason)
        if self.health.state is State.WAITING:
            log.warning("worker_exited", model=self.name, pid=life.process.pid, reason=reason)
            if self.health.faults > 1:
                for ticket in self._schedule.drain():
                    _refuse(ticket, self._not_ready())
        self._rearm()

    def _rearm(self) -> None:
        """Set the one timer to the next moment at which something must happen."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        moments = [ticket.deadline_at for ticket in self._schedule]
        if not self._dying:
            moments += [self.health.alarm_at, self._watch.next_at]
        next_at = min(moments, default=NEVER)
        if next_at != NEVER:
            self._timer = self._loop.call_later(next_at - time.monotonic(), self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        for ticket in self._schedule.expired(now):
            _refuse(ticket, DeadlineExceeded("the deadline passed while the request waited: allow more time"))
        for ticket in self._watch.overdue(now):
            _refuse(ticket, DeadlineExceeded("the deadline passed while the request ran: allow more time"))
        alarm = self.health.alarm_at <= now
        if alarm and self.health.state is State.WAITING:
            self._moved(Event.DUE)
            self._spawn()
        elif self._life and not self._dying and (alarm or self._watch.hung(now)):
            self._kill(self._life, "it hung and was killed")
        self._rearm()

    @property
    def _dying(self) -> bool:
        """Whether the worker can no longer be spoken to, but its exit is still to be seen."""
        return self._life is not None and self._life.ended

    def _new_watch(self) -> Watch[Work]:
        return Watch(concurrency=self._limits.concurrency, hang_s=self._limits.hang_s)


def _refuse(ticket: Ticket[Work], error: Exception) -> None:
    if not ticket.item.answer.done():
        ticket.item.answer.set_exception(error)
