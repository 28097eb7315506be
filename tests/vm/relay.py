"""Joins the socket that is its standard input with a port of this machine: QEMU starts one for each connection."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Bring all of one way, and its end."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    here = socket.socket(fileno=0)
    there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    threading.Thread(target=pump, args=(here, there), daemon=True).start()
    pump(there, here)
