"""Reading and checking files given by the user: errors name option, file and line; outputs are tested before long work.

JSON is read and written without NaN and Infinity, which the standard does not have. A folder is written under another
name before it takes its own (`writing_folder`); those whose writer was killed are removed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from foretoken.errors import InputError, StorageError
from foretoken.params import check_text

try:
    import fcntl
except ImportError:  # Windows: what a killed writer leaves stays there
    fcntl = None  # type: ignore[assignment]

CACHE_VARIABLE = "FORETOKEN_CACHE"
MAX_BYTES = 1 << 28  # a longer text is a mistake, or an endless device


def read_text(field: str, path: Path) -> str:
    """The UTF-8 text of a file of at most `MAX_BYTES`.

    Raises:
        StorageError: names the field and the file, and the line of a byte that is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            return read_stream(field, str(path), file)
    except StorageError:
        raise
    except (OSError, ValueError) as error:  # a ValueError is a NUL in the path
        raise StorageError(f"{field}: cannot read {path}: {error}") from error


def read_stream(field: str, name: str, file: IO[bytes]) -> str:
    """The UTF-8 text of an open file called `name`.

    Raises:
        StorageError: it cannot be read, is longer than `MAX_BYTES`, or is not UTF-8.
    """
    try:
        data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError is a closed file
        raise StorageError(f"{field}: cannot read {name}: {error}") from error
    if len(data) > MAX_BYTES:
        raise StorageError(f"{field}: cannot read {name}: it is longer than {MAX_BYTES >> 20} MiB; give a shorter text")
    try:
        return data.decode("utf-8-sig")  # editors of Windows write a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{field}: cannot read {name}: line {line} is not UTF-8 (byte 0x{data[error.start]:02x})"
        raise StorageError(message) from error


def parse_json(field: str, where: str, text: str) -> Any:  # noqa: ANN401 - whatever the text holds
    """Parse a JSON text; `where` is its file and line.

    Raises:
        InputError: it is not JSON, holds NaN, an infinite number or a lone surrogate, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:  # the only way for a surrogate to get in
            check_text(field, json.dumps(value, ensure_ascii=False))
    except InputError as error:
        raise InputError(field, where, f"holds a text that cannot be encoded: {error.remedy}") from error
    except RecursionError:
        raise InputError(field, where, "not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise InputError(field, where, f"not JSON: {error}") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def read_json(field: str, path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Parse a JSON file.

    Raises:
        StorageError: the file cannot be read, or is not JSON (`parse_json`).
    """
    try:
        return parse_json(field, str(path), read_text(field, path))
    except InputError as error:
        raise StorageError(f"{field}: cannot read {path}: {error.remedy}") from error


def to_json(value: object, indent: int | None = None) -> str:
    """`value` as JSON; NaN and infinite numbers become null, and unknown types their text."""
    return json.dumps(_finite_only(value), default=str, indent=indent, allow_nan=False)


def _finite_only(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite_only(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_only(item) for item in value]
    return value


def as_plain(value: object) -> object:
    """`value` as JSON takes it: dataclasses as objects, tuples as lists, paths as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def replace_text(field: str, path: Path, text: str) -> None:
    """Write a UTF-8 file as `replace_bytes` does.

    Raises:
        StorageError: names the field.
    """
    replace_bytes(field, path, text.encode("utf-8"))


def replace_bytes(field: str, path: Path, data: bytes) -> None:
    """Write a file, replacing the one that is there at once: an interrupted write leaves the old one. A link stays and
    its file is replaced; a device or a pipe is written to.

    Raises:
        StorageError: names the field.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{field}: cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def check_readable(field: str, path: Path) -> None:
    """Check that a file can be read.

    Raises:
        StorageError: names the field.
    """
    try:
        if not path.exists():
            raise StorageError(f"{field}: cannot read {path}: there is no such file")
        if path.is_dir() or not os.access(path, os.R_OK):
            raise StorageError(f"{field}: cannot read {path}: it is {'a folder' if path.is_dir() else 'protected'}")
    except ValueError as error:  # a NUL in the path
        raise StorageError(f"{field}: cannot read {path!r}: {error}") from error


def check_folder(folder: Path) -> None:
    """Create the folder of a result and test that it can be written (`StorageError`), before minutes of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot write to {folder}: {_without_name(error)}") from error


def check_file(field: str, path: Path) -> None:
    """Check that a file can be written.

    Raises:
        StorageError: names the field: the file is a folder or protected, or its folder is not there or cannot be
        written.
    """
    try:
        if "\0" in str(path):
            raise StorageError(f"{field}: cannot write {str(path)!r}: a path cannot hold the character NUL")
        if path.is_dir():
            raise StorageError(f"{field}: cannot write {path}: it is a folder; name a file")
        if not path.parent.is_dir():
            wrong = "is a file; name" if path.parent.exists() else "is not there; make it first, or name"
            raise StorageError(f"{field}: cannot write {path}: {path.parent} {wrong} another folder")
        if path.exists():
            writable = os.access(path, os.W_OK)
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                writable = True
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(f"{field}: cannot write {path}: {_without_name(error)}") from error
    if not writable:
        raise StorageError(f"{field}: cannot write {path}: it is protected")


def _without_name(error: OSError | ValueError) -> str:
    """What went wrong, without the name of the temporary file that was tried."""
    return getattr(error, "strerror", None) or str(error)


def cache_folder(name: str) -> Path:
    """Where things called `name` are kept: under `FORETOKEN_CACHE`, or in the user's cache folder of this platform."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given) / name
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "foretoken" / name


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


def hold_alone(field: str, path: Path, file: IO[Any]) -> None:
    """Lock the open file of `path` until it is closed, so that no two runs add to it; where files cannot be locked
    nothing is done.

    Raises:
        StorageError: another run holds it; names the field.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        remedy = "wait for its end, or name another file"
        raise StorageError(f"{field}: another run adds to {path} now; {remedy}") from error
    except OSError:  # a file system without locks
        return


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


def map_texts(value: object, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - a JSON value of the same shape
    """`value` with `change` applied to every text in its lists and tables."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value
