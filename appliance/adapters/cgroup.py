"""Control groups (v2) of workers: the kernel ends a worker that outgrows its lease, and nobody else.

systemd delegates the daemon's own group to it (`Delegate=memory`). The kernel wants processes in leaves only, so the
daemon moves into a leaf first, with the worker that was started before it; each worker then gets a group beside it.
Where none of this can be had the daemon's own sampling still holds workers to their leases. On Jetson the pages of the
GPU are not charged to groups.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

log = structlog.get_logger()

_DAEMON = "daemon"
HEADROOM = 1.25
"""Times a lease: at the lease the kernel slows a worker down, here it ends it. The daemon means to be first."""


class WorkerGroups:
    """A group for each worker."""

    def __init__(self, home: Path) -> None:
        """Make groups in `home`, our own group; raises OSError when the kernel or its owner does not allow it."""
        self._home = home
        (home / _DAEMON).mkdir(exist_ok=True)
        for pid in dict.fromkeys([str(os.getpid()), *(home / "cgroup.procs").read_text(encoding="ascii").split()]):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                (home / _DAEMON / "cgroup.procs").write_text(pid, encoding="ascii")
        (home / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        self._set: dict[str, tuple[int, int]] = {}

    def limit(self, name: str, pid: int, lease_bytes: int) -> None:
        """Hold the worker of `name` to its lease; what the kernel refuses is logged once."""
        if self._set.get(name) == (pid, lease_bytes):
            return
        known_pid = self._set.get(name, (0, 0))[0]
        self._set[name] = (pid, lease_bytes)
        group = self._home / f"worker-{name}"
        try:
            group.mkdir(exist_ok=True)
            (group / "memory.high").write_text(str(lease_bytes), encoding="ascii")
            (group / "memory.max").write_text(str(round(lease_bytes * HEADROOM)), encoding="ascii")
            if pid != known_pid:
                (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        except OSError as error:
            log.warning("worker_not_limited", model=name, pid=pid, reason=error.strerror)


def find(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> WorkerGroups | str:
    """The groups of our workers, or why there can be none."""
    try:
        text = Path("/proc/self/cgroup").read_text(encoding="ascii") if membership is None else membership
        path = next((line[3:] for line in text.splitlines() if line.startswith("0::")), None)
        home = root / (path or "").lstrip("/")
        if path is None or not (home / "cgroup.controllers").is_file():
            return "this machine has no cgroup v2"
        if "memory" not in (home / "cgroup.controllers").read_text(encoding="ascii").split():
            return "the memory controller is not delegated to this process: set Delegate=memory in its unit"
        if home == root:
            return "this process is in the root group, which cannot be divided: start it as a systemd service"
        return WorkerGroups(home)
    except OSError as error:
        return f"the control group may not be divided ({error.strerror}): set Delegate=memory in the unit"
