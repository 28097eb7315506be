"""Of the lives of a device those are forgotten that were not heard for longest: when one began says too little."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Go on from when each began; its next exchange sets it right."""
    op.alter_column("streams", "first_seen", new_column_name="heard_at")
