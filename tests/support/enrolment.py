"""A fleet's authority with its enrolment service on loopback, devices that ask it, and servers that shake hands."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import Self

from appliance.adapters.identity import Identity
from appliance.authority import Authority
from models.enrolment import IdentityFiles
from provisioning.enroll_serve import EnrolmentServer

DAY_S = 86400.0


class Fleet:
    """An authority in a folder; as a context it serves enrolments at `url`."""

    def __init__(
        self,
        folder: Path,
        name: str = "fleet",
        made_at: float | None = None,
        days: int = 90,
        names: tuple[str, ...] = ("localhost", "127.0.0.1"),
    ) -> None:
        """Make the authority; certificates of devices are valid for `days`, and the service is called by `names`."""
        self._names = names
        self.folder, self.days_ahead = folder, 0.0
        self.authority = Authority(folder / "authority", lambda: b"passphrase")
        self.authority.init(name, days, time.time() if made_at is None else made_at)
        self.ca, self.revoked = folder / "authority" / "authority.pem", folder / "authority" / "revoked.pem"
        self.told: list[str] = []

    def now(self) -> float:
        """What the clock of the service says."""
        return time.time() + self.days_ahead * DAY_S

    def token(self, device: str = "") -> str:
        """A token for a day."""
        return self.authority.new_token(device, [], self.now() + DAY_S)

    def server_file(self, *names: str, at: float | None = None) -> Path:
        """Key and certificate of a server, made `at` some time."""
        made = self.authority.serve_as(names or ("localhost", "127.0.0.1"), time.time() if at is None else at)
        path = self.folder / f"server-{len(list(self.folder.iterdir()))}.pem"
        path.write_bytes(made)
        return path

    def device(self, name: str, at: float | None = None) -> IdentityFiles:
        """Files of a device that an operator enrolled `at` some time."""
        files = IdentityFiles(self.folder / name / "identity")
        identity = Identity(files)
        request = identity.request(name)
        issued = self.authority.certify(request, name, [], time.time() if at is None else at)
        identity.accept(issued, self.ca.read_bytes())
        return files

    def __enter__(self) -> Self:
        """Serve."""
        self._server = EnrolmentServer(("127.0.0.1", 0), self.authority, list(self._names), self.told.append, self.now)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_fault: object) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None, answer: bytes = b"") -> Iterator[int]:
    """The port of a server that shakes hands and waits; without `context` it says `answer`, once asked, in plain text.

    A plain server with no answer at all stays silent.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _address = listener.accept()
            except OSError:  # closed
                return
            with client, contextlib.suppress(OSError):
                if context:
                    with context.wrap_socket(client, server_side=True) as tls:
                        tls.recv(1)
                elif answer:
                    client.recv(1000)
                    client.sendall(answer)
                else:
                    while client.recv(1000):
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)
