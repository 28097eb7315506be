"""What devices report over MQTT, taken in through a shared subscription: of several replicas each message goes to one.

One thread owns the client. A message is acknowledged to the broker after the commit that holds it, so one that was
under way when a server ended comes again when it is back.

A broker goes on to keep a share of the messages for whoever is away. For the only server that is right. One of several
leaves so that the others get its share: it listens on until all that is its own has come, and ends its session.
"""

from __future__ import annotations

import re
import threading
import time

import orjson
import paho.mqtt.client as paho
import structlog
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from appliance.adapters.mqtt import Broker
from appliance.upstream.ingest import Ingest
from models.errors import Unavailable

log = structlog.get_logger()

_TOPICS = [
    f"$share/upstream/appliance/+/{topic}"
    for topic in ("state", "availability", "telemetry", "deployments", "cmd/result")
]
_RETAINED = ("state", "availability")
"""A broker sends what it retained to plain subscriptions only: these are made for a moment, at each connection."""
_TOPIC = re.compile(r"appliance/([A-Za-z0-9._-]{1,64})/(.+)")
_MOST_MESSAGES = 200
"""In one commit, and unacknowledged."""
_POLL_S = 0.5
_LEAVING_S = 1.0
"""What the broker has kept for one of several servers comes in that time after it has left."""
_SHARED_EXPIRY_S = 300
"""Of several servers one that was cut off must be back so soon: until then its share waits for it."""
_RETRY_S = 2.0
_LONGEST_NUMBER = 18
"""Digits of a session, so that it fits into 64 bits."""


class Listener:
    """Listens until it is stopped, and connects again whenever it has to."""

    def __init__(self, broker: Broker, ingest: Ingest, name: str, *, shared: bool) -> None:
        """`name` is this server's own: under it the broker keeps what comes while it is away, unless `shared`."""
        self._broker, self._ingest, self._name, self._shared = broker, ingest, name, shared
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-mqtt")
        self.connected = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Hang up; of what has come nothing is lost."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        fault = ""
        while not self._stopping.is_set():
            try:
                self._listen()
                now = "the broker closed the connection"
            except (OSError, Unavailable) as error:
                now = str(error)
            except Exception as error:  # a broken packet or a fault of paho must not end the thread
                now = f"{type(error).__name__}: {error}"
            self.connected = False
            if now != fault and not self._stopping.is_set():
                log.warning("fleet_mqtt_down", broker=self._broker.host, port=self._broker.port, reason=now)
            fault = now
            self._stopping.wait(_RETRY_S)

    def _listen(self) -> None:
        """One connection; raises OSError, and Unavailable when the database does not answer."""
        messages: list[paho.MQTTMessage] = []
        client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"upstream-{self._name}", protocol=paho.MQTTv5, manual_ack=True
        )
        if self._broker.username:
            client.username_pw_set(self._broker.username, self._broker.password)
        if self._broker.tls:
            client.tls_set_context(self._broker.tls())
        told = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call] # paho leaves it untyped
        told.SessionExpiryInterval = min(self._broker.session_expiry_s, _SHARED_EXPIRY_S if self._shared else 2**32 - 2)
        told.ReceiveMaximum = _MOST_MESSAGES
        client.on_connect = lambda client, _data, _flags, reason, _more: self._subscribe(client, reason)
        client.on_subscribe = lambda *_facts: self._subscribed()
        client.on_message = lambda _client, _data, message: messages.append(message)
        client.connect(
            self._broker.host, self._broker.port, self._broker.keepalive_s, clean_start=False, properties=told
        )
        farewell = None
        try:
            while not self._stopping.is_set() and self._take(client, messages):
                pass
            if self._shared and self._stopping.is_set():
                client.unsubscribe(_TOPICS)
                until = time.monotonic() + _LEAVING_S
                while time.monotonic() < until and self._take(client, messages):
                    pass
                farewell = Properties(PacketTypes.DISCONNECT)  # type: ignore[no-untyped-call] # paho leaves it untyped
                farewell.SessionExpiryInterval = 0
        finally:
            client.disconnect(properties=farewell)

    def _take(self, client: paho.Client, messages: list[paho.MQTTMessage]) -> bool:
        """Take in what has come, after a while if nothing has; whether the connection stands. Raises Unavailable."""
        code = client.loop(_POLL_S)
        before = -1
        while code is MQTTErrorCode.MQTT_ERR_SUCCESS and before < len(messages) < _MOST_MESSAGES:
            before = len(messages)
            code = client.loop(0)
        if messages:
            self._ingest.told(found for message in messages if (found := _read(message)))
            for message in messages:
                if message.qos:
                    client.ack(message.mid, message.qos)
            messages.clear()
        return code is MQTTErrorCode.MQTT_ERR_SUCCESS

    def _subscribe(self, client: paho.Client, reason: object) -> None:
        if getattr(reason, "is_failure", False):
            msg = f"the broker refused the connection: {reason}"
            raise OSError(msg)
        client.subscribe([(topic, 1) for topic in _TOPICS])
        plain = [f"appliance/+/{topic}" for topic in _RETAINED]
        client.subscribe([(topic, 1) for topic in plain])
        client.unsubscribe(plain)

    def _subscribed(self) -> None:
        if not self.connected:
            self.connected = True
            log.info("fleet_mqtt_up", broker=self._broker.host, port=self._broker.port)


def _read(message: paho.MQTTMessage) -> tuple[str, str, bytes, int, bool] | None:
    """Device, rest of the topic, payload, session and whether it was retained; None for what is none of ours."""
    found = _TOPIC.fullmatch(message.topic)
    if not found:
        return None
    session: object = dict(getattr(message.properties, "UserProperty", ())).get("session")
    if found[2] == "state":
        try:
            session = orjson.loads(message.payload).get("session")
        except (ValueError, AttributeError):
            return None
    number = str(session)
    known = number.isdecimal() and len(number) <= _LONGEST_NUMBER
    return found[1], found[2], bytes(message.payload), int(number) if known else 0, message.retain
