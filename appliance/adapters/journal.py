"""`journal.db`: deployments, slots, orders, and what was learned from signed metadata, safe from power cuts.

SQLite with every commit synced to disk, and with a rollback journal: to read it nothing needs to be written, so a
device with a full disk starts. One thread writes; the event loop only waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from appliance.core.command import CommandResult
from appliance.core.deployment import Deployment, Slot
from models import schema
from models.errors import ConfigError
from models.orders import Commander

T = TypeVar("T")

log = structlog.get_logger()

_SCHEMA = """
PRAGMA journal_mode = DELETE;
PRAGMA synchronous = EXTRA;
CREATE TABLE IF NOT EXISTS deployments (id INTEGER PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS slots (digest TEXT PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS signers (name TEXT PRIMARY KEY, sequence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, document TEXT NOT NULL);
"""
_KEPT_DEPLOYMENTS, _KEPT_ORDERS = 100, 1000
_FORGET_DEPLOYMENTS = """
DELETE FROM deployments WHERE id NOT IN (SELECT id FROM deployments ORDER BY id DESC LIMIT ?)
AND id NOT IN
    (SELECT json_extract(document, '$.deployment') FROM slots WHERE json_extract(document, '$.state') <> 'bad')
"""
"""What brought a version that may serve is kept: it knows the way back."""
_FORGET_ORDERS = "DELETE FROM orders WHERE rowid NOT IN (SELECT rowid FROM orders ORDER BY rowid DESC LIMIT ?)"


@dataclass(frozen=True, slots=True)
class Facts:
    """What was learned from signed metadata and orders."""

    time_floor: float = 0.0
    """Unix seconds: it cannot be earlier."""
    revoked: Mapping[str, str] = field(default_factory=dict)
    """Digest -> why."""
    commanders: Mapping[str, Commander] = field(default_factory=dict)
    """Who may order this device, by key id."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Folder that the daemon was given -> name of the bundle in it, when it could be read last."""
    paused: bool = False
    """An operator wants no update to be begun or to go on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An order that was taken; without a `result` its end is not known."""

    id: str
    signer: str
    sequence: int
    content: str
    """Digest of what was ordered."""
    result: CommandResult | None = None
    boot_id: str = ""
    """Of an order to start the machine anew: which start of it took the order."""


@dataclass(frozen=True, slots=True)
class Known:
    """Everything the journal holds; deployments by id, the oldest first."""

    deployments: tuple[Deployment, ...] = ()
    slots: tuple[Slot, ...] = ()
    facts: Facts = Facts()


class Journal:
    """The open database of one daemon."""

    def __init__(self, path: Path) -> None:
        """Open or make `path`; one that is damaged is set aside. Raises ConfigError when it cannot be used."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            try:
                self._database = _opened(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # a disk that is full or read-only, not the content
                    raise
                aside = path.with_name(f"{path.name}.damaged")
                log.warning("journal_damaged", path=str(path), set_aside=str(aside), reason=str(error))
                path.replace(aside)
                path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
                self._database = _opened(path)
        except (sqlite3.Error, OSError) as error:
            self._writer.shutdown()
            msg = f"{path} cannot be used ({error}): make room, or give another folder with --state-dir"
            raise ConfigError(msg) from error

    def read(self) -> Known:
        """What is known; for the start, before others write."""
        return Known(
            tuple(self._all(Deployment, "SELECT document FROM deployments ORDER BY id")),
            tuple(self._all(Slot, "SELECT document FROM slots ORDER BY digest")),
            next(iter(self._all(Facts, "SELECT document FROM facts WHERE name = 'signed'")), Facts()),
        )

    async def record(
        self, *, deployments: Iterable[Deployment] = (), slots: Iterable[Slot] = (), facts: Facts | None = None
    ) -> None:
        """Write all of it or nothing, and return when it is on disk; raises OSError when it cannot be written."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self.write, list(deployments), list(slots), facts)

    async def order(self, order_id: str, signer: str) -> tuple[Entry | None, int]:
        """What is known of an order, and the highest sequence that `signer` has used, 0 when none."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._order, order_id, signer)

    async def keep_order(self, entry: Entry) -> None:
        """Remember an order, and return when it is on disk; raises OSError when it cannot be written."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._keep_order, entry)

    def _order(self, order_id: str, signer: str) -> tuple[Entry | None, int]:
        asked = "SELECT sequence FROM signers WHERE name = ?"
        try:
            sequences = [sequence for (sequence,) in self._database.execute(asked, (signer,))]
            entries = self._all(Entry, "SELECT document FROM orders WHERE id = ?", order_id)
        except sqlite3.Error as error:
            msg = f"the journal cannot be read ({error})"
            raise OSError(msg) from error
        return next(iter(entries), None), max(sequences, default=0)

    def _keep_order(self, entry: Entry) -> None:
        with self._writing():
            self._database.execute(
                "INSERT INTO orders VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET document = excluded.document",
                (entry.id, _text(entry)),
            )
            self._database.execute(
                "INSERT INTO signers VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET sequence = MAX(sequence, excluded.sequence)",
                (entry.signer, entry.sequence),
            )
            self._database.execute(_FORGET_ORDERS, (_KEPT_ORDERS,))

    def write(self, deployments: Iterable[Deployment], slots: Iterable[Slot], facts: Facts | None) -> None:
        """What `record` does, in this thread."""
        with self._writing():
            for one in deployments:
                self._database.execute("INSERT OR REPLACE INTO deployments VALUES (?, ?)", (one.id, _text(one)))
            for slot in slots:
                self._database.execute("INSERT OR REPLACE INTO slots VALUES (?, ?)", (slot.digest, _text(slot)))
            if facts:
                self._database.execute("INSERT OR REPLACE INTO facts VALUES ('signed', ?)", (_text(facts),))
            self._database.execute(_FORGET_DEPLOYMENTS, (_KEPT_DEPLOYMENTS,))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """All of what is written inside, or nothing."""
        try:
            with self._database:
                yield
        except sqlite3.Error as error:
            msg = f"the journal cannot be written: {error}"
            raise OSError(msg) from error

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown()
        self._database.close()

    def _all(self, kind: type[T], query: str, *given: str) -> list[T]:
        found = (_read(kind, text) for (text,) in self._database.execute(query, given))
        return [one for one in found if one is not None]


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False)
    try:
        if not _whole(database):
            database.execute("REINDEX")  # an index is made of its table, and may alone be what is damaged
            if not _whole(database):
                raise sqlite3.DatabaseError("its pages do not fit together")
            log.warning("journal_mended", path=str(path))
        database.executescript(_SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _whole(database: sqlite3.Connection) -> bool:
    """Whether tables are sound and indexes agree with them, of which `quick_check` looks at the first alone."""
    return bool(database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))


def _read(kind: type[T], text: str) -> T | None:
    try:
        return schema.load(kind, json.loads(text))
    except ValueError as error:  # of another version of the appliance
        log.warning("journal_entry_not_read", kind=kind.__name__, reason=str(error))
        return None


def _text(value: Deployment | Slot | Facts | Entry) -> str:
    return json.dumps(schema.dump(value), sort_keys=True)
