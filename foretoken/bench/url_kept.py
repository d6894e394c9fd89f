"""The loads of a measurement, and the file that keeps those that have ended, so that a run that was stopped resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.url_client import UrlSample
from foretoken.bench.url_options import UrlOptions
from foretoken.bench.url_plan import UrlRequest
from foretoken.measure.kept import KeptFile, digest, run_of


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
        InputError, StorageError: see `KeptFile`.
    """

    def __init__(self, path: Path, options: UrlOptions, model: str, runs: Sequence[UrlRun]) -> None:
        planned = digest([[asdict(request) for request in run.requests] for run in runs])
        about = run_of(options, model=model) | {"requests by content": planned}
        self._file = KeptFile(path, "bench url", about)
        self._runs = {run.setting: run for run in runs}
        self._file.restored(self._restore)

    def _restore(self, line: Mapping[str, Any]) -> None:
        run = self._runs[line["setting"]]
        run.samples = [
            UrlSample(**one | {"pieces": [tuple(piece) for piece in one["pieces"]]}) for one in line["samples"]
        ]
        run.counters = list(line["counters"])
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
