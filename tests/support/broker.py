"""A real mosquitto on a free loopback port, and a client that remembers what it hears."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions
from typing_extensions import Self

from support.processes import clean_environment, end_marked, eventually, free_port, listens, new_mark

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/local/sbin:/usr/sbin:/sbin")

needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="condition mosquitto: the broker is not installed")


class Mosquitto:
    """A broker that can be started, stopped and started again on the same port."""

    def __init__(self, folder: Path, *, anonymous: bool = True, more: str = "") -> None:
        """Choose a port; nothing runs yet. Without `anonymous` everybody is refused.

        `more` are further lines of its configuration, about this listener or all.
        """
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._mark = new_mark()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._log_path = folder / "mosquitto.log"
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            # Tests may run as root, whose privileges it would otherwise drop for a user without access to `folder`.
            f"user root\nlistener {self.port} 127.0.0.1\nallow_anonymous {str(anonymous).lower()}\n"
            f"persistence true\npersistence_location {folder}/\n{more}"
        )

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log_path.read_text()

    def start(self) -> Mosquitto:
        """Run until it takes connections."""
        assert MOSQUITTO
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [MOSQUITTO, "-c", str(self._config)],
                env=clean_environment(self._mark),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(self._listens, "mosquitto listens")
        return self

    def stop(self) -> None:
        """End it cleanly, so that retained messages are kept."""
        if self._process:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        end_marked(self._mark)

    def _listens(self) -> bool:
        assert self._process
        assert self._process.poll() is None, self.log
        return listens(self.port)


class Wire:
    """A link to something on loopback that can go silent, and be slow on the way back; as a context it is there."""

    def __init__(self, port: int, delay_s: float = 0.0, *, refused: bytes = b"") -> None:
        """Lead to `port`; what comes back is held up for `delay_s`, piece by piece.

        Who sends a piece with `refused` in it is told so by MQTT's DISCONNECT, as some brokers do, and hung up on.
        """
        self._target, self._delay_s, self._refused = port, delay_s, refused
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self.open = threading.Event()
        """Cleared, nothing comes through any more, and nobody is told."""
        self.open.set()
        self.connections = 0
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Take connections."""
        self._start(self._accept)
        return self

    def __exit__(self, *_error: object) -> None:
        """Cut all of them."""
        self._server.shutdown(socket.SHUT_RDWR)
        self.open.set()
        self._threads[0].join(10)  # nobody else comes
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (self._server, *self._ends):
            end.close()

    def _start(self, work: Callable[..., None], *given: object) -> None:
        self._threads.append(threading.Thread(target=work, args=given, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _address = self._server.accept()
                self._ends.append(near)
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends.append(far)
                self.connections += 1
                for start, end, delay_s, refused in ((near, far, 0.0, self._refused), (far, near, self._delay_s, b"")):
                    self._start(self._pump, start, end, delay_s, refused)

    def _pump(self, start: socket.socket, end: socket.socket, delay_s: float, refused: bytes) -> None:
        with contextlib.suppress(OSError):
            while data := start.recv(65536):
                if refused and refused in data:
                    start.sendall(b"\xe0\x02\x90\x00")  # topic name invalid
                    start.shutdown(socket.SHUT_RDWR)
                    break
                time.sleep(delay_s)
                self.open.wait()
                end.sendall(data)
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class HangsUp:
    """A broker that accepts every connection and closes it; as a context it listens."""

    def __init__(self) -> None:
        """Choose a port."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.accepted_at: list[float] = []
        """Monotonic seconds."""

    def __enter__(self) -> Self:
        """Take connections."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Listen no more."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _address = self._server.accept()
                self.accepted_at.append(time.monotonic())
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"\x20\x03\x00\x00\x00")  # CONNACK: accepted, no properties


@dataclass(frozen=True)
class Message:
    """What arrived."""

    topic: str
    payload: bytes
    retained: bool
    correlation: bytes | None
    session: str = ""
    """The session that an availability is of."""
    traceparent: str = ""

    @property
    def document(self) -> dict[str, Any]:
        """The payload as JSON."""
        document: dict[str, Any] = json.loads(self.payload)
        return document


@dataclass
class Listener:
    """Somebody at the broker who subscribes to everything, remembers it, and can publish."""

    port: int
    tls: ssl.SSLContext | None = None
    heard: list[Message] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Connect and subscribe."""
        ready = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self._client.on_message = self._hear
        self._client.on_connect = self._subscribe
        self._client.on_subscribe = lambda *_args: ready.set()
        if self.tls:
            self._client.tls_set_context(self.tls)
        self._client.connect("127.0.0.1", self.port)
        self._client.loop_start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave."""
        self._client.disconnect()
        self._client.loop_stop()

    def _hear(self, _client: paho.Client, _userdata: object, message: paho.MQTTMessage) -> None:
        correlation = getattr(message.properties, "CorrelationData", None)
        said = dict(getattr(message.properties, "UserProperty", ()))
        session, traceparent = said.get("session", ""), said.get("traceparent", "")
        self.heard.append(
            Message(message.topic, bytes(message.payload), message.retain, correlation, session, traceparent)
        )

    def _subscribe(self, client: paho.Client, *_facts: object) -> None:
        client.subscribe("#", options=SubscribeOptions(qos=1))

    def publish(
        self,
        topic: str,
        payload: object,
        *,
        retain: bool = False,
        reply_to: str = "",
        correlation: bytes | None = None,
        session: str = "",
        traceparent: str = "",
        wait: bool = True,
    ) -> paho.MQTTMessageInfo:
        """Send bytes as they are, anything else as JSON, and wait for the broker to have it unless told otherwise."""
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call] # paho leaves it untyped
        if reply_to:
            properties.ResponseTopic = reply_to
        if correlation is not None:
            properties.CorrelationData = correlation
        for name, value in (("session", session), ("traceparent", traceparent)):
            if value:
                properties.UserProperty = (name, value)
        content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        sent = self._client.publish(topic, content, qos=1, retain=retain, properties=properties)
        if wait:
            sent.wait_for_publish(10)
        return sent

    def on(self, topic: str) -> list[Message]:
        """What was heard on one topic."""
        return [message for message in list(self.heard) if message.topic == topic]

    def wait_for(self, topic: str, within_s: float = 10.0, **fields: object) -> Message:
        """The first message on `topic` whose document has `fields`."""

        def found() -> Message | None:
            return next((message for message in self.on(topic) if _has(message, fields)), None)

        message = eventually(found, f"{topic} says {fields}; heard so far: {self.heard[-5:]}", within_s)
        assert message
        return message


def _has(message: Message, fields: Mapping[str, object]) -> bool:
    return not fields or all(message.document.get(name) == value for name, value in fields.items())
