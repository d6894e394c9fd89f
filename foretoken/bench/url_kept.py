"""The loads of a measurement, and the file that keeps those that have ended, so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.kept_lines import KeptLines
from foretoken.bench.report import as_plain
from foretoken.bench.url_client import UrlSample
from foretoken.bench.url_options import UrlOptions
from foretoken.bench.url_plan import UrlRequest
from foretoken.errors import StorageError

_NOT_MEASURED = ("out", "name", "resume")  # options that no request depends on


@dataclass
class UrlRun:
    """One load: what was planned, what came of it, and what the endpoint's own counters said before and after.

    `is_known`: it was measured before the run was stopped.
    """

    setting: str
    requests: Sequence[UrlRequest]
    samples: list[UrlSample] = field(default_factory=list)
    counters: list[dict[str, float] | None] = field(default_factory=list)
    is_known: bool = False


class KeptRuns:
    """Whole loads in a file. A load that was interrupted is measured again: what its last requests met depends on all
    before them.

    Raises:
        InputError, StorageError: see `KeptLines`; the file holds another measurement.
    """

    def __init__(self, path: Path, options: UrlOptions, model: str, runs: Sequence[UrlRun]) -> None:
        given = {name: value for name, value in asdict(options).items() if name not in _NOT_MEASURED}
        planned = json.dumps([[asdict(request) for request in run.requests] for run in runs])
        about = given | {"model": model, "requests by content": hashlib.sha256(planned.encode()).hexdigest()[:16]}
        self._file = KeptLines(path, {name: as_plain(value) for name, value in about.items()})
        self._runs = {run.setting: run for run in runs}
        for line in self._file.lines:
            self._restore(line)

    def _restore(self, line: dict[str, Any]) -> None:
        try:
            run = self._runs[line["setting"]]
            run.samples = [
                UrlSample(**one | {"pieces": [tuple(piece) for piece in one["pieces"]]}) for one in line["samples"]
            ]
            run.counters = list(line["counters"])
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"the file to resume holds something else than loads of this run ({error})") from error
        run.is_known = True

    def keep(self, run: UrlRun) -> None:
        """Write a load that has ended.

        Raises:
            StorageError: it cannot be written.
        """
        samples = [asdict(sample) for sample in run.samples]
        self._file.append({"setting": run.setting, "samples": samples, "counters": run.counters})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
