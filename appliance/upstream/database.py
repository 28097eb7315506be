"""The upstream's database: SQLite in a file for one process, PostgreSQL for several replicas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy
from alembic import command, config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    DontWrapMixin,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)

from models.errors import BadInput, ConfigError, Unavailable

_MIGRATIONS = Path(__file__).parent / "migrations"
_WAIT_S = 30
"""For another writer of an SQLite file."""
_CONNECTIONS = 8
_LOCK = 7_110_319_460
"""PostgreSQL's advisory lock under which one replica at a time brings the database to its shape."""
_RETRY_S = 2.0


class Database:
    """Connections to one database, to be closed."""

    def __init__(self, url: str) -> None:
        """Connect and bring it to this version's shape; raises ConfigError where that cannot be done."""
        try:
            self._engine = _engine(url)
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise ConfigError(_unusable(url, error)) from error
        # SQLite has whoever waits for another writer look again and again, up to 100 ms later.
        self._turns = threading.Semaphore(_CONNECTIONS if self.is_shared else 1)
        try:
            self._migrate()
        except (DBAPIError, OSError, ValueError) as error:
            self._engine.dispose()
            raise ConfigError(_unusable(url, error)) from error
        except CommandError as error:
            self._engine.dispose()
            msg = f"upstream.database was written by a newer version ({error}): run that one, or restore an older copy"
            raise ConfigError(msg) from error

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use it, too."""
        return self._engine.dialect.name == "postgresql"

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that changes nothing; raises Unavailable when the database does not answer, and BadInput."""
        with _reached(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction, durable when the context is left; raises Unavailable, BadInput, and then nothing was changed.

        A commit whose answer was lost may have happened all the same.
        """
        if not self._turns.acquire(timeout=_WAIT_S):
            raise Unavailable("the database is busy with other changes: retry shortly", _RETRY_S)
        try:
            with _reached(), self._engine.connect() as plain:
                connection = plain.execution_options(writes=True)
                with connection.begin():
                    yield connection
        finally:
            self._turns.release()

    def insert(self, table: Table) -> Any:  # noqa: ANN401 - two classes with the same face and no common base for it
        """An insert with the clauses `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return postgresql.insert(table) if self.is_shared else sqlite.insert(table)

    def add(self, tx: Connection, table: Table, row: Mapping[str, Any]) -> bool:
        """Insert a row unless there is one with its key; whether it was inserted."""
        added = self.insert(table).values(row).on_conflict_do_nothing().returning(*table.primary_key.columns)
        return tx.execute(added).first() is not None

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _migrate(self) -> None:
        told = config.Config()
        told.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
            if self.is_shared:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            told.attributes["connection"] = connection
            command.upgrade(told, "head")


def _engine(url: str) -> Engine:
    parsed = make_url(url)
    shared = parsed.get_backend_name() == "postgresql"
    if not shared and parsed.get_backend_name() != "sqlite":
        msg = f"it is of {parsed.get_backend_name()}"
        raise ArgumentError(msg)
    engine = sqlalchemy.create_engine(
        parsed,
        json_serializer=_written,
        json_deserializer=orjson.loads,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        pool_timeout=_WAIT_S,
        pool_pre_ping=shared,  # a restarted server, or one that hung up on an idle connection, costs no request
        connect_args={"connect_timeout": 10} if shared else {"timeout": _WAIT_S},
    )
    if not shared:
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
    return engine


class _Unwritable(BadInput, DontWrapMixin):
    """Told as it is by every driver: some write JSON before the statement, and some within it."""


def _written(value: Any) -> str:  # noqa: ANN401 - JSON
    """JSON as text; raises BadInput for what is nested deeper than can be written, though it could be read."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        msg = f"the database cannot hold that ({error}): send what is nested less deeply"
        raise _Unwritable(msg) from error


def _prepare(connection: Any, _record: object) -> None:  # noqa: ANN401 - sqlite3's, behind SQLAlchemy's
    connection.isolation_level = None  # `_begin` says when; the driver would begin too late for reads before a write
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # what was acknowledged survives a power cut


def _begin(connection: Connection) -> None:
    # Whoever will write takes the lock first: two that read and then both wish to write could not both go on.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        msg = f"the database cannot hold that ({_first_line(error)}): shorten it"
        raise BadInput(msg) from error
    except (OperationalError, InterfaceError, sqlalchemy.exc.TimeoutError) as error:
        msg = f"the database does not answer ({_first_line(error)}): retry shortly"
        raise Unavailable(msg, _RETRY_S) from error


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).partition("\n")[0][:200]


def _unusable(url: str, error: Exception) -> str:
    with contextlib.suppress(ArgumentError):
        url = make_url(url).render_as_string(hide_password=True)
    return (
        f"upstream.database, {url[:200]!r}, cannot be used ({_first_line(error)}): give one like "
        "sqlite:////var/lib/appliance/upstream.db or postgresql+psycopg://user@host/database"
    )
