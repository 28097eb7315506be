"""Control groups of workers, on a folder that looks like the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.adapters import cgroup
from appliance.adapters.cgroup import WorkerGroups

pytestmark = pytest.mark.unit

MEMBERSHIP = "0::/appliance.service\n"


def delegated(root: Path, controllers: str = "cpu memory pids") -> Path:
    home = root / "appliance.service"
    home.mkdir()
    (home / "cgroup.controllers").write_text(controllers)
    (home / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return home


def test_the_daemon_moves_into_a_leaf_and_each_worker_gets_a_group_with_its_lease(tmp_path: Path) -> None:
    home = delegated(tmp_path)
    groups = cgroup.find(tmp_path, MEMBERSHIP)
    assert isinstance(groups, WorkerGroups)
    assert (home / "daemon" / "cgroup.procs").read_text() == str(os.getpid())
    assert (home / "cgroup.subtree_control").read_text() == "+memory"
    groups.limit("reader", 77, 1000)
    group = home / "worker-reader"
    assert [(group / name).read_text() for name in ("cgroup.procs", "memory.high", "memory.max")] == [
        "77",
        "1000",
        "1250",
    ]


def test_a_worker_that_was_started_before_the_daemon_moves_into_the_leaf_too(tmp_path: Path) -> None:
    """The kernel divides no group that still holds a process."""
    home = delegated(tmp_path)
    (home / "cgroup.procs").write_text(f"{os.getpid()}\n4711\n")
    WorkerGroups(home)
    assert (home / "daemon" / "cgroup.procs").read_text() == "4711"  # a file holds what was written last


def test_a_lease_that_changes_moves_the_limits_and_a_new_worker_moves_in(tmp_path: Path) -> None:
    home = delegated(tmp_path)
    groups = WorkerGroups(home)
    groups.limit("reader", 77, 1000)
    (home / "worker-reader" / "cgroup.procs").unlink()
    groups.limit("reader", 77, 2000)
    assert (home / "worker-reader" / "memory.high").read_text() == "2000"
    assert not (home / "worker-reader" / "cgroup.procs").exists()
    groups.limit("reader", 78, 2000)
    assert (home / "worker-reader" / "cgroup.procs").read_text() == "78"


@pytest.mark.parametrize(
    ("membership", "controllers", "why"),
    [
        ("4:memory:/x\n", "memory", "no cgroup v2"),
        ("0::/elsewhere\n", "memory", "no cgroup v2"),
        (MEMBERSHIP, "cpu pids", "not delegated"),
    ],
)
def test_where_there_can_be_no_groups_the_reason_is_told(
    tmp_path: Path, membership: str, controllers: str, why: str
) -> None:
    delegated(tmp_path, controllers)
    found = cgroup.find(tmp_path, membership)
    assert isinstance(found, str)
    assert why in found


def test_what_the_kernel_refuses_stops_nobody(tmp_path: Path) -> None:
    home = delegated(tmp_path)
    groups = WorkerGroups(home)
    (home / "worker-reader").write_text("in the way")
    groups.limit("reader", 77, 1000)


def test_where_a_group_is_delegated_to_us_the_kernel_takes_our_limits() -> None:
    script = (
        "from appliance.adapters import cgroup\nimport os, pathlib\n"
        "before = os.posix_spawn('/bin/sleep', ['sleep', '30'], {})\nfound = cgroup.find()\nos.kill(before, 9)\n"
        "if isinstance(found, str): print('NO', found)\n"
        "else:\n"
        "    child = os.posix_spawn('/bin/sleep', ['sleep', '30'], {})\n"
        "    found.limit('test', child, 2**26)\n"
        "    print('IN', 'worker-test' in pathlib.Path(f'/proc/{child}/cgroup').read_text())\n"
        "    os.kill(child, 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if run.stdout.startswith("NO"):
        pytest.skip(f"no control group is delegated to this process: {run.stdout[3:].strip()}")
    assert run.stdout == "IN True\n"
