"""The fleet as the daemon sees it: a door to its broker, with what waits for it, where one is set up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from appliance.adapters.mqtt import Broker, Mqtt
from appliance.adapters.tls import Calling
from appliance.core.outbox import Rules
from appliance.service import Service
from appliance.settings import Settings

_SPOOL = "spool.db"


@contextlib.contextmanager
def door_to_broker(config: Settings, service: Service, now: Callable[[], float]) -> Iterator[Mqtt | None]:
    """The door, not open yet; None without a broker."""
    told = config.mqtt
    if not told.host:
        yield None
        return
    from appliance.adapters.spool import Spool  # noqa: PLC0415 - a start without MQTT needs no database

    broker = Broker(
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
    rules = Rules(most_bytes=told.spool_bytes, age_s=told.spool_age_s, replay_per_s=told.replay_per_s)
    with contextlib.closing(Spool(config.state_dir / _SPOOL, rules)) as spool:
        yield Mqtt(broker, service, spool, now=now, telemetry_s=told.telemetry_s, results=told.results)
