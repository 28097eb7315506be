"""The first shape of the database."""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Integer, PrimaryKeyConstraint, String, Text

revision = "0001"
down_revision = None

_NAME = String(128)
_JSON = JSON(none_as_null=True)
_COUNTED = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "audit",
        Column("id", _COUNTED, nullable=False),
        Column("at", Float(), nullable=False),
        Column("by", _NAME, nullable=False),
        Column("action", String(32), nullable=False),
        Column("device_id", _NAME, server_default="", nullable=False),
        Column("detail", _JSON, nullable=False),
        PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_of", "audit", ["device_id", "at"])
    op.create_table(
        "campaign_devices",
        Column("campaign", BigInteger(), nullable=False),
        Column("device_id", _NAME, nullable=False),
        Column("wave", Integer(), nullable=False),
        Column("before", _NAME),
        Column("asked_at", Float()),
        Column("outcome", String(16), server_default="", nullable=False),
        Column("outcome_at", Float()),
        Column("number", BigInteger(), server_default="0", nullable=False),
        Column("latency_ratio", Float()),
        Column("reason", Text(), server_default="", nullable=False),
        PrimaryKeyConstraint("campaign", "device_id"),
    )
    op.create_index("campaign_devices_by", "campaign_devices", ["campaign", "wave", "outcome"])
    op.create_index("campaign_devices_of", "campaign_devices", ["device_id"])
    op.create_table(
        "campaigns",
        Column("id", _COUNTED, nullable=False),
        Column("model", _NAME, nullable=False),
        Column("version", _NAME, nullable=False),
        Column("plan", _JSON, nullable=False),
        Column("state", String(16), nullable=False),
        Column("wave", Integer(), nullable=False),
        Column("reason", Text(), server_default="", nullable=False),
        Column("created_at", Float(), nullable=False),
        Column("created_by", _NAME, nullable=False),
        Column("changed_at", Float(), nullable=False),
        PrimaryKeyConstraint("id"),
    )
    op.create_index("campaigns_state", "campaigns", ["state"])
    op.create_table(
        "commands",
        Column("id", _COUNTED, nullable=False),
        Column("target", _JSON, nullable=False),
        Column("created_at", Float(), nullable=False),
        Column("created_by", _NAME, nullable=False),
        PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "deliveries",
        Column("device_id", _NAME, nullable=False),
        Column("order_id", _NAME, nullable=False),
        Column("command", BigInteger(), nullable=False),
        Column("envelope", _JSON, nullable=False),
        Column("expires_at", Float(), nullable=False),
        Column("acknowledged_at", Float()),
        Column("result", _JSON),
        Column("result_at", Float()),
        PrimaryKeyConstraint("device_id", "order_id"),
    )
    op.create_index("deliveries_of", "deliveries", ["command"])
    op.create_index("deliveries_open", "deliveries", ["device_id", "acknowledged_at"])
    op.create_table(
        "device_groups",
        Column("name", _NAME, nullable=False),
        Column("device_id", _NAME, nullable=False),
        PrimaryKeyConstraint("name", "device_id"),
    )
    op.create_index("device_groups_of", "device_groups", ["device_id"])
    op.create_table(
        "device_labels",
        Column("device_id", _NAME, nullable=False),
        Column("key", _NAME, nullable=False),
        Column("value", _NAME, nullable=False),
        Column("own", Boolean(), nullable=False),
        PrimaryKeyConstraint("device_id", "key"),
    )
    op.create_index("device_labels_by", "device_labels", ["key", "value"])
    op.create_table(
        "devices",
        Column("device_id", _NAME, nullable=False),
        Column("incarnation", _NAME, server_default="", nullable=False),
        Column("registered_at", Float(), nullable=False),
        Column("last_seen", Float(), nullable=False),
        Column("availability", String(16), server_default="", nullable=False),
        Column("session", BigInteger(), server_default="0", nullable=False),
        Column("state", _JSON),
        Column("versions", _JSON),
        Column("health", String(16), server_default="", nullable=False),
        Column("degraded", Text(), server_default="", nullable=False),
        Column("profile", String(64), server_default="", nullable=False),
        Column("paused", Boolean(), server_default="0", nullable=False),
        Column("retired_at", Float()),
        PrimaryKeyConstraint("device_id"),
    )
    op.create_index("devices_seen", "devices", ["last_seen"])
    op.create_table(
        "items",
        Column("device_id", _NAME, nullable=False),
        Column("incarnation", _NAME, nullable=False),
        Column("number", BigInteger(), autoincrement=False, nullable=False),
        Column("kind", String(16), nullable=False),
        Column("at", Float(), nullable=False),
        Column("received_at", Float(), nullable=False),
        Column("payload", _JSON, nullable=False),
        PrimaryKeyConstraint("device_id", "incarnation", "number"),
    )
    op.create_index("items_age", "items", ["kind", "received_at"])
    op.create_index("items_of", "items", ["device_id", "kind", "received_at"])
    op.create_table(
        "pins",
        Column("device_id", _NAME, nullable=False),
        Column("model", _NAME, nullable=False),
        Column("version", _NAME, nullable=False),
        Column("campaign", BigInteger()),
        PrimaryKeyConstraint("device_id", "model"),
    )
    op.create_table(
        "samples",
        Column("sample_id", _NAME, nullable=False),
        Column("device_id", _NAME, nullable=False),
        Column("model", _NAME, nullable=False),
        Column("version", _NAME, nullable=False),
        Column("received_at", Float(), nullable=False),
        Column("keep_until", Float(), nullable=False),
        Column("sample", _JSON),
        Column("claimed_until", Float(), server_default="0", nullable=False),
        Column("opinion", _JSON),
        Column("agrees", Boolean()),
        Column("answered_at", Float()),
        Column("acknowledged_at", Float()),
        PrimaryKeyConstraint("sample_id"),
    )
    op.create_index("samples_agreeing", "samples", ["model", "version", "answered_at"])
    op.create_index("samples_of", "samples", ["device_id", "acknowledged_at"])
    op.create_index("samples_waiting", "samples", ["answered_at", "claimed_until"])
    op.create_table(
        "streams",
        Column("device_id", _NAME, nullable=False),
        Column("incarnation", _NAME, nullable=False),
        Column("first_seen", Float(), nullable=False),
        Column("exchange", BigInteger(), server_default="0", nullable=False),
        Column("batch_id", _NAME, server_default="", nullable=False),
        Column("sent_at", Float(), server_default="0", nullable=False),
        Column("received", _JSON, nullable=False),
        PrimaryKeyConstraint("device_id", "incarnation"),
    )
    op.create_table(
        "tokens",
        Column("name", _NAME, nullable=False),
        Column("role", String(16), nullable=False),
        Column("device_id", _NAME, server_default="", nullable=False),
        Column("sha256", String(64), nullable=False),
        Column("made_at", Float(), nullable=False),
        Column("made_by", _NAME, nullable=False),
        PrimaryKeyConstraint("name"),
    )
    op.create_index("tokens_of", "tokens", ["device_id"])
