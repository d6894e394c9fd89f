"""The answers of a speed run, written to a file as they come, so that a run that was stopped goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from foretoken.bench.measure import Answer, SpeedSample, SpeedSetting
from foretoken.measure.kept import KeptFile

_Place = tuple[str, int, float, int]  # setting, prompt, temperature, repeat


class Samples:
    """The answers so far; with `open_samples` also in a file."""

    def __init__(self) -> None:
        self.all: list[SpeedSample] = []
        self._places: set[_Place] = set()
        self._file: KeptFile | None = None

    def __contains__(self, place: _Place) -> bool:
        return place in self._places

    def add(self, sample: SpeedSample) -> None:
        """Keep an answer, on disk before this returns.

        Raises:
            StorageError: the file cannot be written.
        """
        self._keep(sample)
        if self._file is not None:
            self._file.append(asdict(sample) | {"setting": sample.setting.name})

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

    def attach(self, file: KeptFile) -> None:
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


def open_samples(path: Path, run: Mapping[str, Any], settings: Mapping[str, SpeedSetting]) -> Samples:
    """The answers in `path` of an earlier run, which is resumed; a new file where there is none.

    `run` is what must agree; `settings` are those of this run, by name.

    Raises:
        InputError, StorageError: see `KeptFile`.
    """
    samples = Samples()
    file = KeptFile(path, "bench speed", run)
    file.restored(lambda line: samples.restore(line, settings))
    samples.attach(file)
    return samples
