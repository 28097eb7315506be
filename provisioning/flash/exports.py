"""Takes back what NVIDIA's flasher opens on the host: `python -m provisioning.flash.exports SYSROOT`.

The flasher shares its images over NFS with any machine of the board's network, links udev rules and keeps USB awake,
and takes that back only when it reaches its own end. This guard is a process of its own: it waits for the end of its
standard input, which comes when the run has ended or was killed, ends the tool that may still run, and cleans up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from models.errors import WorkshopError

_MARK = "# Entry added by NVIDIA initrd flash tool"
"""It and the line after it come from the flasher."""
_RULES = ("99-l4t-host.rules", "10-l4t-usb-msd.rules")
_AUTOSUSPEND = "sys/module/usbcore/parameters/autosuspend"
_END_S = 10.0
"""A tool that is told to end may take this long."""


@contextlib.contextmanager
def guarded(sysroot: Path) -> Iterator[Callable[[int], None]]:
    """A context that ends, whatever happens to us, with everything taken back from the host at `sysroot`.

    It gives a function that is told the process group of the tool that runs, which ends with the run; 0 for none.
    """
    command = [sys.executable, "-m", "provisioning.flash.exports", str(sysroot)]
    # In a session of its own: what kills the run must not kill its guard.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:  # noqa: S603 - ourselves
        pipe = guard.stdin
        if pipe is None:
            raise WorkshopError("the guard of the host cannot be told anything: run again")

        def watch(group: int) -> None:
            pipe.write(f"{group}\n".encode())
            pipe.flush()

        yield watch


def clean(sysroot: Path, autosuspend: str) -> None:
    """Take everything back; `autosuspend` is what that of USB was before."""
    exports = sysroot / "etc/exports"
    with contextlib.suppress(OSError):
        lines = exports.read_text().splitlines(keepends=True)
        kept = [
            line
            for number, line in enumerate(lines)
            if not line.startswith(_MARK) and not (number and lines[number - 1].startswith(_MARK))
        ]
        if kept != lines:
            exports.write_text("".join(kept))
    for rule in _RULES:
        with contextlib.suppress(OSError):
            (sysroot / "etc/udev/rules.d" / rule).unlink()
    if autosuspend:
        with contextlib.suppress(OSError):
            (sysroot / _AUTOSUSPEND).write_text(autosuspend)
    exportfs = shutil.which("exportfs")
    if exportfs:  # what is shared now becomes what /etc/exports says
        subprocess.run([exportfs, "-ra"], check=False, stderr=subprocess.DEVNULL)  # noqa: S603 - found above


def _end(group: int) -> None:
    """End a process group, by force if need be."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        until = time.monotonic() + _END_S
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Wait for the end of the run, then clean up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sysroot, group = Path(sys.argv[1]), 0
    try:
        autosuspend = (sysroot / _AUTOSUSPEND).read_text()
    except OSError:
        autosuspend = ""
    for line in sys.stdin:
        group = int(line)
    if group:
        _end(group)
    clean(sysroot, autosuspend)


if __name__ == "__main__":
    main()
