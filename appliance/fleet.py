"""The fleet as the daemon sees it: the door to its broker, and the sync with upstream, each where it is set up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from appliance.adapters import host
from appliance.adapters.mqtt import Broker, Mqtt
from appliance.adapters.tls import Calling
from appliance.core.outbox import Rules
from appliance.faults import Switch
from appliance.service import Service
from appliance.settings import Mqtt as MqttSettings
from appliance.settings import Settings
from appliance.updates import Updates

if TYPE_CHECKING:
    from appliance.cloudsync import CloudSync
    from appliance.second_opinion import SecondOpinion

# A start without a fleet needs no database and no client, so these are imported where they are needed.

log = structlog.get_logger()

_SPOOL, _SYNC = "spool.db", "sync.db"
_UNPACED_PER_S = 1e6
"""Upstream says how fast by itself."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Its parts, not begun yet; None where one is not set up."""

    mqtt: Mqtt | None
    sync: CloudSync | None
    opinion: SecondOpinion | None

    @property
    def switches(self) -> Mapping[str, Switch]:
        """For fault injection."""
        return {"broker-loss": self.mqtt.lose_broker} if self.mqtt else {}

    def status(self) -> dict[str, Any]:
        """For operators, by part."""
        return {
            "mqtt": self.mqtt.status() if self.mqtt else None,
            "sync": self.sync.status() if self.sync else None,
            "second_opinion": self.opinion.status() if self.opinion else None,
        }

    def configure(self, config: Settings) -> None:
        """Go on by other settings."""
        if self.mqtt:
            self.mqtt.configure(config)

    def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Connect, until `stack` is left; called on the event loop."""
        if not self.mqtt:
            log.info("mqtt_off", why="no broker is configured (mqtt.host)")
        for part in (self.mqtt, self.sync):
            if part:
                part.start()
                stack.push_async_callback(part.stop)


@contextlib.contextmanager
def fleet_of(config: Settings, service: Service, updates: Updates, now: Callable[[], float]) -> Iterator[Fleet]:
    """What the settings name; `now` tells Unix seconds."""
    with contextlib.ExitStack() as stack:
        mqtt = _door_to_broker(stack, config, service, now)
        sync = _sync(stack, config, service, updates, now)
        yield Fleet(mqtt, sync, _second_opinion(config, service, sync, mqtt, now) if sync else None)


def broker_of(told: MqttSettings) -> Broker | None:
    """The broker of the fleet; None where none is set."""
    if not told.host:
        return None
    return Broker(
        host=told.host,
        port=told.port,
        username=told.username,
        password=told.password.get_secret_value(),
        keepalive_s=told.keepalive_s,
        longest_retry_s=told.longest_retry_s,
        session_expiry_s=told.session_expiry_s,
        message_expiry_s=math.ceil(told.spool_age_s),
        tls=Calling(told.ca, told.certificate, told.key).context if told.tls else None,
    )


def _door_to_broker(
    stack: contextlib.ExitStack, config: Settings, service: Service, now: Callable[[], float]
) -> Mqtt | None:
    """None for the fleet's home, too, which is no device of it."""
    told, broker = config.mqtt, broker_of(config.mqtt)
    if broker is None or config.role == "upstream":
        return None
    from appliance.adapters.spool import Spool  # noqa: PLC0415 - see the top

    rules = Rules(most_bytes=told.spool_bytes, age_s=told.spool_age_s, replay_per_s=told.replay_per_s)
    spool = stack.enter_context(contextlib.closing(Spool(config.state_dir / _SPOOL, rules)))
    return Mqtt(broker, service, spool, now=now, telemetry_s=told.telemetry_s, results=told.results)


def _sync(
    stack: contextlib.ExitStack, config: Settings, service: Service, updates: Updates, now: Callable[[], float]
) -> CloudSync | None:
    told = config.upstream
    if not told.url:
        return None
    from appliance.adapters.exchange import Exchanges  # noqa: PLC0415 - see the top
    from appliance.adapters.spool import Spool  # noqa: PLC0415
    from appliance.cloudsync import CloudSync  # noqa: PLC0415
    from models.sync import MOST_ITEMS  # noqa: PLC0415

    rules = Rules(
        most_bytes=told.spool_bytes,
        age_s=told.spool_age_s,
        sample_age_s=config.second_opinion.keep_s,
        window=MOST_ITEMS,
        replay_per_s=_UNPACED_PER_S,
    )
    spool = stack.enter_context(contextlib.closing(Spool(config.state_dir / _SYNC, rules)))
    tls = Calling(told.ca, told.certificate, told.key)
    exchange = stack.enter_context(contextlib.closing(Exchanges(told.url, tls, told.token_file)))
    assumed = config.clock.assume_synced
    return CloudSync(
        service, told, spool, exchange, updates, wall=now, synced=lambda: assumed or bool(host.clock_synced())
    )


def _second_opinion(
    config: Settings, service: Service, sync: CloudSync, mqtt: Mqtt | None, now: Callable[[], float]
) -> SecondOpinion | None:
    if not config.second_opinion.models:
        return None
    from appliance.second_opinion import SecondOpinion  # noqa: PLC0415 - see the top

    publish = mqtt.publish_result if mqtt else None
    most_pixels = config.limits.picture_pixels
    return SecondOpinion(service, config.second_opinion, sync, publish, most_pixels=most_pixels, wall=now)
