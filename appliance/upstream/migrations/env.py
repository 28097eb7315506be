"""How Alembic reaches the database: by the connection that `database.Database` opened, inside its transaction."""

from __future__ import annotations

from alembic import context

from appliance.upstream.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
