"""One command of somebody else's, run to its end: every line kept, watched meanwhile, ended as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_LIMIT_S = 2 * 3600.0
"""A command that takes longer is ended; NVIDIA's own waits are minutes."""
_POLL_S = 0.2
_END_S = 10.0
"""A command that is told to end may take this long."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that came to its end."""

    code: int
    said: str
    lost: OSError | None
    """Why its words could not all be kept, as on a full disk."""


def call(
    argv: Sequence[str],
    folder: Path,
    keep: Callable[[str], object],
    watch: Callable[[int], None],
    look: Callable[[], None],
) -> Ended:
    """Run `argv` in `folder` to its end.

    `keep` is given each line, in a thread. `watch` is told the process group, and 0 at the end. `look` is called every
    now and then, and once at the end. Whatever is raised meanwhile, nothing of the command goes on.
    """
    said: list[str] = []
    lost: list[OSError] = []

    def read(pipe: IO[str]) -> None:
        for line in pipe:
            said.append(line)
            try:
                keep(line)
            except OSError as error:  # a command whose words nobody reads waits for ever
                lost.append(error)

    with subprocess.Popen(  # noqa: S603 - the command that the plan shows
        argv,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own
    ) as process:
        reader = threading.Thread(target=read, args=(process.stdout,))
        reader.start()
        try:
            watch(process.pid)
            _await(process, look)
        finally:
            _end(process)
            reader.join()
            watch(0)
    look()
    return Ended(process.returncode, "".join(said), lost[0] if lost else None)


def _await(process: subprocess.Popen[str], look: Callable[[], None]) -> None:
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return
        look()


def _end(process: subprocess.Popen[str]) -> None:
    """End what still runs, and whatever it has left behind in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        os.killpg(process.pid, signal.SIGKILL)
