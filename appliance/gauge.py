"""What this process takes: its resident memory, the highest it has been, and how to give back what is not used.

On Jetson the GPU's pages are in no process's count. There what the kernel says that the GPU holds is added, so that a
difference around a load or a run holds both: of this process, and of whatever else used the GPU meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance.adapters import host
from appliance.core.budget import PREDICT, bucket_of
from models.measurements import Memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def _nvmap_bytes() -> int:
    return host.memory_bytes().get("nvmap", 0)


class Gauge:
    """Resident memory by the kernel's own count. Differences are exact even where pages are shared with others."""

    def __init__(self, gpu_bytes: Callable[[], int] = _nvmap_bytes) -> None:
        """Find out whether the kernel lets the peak be measured anew; `gpu_bytes` is what the GPU holds of memory."""
        self.works = self.reset()
        self._gpu_bytes = gpu_bytes

    @staticmethod
    def reset() -> bool:
        """Measure the peak anew from here; False where the kernel refuses that."""
        try:
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            return False
        return True

    def resident_bytes(self) -> int:
        """What is there now."""
        return _status("VmRSS:") + self._gpu_bytes()

    def peak_bytes(self) -> int:
        """The most since `reset`; of the GPU what it holds now, because a session keeps its buffers until `trim`."""
        return _status("VmHWM:") + self._gpu_bytes()


def _status(key: str) -> int:
    with _STATUS.open(encoding="ascii", errors="replace") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def trim() -> None:
    """Give the heap's free pages back to the machine; C libraries without `malloc_trim` keep them."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `mallopt`."""
_MAPPED_BYTES = 2**20
"""Blocks from this size on lie in pages of their own, and go back to the machine when they are freed. Left alone, glibc
raises that bound to 32 MiB, and what was a picture then stays a hole in the heap: 20 MB after twenty pages of text."""
_TOP_BYTES = 2**20
"""As much may be free at the end of a heap. `trim` gives back the rest, but not that of the heaps of threads."""


def bound_heap() -> None:
    """Let large blocks leave no holes in the heap of this process; other C libraries have no such setting."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        set_option(_M_TRIM_THRESHOLD, _TOP_BYTES)


_TRIES = 3
"""Runs of one size class that are measured in vain, because others began meanwhile, before such a figure is taken."""


class Meter:
    """Measures what runs take: once for each graph and size class, if possible in a run that nothing overlaps."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.dirty = False
        """Whether something ran since memory was last given back."""
        self._gauge = Gauge()
        self._known: set[tuple[str, int]] = set()
        self._tries: Counter[tuple[str, int]] = Counter()
        self._turn = threading.Lock()
        self._begun = self._running = 0

    def known(self, memory: Memory | None) -> None:
        """These need not be measured again."""
        if memory:
            self._known |= {(graph, int(bucket)) for graph, buckets in memory.run_bytes.items() for bucket in buckets}

    def knows(self, graph: str, input_bytes: int) -> bool:
        """Whether it is known what such a run takes, or cannot be known here."""
        return not self._gauge.works or (graph or PREDICT, bucket_of(input_bytes)) in self._known

    @contextlib.contextmanager
    def run(self, graph: str, input_bytes: int, release: Callable[[], None]) -> Iterator[list[tuple[str, int, int]]]:
        """Around a run. The list gets (graph, bucket, bytes) when it was measured; `release` gives back memory.

        After others have overlapped it several times a figure is taken that counts them too: rather too much
        than unknown.
        """
        key = (graph or PREDICT, bucket_of(input_bytes))
        measured: list[tuple[str, int, int]] = []
        with self._turn:
            self._begun += 1
            order = self._begun
            measures = self._gauge.works and not self._running and key not in self._known
            self._running += 1
            self.dirty = True
            if measures:
                self._tries[key] += 1
                release()
                before_bytes = self._gauge.resident_bytes()
                self._gauge.reset()
        try:
            yield measured
            if measures and (self._begun == order or self._tries[key] >= _TRIES):
                self._known.add(key)
                measured.append((*key, max(0, self._gauge.peak_bytes() - before_bytes)))
        finally:
            with self._turn:
                self._running -= 1

    def clean(self, release: Callable[[], None]) -> None:
        """Give back memory, unless something runs."""
        with self._turn:
            if self.dirty and not self._running:
                release()
                self.dirty = False
