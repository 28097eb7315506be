"""`spool.db`, `sync.db`: what waits for the broker, or for upstream, kept over restarts. Written seldom: cards wear.

All that waits is in memory; the database is its image. One thread writes it, a second after something has changed, all
changes in one commit: what the broker has acknowledged until then never touches the disk. So with a broker that answers
nothing is written at all, and without one a second's telemetry is what a power cut takes.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable, Collection
from dataclasses import astuple
from pathlib import Path
from typing import Any

import structlog

from appliance.core.outbox import Kind, Outbox, Publication, Rules

log = structlog.get_logger()

_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS publications
    (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, topic TEXT NOT NULL, payload BLOB NOT NULL, at REAL NOT NULL,
     correlation BLOB, traceparent TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_AGE_S = 60.0
"""Ages are days, and to look at each takes long: it is done no more often."""
_COMMIT_S, _RETRY_S = 1.0, 30.0
"""From a change to its commit; and after one that failed, as on a full disk."""
_ENTRIES = "SELECT number, kind, topic, payload, at, correlation, traceparent FROM publications ORDER BY number"
_STARTS = "starts"
_NUMBERS_OF_A_START = 2**32
"""So none comes twice, though what was acknowledged leaves no trace."""


class Spool:
    """An outbox with its image on disk. May be used by several threads."""

    def __init__(self, path: Path, rules: Rules) -> None:
        """Go on with what `path` holds; where it is damaged it is set aside, where it cannot be used memory must do."""
        self._lock, self._changed, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._notes: dict[str, str] = {}
        self._unwritten: dict[int, Publication] = {}
        self._unwritten_notes: dict[str, str] = {}
        self._gone: set[int] = set()
        """Numbers of what is on disk and must not be."""
        self._when_safe: dict[int, Callable[[], None]] = {}
        self._aged_at = 0.0
        self.commits = self.refused = 0
        self.problem = ""
        """Why nothing is kept on disk; empty while it is."""
        self._name = path.name
        self._database, waiting = self._opened(path)
        self._outbox = Outbox(rules, waiting)
        starts = self.note(_STARTS)
        self.start_number = (int(starts) if starts.isdecimal() else 0) + 1
        """Higher than of each start before."""
        self.take_note(_STARTS, str(self.start_number))
        self._number = max(self.start_number * _NUMBERS_OF_A_START, *(one.number for one in self._outbox), 0)
        self._writer = threading.Thread(target=self._run, name="spool", daemon=True)
        self._writer.start()

    def put(
        self,
        kind: Kind,
        topic: str,
        payload: bytes,
        *,
        at: float,
        correlation: bytes | None = None,
        traceparent: str = "",
        when_safe: Callable[[], None] = lambda: None,
    ) -> None:
        """Let `payload` wait for the broker; made `at`, in Unix seconds.

        `when_safe` is called, in any thread, when the broker has it, or the disk.
        """
        with self._lock:
            self._number += 1
            publication = Publication(self._number, kind, topic, payload, at, correlation, traceparent)
            self._when_safe[publication.number] = when_safe
            self._unwritten[publication.number] = publication
            self._forget(self._outbox.put(publication))
        self.age(at)

    def age(self, wall: float) -> None:
        """Drop what is too old at the wall time `wall`, where that was not looked at lately."""
        with self._lock:
            if not 0 <= wall - self._aged_at < _AGE_S:
                self._aged_at = wall
                self._forget(self._outbox.aged(wall))
        self._changed.set()

    def write(self) -> bool:
        """Write what is not written, now; whether that was done. Blocks."""
        return self._commit()

    def take(
        self, now: float, window: int, kinds: Collection[Kind] = tuple(Kind), most_bytes: float = math.inf
    ) -> list[Publication]:
        """What is to be sent at the monotonic time `now` to a broker that takes `window` at once; see `Outbox.take`."""
        with self._lock:
            return self._outbox.take(now, window, kinds, most_bytes)

    def wait_s(self, now: float, window: int) -> float | None:
        """Seconds until `take` has more by itself, None where it will not."""
        with self._lock:
            return self._outbox.wait_s(now, window)

    def settled(self, number: int, *, refused: bool = False) -> None:
        """The broker has acknowledged a publication, or will never take it."""
        with self._lock:
            self._outbox.settled(number)
            tell = self._forget([number])
            self.refused += refused
        for call in tell:
            call()
        self._changed.set()

    def disconnected(self) -> None:
        """What was not acknowledged will be sent again."""
        with self._lock:
            self._forget(self._outbox.disconnected())
        self._changed.set()

    def note(self, name: str) -> str:
        """What was noted under `name`, empty when nothing was."""
        return self._notes.get(name, "")

    def take_note(self, name: str, value: str) -> None:
        """Note something with the next commit."""
        with self._lock:
            self._notes[name] = self._unwritten_notes[name] = value
        self._changed.set()

    def status(self) -> dict[str, Any]:
        """For operators."""
        with self._lock:
            return {
                "waiting": {kind.value: self._outbox.count(kind) for kind in Kind},
                "waiting_bytes": self._outbox.size_bytes,
                "in_flight": self._outbox.in_flight,
                "dropped": {reason: self._outbox.dropped[reason] for reason in ("full", "old")},
                "refused": self.refused,
                "commits": self.commits,
                "problem": self.problem or None,
            }

    def close(self) -> None:
        """Write what is not written, and end."""
        self._closing.set()
        self._changed.set()
        self._writer.join()
        if self._database:
            self._database.close()

    def _forget(self, numbers: list[int]) -> list[Callable[[], None]]:
        """Those need not be on disk; whom to tell that they are safe. Called with the lock."""
        for number in numbers:
            if self._unwritten.pop(number, None) is None:
                self._gone.add(number)
        return [call for number in numbers if (call := self._when_safe.pop(number, None))]

    def _run(self) -> None:
        while not self._closing.is_set():
            self._changed.wait()
            self._closing.wait(_RETRY_S if self.problem else _COMMIT_S)
            self._changed.clear()
            if not self._commit():
                self._changed.set()
        self._commit()

    def _commit(self) -> bool:
        with self._writing:
            return self._commit_alone()

    def _commit_alone(self) -> bool:
        with self._lock:
            written, self._unwritten = self._unwritten, {}
            gone, self._gone = self._gone, set()
            notes, self._unwritten_notes = self._unwritten_notes, {}
        if not (written or gone or notes):
            return True
        try:
            self._write(list(written.values()), gone, notes)
        except sqlite3.Error as error:
            with self._lock:
                self._unwritten = {
                    number: one for number, one in written.items() if number in self._outbox
                } | self._unwritten
                self._gone |= gone
                self._unwritten_notes = notes | self._unwritten_notes
            if not self.problem:
                log.warning("spool_not_written", reason=str(error))
            self.problem = f"{self._name} cannot be written ({error}): what waits is in memory only"
            return False
        self.commits, self.problem = self.commits + 1, ""
        with self._lock:
            safe = [call for number in written if (call := self._when_safe.pop(number, None))]
        for call in safe:
            call()
        return True

    def _write(self, written: list[Publication], gone: set[int], notes: dict[str, str]) -> None:
        if self._database is None:
            raise sqlite3.OperationalError("it could not be opened")
        with self._database:
            rows = [(one.number, one.kind.value, *astuple(one)[2:]) for one in written]
            self._database.executemany("INSERT OR REPLACE INTO publications VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._database.executemany("DELETE FROM publications WHERE number = ?", [(number,) for number in gone])
            self._database.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", list(notes.items()))

    def _opened(self, path: Path) -> tuple[sqlite3.Connection | None, list[Publication]]:
        try:
            try:
                return self._read(path)
            except sqlite3.OperationalError:  # a disk that is full or read-only, not the content
                raise
            except (sqlite3.DatabaseError, ValueError, TypeError) as error:
                aside = path.with_name(f"{path.name}.damaged")
                log.warning("spool_damaged", path=str(path), set_aside=str(aside), reason=str(error))
                path.replace(aside)
                path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
                return self._read(path)
        except (sqlite3.Error, OSError) as error:
            self.problem = f"{path} cannot be used ({error}): what waits is in memory only"
            log.warning("spool_not_opened", reason=self.problem)
            return None, []

    def _read(self, path: Path) -> tuple[sqlite3.Connection, list[Publication]]:
        database = sqlite3.connect(path, check_same_thread=False)
        try:
            database.executescript(_SCHEMA)
            (state,) = database.execute("PRAGMA quick_check").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            self._notes = dict(database.execute("SELECT name, value FROM notes"))
            return database, [Publication(row[0], Kind(row[1]), *row[2:]) for row in database.execute(_ENTRIES)]
        except (sqlite3.Error, ValueError, TypeError):
            database.close()
            raise
