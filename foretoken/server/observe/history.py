"""`History`: writes the figures of finished requests to SQLite, from a thread, and never stops the server.

A file that is locked, or a disk that is full, costs rows, which are counted; it is tried again with later ones.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from foretoken.errors import StorageError
from foretoken.server.observe.background import Background
from foretoken.server.observe.figures import RequestFigures, figures_of
from foretoken.server.observe.history_schema import COLUMNS, check_history, connect
from foretoken.server.record import RequestRecord

_BUSY_S = 1.0  # how long a row waits for another process that writes
_RETENTION_S = 600.0
_SHARE_DELETED = 0.1  # of a file that is too large: then it is not at its limit with every row
_DAY_S = 86_400.0
_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"

_log = logging.getLogger("foretoken.server")


class History:
    """See `record.RequestObserver`. Requests older than `max_age_days` are deleted, and the oldest ones of a file
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
        self._background: Background[RequestFigures] = Background("foretoken-history", self._write, idle_s=_RETENTION_S)

    @property
    def num_dropped(self) -> int:
        """Requests that are missing in the file."""
        return self._background.num_dropped

    def finished(self, record: RequestRecord) -> None:
        """See `RequestObserver.finished`."""
        self._background.put(figures_of(record))

    def drain(self) -> None:
        """Wait until every request that has finished is written, or counted as dropped."""
        self._background.drain()

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._background.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, batch: Sequence[RequestFigures]) -> int:
        """Write a batch; how many of it are lost."""
        num_lost = len(batch)
        try:
            if self._connection is None:
                self._connection = connect(self._path, _BUSY_S)
            if batch:
                self._insert(self._connection, batch)
            num_lost = 0
            if time.monotonic() - self._retained_s > _RETENTION_S:
                self._delete_old(self._connection)
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
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _delete_old(self, connection: sqlite3.Connection) -> None:
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
