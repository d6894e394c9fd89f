"""The answers of a speed run, written to a file as they come, so that a run that was stopped goes on from there.

The file is JSON lines: first an object `about` with everything that must agree for answers to be compared, then one
object for each answer. A last line that was cut off by the end of a process is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from foretoken.bench.measure import Answer, SpeedSample, SpeedSetting
from foretoken.errors import InputError, StorageError

_Place = tuple[str, int, float, int]  # setting, prompt, temperature, repeat


class Samples:
    """The answers so far; with `open_samples` also in a file."""

    def __init__(self) -> None:
        self.all: list[SpeedSample] = []
        self._places: set[_Place] = set()
        self._file: TextIO | None = None

    def __contains__(self, place: _Place) -> bool:
        return place in self._places

    def add(self, sample: SpeedSample) -> None:
        """Keep an answer, on disk before this returns.

        Raises:
            StorageError: the file cannot be written.
        """
        self._keep(sample)
        if self._file is not None:
            values = asdict(sample) | {"setting": sample.setting.name}
            _write_line(self._file, values)

    def drop(self, setting: SpeedSetting) -> None:
        """Leave out a setting's answers; the file keeps them."""
        self.all = [sample for sample in self.all if sample.setting != setting]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, sample: SpeedSample) -> None:
        self.all.append(sample)
        self._places.add((sample.setting.name, sample.prompt_index, sample.temperature, sample.repeat))

    def attach(self, file: TextIO) -> None:
        """Write the answers from now on to a file."""
        self._file = file

    def restore(self, values: Mapping[str, Any], settings: Mapping[str, SpeedSetting]) -> None:
        """Take over an answer that was written; one of a setting that is not in `settings` is passed over.

        Raises:
            KeyError, TypeError: something is missing.
        """
        setting = settings.get(values["setting"])
        if setting is None:
            return
        answer = dict(values["answer"])
        answer["token_ids"] = tuple(answer["token_ids"])
        answer["positions"] = tuple((int(drafted), int(accepted)) for drafted, accepted in answer["positions"])
        own = {
            field.name: values[field.name] for field in fields(SpeedSample) if field.name not in ("setting", "answer")
        }
        self._keep(SpeedSample(setting=setting, answer=Answer(**answer), **own))


def open_samples(path: Path, about: Mapping[str, Any], settings: Mapping[str, SpeedSetting]) -> Samples:
    """The answers in `path` of an earlier run, which is gone on with; a new file where there is none.

    `about` is what must agree, as JSON values; `settings` are those of this run, by name.

    Raises:
        InputError: the file was written with other options; names the first that differs.
        StorageError: the file cannot be read or written, or holds something else.
    """
    about = json.loads(json.dumps(about))
    samples = Samples()
    try:
        known = path.read_bytes() if path.exists() else b""
        whole = known[: known.rfind(b"\n") + 1]
        lines = whole.decode("utf-8").splitlines()
        if lines:
            _check_about(path, json.loads(lines[0])["about"], about)
        for line in lines[1:]:
            samples.restore(json.loads(line), settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        if whole != known:
            os.truncate(path, len(whole))
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot keep the answers in {path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise StorageError(f"{path} does not hold the answers of a speed run ({error}); name another file") from error
    samples.attach(file)
    if not lines:
        _write_line(file, {"about": about})
    return samples


def _check_about(path: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for field in dict.fromkeys((*now, *known)):
        if known.get(field) != now.get(field):
            raise InputError(
                "resume",
                str(path),
                f"was measured with {field}={known.get(field)!r}, this run has {now.get(field)!r}; give the same "
                "options, or another file",
            )


def _write_line(file: TextIO, values: Mapping[str, Any]) -> None:
    try:
        file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot keep the answers in {file.name}: {error}") from error
