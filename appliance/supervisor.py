"""Keeps one worker process alive and hands it work.

Runs on the event loop and never blocks it. What to do when is decided in `core.health` and
`core.schedule`; this file performs it: spawn, send, receive, kill, reap, and wake up in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from appliance import wire
from appliance.arena import ArenaFullError, Slot
from appliance.core.health import Event, State, WorkerHealth
from appliance.core.schedule import DEFAULT_PRIORITY, Schedule, Ticket
from appliance.life import Answer, Held, Life, Work
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

LOAD_LIMIT_S = 120.0
"""A worker that is not ready by then is taken for hung."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one worker."""

    queue: int = 64
    """Requests that may wait."""
    concurrency: int = 2
    """Runs at the same time in the worker."""
    hang_s: float = 20.0
    """A run that makes no progress for longer is taken for hung, and its worker is killed."""
    body_bytes: int = 16 * 1024 * 1024


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
        return len(self._life.held) if self._life else 0

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
        deadline_at: float = float("inf"),
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
            life = Life(most * (self._limits.body_bytes + wire.INLINE_BYTES))
        except OSError as error:  # no memory, process or descriptor left: that may pass
            reason = f"no worker can be started: {error.strerror}"
            self._moved(Event.EXITED, reason)
            log.warning("worker_not_started", model=self.name, reason=reason)
            self._rearm()
            return
        self._life = life
        self._gone.clear()
        self._loop.add_reader(life.pidfd, self._reap, life)
        self._loop.add_reader(life.sock, self._readable, life)
        self._loop.add_reader(life.output, self._log_output, life)
        data, _slots = wire.encode(self._order)
        with contextlib.suppress(OSError):  # it died at once, as `_reap` is told
            wire.send_with_fds(life.sock, data, [life.requests.fd, life.answers.fd])
        self._rearm()

    def _readable(self, life: Life) -> None:
        while True:
            try:
                data = life.sock.recv(wire.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                if self.health.state is not State.STOPPED:
                    life.process.kill()  # usually it is dying already; what hung up must not linger
                self._disconnect(life)
                return
            try:
                self._receive(life, data)
            except Exception:  # what a broken worker says may be anything: it can take nobody but itself
                log.exception("worker_incomprehensible", model=self.name, pid=life.process.pid)
                life.reason = "it sent what cannot be understood"
                life.process.kill()
                self._disconnect(life)
                return

    def _log_output(self, life: Life) -> None:
        """Make log lines of what libraries in the worker print, so that the log stays one of JSON lines."""
        for line in life.printed_lines():
            log.warning("worker_output", model=self.name, pid=life.process.pid, line=line)
        if life.silent:
            self._loop.remove_reader(life.output)

    def _receive(self, life: Life, data: bytes) -> None:
        message, payloads, slots = wire.decode(data, life.answers)
        if isinstance(message, wire.Done):
            held = life.held.pop(message.id)
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
            life.held[message.id].alive_at = time.monotonic()
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
        _refuse(life.held.pop(message.id).ticket, error)

    def _pump(self) -> None:
        """Hand the worker as much as it should hold."""
        life = self._life
        while life and not life.ended and self.health.state is State.READY and len(life.held) < self._in_flight:
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
            life.held[ticket.id] = Held(ticket)
            self._send_bytes(life, data)
        for begun in itertools.islice(life.held.values() if life else (), self._limits.concurrency):
            begun.began_at = min(begun.began_at, time.monotonic())
        self._rearm()

    def _send(self, life: Life, message: wire.Message) -> None:
        data, _slots = wire.encode(message)
        self._send_bytes(life, data)

    def _send_bytes(self, life: Life, data: bytes) -> None:
        if life.backlog:
            life.backlog.append(data)
            return
        try:
            life.sock.send(data)
        except BlockingIOError:
            life.backlog.append(data)
            self._loop.add_writer(life.sock, self._writable, life)
        except OSError:
            pass  # the worker is gone; its end of the socket says so to `_readable`

    def _writable(self, life: Life) -> None:
        while life.backlog:
            try:
                life.sock.send(life.backlog[0])
            except BlockingIOError:
                return
            except OSError:
                life.backlog.clear()
                break
            life.backlog.popleft()
        self._loop.remove_writer(life.sock)

    def _disconnect(self, life: Life) -> None:
        """The worker's end is closed: whoever waits for it is told at once."""
        if not life.connected:
            return
        self._loop.remove_reader(life.sock)
        self._loop.remove_writer(life.sock)
        life.sock.close()
        lost, life.held = life.held, {}
        for held in lost.values():
            _refuse(held.ticket, WorkerLost(f"the worker of {self.name!r} died while it held this request: retry"))

    def _reap(self, life: Life) -> None:
        """The process has ended: take its exit status, close its memory, decide what comes next."""
        self._loop.remove_reader(life.pidfd)
        reason = life.wait()
        if life.connected:
            self._readable(life)  # its last words may still lie in the socket
            reason = life.reason or reason
        self._disconnect(life)
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
        if self.health.state is State.WAITING:
            moments.append(self.health.retry_at)
        if self._life and self._life.connected:
            if self.health.state is State.LOADING:
                moments.append(self.health.since + LOAD_LIMIT_S)
            for held in self._life.held.values():
                moments.append(held.silent_since + self._limits.hang_s)
                if not held.ticket.item.answer.done():
                    moments.append(held.ticket.deadline_at)
        if moments and min(moments) != float("inf"):
            self._timer = self._loop.call_later(min(moments) - time.monotonic(), self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        for ticket in self._schedule.expired(now):
            _refuse(ticket, DeadlineExceeded("the deadline passed while the request waited: allow more time"))
        for held in self._life.held.values() if self._life else ():
            if held.ticket.deadline_at <= now:
                _refuse(held.ticket, DeadlineExceeded("the deadline passed while the request ran: allow more time"))
        if self.health.state is State.WAITING and self.health.retry_at <= now:
            self._moved(Event.DUE)
            self._spawn()
            return
        if self._life and self._hung(self._life, now):
            self._life.reason = "it hung and was killed"
            self._life.process.send_signal(signal.SIGKILL)
            # Everything it held is lost; the timer must not fire for it again.
            self._disconnect(self._life)
        self._rearm()

    def _hung(self, life: Life, now: float) -> bool:
        if self.health.state is State.LOADING:
            return now >= self.health.since + LOAD_LIMIT_S
        return any(now >= held.silent_since + self._limits.hang_s for held in life.held.values())


def _refuse(ticket: Ticket[Work], error: Exception) -> None:
    if not ticket.item.answer.done():
        ticket.item.answer.set_exception(error)
