"""A file of JSON lines that grows with a run, so that a run that was stopped resumes from it.

The first line is a header: the format, the kind of run, and under `run` everything that must agree for measurements of
two runs to stand in one table. Each further line is one measurement. A last line that was cut off by the end of a
process is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from foretoken.errors import InputError, StorageError
from foretoken.files import as_plain, hold_alone
from foretoken.spec_checks import NO_TABLE, PACKAGED_TABLE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = "foretoken.kept/1"
_OUTPUTS = frozenset({"out", "name", "resume", "price_per_hour", "slo_ms"})  # options that no measurement depends on

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)  # of other values

_Value = TypeVar("_Value")


class KeptFile:
    """The measurements so far in `lines`; `append` writes one more to the disk before it returns. Without a `path`
    nothing is kept.

    `kind` names what is measured, such as `bench speed`; `run` holds what must agree. `option` is the one by which the
    user named the file, for errors.

    Raises:
        InputError: the file is of another run; names the first field that differs.
        StorageError: the file cannot be read or written, or holds something else, or another run has it open.
    """

    def __init__(self, path: Path | None, kind: str, run: Mapping[str, Any], option: str = "resume") -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        if path is not None:
            self._open(path, kind, run, option)

    def _open(self, path: Path, kind: str, run: Mapping[str, Any], option: str) -> None:
        header = json.loads(json.dumps({"format": FORMAT, "kind": kind, "run": as_plain(run)}))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            hold_alone(option, path, self._file)  # before it is read: the end of a line may still be on its way
            found = self._read(path, header, option)
        except (InputError, StorageError):
            self.close()
            raise
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except _MALFORMED as error:
            self.close()
            raise self._refused(error) from error
        self.lines = found[1:]
        if not found:
            self._write(self._file, header)

    def _read(self, path: Path, header: Mapping[str, Any], option: str) -> list[Any]:
        """The whole lines of the file, which must be of this run; what was cut off behind them is removed."""
        known = path.read_bytes()
        whole = known[: known.rfind(b"\n") + 1]
        found: list[Any] = [json.loads(line) for line in whole.decode("utf-8").split("\n")[:-1]]
        if found:
            self._check(found[0], header, option)
        elif not json.dumps(header).encode().startswith(known):
            raise ValueError("it does not begin with the header of this run")
        if whole != known:
            os.truncate(path, len(whole))
        return found

    def append(self, values: Mapping[str, Any]) -> None:
        """Add one line, written to the disk before this returns.

        Raises:
            StorageError: it cannot be written.
        """
        if self._file is not None:
            self._write(self._file, values)
            self.lines.append(dict(values))

    def _write(self, file: TextIO, values: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def restored(self, read: Callable[[dict[str, Any]], _Value]) -> list[_Value]:
        """What `read` makes of each line; a line that it fails on as on other values (`_MALFORMED`) is refused, and the
        file closed.

        Raises:
            StorageError: the file holds something else.
        """
        return [self._made(read, line) for line in self.lines]

    def _made(self, read: Callable[[Any], _Value], value: Any) -> _Value:  # noqa: ANN401 - of a line
        try:
            return read(value)
        except _MALFORMED as error:
            self.close()
            raise self._refused(error) from error

    def once(self, name: str, read: Callable[[Any], _Value], measure: Callable[[], _Value]) -> _Value:
        """What an earlier run kept under `name`, which `read` makes of plain values; without it what `measure` gives,
        which is kept.

        Raises:
            StorageError: see `restored` and `append`.
        """
        if name in self._named:
            return self._made(read, self._named[name])
        found = measure()
        self.append({"name": name, "value": as_plain(found)})
        return found

    @cached_property
    def _named(self) -> dict[str, Any]:
        """What an earlier run kept, by name."""
        return dict(self.restored(lambda line: (line["name"], line["value"])))

    def close(self) -> None:
        """Close the file; what it could not take was an error of `append`."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _check(self, known: Mapping[str, Any], now: Mapping[str, Any], option: str) -> None:
        if known["format"] != FORMAT:
            raise ValueError(f"its format is {known['format']!r}, not {FORMAT!r}")
        pairs = {"kind": (known["kind"], now["kind"])}
        pairs |= {name: (known["run"].get(name), now["run"].get(name)) for name in (*now["run"], *known["run"])}
        for name, (before, here) in pairs.items():
            if before != here:
                where, remedy = f"was measured with {name}={before!r}", "give the same options, or another file"
                raise InputError(option, str(self.path), f"{where}, this run has {here!r}; {remedy}")

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"cannot keep the measurements in {self.path}: {error}")

    def _refused(self, error: Exception) -> StorageError:
        return StorageError(f"{self.path} does not hold the measurements of such a run ({error!r}); name another file")


def run_of(
    options: DataclassInstance,
    without: Iterable[str] = (),
    models: Iterable[str | None] = (),
    files: Iterable[str | None] = (),
    **more: object,
) -> dict[str, Any]:
    """What must agree between two runs: their options but outputs and those named in `without`, `more`, and what
    `models` and the `files` that drafters read (`SpecConfig.corpus`, `SpecConfig.ngram_table`) hold: what has this name
    may have been written anew since.

    Raises:
        ModelError, StorageError: a model or file that is not there.
    """
    from foretoken.model.names import model_folder  # a run that loads no model needs none of this
    from foretoken.train.answers import folder_fingerprint

    left_out = _OUTPUTS.union(without)
    named = dict.fromkeys(name for name in models if name is not None)
    contents = {f"files of {name}": folder_fingerprint(model_folder(name)) for name in named}
    read = dict.fromkeys(name for name in files if name not in (None, PACKAGED_TABLE, NO_TABLE))
    contents |= {f"content of {name}": _file_digest(Path(str(name))) for name in read}
    return {name: value for name, value in asdict(options).items() if name not in left_out} | contents | more


def kept_run(
    path: Path | None,
    kind: str,
    asked: Mapping[str, object],
    options: DataclassInstance,
    **about: Any,  # noqa: ANN401
) -> KeptFile:
    """The file of a run whose options, and what else `about` says, agree (`run_of`), and what is `asked` by content.

    Raises:
        ModelError, InputError, StorageError: see `run_of` and `KeptFile`.
    """
    contents = {f"{name} by content": digest(value) for name, value in asked.items()}
    return KeptFile(path, kind, run_of(options, **about) | contents)


def _file_digest(path: Path) -> str:
    """A short hash of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def digest(value: object) -> str:
    """A short hash of a JSON value's content."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
