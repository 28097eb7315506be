"""The steps by which a database of an earlier version comes to the shape of this one; Alembic runs them."""
