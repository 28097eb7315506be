"""Takes back what NVIDIA's flasher opens on the host: `python -m provisioning.flash.exports`.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from models.errors import WorkshopError

_MARK = b"# Entry added by NVIDIA initrd flash tool"
"""It and the line after it come from the flasher."""
_RULES = ("99-l4t-host.rules", "10-l4t-usb-msd.rules")
_AUTOSUSPEND = "sys/module/usbcore/parameters/autosuspend"
_END_S = 10.0
"""A tool that is told to end may take this long."""


@contextlib.contextmanager
def guarded(sysroot: Path | None, locks: Sequence[int] = ()) -> Iterator[Callable[[int], None]]:
    """A context that ends, whatever happens to us, with everything taken back from the host at `sysroot`.

    What a power cut of this host has left open is taken back before. With None nothing of the host is touched. Files
    with the descriptors `locks` stay locked until then, so that no other run begins before. It gives a function that
    is told the process group of the tool that runs, which ends with the run; 0 for none. That raises WorkshopError
    when the guard has gone.
    """
    if sysroot and _left_open(sysroot):
        clean(sysroot)
    autosuspend = _autosuspend(sysroot) if sysroot else ""
    where = [str(sysroot), autosuspend] if sysroot else []
    command = [sys.executable, "-m", "provisioning.flash.exports", *where]
    # In a session of its own: what kills the run must not kill its guard.
    with subprocess.Popen(  # noqa: S603 - ourselves
        command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, pass_fds=locks
    ) as guard:
        pipe = guard.stdin

        def watch(group: int) -> None:
            try:
                if pipe:
                    pipe.write(f"{group}\n".encode())
            except OSError as error:
                msg = "the guard that closes this host again has ended, so nothing is opened any more: run again"
                raise WorkshopError(msg) from error

        try:
            yield watch
        finally:
            if sysroot and guard.poll() is not None:  # somebody has ended it
                clean(sysroot, autosuspend)


def clean(sysroot: Path, autosuspend: str = "") -> None:
    """Take everything back; `autosuspend` is what that of USB was before."""
    exports = (sysroot / "etc/exports").resolve()
    try:
        lines = exports.read_bytes().splitlines(keepends=True)
        kept = [
            line
            for number, line in enumerate(lines)
            if not line.startswith(_MARK) and not (number and lines[number - 1].startswith(_MARK))
        ]
        if kept != lines:  # as a whole: the lines of others must outlive a full disk
            from models.folder import write_file  # noqa: PLC0415 - loads numpy, which a guard mostly has no use for

            write_file(exports, b"".join(kept), exports.stat().st_mode & 0o777)
    except FileNotFoundError:
        pass
    except OSError as error:
        print(
            f"{exports} still shares what the flasher has opened ({error.strerror}): delete the lines at "
            f"{_MARK.decode()!r}, then sudo exportfs -ra",
            file=sys.stderr,
        )
    for rule in _RULES:
        with contextlib.suppress(OSError):
            (sysroot / "etc/udev/rules.d" / rule).unlink()
    if autosuspend:
        with contextlib.suppress(OSError):
            (sysroot / _AUTOSUSPEND).write_text(autosuspend)
    exportfs = shutil.which("exportfs")
    if exportfs:  # what is shared now becomes what /etc/exports says
        subprocess.run([exportfs, "-ra"], check=False, stderr=subprocess.DEVNULL)  # noqa: S603 - found above


def _left_open(sysroot: Path) -> bool:
    """Whether a flasher has come to no end here."""
    with contextlib.suppress(OSError):
        if _MARK in (sysroot / "etc/exports").read_bytes():
            return True
    return any(os.path.lexists(sysroot / "etc/udev/rules.d" / rule) for rule in _RULES)


def _autosuspend(sysroot: Path) -> str:
    try:
        return (sysroot / _AUTOSUSPEND).read_text()
    except OSError:
        return ""


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
    group = 0
    for line in sys.stdin:
        group = int(line)
    if group:
        _end(group)
    if sys.argv[1:]:
        clean(Path(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
