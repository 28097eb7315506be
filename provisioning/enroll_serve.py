"""The enrolment service: devices ask it for certificates over HTTPS. For workshops and trials.

It holds the opened key of the authority: let it run where and while devices are enrolled or renew, no longer.
"""

from __future__ import annotations

import json
import ssl
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any, cast

from cryptography.hazmat.primitives.serialization import Encoding

from appliance.authority import Authority
from models import schema
from models.enrolment import AUTHORITY, ENROL, LARGEST_BYTES, RENEW, REVOKED, Ask, Issued
from models.errors import ApplianceError, BadInput, Forbidden

_SILENCE_S = 20.0
"""A client that says nothing for so long is given up."""


class EnrolmentServer(ThreadingHTTPServer):
    """Serves one authority; one thread a connection."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        authority: Authority,
        names: list[str],
        told: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """Listen at `address`, under a certificate for `names`; `told` gets a line for each answer."""
        self.authority, self.told, self.now = authority, told, now
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        with tempfile.NamedTemporaryFile() as own:  # of mode 0600, and for a moment: OpenSSL reads files only
            own.write(authority.serve_as(names, now()))
            own.flush()
            self._context.load_cert_chain(own.name)
        self._context.load_verify_locations(cadata=authority.certificate.public_bytes(Encoding.PEM).decode())
        self._context.verify_mode = ssl.CERT_OPTIONAL  # a first enrolment has none to show
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket, Any]:
        """A connection whose handshake happens when its own thread reads from it: it may not hold up the others."""
        plain, client = super().get_request()
        plain.settimeout(_SILENCE_S)
        return self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False), client

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left, or speaks no TLS, is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Public files."""
        server = cast("EnrolmentServer", self.server)
        if self.path == AUTHORITY:
            self._answer(HTTPStatus.OK, server.authority.certificate.public_bytes(Encoding.PEM))
        elif self.path == REVOKED:
            self._answer(HTTPStatus.OK, server.authority.list_revoked(server.now(), anew=False))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path[:100]}")

    def do_POST(self) -> None:
        """Certificates."""
        try:
            issued = self._issued()
        except Forbidden as error:
            self._refuse(HTTPStatus.FORBIDDEN, str(error))
        except BadInput as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ApplianceError, OSError) as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._answer(HTTPStatus.OK, json.dumps(schema.dump(issued)).encode())

    def _issued(self) -> Issued:
        server = cast("EnrolmentServer", self.server)
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > LARGEST_BYTES:
            self.close_connection = True  # what it still sends is not read
            msg = f"a request of at most {LARGEST_BYTES} bytes, with its length, is taken here"
            raise BadInput(msg)
        try:
            ask = schema.load(Ask, json.loads(self.rfile.read(int(length))))
        except (ValueError, RecursionError) as error:
            msg = f"this is no request for a certificate ({error})"
            raise BadInput(msg) from error
        if self.path == ENROL:
            return server.authority.enrol(ask, server.now())
        if self.path != RENEW:
            msg = f"there is nothing at {self.path[:100]}"
            raise BadInput(msg)
        shown = cast("ssl.SSLSocket", self.connection).getpeercert(binary_form=True)
        if shown is None:
            raise Forbidden("a renewal needs the certificate that it replaces: show it in the handshake")
        return server.authority.renew(ask, shown, server.now())

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(status, json.dumps({"error": sentence}).encode())
        cast("EnrolmentServer", self.server).told(f"{self.client_address[0]}: {self.command} refused, {sentence}")

    def _answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response_only(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the library
        """Requests are not news; refusals are, and are told elsewhere."""
