"""`History`: the figures of finished requests in SQLite, one row for each, columns named after `RequestFigures`.

Rows are written from a thread, which never stops the server: a file that is locked, or a disk that is full, costs rows,
which are counted; it is tried again with later ones. `PRAGMA user_version` is the version of the schema. A new version
adds a script to `_MIGRATIONS`; a file of a later version than this program's is refused.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import fields
from pathlib import Path

from foretoken.errors import StorageError
from foretoken.server.observe import acceptance
from foretoken.server.observe.figures import FiguresWriter, RequestFigures

COLUMNS = tuple(field.name for field in fields(RequestFigures) if field.name != "places")  # those are kept by day
_APPLICATION = 0x666F7265  # "fore": tells the file from other SQLite files

_MIGRATIONS = (
    """
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL, route TEXT NOT NULL, model TEXT NOT NULL,
        began_unix_s REAL NOT NULL, duration_s REAL NOT NULL, status INTEGER NOT NULL, reason TEXT NOT NULL,
        is_stream INTEGER NOT NULL, finish_reason TEXT NOT NULL,
        key TEXT NOT NULL, slice TEXT NOT NULL, drafter TEXT NOT NULL, rule TEXT NOT NULL, why_plain TEXT NOT NULL,
        num_answers INTEGER NOT NULL, num_prompt_tokens INTEGER NOT NULL, num_cached_tokens INTEGER NOT NULL,
        num_completion_tokens INTEGER NOT NULL, num_steps INTEGER NOT NULL, num_drafts INTEGER NOT NULL,
        num_drafted INTEGER NOT NULL, num_accepted INTEGER NOT NULL, num_rejected INTEGER NOT NULL,
        ttft_s REAL, inter_token_s REAL, inter_token_p99_s REAL, tokens_per_s REAL, queued_s REAL,
        draft_s REAL NOT NULL, verify_s REAL NOT NULL, prompt_s REAL NOT NULL, wasted_s REAL NOT NULL,
        estimated_speedup REAL
    );
    CREATE INDEX requests_by_time ON requests (began_unix_s);
    """,
    acceptance.SCHEMA,
)
SCHEMA_VERSION = len(_MIGRATIONS)
_BUSY_S = 1.0  # how long a row waits for another process that writes
_RETENTION_S = 600.0
_SHARE_DELETED = 0.1  # of a file that is too large: then it is not at its limit with every row
_DAY_S = 86_400.0
_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"

_log = logging.getLogger("foretoken.server")


def connect(path: Path, busy_s: float) -> sqlite3.Connection:
    """A connection to the history in `path`, which is created or brought to this schema. Raises sqlite3.Error: it
    cannot be opened or written now; StorageError: it is another program's file, or of a later version.
    """
    with suppress(OSError):  # SQLite says what is wrong
        path.touch(mode=0o600)  # names of keys and what they used are for the server alone
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reading(path: Path) -> sqlite3.Connection:
    """A connection that reads an existing history, also while a server writes to it.

    Raises:
        StorageError: there is none, or it is of another version.
    """
    if not path.is_file():
        raise StorageError(f"history: there is no file {path}")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        version = _version(connection, path)
    except sqlite3.Error as error:
        raise StorageError(f"history: cannot read {path}: {error}") from error
    if version != SCHEMA_VERSION:
        connection.close()
        raise StorageError(f"history: {path} has schema {version}, this foretoken reads {SCHEMA_VERSION}")
    return connection


def check_history(path: Path) -> None:
    """Refuse (`StorageError`) at start what could never be written to."""
    try:
        with closing(connect(path, busy_s=5.0)):
            return
    except sqlite3.Error as error:
        passes = any(word in str(error) for word in ("locked", "busy", "full"))  # rows are written when it is over
        if not (passes and isinstance(error, sqlite3.OperationalError)):
            raise StorageError(f"history: cannot open {path}: {error}") from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection, path)
    if version > SCHEMA_VERSION:
        message = f"history: {path} has schema {version}, this foretoken writes {SCHEMA_VERSION}: name another file"
        raise StorageError(message)
    if version == 0:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # deleted rows give their space back
    connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
    connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may cost the last rows, not the file
    for script in _MIGRATIONS[version:]:
        version += 1
        connection.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {version}; "
            f"PRAGMA application_id = {_APPLICATION}; COMMIT;"
        )


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    is_empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != _APPLICATION and not is_empty:
        raise StorageError(f"history: {path} is a database of another program: name another file")
    return version


class History(FiguresWriter):
    """A row of every request. Requests older than `max_age_days` are deleted, and the oldest ones of a file
    larger than `max_bytes`.

    Raises:
        StorageError: the file can never be written: another program's, a later version's, a folder that is not there.
    """

    def __init__(self, path: Path, max_age_days: float, max_bytes: int) -> None:
        check_history(path)
        self._path, self._max_age_s, self._max_bytes = path, max_age_days * _DAY_S, max_bytes
        self._connection: sqlite3.Connection | None = None
        self._retained_s = float("-inf")
        self._has_failed = False
        self.series: tuple[acceptance.AcceptanceSeries, ...] = ()  # of whole days, read again every ten minutes
        with suppress(StorageError, sqlite3.Error):  # a file that is locked now is read later
            self.series = acceptance_series(path)
        super().__init__("foretoken-history", idle_s=_RETENTION_S)

    def close(self) -> None:
        """Write what is queued and close the file."""
        super().close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, batch: Sequence[RequestFigures]) -> int:
        num_lost = len(batch)
        try:
            if self._connection is None:
                self._connection = connect(self._path, _BUSY_S)
            if batch:
                self._insert(self._connection, batch)
            num_lost = 0
            if time.monotonic() - self._retained_s > _RETENTION_S:
                self._delete_old(self._connection)
                self._judge(self._connection)
                self._retained_s = time.monotonic()
        except (sqlite3.Error, StorageError) as error:
            self._fail(error)
            return num_lost
        if self._has_failed:
            _log.warning("the history is written again; %d requests are missing in it", self.num_dropped)
            self._has_failed = False
        return 0

    def _insert(self, connection: sqlite3.Connection, batch: Sequence[RequestFigures]) -> None:
        rows = [tuple(getattr(figures, name) for name in COLUMNS) for figures in batch]
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(_INSERT, rows)
            acceptance.add_to_days(connection, batch)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _judge(self, connection: sqlite3.Connection) -> None:
        known = {one.name for one in self.series if one.has_fallen}
        self.series = acceptance.series_of(connection, acceptance.day_of(time.time()))
        for one in self.series:
            if one.has_fallen and one.name not in known:
                _log.warning("acceptance of %s fell: %s", one.name.drafter, acceptance.cause_of(one, self.series))

    def _delete_old(self, connection: sqlite3.Connection) -> None:
        acceptance.delete_old_days(connection)
        connection.execute("DELETE FROM requests WHERE began_unix_s < ?", (time.time() - self._max_age_s,))
        if self._num_bytes(connection) > self._max_bytes:
            count = connection.execute("SELECT count(*) FROM requests").fetchone()[0]
            size = max(1, int(count * _SHARE_DELETED))
            while count > 0 and self._num_bytes(connection) > self._max_bytes:
                connection.execute(
                    "DELETE FROM requests WHERE id IN (SELECT id FROM requests ORDER BY began_unix_s LIMIT ?)", (size,)
                )
                count -= size
        connection.executescript("PRAGMA incremental_vacuum")  # `execute` would stop after one page
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _num_bytes(self, connection: sqlite3.Connection) -> int:
        """Size of the rows: pages in use, whatever the file has besides."""
        pages, free, size = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _fail(self, error: Exception) -> None:
        """Say it once, and begin with a new connection: the old one may be of a file that is gone."""
        if not self._has_failed:
            _log.warning("requests cannot be written to the history: %s; the server goes on", error)
        self._has_failed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def acceptance_series(path: Path, alpha: float = acceptance.ALPHA) -> tuple[acceptance.AcceptanceSeries, ...]:
    """Acceptance by day of a history, also while a server writes to it, and whether it has fallen: see `series_of`.

    Raises:
        StorageError: the file cannot be read, or is damaged.
    """
    with closing(connect_reading(path)) as connection:
        try:
            return acceptance.series_of(connection, acceptance.day_of(time.time()), alpha)
        except sqlite3.Error as error:
            remedy = "take a backup, or let the server begin another file"
            raise StorageError(f"history: cannot read {path}: {error}; {remedy}") from error
