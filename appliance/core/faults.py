"""What can go wrong with a worker, and which of it an error is. Pure.

Runtimes report the state of a GPU only in the words of their messages, so the words decide. The numbers and
sentences are those of `cudaError_t` in CUDA 12 and 13; a sticky error leaves a context that answers nothing,
or nonsense, until its process ends. None of this has met a real GPU fault yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from models.errors import ApplianceError, BundleError, CallerError, InsufficientMemory, Overloaded


class Fault(Enum):
    """A class of faults; each has its own way up the ladder of `core.health`."""

    BAD_INPUT = "bad-input"
    """The caller's: the worker is well."""
    MODEL_ERROR = "model-error"
    """A valid request failed, or a golden vector was answered wrongly."""
    OUT_OF_MEMORY = "out-of-memory"
    HANG = "hang"
    POISONED_CONTEXT = "poisoned-context"
    """A sticky CUDA error: this process cannot compute any more, another one may."""
    DRIVER_GONE = "driver-gone"
    """No process can reach the GPU."""
    PLAN_REFUSED = "plan-refused"
    """What should be loaded is damaged, or made for something else."""
    CRASH = "crash"
    """The process ended, or could not be started, without saying why."""


_CUDA_CODE = re.compile(r"\bcuda ?(?:runtime |driver )?(?:error|failure)(?: code)?[ :#(]*(\d{1,3})\b", re.IGNORECASE)
_BY_CODE: Mapping[int, Fault] = {
    2: Fault.OUT_OF_MEMORY,
    **dict.fromkeys((214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719), Fault.POISONED_CONTEXT),
    **dict.fromkeys((3, 4, 35, 46, 100, 101, 802, 803), Fault.DRIVER_GONE),
}
_BY_WORDS: Mapping[Fault, re.Pattern[str]] = {
    Fault.DRIVER_GONE: re.compile(
        r"driver shutting down|driver version is insufficient|busy or unavailable|no CUDA-capable device|GPU is lost"
        r"|fallen off the bus|unsupported display driver",
        re.IGNORECASE,
    ),
    Fault.POISONED_CONTEXT: re.compile(
        r"illegal memory access|launch timed out|device-side assert|hardware stack error|illegal instruction"
        r"|misaligned address|invalid program counter|unspecified launch failure|uncorrectable ECC",
        re.IGNORECASE,
    ),
    Fault.OUT_OF_MEMORY: re.compile(
        r"out of memory|MemoryError|bad_alloc|Failed to allocate|Unable to allocate|Cannot allocate memory"
        r"|ALLOC_FAILED|NvMapMemAlloc",
        re.IGNORECASE,
    ),
}


def classify(error: ApplianceError, *, asked: bool = True) -> Fault:
    """Which fault an error of a worker is; where no caller has `asked`, the model is to blame for its input."""
    if (
        isinstance(error, CallerError | InsufficientMemory | Overloaded) and asked
    ):  # the latter say nothing of the model
        return Fault.BAD_INPUT
    known = Fault.OUT_OF_MEMORY if isinstance(error, InsufficientMemory) else _BY_CODE.get(cuda_code(str(error)) or 0)
    if known is None:
        known = next((fault for fault, words in _BY_WORDS.items() if words.search(str(error))), None)
    return known or (Fault.PLAN_REFUSED if isinstance(error, BundleError | CallerError) else Fault.MODEL_ERROR)


def cuda_code(message: str) -> int | None:
    """The CUDA error code that a message names, if any."""
    found = _CUDA_CODE.search(message)
    return int(found.group(1)) if found else None
