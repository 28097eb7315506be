"""The child process that owns the sessions of one bundle, and the only one that may touch a GPU.

Started as `python -m appliance.worker RUNTIME FD`, FD being its end of the socket pair. The first message
opens the model; the worker proves it on a golden vector, says Ready, and then answers Runs on a
small pool of threads. It exits when told to, or at once when the daemon's end of the socket closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from appliance import wire
from appliance.arena import Arena, ArenaFullError, Slot
from appliance.gauge import Meter
from models.errors import ApplianceError, ModelError
from models.spec import Payload, Tensor

if TYPE_CHECKING:
    from appliance.model import Model

_ANSWER_WAIT_S = 10.0
_PROGRESS_S = 0.1
_LONGEST_MESSAGE = 2000
_PR_SET_PDEATHSIG = 1

_Job: TypeAlias = "tuple[wire.Run | wire.Prove, list[Tensor], list[Slot]]"


class Worker:
    """The loop around a model: one thread reads the socket, a few run the work."""

    def __init__(self, sock: socket.socket) -> None:
        """Serve the daemon at the other end of `sock`."""
        self._sock = sock
        self._sending = threading.Lock()
        self._freed = threading.Condition()
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._meter = Meter()

    def serve(self, runtime: str) -> int:
        """Open the model and answer until told to stop; the exit status of the process."""
        with contextlib.suppress(Exception):  # it will happen again, where it can be told
            _load_libraries(runtime)
        data, (requests_fd, answers_fd) = wire.receive_with_fds(self._sock, 2)
        self._requests, self._answers = Arena(requests_fd), Arena(answers_fd)
        order, _payloads, _slots = wire.decode(data)
        if not isinstance(order, wire.Open):
            raise TypeError(order)
        try:
            # Imported here, so that a library that cannot be loaded is told to the daemon like any other fault.
            from appliance.model import Model  # noqa: PLC0415

            self._model: Model = Model(order)
            self._meter.known(order.memory)
            self._idle_trim_s = order.idle_trim_s
            self._send(self._model.describe())
        except Exception as error:  # a runtime's own fault: say it before dying of it
            self._send(wire.Failed(*_told(error, "loading failed: ")))
            return 1
        threads = [threading.Thread(target=self._run_all, daemon=True) for _ in range(order.concurrency)]
        for thread in threads:
            thread.start()
        self._read_all(threads)
        os._exit(0)  # the daemon is gone, or all is answered: nobody waits for what the threads still hold

    def _read_all(self, threads: Sequence[threading.Thread]) -> None:
        """Read until the socket ends: at the daemon's end, or here once the last answer after Stop is out."""
        while data := self._sock.recv(wire.MESSAGE_BYTES):
            message, payloads, slots = wire.decode(data, self._requests)
            if isinstance(message, wire.Run):
                self._work.put((message, wire.join(message.tensors, payloads), slots))
            elif isinstance(message, wire.Prove):
                self._work.put((message, [], []))
            elif isinstance(message, wire.Break):
                if message.fault == "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                self._model.break_(message.fault, message.amount)
            elif isinstance(message, wire.Free):
                with self._freed:
                    for slot in message.slots:
                        self._answers.free(Slot(*slot))
                    self._freed.notify_all()
            elif isinstance(message, wire.Stop):
                # Reading goes on meanwhile: the last answers may need memory that the daemon has yet to free.
                threading.Thread(target=self._leave, args=[threads], daemon=True).start()

    def _leave(self, threads: Sequence[threading.Thread]) -> None:
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            thread.join()
        self._sock.shutdown(socket.SHUT_RDWR)

    def _run_all(self) -> None:
        while (job := self._next()) is not None:
            run, tensors, slots = job
            try:
                answer, timing_ms = self._answer(run, tensors)
                reply: wire.Message = wire.Done(run.id, wire.heads(answer), timing_ms)
                self._send(reply, [tensor.data for tensor in answer])
            except Exception as error:  # a task's or a library's fault must not end the worker
                self._send(wire.Error(run.id, *_told(error)))
            if slots:
                self._send(wire.Free(tuple((slot.offset, slot.length, slot.generation) for slot in slots)))

    def give_up(self, error: BaseException) -> None:
        """Tell the daemon what this process dies of, and die; for errors that nobody else has caught."""
        with contextlib.suppress(OSError):
            self._send(wire.Failed(*_told(error, "it failed: ")))
        os._exit(1)

    def _next(self) -> _Job | None:
        """The next work; None at the end. When there is none for long, memory is given back meanwhile."""
        with contextlib.suppress(queue.Empty):
            return self._work.get(timeout=self._idle_trim_s if self._meter.dirty else None)
        self._meter.clean(self._model.trim)
        return self._work.get()

    def _answer(
        self, run: wire.Run | wire.Prove, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Mapping[str, float]]:
        if isinstance(run, wire.Prove):
            self._model.prove(self._progress(run))
            return [], {}
        input_bytes = self._model.input_bytes(run.graph, tensors)
        if not self._meter.knows(run.graph, input_bytes):
            self._send(wire.Unmeasured(run.id))
        with self._meter.run(run.graph, input_bytes, self._model.trim) as measured:
            if run.graph:
                answer = self._model.infer(run.graph, tensors, run.outputs)
            else:
                answer = self._model.predict(tensors[0], self._progress(run))
        for graph, bucket_bytes, run_bytes in measured:
            self._send(wire.Measured(graph, bucket_bytes, run_bytes))
        return answer

    def _progress(self, run: wire.Run | wire.Prove) -> Callable[[], None]:
        """A function that tells the daemon, not too often, that `run` goes on."""
        told_at = time.monotonic()

        def goes_on() -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= _PROGRESS_S:
                told_at = time.monotonic()
                self._send(wire.Progress(run.id))

        return goes_on

    def _send(self, message: wire.Message, payloads: Sequence[Payload] = ()) -> None:
        fits = sum(memoryview(payload).nbytes for payload in payloads) <= self._answers.capacity_bytes
        with self._freed:
            until = time.monotonic() + _ANSWER_WAIT_S
            while True:
                try:
                    data, _slots = wire.encode(message, payloads, self._answers)
                    break
                except ArenaFullError:
                    # The daemon copies answers out at once, so room comes back within milliseconds.
                    if not fits or not self._freed.wait(until - time.monotonic()):
                        msg = "the answer is larger than the memory shared with the daemon: ask for fewer outputs"
                        raise ModelError(msg) from None
        with self._sending:
            self._sock.send(data)


def _load_libraries(runtime: str) -> None:
    """Import what opening a model will need, while nobody waits for it."""
    import appliance.model  # noqa: F401, PLC0415 - see `serve`
    from appliance.runtime import choose  # noqa: PLC0415

    if runtime == "onnxruntime-cpu":  # one of a GPU would open a context, which costs hundreds of MB without a model
        choose(runtime)


def main() -> None:
    """Entry of the worker process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # What reaches the whole process group (Ctrl-C, a plain stop) is for the daemon, which then says Stop.
        signal.signal(number, signal.SIG_IGN)
    # A worker that loads, or hangs, does not read its socket: the kernel sees to it that it dies with the daemon.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sock = socket.socket(fileno=int(sys.argv[2]))
    worker = Worker(sock)
    threading.excepthook = lambda failure: worker.give_up(failure.exc_value or SystemExit())
    try:
        status = worker.serve(sys.argv[1])
    except Exception as error:
        worker.give_up(error)
    else:
        sys.exit(status)


def _told(error: BaseException, before: str = "") -> tuple[str, str]:
    """The name and message under which an error crosses to the daemon."""
    if isinstance(error, ApplianceError):
        return type(error).__name__, str(error)[:_LONGEST_MESSAGE]
    return ModelError.__name__, f"{before}{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]


if __name__ == "__main__":
    main()
