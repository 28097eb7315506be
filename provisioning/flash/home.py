"""A flashed board counts as done when it has called home: the ticket, the listener, the verdict."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from models import schema
from models.bundle import Golden, Graph
from models.callhome import PROOF, Question, Reply, Report, Ticket, proves, reply_proof, report_proof
from models.errors import BundleError, ConfigError
from models.folder import BundleFolder, write_file
from models.spec import DTYPES, Array, Tensor
from provisioning.flash.failures import FAILURES, Failure

HOST_ON_USB = "192.168.55.100"
"""Address of the PC on the USB network that a booted Jetson opens."""
_MOST_BYTES = 16 * 2**20
"""Of a report."""
_SILENCE_S, _LONGEST_S = 10.0, 60.0
"""A caller may say nothing for so long, and take so long in all."""
_SERIAL = re.compile(r"[A-Za-z0-9]{1,64}")
"""It becomes the name of a file."""


class Exam:
    """The golden question of a bundle, and what is right."""

    def __init__(self, bundle: BundleFolder) -> None:
        """Take the graph with the smallest golden vector; raises BundleError when it cannot be read."""
        manifest = bundle.manifest
        self._bundle = bundle
        name, self._graph = min(manifest.graphs.items(), key=lambda item: _golden(item[1], "").inputs.size_bytes)
        self.digest = manifest.digest
        inputs = bundle.read_arrays(_golden(self._graph, "").inputs)
        self.question = Question(f"{manifest.name}.{name}", {"inputs": [_spoken(*item) for item in inputs.items()]})

    def check(self, report: Report) -> Failure | None:
        """What is wrong with the answer in a report; None when it is right."""
        if report.answer is None:
            return FAILURES["no_answer"]
        if self.digest not in [one.get("digest") for one in report.bundles]:
            return FAILURES["wrong_answer"]
        try:
            golden = _golden(self._graph, str(report.answer.get("parameters", {}).get("precision", "")))
            golden.check(_heard(report.answer), self._bundle.read_arrays(golden.outputs))
        except (BundleError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            return FAILURES["wrong_answer"]
        return None


def _golden(graph: Graph, precision: str) -> Golden:
    """That of the precision that answered; of another than the bundle's (an engine's own), that of the first."""
    variant = graph.variants.get(precision) or next(iter(graph.variants.values()))
    return variant.golden


def _spoken(name: str, array: Array) -> dict[str, Any]:
    tensor = Tensor.from_array(name, array)
    return {"name": name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": array.reshape(-1).tolist()}


def _heard(answer: Mapping[str, Any]) -> dict[str, Array]:
    return {
        str(one["name"]): np.array(one["data"], DTYPES[one["datatype"]]).reshape(one["shape"])
        for one in answer["outputs"]
    }


@dataclass(frozen=True, slots=True)
class Expected:
    """What a board of a run must be."""

    release: str
    armed: bool
    exam: Exam


def verdict(report: Report, expected: Expected) -> Failure | None:
    """What is wrong with a board that called home; None when it is as it was meant to be."""
    if report.l4t != expected.release:
        return FAILURES["wrong_release"]
    armed = report.slots.get("armed") is True and report.slots.get("bootable") == {"A": True, "B": True}
    if expected.armed and not armed:
        return FAILURES["not_armed"]
    return expected.exam.check(report)


def new_ticket(run: str, urls: tuple[str, ...], user: str, exam: Exam) -> Ticket:
    """A ticket with a nonce that nobody knows."""
    return Ticket(run, secrets.token_hex(32), urls, user, exam.question)


def login_key(folder: Path, serial: str) -> str:
    """Public half of the key that logs in on one board; its private half is made in `folder`, or already there."""
    private = folder / f"{serial}.key"
    public = folder / f"{serial}.key.pub"
    if not private.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = Ed25519PrivateKey.generate()
        line = secret.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {serial}".encode()
        write_file(public, line)
        write_file(private, secret.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), mode=0o600)
    return public.read_text()


class Home:
    """Where boards call; told from its own threads."""

    def __init__(self, ticket: Ticket, expected: Expected, keys: Path) -> None:
        """Take reports made with the nonce of `ticket`; keys for logging in are kept in the folder `keys`."""
        self._ticket, self._expected, self._keys = ticket, expected, keys
        self._lock = threading.Lock()
        self.challenge = secrets.token_hex(16)
        """A report that was made for another is an old one."""
        self.trouble = ""
        """Why boards that are good cannot be let in."""
        self._heard: dict[str, tuple[Report, Failure | None]] = {}

    def heard(self) -> dict[str, tuple[Report, Failure | None]]:
        """The latest report of each board, by serial number, and what is wrong with it."""
        with self._lock:
            return dict(self._heard)

    def take(self, content: bytes, proof: str) -> bytes | None:
        """Judge a report and make the reply; None for one that does not come from a board of this run."""
        if not proves(proof, report_proof(self._ticket.nonce, content, self.challenge)):
            return None
        try:
            report = schema.load(Report, json.loads(content))
        except (ValueError, RecursionError):
            return None
        if report.run != self._ticket.run or not _SERIAL.fullmatch(report.serial):
            return None
        failure = verdict(report, self._expected)
        with self._lock:
            try:
                key = "" if failure else login_key(self._keys, report.serial)
            except OSError as error:
                self.trouble = (
                    f"{self._keys} cannot keep the key of a board ({error.strerror}): make room, and run again"
                )
                return None
            self._heard[report.serial] = report, failure
        reply = Reply(not failure, f"{failure.what}: {failure.remedy}" if failure else "", key)
        return json.dumps(schema.dump(reply)).encode()

    def reply_proof(self, content: bytes, asked: str) -> str:
        """What shows a board that a reply is ours, and to its report, whose proof is `asked`."""
        return reply_proof(self._ticket.nonce, content, asked)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # a board whose reply is on its way gets it, also when the wait is over
    home: Home

    def handle_error(self, request: object, client_address: object) -> None:
        """Who hangs up in the middle will call again."""


class _Call(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(_SILENCE_S)
        self._limit = threading.Timer(_LONGEST_S, _hang_up, [self.connection])
        self._limit.start()

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def do_GET(self) -> None:
        self._answer(self.server.home.challenge.encode())

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        home, asked = self.server.home, self.headers.get(PROOF, "")
        reply = home.take(self.rfile.read(int(length)), asked)
        if reply is None:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        self._answer(reply, {PROOF: home.reply_proof(reply, asked), "content-type": "application/json"})

    def _answer(self, content: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the library
        """Calls are told by what comes of them."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def listening(home: Home, host: str, port: int) -> Iterator[int]:
    """Listen for boards while the context lasts; gives the port. Raises ConfigError when the address cannot be had."""
    try:
        server = _Server((host, port), _Call)
    except OSError as error:
        msg = f"cannot listen on {host}:{port} ({error.strerror}): choose another with --listen HOST:PORT"
        raise ConfigError(msg) from error
    server.home = home
    thread = threading.Thread(target=server.serve_forever, name="home")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
