"""Entry of a worker that starts while others serve: what takes time happens on a thread of low priority.

Started by `main` with RUNTIME FD, see `appliance.worker`. On Linux a priority belongs to a thread and to those that it
starts, and only root may raise one again: so the main thread, which starts those that will serve, keeps its own, and a
helper imports, loads and proves. Of this package nothing is imported before it, and of the library next to nothing:
without `runpy` and `typing` an interpreter takes a third less time until it works at a low priority.
"""

from __future__ import annotations

import importlib
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

NICE = 19
"""4.5 % of the share of those who compute where the processors are busy; less would make a load look like a hang."""


def gently(call: Callable[[], T], nice: int = NICE) -> T:
    """What `call` returns, or raises, on a thread whose priority is that many steps lower."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        os.nice(nice)
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    helper = threading.Thread(target=run)  # an executor would import for longer than many a model takes to load
    helper.start()
    helper.join()
    if raised:
        raise raised[0]
    return returned[0]


def main() -> None:
    """Entry of the worker process."""
    gently(lambda: importlib.import_module("appliance.worker")).main(gentle=True)
