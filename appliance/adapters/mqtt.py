"""The MQTT 5 door: availability, retained state, and orders from the fleet. Sees only `service`.

One thread of ours owns the paho client and its socket; paho starts no thread. Its callbacks only
note what happened, and the loop below acts on it, because work, locks or waits inside paho's
callbacks have deadlocked others. Orders are executed on the daemon's event loop, never here.

    appliance/{device_id}/availability   retained "online"; "offline" by will or at a clean stop
    appliance/{device_id}/state          retained JSON: models, versions, digests, readiness
    appliance/{device_id}/cmd            orders (QoS 1)
    appliance/{device_id}/cmd/result     their answers, unless the order names a response topic
"""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import random
import select
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import paho.mqtt.client as paho
import structlog
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from appliance.adapters.tls import Calling
from appliance.service import Service

log = structlog.get_logger()

_FIRST_RETRY_S = 1.0
_CONNACK_WAIT_S = 10.0
_GOODBYE_S = 2.0
_POLL_S = 1.0
_LARGEST_ORDER_BYTES = 256 * 1024
_MOST_LEVELS = 100
"""Of a response topic; mosquitto hangs up on a client that publishes to more than 200."""


@dataclass(frozen=True, slots=True)
class Broker:
    """Where and how to connect."""

    host: str
    port: int
    username: str = ""
    password: str = field(default="", repr=False)
    keepalive_s: int = 30
    longest_retry_s: float = 60.0
    tls: Calling | None = None
    """None for plain text. Read anew at each connection, so that a renewed certificate is shown."""


@dataclass(frozen=True, slots=True)
class _Publication:
    topic: str
    payload: bytes
    retain: bool = False
    correlation: bytes | None = None


class Mqtt:
    """The connection to the fleet's broker; keeps trying for ever."""

    def __init__(self, broker: Broker, service: Service, *, now: Callable[[], float]) -> None:
        """Speak for `service` at `broker`; `now` tells trusted wall time, by which orders expire."""
        self._broker, self._service, self._now = broker, service, now
        self._prefix = f"appliance/{service.device_id}"
        self._outbox: queue.SimpleQueue[_Publication] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._cut_off = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)
        self._refused: str | None = None
        self._connected = False
        self._answering: set[asyncio.Task[None]] = set()
        self._inbox: list[paho.MQTTMessage] = []
        self._fault = "not connected yet"

    def status(self) -> dict[str, Any]:
        """For people and for `/v1/status`."""
        return {
            "broker": f"{self._broker.host}:{self._broker.port}",
            "connected": self._connected,
            "reason": None if self._connected else self._fault,
        }

    def start(self) -> None:
        """Begin to connect; called on the event loop that executes orders."""
        self._loop = asyncio.get_running_loop()
        self._service.listeners.append(self._publish_state)
        self._thread.start()

    async def stop(self) -> None:
        """Say goodbye (a clean stop is not left to the will) and end the thread."""
        self._stopping.set()
        self._wake()
        await asyncio.to_thread(self._thread.join)
        os.close(self._wake_fd)

    def lose_broker(self, on: bool, _amount: float) -> None:
        """Fault injection: be cut off from the broker until mended."""
        if on:
            self._cut_off.set()
        else:
            self._cut_off.clear()
        self._wake()

    def _publish_state(self) -> None:
        """Queue the retained state; runs on the event loop."""
        status = self._service.status()
        state = {key: status[key] for key in ("device_id", "appliance", "ready", "models", "clock", "update")}
        self._publish(_Publication(f"{self._prefix}/state", orjson.dumps(state), retain=True))

    def _publish(self, publication: _Publication) -> None:
        if self._connected:
            self._outbox.put(publication)
            self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _handle(self, message: paho.MQTTMessage) -> None:
        """Begin to execute one order; runs on the event loop."""
        task = self._loop.create_task(self._answer(message))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, message: paho.MQTTMessage) -> None:
        result = await self._service.order(bytes(message.payload), now=self._now(), retained=message.retain)
        properties = message.properties
        reply_to = getattr(properties, "ResponseTopic", "")
        topic = reply_to if self._may_answer_on(reply_to) else f"{self._prefix}/cmd/result"
        correlation = getattr(properties, "CorrelationData", None)
        log.info("order", id=result.id, status=result.status, reason=result.reason or None)
        self._publish(_Publication(topic, orjson.dumps(result), correlation=correlation))

    def _may_answer_on(self, topic: str) -> bool:
        """Whether an order may have its answer on `topic`.

        Wildcards, and more levels than brokers take, would cost the connection; on topics of our own an answer
        would be taken for what they usually say.
        """
        ours = {f"{self._prefix}/{name}" for name in ("availability", "state", "cmd")}
        return bool(topic) and not set(topic) & set("+#$") and topic.count("/") < _MOST_LEVELS and topic not in ours

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            started = time.monotonic()
            self._refused = None
            try:
                self._session()
            except OSError as error:
                self._fault = f"cannot connect: {error.strerror or error}"
            except Exception as error:  # a broken packet or a fault of paho must not end the thread
                self._fault = f"{type(error).__name__}: {error}"
            was_up = self._connected
            self._connected = False
            if self._stopping.is_set():
                return
            if was_up or retry_s == _FIRST_RETRY_S:
                log.warning("mqtt_down", broker=self._broker.host, port=self._broker.port, reason=self._fault)
            if was_up and time.monotonic() - started > self._broker.longest_retry_s:
                retry_s = _FIRST_RETRY_S
            # Full jitter: a fleet that lost its broker must not come back all at once.
            self._stopping.wait(random.uniform(0.1, retry_s))  # noqa: S311 - not for secrets
            retry_s = min(retry_s * 2, self._broker.longest_retry_s)

    def _session(self) -> None:
        """One connection from CONNECT to its end; raises OSError, or returns with `_fault` set."""
        if self._cut_off.is_set():
            raise OSError(errno.ENETUNREACH, "cut off by fault injection")
        client = self._client()
        client.connect(
            self._broker.host,
            self._broker.port,
            keepalive=self._broker.keepalive_s,
            clean_start=paho.MQTT_CLEAN_START_FIRST_ONLY,
        )
        give_up_at = time.monotonic() + _CONNACK_WAIT_S
        announced = False
        try:
            while not self._stopping.is_set():
                code = MQTTErrorCode.MQTT_ERR_CONN_LOST if self._cut_off.is_set() else self._turn(client)
                if code is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                    self._fault = self._refused or f"connection lost: {paho.error_string(code)}"
                    return
                if not self._connected and time.monotonic() > give_up_at:
                    self._fault = "the broker accepted the connection but never answered"
                    return
                if self._connected and not announced:
                    self._announce(client)
                    announced = True
                self._drain(client)
            self._goodbye(client)
        finally:
            client.disconnect()

    def _client(self) -> paho.Client:
        client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"appliance-{self._service.device_id}", protocol=paho.MQTTv5
        )
        if self._broker.username:
            client.username_pw_set(self._broker.username, self._broker.password)
        if self._broker.tls:
            client.tls_set_context(self._broker.tls.context())
        client.will_set(f"{self._prefix}/availability", b"offline", qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_message = self._on_message
        return client

    def _on_connect(
        self, _client: paho.Client, _userdata: object, _flags: object, reason: ReasonCode, _properties: object
    ) -> None:
        if reason.is_failure:
            self._refused = f"the broker refused the connection: {reason}"
        else:
            self._connected = True

    def _on_message(self, _client: paho.Client, _userdata: object, message: paho.MQTTMessage) -> None:
        if len(message.payload) <= _LARGEST_ORDER_BYTES:
            self._inbox.append(message)
        else:
            log.warning("order_too_large", bytes=len(message.payload))

    def _turn(self, client: paho.Client) -> MQTTErrorCode:
        """Wait for the socket, for something to send, or for a while; let paho do its part."""
        sock = client.socket()
        if sock is None:
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        poll = select.poll()  # unlike select it takes descriptors above 1023, which many clients at once bring about
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(sock, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
        unread = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0  # decrypted: the system knows nothing of it
        events = dict(poll.poll(0 if unread else _POLL_S * 1000))
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        happened = events.get(sock.fileno(), 0)
        if unread or happened & ~select.POLLOUT:
            code = client.loop_read()
            if code is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return code
        if happened & select.POLLOUT:
            code = client.loop_write()
            if code is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return code
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._loop.call_soon_threadsafe(self._handle, message)
        return client.loop_misc()

    def _announce(self, client: paho.Client) -> None:
        # As published: otherwise a retained order is told from others only at the next connect, after it was done.
        client.subscribe(f"{self._prefix}/cmd", options=SubscribeOptions(qos=1, retainAsPublished=True))
        client.publish(f"{self._prefix}/availability", b"online", qos=1, retain=True)
        log.info("mqtt_up", broker=self._broker.host, port=self._broker.port)
        self._loop.call_soon_threadsafe(self._publish_state)

    def _drain(self, client: paho.Client) -> None:
        while True:
            try:
                publication = self._outbox.get_nowait()
            except queue.Empty:
                return
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call] # paho leaves it untyped
            if publication.correlation is not None:
                properties.CorrelationData = publication.correlation
            client.publish(
                publication.topic, publication.payload, qos=1, retain=publication.retain, properties=properties
            )

    def _goodbye(self, client: paho.Client) -> None:
        """Publish "offline" and wait for the broker's acknowledgement, but not for long."""
        if not self._connected:
            return
        self._drain(client)
        sent = client.publish(f"{self._prefix}/availability", b"offline", qos=1, retain=True)
        until = time.monotonic() + _GOODBYE_S
        while not sent.is_published() and time.monotonic() < until:
            if self._turn(client) is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return
