"""The child process that owns the sessions of one bundle, and the only one that may touch a GPU.

Started by `main` with RUNTIME FD (while others serve by that of `appliance.gently`), FD being its end of the socket
pair. The first message opens the model; the worker proves it on a golden vector, says Ready, and then answers Runs on a
small pool of threads. It exits when told to, or at once when the daemon's end of the socket closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from appliance import wire
from appliance.arena import Arena, ArenaFullError, Slot
from appliance.core.budget import bucket_of
from appliance.gauge import Meter, bound_heap
from appliance.gently import NICE, gently
from models.errors import ApplianceError, ModelError, Overloaded
from models.spec import Tensor

if TYPE_CHECKING:
    from appliance.model import Model

T = TypeVar("T")

_ANSWER_WAIT_S = 10.0
_PROGRESS_S = 0.1
_LONGEST_MESSAGE = 2000
_TOGETHER_S = 0.001
"""Answers of a batch wait for each other no longer than this."""
_QUICK_S = 0.0003
"""Runs that take less are computed by the thread that reads: to hand one over takes as long."""
_FORGET = 1.05
"""A run that neighbours disturbed says little, so the fastest one counts, and for less with each that is slower."""
BEHIND = 2
"""Steps of priority that those who compute stand behind the daemon: it only moves bytes, and every request needs it."""
_LOWEST = 19
"""As a step from any priority to the lowest."""
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Job:
    """A run to compute, its tensors, and the slots of the daemon's arena that they lie in."""

    run: wire.Run
    tensors: list[Tensor]
    slots: list[Slot]
    kind: tuple[str, int]
    """Its graph and size class."""


_Compute: TypeAlias = "Callable[[_Job], tuple[list[Tensor], dict[str, float]]]"


class Worker:
    """The loop around a model: one thread reads the socket, a few run the work."""

    def __init__(self, sock: socket.socket) -> None:
        """Serve the daemon at the other end of `sock`."""
        self._sock = sock
        self._reader = threading.current_thread()
        self._sending = threading.Lock()
        self._freed = threading.Condition()
        self._work: queue.SimpleQueue[list[_Job] | wire.Prove | None] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        self._meter = Meter()
        self._took_s: dict[tuple[str, int], float] = {}
        """Of the fastest run of each graph and size class."""
        self._whole = True
        """Whether nothing was broken on purpose: what hangs must not keep this from reading that it is mended."""

    def serve(self, runtime: str, *, gentle: bool = False) -> int:
        """Open the model and answer until told to stop; the exit status of the process.

        With `gentle` its libraries are loaded on a thread of low priority.
        """
        bound_heap()
        with contextlib.suppress(Exception):  # it will happen again, where it can be told
            _call(lambda: _load_libraries(runtime), NICE if gentle else 0)
        data, (requests_fd, answers_fd) = wire.receive_with_fds(self._sock, 2)
        self._requests, self._answers = Arena(requests_fd), Arena(answers_fd)
        order, _payloads, _slots = wire.decode(data)
        if not isinstance(order, wire.Open):
            raise TypeError(order)
        try:
            nice = NICE if order.gentle else 0
            if order.runtime == "openvino":  # threads that it starts while it opens compute later, and keep this
                nice = BEHIND
            self._model: Model = _call(lambda: _open(order), nice)
            self._meter.known(order.memory)
            self._idle_trim_s = order.idle_trim_s
            self._send([(self._model.describe(), ())])
        except Exception as error:  # a runtime's own fault: say it before dying of it
            self._send([(wire.Failed(*_told(error, "loading failed: ")), ())])
            return 1
        threads = [threading.Thread(target=self._run_all, daemon=True) for _ in range(order.concurrency)]
        for thread in threads:
            thread.start()
        gc.freeze()  # what is there now stays: no collection need look at it
        self._read_all(threads)
        os.nice(_LOWEST)  # the kernel takes back what it held, and nobody waits for that either
        os._exit(0)  # the daemon is gone, or all is answered: nobody waits for what the threads still hold

    def _read_all(self, threads: Sequence[threading.Thread]) -> None:
        """Read until the socket ends: at the daemon's end, or here once the last answer after Stop is out."""
        while data := self._sock.recv(wire.MESSAGE_BYTES):
            batch = []
            for message, payloads, slots in wire.unpack(data, self._requests):
                if isinstance(message, wire.Run):
                    self._wanted.add(message.id)
                    kind = message.graph, bucket_of(sum(map(len, payloads)))
                    batch.append(_Job(message, wire.join(message.tensors, payloads), slots, kind))
                elif isinstance(message, wire.Stop):
                    # Reading goes on meanwhile: the last answers may need memory that the daemon has yet to free.
                    threading.Thread(target=self._leave, args=[threads], daemon=True).start()
                else:
                    self._heed(message)
            if batch and all(map(self._quick, batch)):
                self._answer_in_turn(batch, self._at_once)
                self._finish(batch)
            elif batch:
                self._work.put(batch)

    def _heed(self, message: wire.Message) -> None:
        if isinstance(message, wire.Prove):
            self._work.put(message)
        elif isinstance(message, wire.Drop):
            self._wanted.discard(message.id)
        elif isinstance(message, wire.Break):
            if message.fault == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            self._whole = False
            self._model.break_(message.fault, message.amount)
        elif isinstance(message, wire.Free):
            with self._freed:
                for slot in message.slots:
                    self._answers.free(Slot(*slot))
                self._freed.notify_all()

    def _leave(self, threads: Sequence[threading.Thread]) -> None:
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            thread.join()
        self._sock.shutdown(socket.SHUT_RDWR)

    def _run_all(self) -> None:
        os.nice(BEHIND)  # of this thread alone
        while (work := self._next()) is not None:
            if isinstance(work, wire.Prove):
                self._send([self._prove(work)])
                continue
            if len(work) > 1 and work[0].run.one_run:
                self._answer_together(work)
            else:
                self._answer_in_turn(work, self._compute)
            self._finish(work)

    def _finish(self, batch: Sequence[_Job]) -> None:
        self._wanted.difference_update([job.run.id for job in batch])
        slots = [slot for job in batch for slot in job.slots]
        if slots:
            self._send([(wire.Free(tuple((slot.offset, slot.length, slot.generation) for slot in slots)), ())])

    def give_up(self, error: BaseException) -> None:
        """Tell the daemon what this process dies of, and die; for errors that nobody else has caught."""
        with contextlib.suppress(OSError):
            self._send([(wire.Failed(*_told(error, "it failed: ")), ())])
        os._exit(1)

    def _next(self) -> list[_Job] | wire.Prove | None:
        """The next work; None at the end. When there is none for long, memory is given back meanwhile."""
        with contextlib.suppress(queue.Empty):
            return self._work.get(timeout=self._idle_trim_s if self._meter.dirty else None)
        self._meter.clean(self._model.trim)
        return self._work.get()

    def _quick(self, job: _Job) -> bool:
        """Whether the thread that reads may compute it: it is known to take next to no time, nor memory."""
        return self._whole and not job.slots and self._took_s.get(job.kind, _QUICK_S) < _QUICK_S

    def _prove(self, proof: wire.Prove) -> wire.Parcel:
        try:
            self._model.prove(self._progress(proof))
        except Exception as error:  # whatever it is, the daemon decides what to do about it
            return wire.Error(proof.id, *_told(error)), ()
        return wire.Done(proof.id, (), {}), ()

    def _answer_in_turn(self, batch: Sequence[_Job], compute: _Compute) -> None:
        """Compute one after the other; answers travel together as long as nobody waits for it."""
        parcels: list[wire.Parcel] = []
        due_at, last = time.monotonic() + _TOGETHER_S, batch[-1]
        for job in batch:
            parcels.append(self._answer(job, compute))
            if job is not last and (time.monotonic() >= due_at or _size_bytes(parcels) > wire.INLINE_BYTES):
                self._reply(parcels)
                parcels = []
                due_at = time.monotonic() + _TOGETHER_S
        self._reply(parcels)

    def _answer(self, job: _Job, compute: _Compute) -> wire.Parcel:
        run = job.run
        if self._unwanted(run):
            return wire.Skipped(run.id), ()
        started_at = time.monotonic()
        try:
            answer, timing_ms = compute(job)
        except Exception as error:  # a task's or a library's fault must not end the worker
            return wire.Error(run.id, *_told(error)), ()
        took_s = time.monotonic() - started_at
        if run.graph:
            self._took_s[job.kind] = min(took_s, self._took_s.get(job.kind, took_s) * _FORGET)
        return self._done(run, answer, timing_ms, took_s)

    def _at_once(self, job: _Job) -> tuple[list[Tensor], dict[str, float]]:
        return self._model.infer(job.run.graph, job.tensors, job.run.outputs)

    def _compute(self, job: _Job) -> tuple[list[Tensor], dict[str, float]]:
        run = job.run
        with self._measured(run, self._model.input_bytes(run.graph, job.tensors)):
            if run.graph:
                return self._model.infer(run.graph, job.tensors, run.outputs)
            return self._model.predict(job.tensors[0], self._progress(run))

    def _answer_together(self, batch: Sequence[_Job]) -> None:
        """Compute all in one run; when that fails each in its own, so that a bad request fails nobody else."""
        wanted = [job for job in batch if not self._unwanted(job.run)]
        parcels: list[wire.Parcel] = [(wire.Skipped(job.run.id), ()) for job in batch if job not in wanted]
        if wanted:
            run = wanted[0].run
            started_at = time.monotonic()
            requests = [job.tensors for job in wanted]
            try:
                with self._measured(run, sum(self._model.input_bytes(run.graph, tensors) for tensors in requests)):
                    answers, timing_ms = self._model.infer_together(run.graph, requests, run.outputs)
            except Exception:  # whatever it is, it shows again in the run that causes it
                self._answer_in_turn(batch, self._compute)
                return
            # A run of fewer than were meant says nothing of what so many cost.
            took_s = time.monotonic() - started_at if len(wanted) == len(batch) else 0.0
            parcels += [
                self._done(job.run, answer, timing_ms, took_s, together=len(wanted))
                for job, answer in zip(wanted, answers, strict=True)
            ]
        self._reply(parcels)

    @contextlib.contextmanager
    def _measured(self, run: wire.Run, input_bytes: int) -> Iterator[None]:
        """Around a computation: what memory it takes is measured once, and told."""
        if not self._meter.knows(run.graph, input_bytes):
            self._send([(wire.Unmeasured(run.id), ())])
        with self._meter.run(run.graph, input_bytes, self._model.trim) as measured:
            yield
        for graph, bucket_bytes, run_bytes in measured:
            self._send([(wire.Measured(graph, bucket_bytes, run_bytes), ())])

    def _unwanted(self, run: wire.Run) -> bool:
        """Whether nobody waits for the answer any more."""
        return run.id not in self._wanted or (run.deadline_at is not None and time.monotonic() >= run.deadline_at)

    def _done(
        self, run: wire.Run, answer: Sequence[Tensor], timing_ms: Mapping[str, float], took_s: float, together: int = 1
    ) -> wire.Parcel:
        if self._unwanted(run):
            return wire.Skipped(run.id), ()
        return wire.Done(run.id, wire.heads(answer), timing_ms, took_s, together), [tensor.data for tensor in answer]

    def _reply(self, parcels: Sequence[wire.Parcel]) -> None:
        """Send answers together, or one by one when that is too much; what cannot be sent at all is a failure."""
        if not parcels:
            return
        if threading.current_thread() is self._reader and _size_bytes(parcels) > wire.INLINE_BYTES:
            # That may have to wait for memory to be freed, of which only this thread hears.
            threading.Thread(target=self._reply, args=[parcels], daemon=True).start()
            return
        try:
            self._send(parcels)
        except ApplianceError as error:
            if len(parcels) > 1:
                for parcel in parcels:
                    self._reply([parcel])
                return
            ((message, _payloads),) = parcels
            assert isinstance(message, wire.Done)  # noqa: S101 - the others carry no tensors
            self._send([(wire.Error(message.id, *_told(error)), ())])

    def _progress(self, run: wire.Run | wire.Prove) -> Callable[[], None]:
        """A function that tells the daemon, not too often, that `run` goes on."""
        told_at = time.monotonic()

        def goes_on() -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= _PROGRESS_S:
                told_at = time.monotonic()
                self._send([(wire.Progress(run.id), ())])

        return goes_on

    def _send(self, parcels: Sequence[wire.Parcel]) -> None:
        with self._freed:
            until = time.monotonic() + _ANSWER_WAIT_S
            while True:
                try:
                    data = wire.pack(parcels, self._answers)
                    break
                except ArenaFullError:
                    if _size_bytes(parcels) > self._answers.capacity_bytes:
                        msg = "the answer is larger than the memory shared with the daemon: ask for fewer outputs"
                        raise ModelError(msg) from None
                    # The daemon copies most answers out, and lends few, so room comes back within milliseconds.
                    if not self._freed.wait(until - time.monotonic()):
                        raise Overloaded("too many large answers are held: retry shortly") from None
        with self._sending:
            self._sock.send(data)


def _size_bytes(parcels: Sequence[wire.Parcel]) -> int:
    return sum([memoryview(payload).nbytes for _message, payloads in parcels for payload in payloads])


def _call(call: Callable[[], T], nice: int) -> T:
    return gently(call, nice) if nice else call()


def _open(order: wire.Open) -> Model:
    # Imported here, so that a library that cannot be loaded is told to the daemon like any other fault.
    from appliance.model import Model  # noqa: PLC0415

    model = Model(order)
    if order.gentle:
        model.prove(lambda: None)
    return model


def _load_libraries(runtime: str) -> None:
    """Import what opening a model will need, while nobody waits for it."""
    import appliance.model  # noqa: F401, PLC0415 - see `serve`
    import models.tasks.reading  # noqa: F401, PLC0415
    from appliance.runtime import choose  # noqa: PLC0415

    if runtime == "onnxruntime-cpu":  # one of a GPU would open a context, which costs hundreds of MB without a model
        choose(runtime)


def main(*, gentle: bool = False) -> None:
    """Entry of the worker process; with `gentle` others serve meanwhile."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # What reaches the whole process group (Ctrl-C, a plain stop) is for the daemon, which then says Stop.
        signal.signal(number, signal.SIG_IGN)
    # A worker that loads, or hangs, does not read its socket: the kernel sees to it that it dies with the daemon.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sock = socket.socket(fileno=int(sys.argv[2]))
    worker = Worker(sock)
    threading.excepthook = lambda failure: worker.give_up(failure.exc_value or SystemExit())
    try:
        status = worker.serve(sys.argv[1], gentle=gentle)
    except Exception as error:
        worker.give_up(error)
    else:
        sys.exit(status)


def _told(error: BaseException, before: str = "") -> tuple[str, str]:
    """The name and message under which an error crosses to the daemon."""
    if isinstance(error, ApplianceError):
        return type(error).__name__, str(error)[:_LONGEST_MESSAGE]
    return ModelError.__name__, f"{before}{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
