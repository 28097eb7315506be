"""Entry of a worker that starts while others serve: what takes time happens on a thread of low priority.

Started as `python -m appliance.gently RUNTIME FD`. On Linux a priority belongs to a thread and to those that it starts,
and only root may raise one again: so the main thread, which starts those that will serve, keeps its own, and a helper
imports, loads and proves. Of this package nothing is imported before it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

NICE = 10
"""A tenth of the share of those who serve where the processors are busy; less would make a load look like a hang."""


def gently(call: Callable[[], T]) -> T:
    """What `call` returns, or raises, on a thread of low priority."""
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICE,)) as pool:
        return pool.submit(call).result()


if __name__ == "__main__":
    gently(lambda: importlib.import_module("appliance.worker")).main(gentle=True)
