"""The SQLite schema of the history: one row per finished request, columns named after `RequestFigures`.

`PRAGMA user_version` is the version of the schema. A new version adds a script to `_MIGRATIONS`; a file of a later
version than this program's is refused.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import fields
from pathlib import Path

from foretoken.errors import StorageError
from foretoken.server.observe.figures import RequestFigures

COLUMNS = tuple(field.name for field in fields(RequestFigures))
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
)
SCHEMA_VERSION = len(_MIGRATIONS)


def connect(path: Path, busy_s: float) -> sqlite3.Connection:
    """A connection to the history in `path`, which is created or brought to this schema.

    Raises:
        sqlite3.Error: it cannot be opened or written now.
        StorageError: it is another program's file, or of a later version.
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
    """Refuse at start what could never be written to.

    Raises:
        StorageError: the file cannot be opened, is another program's, or of a later version.
    """
    try:
        with closing(connect(path, busy_s=5.0)):
            return
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error) or "full" in str(error):
            return  # passes: rows are written when it is over
        raise StorageError(f"history: cannot open {path}: {error}") from error
    except sqlite3.Error as error:
        raise StorageError(f"history: cannot open {path}: {error}") from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection, path)
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"history: {path} has schema {version}, this foretoken writes {SCHEMA_VERSION}: name another file"
        )
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
