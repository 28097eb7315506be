"""Tells systemd about the daemon (sd_notify protocol: one datagram to $NOTIFY_SOCKET)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send `state` ("READY=1", "STOPPING=1", "STATUS=..."); nothing happens without systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), address)
