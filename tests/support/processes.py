"""Real processes for tests: started with a mark in their environment, found and ended by process id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MARK = "JOURNEY_TEST"
"""Variable that every process of one test inherits, however far it is removed from its parent."""


def eventually(look: Callable[[], T], what: str, within_s: float = 10.0) -> T:
    """Look until something true is seen and return it; fail with `what` after the deadline."""
    until = time.monotonic() + within_s
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < until, f"not within {within_s} s: {what}; last seen: {seen!r}"
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody takes connections on a port of the loopback address."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def clean_environment(mark: str = "") -> dict[str, str]:
    """Ours, without the developer's own settings of the appliance, proxies and colours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("APPLIANCE_") and not name.lower().endswith("_proxy")
    }
    kept.pop("COLUMNS", None)  # nobody knows the width of a pipe
    return {**kept, "NO_COLOR": "1"} | ({MARK: mark} if mark else {})


def new_mark() -> str:
    """A value of MARK that no other process has."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Process ids of all living processes with that mark (a zombie has no environment left)."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_marked(mark: str) -> None:
    """Kill, by id, whatever of a test is still there."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not marked(mark), "the processes of this test are gone")


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process point to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return sorted(found)


def loaded(pid: int, library: str) -> bool:
    """Whether a process has mapped a library and come to rest: no thread of it runs, or did for a moment."""

    def threads() -> list[tuple[str, str]]:
        tasks = [path.read_text() for path in sorted(Path(f"/proc/{pid}/task").glob("*/stat"))]
        ran = [path.read_text() for path in sorted(Path(f"/proc/{pid}/task").glob("*/schedstat"))]
        return [(text.rpartition(")")[2].split()[0], spent) for text, spent in zip(tasks, ran, strict=True)]

    try:
        before = threads()
        time.sleep(0.1)
        rests = threads() == before and {state for state, _spent in before} == {"S"}
        return rests and library in Path(f"/proc/{pid}/maps").read_text()
    except (OSError, ValueError):  # a thread has ended meanwhile
        return False


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children() -> set[int]:
    """Process ids of our own children, zombies too."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
