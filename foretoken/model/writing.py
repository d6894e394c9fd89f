"""A folder in which something is written before it takes its final name, the removal of those whose writer was killed,
and a lock for what only one process should write.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed writer leaves stays there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def writing_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A fresh folder in `parent` whose name begins with `prefix`, removed at the end unless it was given another name.

    A writer holds a lock on its folder, so folders of the same prefix that nobody locks are left from writers that were
    killed: they are removed first.

    Raises:
        OSError: the folder cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_left(parent, prefix)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as name:
        lock = _lock(Path(name))
        try:
            yield Path(name)
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, waiting while another process does; where files cannot be locked nobody waits.

    Raises:
        OSError: the file cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: several write, each under a name of its own
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _remove_left(parent: Path, prefix: str) -> None:
    for folder in [
        path for path in parent.iterdir() if path.name.startswith(prefix) and path.is_dir() and not path.is_symlink()
    ]:
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """An open file that locks the folder; None where another process has locked it or its file system cannot lock."""
    if fcntl is None:
        return None
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return None
        return file
    return None
