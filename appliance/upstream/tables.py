"""The tables of the upstream's database, in the words of SQLAlchemy; migrations/ brings a database to this shape.

Times are Unix seconds by the server's clock unless a comment says otherwise. Rows of several tables that belong to a
device carry its name and no foreign key: what a device reports is taken before anybody has registered it, and a lock
on the device's row for each of them would have replicas wait for each other.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

_NAME = String(128)
_JSON = JSON(none_as_null=True)
_COUNTED = BigInteger().with_variant(Integer, "sqlite")
"""Numbers that the database gives; SQLite does so for its own kind of integer only."""

devices = Table(
    "devices",
    metadata,
    Column("device_id", _NAME, primary_key=True),
    Column("incarnation", _NAME, nullable=False, server_default=""),  # the newest
    Column("registered_at", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
    Column("availability", String(16), nullable=False, server_default=""),  # what MQTT says; empty without it
    Column("session", BigInteger, nullable=False, server_default="0"),  # of the state, where it came by MQTT
    Column("state", _JSON),
    Column("versions", _JSON),  # model -> {version, digest}, of the state
    Column("health", String(16), nullable=False, server_default=""),
    Column("degraded", Text, nullable=False, server_default=""),
    Column("profile", String(64), nullable=False, server_default=""),
    Column("paused", Boolean, nullable=False, server_default="0"),
    Column("retired_at", Float),
    Index("devices_seen", "last_seen"),
)
groups = Table(
    "device_groups",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("device_id", _NAME, primary_key=True),
    Index("device_groups_of", "device_id"),
)
labels = Table(
    "device_labels",
    metadata,
    Column("device_id", _NAME, primary_key=True),
    Column("key", _NAME, primary_key=True),
    Column("value", _NAME, nullable=False),
    Column("own", Boolean, nullable=False),  # set here; the others are those that the device reports
    Index("device_labels_by", "key", "value"),
)
streams = Table(  # one for each life of a device
    "streams",
    metadata,
    Column("device_id", _NAME, primary_key=True),
    Column("incarnation", _NAME, primary_key=True),
    Column("heard_at", Float, nullable=False),
    Column("exchange", BigInteger, nullable=False, server_default="0"),  # number of the last answer
    Column("batch_id", _NAME, nullable=False, server_default=""),  # that it answered
    Column("sent_at", Float, nullable=False, server_default="0"),  # of that batch, by the device's clock
    Column("received", _JSON, nullable=False),  # ranges of the numbers that were taken, also of rows deleted since
)
items = Table(  # what devices told; kept in one row each, once
    "items",
    metadata,
    Column("device_id", _NAME, primary_key=True),
    Column("incarnation", _NAME, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("at", Float, nullable=False),  # by the device's clock
    Column("received_at", Float, nullable=False),
    Column("payload", _JSON, nullable=False),
    Index("items_of", "device_id", "kind", "received_at"),
    Index("items_age", "kind", "received_at"),
)
samples = Table(  # pictures that are to be read again
    "samples",
    metadata,
    Column("sample_id", _NAME, primary_key=True),
    Column("device_id", _NAME, nullable=False),
    Column("model", _NAME, nullable=False),
    Column("version", _NAME, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("keep_until", Float, nullable=False),
    Column("sample", _JSON),  # with its pictures, until they are deleted
    Column("claimed_until", Float, nullable=False, server_default="0"),  # somebody reads it until then
    Column("opinion", _JSON),
    Column("agrees", Boolean),  # null while there is no opinion, or none could be had
    Column("answered_at", Float),
    Column("acknowledged_at", Float),
    Index("samples_of", "device_id", "acknowledged_at"),
    Index("samples_waiting", "answered_at", "claimed_until"),
    Index("samples_agreeing", "model", "version", "answered_at"),
)
pins = Table(  # what devices should run
    "pins",
    metadata,
    Column("device_id", _NAME, primary_key=True),
    Column("model", _NAME, primary_key=True),
    Column("version", _NAME, nullable=False),
    Column("campaign", BigInteger),  # that asked for it; null for an operator
)
campaigns = Table(
    "campaigns",
    metadata,
    Column("id", _COUNTED, primary_key=True),
    Column("model", _NAME, nullable=False),
    Column("version", _NAME, nullable=False),
    Column("plan", _JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("wave", Integer, nullable=False),
    Column("reason", Text, nullable=False, server_default=""),
    Column("created_at", Float, nullable=False),
    Column("created_by", _NAME, nullable=False),
    Column("changed_at", Float, nullable=False),
    Index("campaigns_state", "state"),
)
members = Table(  # devices of campaigns
    "campaign_devices",
    metadata,
    Column("campaign", BigInteger, primary_key=True),
    Column("device_id", _NAME, primary_key=True),
    Column("wave", Integer, nullable=False),
    Column("before", _NAME),  # the pin that it had; null for none
    Column("asked_at", Float),
    Column("outcome", String(16), nullable=False, server_default=""),
    Column("outcome_at", Float),
    Column("number", BigInteger, nullable=False, server_default="0"),  # of the report that said so
    Column("latency_ratio", Float),
    Column("reason", Text, nullable=False, server_default=""),
    Index("campaign_devices_of", "device_id"),
    Index("campaign_devices_by", "campaign", "wave", "outcome"),
)
commands = Table(
    "commands",
    metadata,
    Column("id", _COUNTED, primary_key=True),
    Column("target", _JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", _NAME, nullable=False),
)
deliveries = Table(  # the signed orders of a command, one for each device
    "deliveries",
    metadata,
    Column("device_id", _NAME, primary_key=True),
    Column("order_id", _NAME, primary_key=True),
    Column("command", BigInteger, nullable=False),
    Column("envelope", _JSON, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("acknowledged_at", Float),
    Column("result", _JSON),
    Column("result_at", Float),
    Index("deliveries_of", "command"),
    Index("deliveries_open", "device_id", "acknowledged_at"),
)
tokens = Table(
    "tokens",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("role", String(16), nullable=False),
    Column("device_id", _NAME, nullable=False, server_default=""),  # that a token of role `device` is for
    Column("sha256", String(64), nullable=False),
    Column("made_at", Float, nullable=False),
    Column("made_by", _NAME, nullable=False),
    Index("tokens_of", "device_id"),
)
DOINGS = ("registered", "flashed anew", "came back", "restored")
"""Actions in the audit log that are devices' own; all others are those of people and of campaigns."""
audit = Table(
    "audit",
    metadata,
    Column("id", _COUNTED, primary_key=True),
    Column("at", Float, nullable=False),
    Column("by", _NAME, nullable=False),
    Column("action", String(32), nullable=False),
    Column("device_id", _NAME, nullable=False, server_default=""),
    Column("detail", _JSON, nullable=False),
    Index("audit_of", "device_id", "at"),
)
