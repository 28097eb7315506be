"""The MQTT 5 door: availability, retained state, reports, and orders from the fleet. Sees only `service`.

One thread of ours owns the paho client and its socket; paho starts no thread. Its callbacks only note what happened,
and the loop below acts on it, because work, locks or waits inside paho's callbacks have deadlocked others. Orders are
executed on the daemon's event loop, never here.

paho remembers messages in memory only, and sends all of them at once when it connects again. So each connection has a
client of its own, what must arrive waits in the spool until the broker has acknowledged it, and `core.outbox` says what
is sent when. An order is acknowledged when its answer is safe (with the broker, or on disk): one whose answer was lost
comes again, and the inbox knows it.

    appliance/{device_id}/availability     retained "online"; "offline" by will or at a clean stop
    appliance/{device_id}/state            retained JSON: models, versions, digests, readiness
    appliance/{device_id}/telemetry        figures, from time to time
    appliance/{device_id}/deployments      how each deployment ended, with the figures of its verdicts
    appliance/{device_id}/results/{model}  answers of models, where they are asked for
    appliance/{device_id}/cmd              orders (QoS 1)
    appliance/{device_id}/cmd/result       their answers, unless the order names a response topic

Past 400 lines because the topics, and the life of the one connection they share, are read together.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import paho.mqtt.client as paho
import structlog
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from appliance.adapters.telemetry import Telemetry, ended_deployments, reported_state
from appliance.core import trace
from appliance.core.command import CommandResult
from appliance.core.outbox import Kind, Publication, Reconnect
from appliance.service import InferRequest, InferResponse, Service, documents

if TYPE_CHECKING:
    from appliance.adapters.spool import Spool
    from appliance.settings import Settings

log = structlog.get_logger()

_CONNACK_WAIT_S = 10.0
_GOODBYE_S, _MOST_GOODBYE_S = 2.0, 5.0
_POLL_S = 1.0
_MOST_ORDERS = 32
"""That the broker may deliver before the first is acknowledged: what memory orders may take is this many packets."""
_LARGEST_PACKET_BYTES = 2 * 2**20
"""The broker keeps larger ones to itself; what is an order must be much smaller yet."""
_MOST_LEVELS = 100
"""Of a response topic; mosquitto hangs up on a client that publishes to more than 200."""
_SPARE_WINDOW = 3
"""Of what a broker takes at once, for availability and state."""
_PACKET_OVERHEAD_BYTES = 1024
_BLAMES = frozenset({0x81, 0x82, 0x90, 0x95, 0x97, 0x99})
"""Reasons for which a broker hangs up that speak of what it was sent: malformed, against the protocol, topic, size,
quota, format. Some take fewer levels of a topic, or less in one, than they announce."""
_SESSIONS_OF_A_START = 1_000_000
_REPORTED = "reported"


@dataclass(frozen=True, slots=True)
class Broker:
    """Where and how to connect."""

    host: str
    port: int
    username: str = ""
    password: str = field(default="", repr=False)
    keepalive_s: int = 30
    longest_retry_s: float = 60.0
    session_expiry_s: int = 86400
    """How long the broker keeps orders for a device that is away."""
    message_expiry_s: int = 7 * 86400
    """How long it keeps what the device has told for those who are away."""
    tls: Callable[[], ssl.SSLContext] | None = None
    """Asked anew at each connection, so that a renewed certificate is shown; None for plain text."""


@dataclass(slots=True)
class _Delivery:
    """An order that came, to be acknowledged when its answer is safe."""

    message: paho.MQTTMessage
    safe: bool = False


class _Link:
    """One connection: what paho's callbacks noted about it, and what is in flight on it."""

    def __init__(self, session: int, *, careful: bool) -> None:
        self.session, self.careful = session, careful
        """Careful is one after a broker found fault with what it was sent: one thing at a time, to see which it is."""
        self.blames = False
        """Whether the broker hung up for what it was sent."""
        self.up_at: float | None = None
        self.fault = ""
        self.window = 2**16
        """Publications that the broker takes at once."""
        self.largest_bytes = 2**28
        self.messages: list[paho.MQTTMessage] = []
        self.acknowledged: list[tuple[int, bool]] = []
        """Message ids, and whether the broker refused it."""
        self.in_flight: dict[int, Publication] = {}
        """By message id."""
        self.deliveries: deque[_Delivery] = deque()
        """In the order in which they came, in which MQTT wants them acknowledged."""
        self.state_in_flight: int | None = None

    def on_connect(
        self, _client: paho.Client, _userdata: object, _flags: object, reason: ReasonCode, properties: Properties | None
    ) -> None:
        """Connected, or refused."""
        if reason.is_failure:
            self.fault = f"the broker refused the connection: {reason}"
            return
        self.up_at = time.monotonic()
        self.window = 1 if self.careful else max(1, getattr(properties, "ReceiveMaximum", self.window) - _SPARE_WINDOW)
        self.largest_bytes = getattr(properties, "MaximumPacketSize", self.largest_bytes)

    def on_disconnect(
        self, _client: paho.Client, _userdata: object, flags: paho.DisconnectFlags, reason: ReasonCode, _more: object
    ) -> None:
        """The broker says why it hangs up."""
        if flags.is_disconnect_packet_from_server:
            self.fault = f"the broker closed the connection: {reason}"
            self.blames = reason.value in _BLAMES

    def on_subscribe(
        self, _client: paho.Client, _userdata: object, _mid: int, reasons: list[ReasonCode], _more: object
    ) -> None:
        """Whether orders may be read."""
        if any(reason.is_failure for reason in reasons):
            self.fault = f"the broker does not let this device read its orders ({reasons[0]}): look at its access list"
            log.warning("mqtt_orders_refused", reason=self.fault)

    def on_publish(
        self, _client: paho.Client, _userdata: object, mid: int, reason: ReasonCode, _properties: object
    ) -> None:
        """Acknowledged, or refused."""
        self.acknowledged.append((mid, reason.is_failure))

    def on_message(self, _client: paho.Client, _userdata: object, message: paho.MQTTMessage) -> None:
        """Something came."""
        self.messages.append(message)


class Mqtt:
    """The connection to the fleet's broker; keeps trying for ever."""

    def __init__(
        self,
        broker: Broker,
        service: Service,
        spool: Spool,
        *,
        now: Callable[[], float],
        telemetry_s: float = 0.0,
        results: Collection[str] = (),
    ) -> None:
        """Speak for `service` at `broker`; `now` tells trusted wall time, by which orders expire.

        Telemetry is made every `telemetry_s`, 0 is never; answers of the bundles `results` are published, too.
        """
        self._broker, self._service, self._spool, self._now = broker, service, spool, now
        self._telemetry_s = telemetry_s
        self._results = frozenset(results)
        self._prefix = f"appliance/{service.device_id}"
        self._telemetry = Telemetry(service)
        self._state: deque[bytes] = deque(maxlen=1)
        """What is to be retained, when that has changed."""
        self._link = _Link(spool.start_number * _SESSIONS_OF_A_START, careful=False)
        self._fault = "not connected yet"
        self._given_up_topics: deque[str] = deque(maxlen=100)
        """An order that was not acknowledged comes again, and must not have its answer there again."""
        self._stopping = threading.Event()
        self._cut_off = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _connected(self) -> bool:
        return self._link.up_at is not None

    def status(self) -> dict[str, Any]:
        """For people and for `/v1/status`."""
        return {
            "broker": f"{self._broker.host}:{self._broker.port}",
            "tls": self._broker.tls is not None,
            "connected": self._connected,
            "reason": (self._link.fault or None) if self._connected else self._fault,
            "session": self._link.session,
            "spool": self._spool.status(),
        }

    def start(self) -> None:
        """Begin to connect; called on the event loop that executes orders."""
        self._loop = asyncio.get_running_loop()
        self._service.listeners.append(self._tell)
        if self._results:
            self._service.mirrors.append(self._publish_answer)
        self._keep(self._loop.create_task(self._tell_figures()))
        self._thread.start()

    async def stop(self) -> None:
        """Say goodbye (a clean stop is not left to the will) and end the thread."""
        self._service.listeners.remove(self._tell)
        for task in self._tasks:
            task.cancel()
        self._stopping.set()
        self._wake()
        await asyncio.to_thread(self._thread.join, _MOST_GOODBYE_S)
        if not self._thread.is_alive():  # it may hang in a TLS handshake, and ends with the process then
            os.close(self._wake_fd)
            self._wake_fd = -1

    def configure(self, config: Settings) -> None:
        """Make telemetry as often as `config` says from now on."""
        self._telemetry_s = config.mqtt.telemetry_s

    def publish_result(self, model: str, document: dict[str, Any], safe: Callable[[], None]) -> None:
        """Tell something more about an answer of `model`; `safe` is called, in any thread, when it will not be lost."""
        topic, at = f"{self._prefix}/results/{model}", self._now()
        self._spool.put(Kind.RESULT, topic, orjson.dumps(document), at=at, when_safe=safe)
        self._wake()

    def lose_broker(self, on: bool, _amount: float) -> None:
        """Fault injection: be cut off from the broker until mended."""
        if on:
            self._cut_off.set()
        else:
            self._cut_off.clear()
        self._wake()

    # On the event loop

    def _tell(self) -> None:
        """Something that `status` says has changed: tell it, and how deployments have ended since."""
        state = reported_state(self._service.status())
        self._state.append(orjson.dumps({**state, "session": self._link.session}))
        reports, reported = ended_deployments(self._service, self._spool.note(_REPORTED))
        for report in reports:
            self._put(Kind.RESULT, f"{self._prefix}/deployments", report)
        if reports:
            self._spool.take_note(_REPORTED, reported)
        self._wake()

    async def _tell_figures(self) -> None:
        """Make telemetry from time to time, with a broker or without."""
        told_at = time.monotonic()
        while True:
            await asyncio.sleep(min(_POLL_S, self._telemetry_s or _POLL_S))
            if self._telemetry_s and time.monotonic() - told_at >= self._telemetry_s:
                told_at = time.monotonic()
                figures = self._telemetry.document(self._now(), self._link.session)
                self._put(Kind.TELEMETRY, f"{self._prefix}/telemetry", figures)

    def _publish_answer(self, request: InferRequest, response: InferResponse) -> None:
        if request.model in self._results:
            for document in documents(response):
                told = {"at": round(self._now(), 3), "source": request.source or None, **document}
                header = request.trace.header if request.trace else ""
                self._put(Kind.TELEMETRY, f"{self._prefix}/results/{request.model}", told, traceparent=header)

    def _put(self, kind: Kind, topic: str, document: dict[str, Any], *, traceparent: str = "") -> None:
        self._spool.put(kind, topic, orjson.dumps(document), at=self._now(), traceparent=traceparent)
        self._wake()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _handle(self, delivery: _Delivery) -> None:
        if self._stopping.is_set():  # it comes again at the next start
            return
        self._keep(self._loop.create_task(self._answer(delivery)))

    async def _answer(self, delivery: _Delivery) -> None:
        message, properties = delivery.message, delivery.message.properties
        try:
            result = await self._service.order(bytes(message.payload), now=self._now(), retained=message.retain)
        except Exception as error:  # not acknowledged, it would come again for ever, and keep all others waiting
            log.exception("order_fault")
            result = CommandResult("", "failed", f"a fault of the appliance itself ({error}): see its log")
        reply_to = getattr(properties, "ResponseTopic", "")
        topic = reply_to if self._may_answer_on(reply_to) else f"{self._prefix}/cmd/result"
        correlation = getattr(properties, "CorrelationData", None)
        context = trace.read(_said(message).get("traceparent", ""), os.urandom(8).hex())
        traced = {"trace_id": context.trace_id} if context else {}
        log.info("order", id=result.id, status=result.status, reason=result.reason or None, **traced)

        def safe() -> None:
            delivery.safe = True
            self._wake()

        self._spool.put(
            Kind.RESULT,
            topic,
            orjson.dumps(result),
            at=self._now(),
            correlation=correlation,
            traceparent=context.header if context else "",
            when_safe=safe,
        )
        self._wake()

    def _may_answer_on(self, topic: str) -> bool:
        """Whether an order may have its answer on `topic`.

        Wildcards, and more levels than brokers take, would cost the connection; on topics of our own an answer
        would be taken for what they usually say.
        """
        misleading = topic.startswith(f"{self._prefix}/") and topic != f"{self._prefix}/cmd/result"
        unfit = set(topic) & set("+#$") or topic.count("/") >= _MOST_LEVELS or topic in self._given_up_topics
        return bool(topic) and not misleading and not unfit

    def _wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was stopped: nobody is there to be woken
            os.eventfd_write(self._wake_fd, 1)

    # In the thread that owns the connection

    def _run(self) -> None:
        tries, careful = Reconnect(), False
        while not self._stopping.is_set():
            link = self._link = _Link(self._link.session + 1, careful=careful)
            self._loop.call_soon_threadsafe(self._tell)  # with this session's number
            try:
                self._connect(link)
            except OSError as error:
                link.fault = link.fault or f"cannot connect: {error.strerror or error}"
            except Exception as error:  # a broken packet or a fault of paho must not end the thread
                link.fault = f"{type(error).__name__}: {error}"
            was_up, link.up_at = link.up_at, None
            self._fault = link.fault
            careful = link.blames and not self._given_up(link)
            self._spool.disconnected()
            if self._stopping.is_set():
                return
            tries = tries.after(0.0 if was_up is None else time.monotonic() - was_up, self._broker.longest_retry_s)
            if was_up is not None or tries.failures == 1:
                log.warning("mqtt_down", broker=self._broker.host, port=self._broker.port, reason=link.fault)
            self._stopping.wait(tries.wait_s(random.random(), self._broker.longest_retry_s))  # noqa: S311 - not for secrets

    def _given_up(self, link: _Link) -> bool:
        """Whether it is known for what the broker hung up: it would do so for ever, so that one is sent no more."""
        if len(link.in_flight) != 1 or link.state_in_flight is not None:
            return False
        (publication,) = link.in_flight.values()
        log.warning("mqtt_given_up", topic=publication.topic, reason=link.fault)
        self._given_up_topics.append(publication.topic)
        self._settle(publication, refused=True)
        return True

    def _connect(self, link: _Link) -> None:
        """One connection from CONNECT to its end; raises OSError, or returns with the fault of `link` set."""
        if self._cut_off.is_set():
            raise OSError(errno.ENETUNREACH, "cut off by fault injection")
        client = self._client(link)
        told = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call] # paho leaves it untyped
        told.SessionExpiryInterval = self._broker.session_expiry_s
        told.ReceiveMaximum, told.MaximumPacketSize = _MOST_ORDERS, _LARGEST_PACKET_BYTES
        client.connect(
            self._broker.host, self._broker.port, self._broker.keepalive_s, clean_start=False, properties=told
        )
        give_up_at = time.monotonic() + _CONNACK_WAIT_S
        announced = False
        try:
            while not self._stopping.is_set():
                code = MQTTErrorCode.MQTT_ERR_CONN_LOST if self._cut_off.is_set() else self._turn(client, link)
                if code is not MQTTErrorCode.MQTT_ERR_SUCCESS or (link.fault and link.up_at is None):
                    link.fault = link.fault or f"connection lost: {paho.error_string(code)}"
                    return
                if link.up_at is None and time.monotonic() > give_up_at:
                    link.fault = "the broker accepted the connection but never answered"
                    return
                if link.up_at is not None:
                    if not announced:
                        self._announce(client, link)
                        announced = True
                    self._drain(client, link)
            self._goodbye(client, link)
        finally:
            client.disconnect()

    def _client(self, link: _Link) -> paho.Client:
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"appliance-{self._service.device_id}",
            protocol=paho.MQTTv5,
            manual_ack=True,
        )
        client.max_inflight_messages_set(0)  # the outbox says how many
        if self._broker.username:
            client.username_pw_set(self._broker.username, self._broker.password)
        if self._broker.tls:
            client.tls_set_context(self._broker.tls())
        client.will_set(*self._availability("offline"), properties=_numbered(PacketTypes.WILLMESSAGE, link.session))
        client.on_connect, client.on_disconnect = link.on_connect, link.on_disconnect
        client.on_subscribe, client.on_publish = link.on_subscribe, link.on_publish
        client.on_message = link.on_message
        return client

    def _turn(self, client: paho.Client, link: _Link) -> MQTTErrorCode:
        """Wait for the socket, for something to send, or for a while; let paho do its part."""
        sock = client.socket()
        if sock is None:
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        poll = select.poll()  # unlike select it takes descriptors above 1023, which many clients at once bring about
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(sock, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
        buffered = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0  # which no poll tells
        wait_s = None if link.up_at is None else self._spool.wait_s(time.monotonic(), link.window)
        wait_s = 0.0 if buffered else min(_POLL_S, _POLL_S if wait_s is None else wait_s)
        events = dict(poll.poll(wait_s * 1000))
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        happened = events.get(sock.fileno(), 0)
        if buffered or happened & ~select.POLLOUT:
            code = client.loop_read()
            if code is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return code
        if happened & select.POLLOUT:
            code = client.loop_write()
            if code is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return code
        self._act(client, link)
        return client.loop_misc()

    def _act(self, client: paho.Client, link: _Link) -> None:
        """Do what paho's callbacks have noted, and acknowledge orders whose answers are safe."""
        acknowledged, link.acknowledged = link.acknowledged, []
        for mid, refused in acknowledged:
            publication = link.in_flight.pop(mid, None)
            if publication:
                self._settle(publication, refused=refused)
            elif mid == link.state_in_flight:
                link.state_in_flight = None
        messages, link.messages = link.messages, []
        for message in messages:
            is_order = message.topic == f"{self._prefix}/cmd"
            delivery = _Delivery(message, safe=not is_order)
            if message.qos:
                link.deliveries.append(delivery)
            if is_order:
                self._loop.call_soon_threadsafe(self._handle, delivery)
            elif message.payload != b"online" and _session(message) != link.session:
                self._say_online(client, link)  # the will of an earlier session came late
        while link.deliveries and link.deliveries[0].safe:
            client.ack(link.deliveries.popleft().message.mid, 1)

    def _settle(self, publication: Publication, *, refused: bool) -> None:
        """The broker has, or does not want, a publication; an answer that it takes nowhere else goes to our topic."""
        ours = f"{self._prefix}/cmd/result"
        if refused and not publication.topic.startswith(f"{self._prefix}/"):
            self._spool.put(
                Kind.RESULT, ours, publication.payload, at=publication.at, correlation=publication.correlation
            )
        elif refused:
            log.warning("mqtt_refused", topic=publication.topic, bytes=len(publication.payload))
        self._spool.settled(publication.number, refused=refused)

    def _announce(self, client: paho.Client, link: _Link) -> None:
        # As published: otherwise a retained order is told from others only at the next connect, after it was done.
        client.subscribe(f"{self._prefix}/cmd", options=SubscribeOptions(qos=1, retainAsPublished=True))
        self._say_online(client, link)
        client.subscribe(f"{self._prefix}/availability", qos=1)
        log.info("mqtt_up", broker=self._broker.host, port=self._broker.port, session=link.session)

    def _say_online(self, client: paho.Client, link: _Link) -> None:
        client.publish(*self._availability("online"), properties=_numbered(PacketTypes.PUBLISH, link.session))

    def _availability(self, word: str) -> tuple[str, bytes, int, bool]:
        """Topic, payload, quality of service and whether it is retained."""
        return f"{self._prefix}/availability", word.encode(), 1, True

    def _drain(self, client: paho.Client, link: _Link) -> None:
        """Send the newest state, then what the outbox allows."""
        if self._state and link.state_in_flight is None:
            sent = client.publish(f"{self._prefix}/state", self._state.pop(), qos=1, retain=True)
            link.state_in_flight = sent.mid
        if link.careful and link.state_in_flight is not None:
            return
        for publication in self._spool.take(time.monotonic(), link.window):
            if publication.size_bytes + _PACKET_OVERHEAD_BYTES > link.largest_bytes:
                self._settle(publication, refused=True)
                continue
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call] # paho leaves it untyped
            properties.MessageExpiryInterval = self._broker.message_expiry_s
            if publication.correlation is not None:
                properties.CorrelationData = publication.correlation
            if publication.traceparent:
                properties.UserProperty = ("traceparent", publication.traceparent)
            sent = client.publish(publication.topic, publication.payload, qos=1, properties=properties)
            link.in_flight[sent.mid] = publication

    def _goodbye(self, client: paho.Client, link: _Link) -> None:
        """Publish "offline" and wait for the broker's acknowledgement, but not for long."""
        if link.up_at is None:
            return
        self._drain(client, link)
        numbered = _numbered(PacketTypes.PUBLISH, link.session)
        sent = client.publish(*self._availability("offline"), properties=numbered)
        until = time.monotonic() + _GOODBYE_S
        while not sent.is_published() and time.monotonic() < until:
            if self._turn(client, link) is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return


def _numbered(packet: int, session: int) -> Properties:
    """Properties that name the session, so that a late will of an earlier one can be told from this one's."""
    properties = Properties(packet)  # type: ignore[no-untyped-call] # paho leaves it untyped
    properties.UserProperty = ("session", str(session))
    return properties


def _said(message: paho.MQTTMessage) -> dict[str, str]:
    """User properties of a message."""
    return dict(getattr(message.properties, "UserProperty", ()))


def _session(message: paho.MQTTMessage) -> int | None:
    """The session that an availability speaks of, where it says one."""
    number = _said(message).get("session", "")
    return int(number) if number.isdecimal() else None
