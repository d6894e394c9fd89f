"""A file of JSON lines that grows with a run, so that a run that was stopped goes on from there.

First an object `about` with everything that must agree for two measurements to stand in one table, then one object for
each measurement. A last line that was cut off by the end of a process is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, StorageError


class KeptLines:
    """The measurements so far in `lines`; `append` writes one more before it returns.

    Raises:
        InputError: the file was written with other options; names the first that differs.
        StorageError: the file cannot be read or written, or holds something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        about = json.loads(json.dumps(about))
        try:
            known = path.read_bytes() if path.exists() else b""
            whole = known[: known.rfind(b"\n") + 1]
            found: list[Any] = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
            if found:
                _check_about(path, found[0]["about"], about)
            path.parent.mkdir(parents=True, exist_ok=True)
            if whole != known:
                os.truncate(path, len(whole))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot keep the measurements in {path}: {error}") from error
        except InputError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise not_ours(path, error) from error
        self.lines: list[dict[str, Any]] = found[1:]
        if not found:
            self.append({"about": about})

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one line to the disk.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"cannot keep the measurements in {self.path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def not_ours(path: Path, error: Exception) -> StorageError:
    """The error for a file that holds something else."""
    return StorageError(f"{path} does not hold the measurements of such a run ({error}); name another file")


def _check_about(path: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for field in dict.fromkeys((*now, *known)):
        if known.get(field) != now.get(field):
            raise InputError(
                "resume",
                str(path),
                f"was measured with {field}={known.get(field)!r}, this run has {now.get(field)!r}; give the same "
                "options, or another file",
            )
