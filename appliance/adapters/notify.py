"""Tells systemd about the daemon (sd_notify protocol: one datagram to $NOTIFY_SOCKET)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

import structlog

log = structlog.get_logger()


def notify(state: str) -> None:
    """Send `state` ("READY=1", "STOPPING=1", "STATUS=..."); nothing happens without systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)  # a manager that does not read must not hold the event loop
        sock.sendto(state.encode(), address)


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """How often systemd wants to be told that this process is well; None when it does not watch it."""
    try:
        wanted = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return int(environ["WATCHDOG_USEC"]) / 1e6 if wanted else None
    except (KeyError, ValueError):
        return None


async def feed_watchdog(every_s: float, failed: Callable[[], str]) -> None:
    """Tell systemd for ever that the daemon is well, while the loop turns and `failed` names no reason.

    Hungry, systemd ends and restarts the daemon.
    """
    told = ""
    while True:
        reason = failed()
        if not reason:
            notify("WATCHDOG=1")
        elif reason != told:
            log.error("watchdog_starved", reason=reason)
            notify(f"STATUS=failed: {reason}")
        told = reason
        await asyncio.sleep(every_s)
