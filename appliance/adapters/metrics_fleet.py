"""What a scrape says of the fleet: the broker, upstream, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def fleet_metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Of each part that is set up."""
    for key, metrics in (("mqtt", _of_broker), ("sync", _of_sync), ("second_opinion", _of_opinions)):
        if status.get(key):
            yield from metrics(status[key])


def _of_broker(mqtt: Mapping[str, Any]) -> Iterator[Metric]:
    spool = mqtt["spool"]
    yield GaugeMetricFamily("appliance_mqtt_connected", "1 while the broker is.", value=float(mqtt["connected"]))
    waiting = GaugeMetricFamily("appliance_spool_waiting", "Publications that the broker lacks.", labels=("kind",))
    for kind, count in spool["waiting"].items():
        waiting.add_metric([kind], float(count))
    dropped = CounterMetricFamily("appliance_spool_dropped", "Telemetry given up, by reason.", labels=("reason",))
    for reason, count in spool["dropped"].items():
        dropped.add_metric([reason], float(count))
    yield from (waiting, dropped)
    yield GaugeMetricFamily("appliance_spool_bytes", "What waits takes.", value=float(spool["waiting_bytes"]))
    for key, what in (("refused", "Publications the broker did not want."), ("commits", "Writes to spool.db.")):
        yield CounterMetricFamily(f"appliance_spool_{key}", what, value=float(spool[key]))


def _of_sync(sync: Mapping[str, Any]) -> Iterator[Metric]:
    spool = sync["spool"]
    yield GaugeMetricFamily("appliance_sync_works", "1 while upstream answers.", value=float(sync["works"]))
    waiting = GaugeMetricFamily("appliance_sync_waiting", "Items that upstream lacks.", labels=("kind",))
    for kind, count in spool["waiting"].items():
        waiting.add_metric([kind], float(count))
    dropped = CounterMetricFamily("appliance_sync_dropped", "Items given up, by reason.", labels=("reason",))
    for reason, count in (*spool["dropped"].items(), ("refused", spool["refused"]), ("large", sync["too_large"])):
        dropped.add_metric([reason], float(count))
    yield from (waiting, dropped)
    yield GaugeMetricFamily("appliance_sync_bytes", "What waits takes.", value=float(spool["waiting_bytes"]))
    for key, what in (
        ("exchanges", "Exchanges that came off."),
        ("failures", "Exchanges that did not."),
        ("moved_bytes", "Both ways, without TLS and TCP."),
    ):
        yield CounterMetricFamily(f"appliance_sync_{key}", what, value=float(sync[key]))
    if sync["last_s_ago"] is not None:
        since_s = float(sync["last_s_ago"])
        yield GaugeMetricFamily("appliance_sync_last_seconds", "Since the last that came off.", value=since_s)


def _of_opinions(counts: Mapping[str, Any]) -> Iterator[Metric]:
    opinions = CounterMetricFamily("appliance_second_opinions", "Samples, by outcome.", labels=("outcome",))
    for outcome in ("asked", "left_out", "answered", "agreed", "unanswered"):
        opinions.add_metric([outcome], float(counts[outcome]))
    yield opinions
