"""A measurement with everything needed to judge it: tables, plots, command, machine, versions, caveats."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.files import as_plain
from foretoken.machine.identity import machine, versions
from foretoken.measure.plots import Plot


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Table:
    """One table of text and the lines below it.

    `justify` holds l or r for each column, its last letter is repeated. `styles` holds a terminal style per line.
    """

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    justify: str = "lr"
    styles: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Report:
    """A measurement.

    `results` are the further fields of the JSON object: the rows, and what they are summarised to. `explained` says
    what the columns of the tables mean, `conclusions` are lines below all tables. `verdict` is the outcome in one line,
    and whether it `passed`, of a report that has one. `plots` are for HTML. `files` are those that were written.
    """

    title: str
    command: str
    options: Mapping[str, Any]
    results: Mapping[str, Any]
    tables: tuple[Table, ...]
    explained: str = ""
    caveats: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()
    verdict: str = ""
    passed: bool = True
    plots: tuple[Plot, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    date: str = field(default_factory=now)
    files: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """The first line of a page."""
        return self.verdict or f"{self.title}, measured on {self.date[:10]}"

    @property
    def rows(self) -> Sequence[Any]:
        """The rows of the results."""
        return tuple(self.results["rows"])

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped, and this is what had been measured by then."""
        return bool(self.results.get("interrupted", False))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without tables and plots, which repeat the rows; None where not finite."""
        names = ("command", "machine", "versions", "options", "caveats", "date", "files")
        found = {name: as_plain(getattr(self, name)) for name in names}
        return found | {str(name): as_plain(value) for name, value in self.results.items()}

    def json_line(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)
