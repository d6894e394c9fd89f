"""The report of a measurement: printed tables, a line of JSON, and a dated result of raw JSON and a Markdown page.

Every report carries the command, the machine, the versions and the caveats of its numbers.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.engine.startup.machine import machine as machine
from foretoken.engine.startup.machine import versions as versions
from foretoken.errors import InputError, StorageError
from foretoken.files import to_json
from foretoken.printing import markdown as pages
from foretoken.printing.console import Console


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
    """A measurement with everything needed to judge it.

    `results` are the further fields of the JSON object: the rows, and what they are summarised to. `explained` says
    what the columns of the tables mean, `conclusions` are lines below all tables. `files` are those that were written.
    """

    title: str
    command: str
    options: Mapping[str, Any]
    results: Mapping[str, Any]
    tables: tuple[Table, ...]
    explained: str = ""
    caveats: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    date: str = field(default_factory=now)
    files: tuple[str, ...] = ()

    @property
    def rows(self) -> Sequence[Any]:
        """The rows of the results."""
        return tuple(self.results["rows"])

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped, and this is what had been measured by then."""
        return bool(self.results.get("interrupted", False))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the tables, which repeat the rows; numbers that are not finite are None."""
        names = ("command", "machine", "versions", "options", "caveats", "date", "files")
        found = {name: as_plain(getattr(self, name)) for name in names}
        return found | {str(name): as_plain(value) for name, value in self.results.items()}

    def json_line(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)


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


def print_report(report: Report, console: Console | None = None) -> None:
    """The tables, what their columns mean, conclusions, caveats and the files written; of an interrupted run without
    any figure nothing is explained.
    """
    console = console or Console()
    print_tables(report.tables, console)
    is_empty = report.interrupted and not any(table.lines for table in report.tables)
    for line in () if is_empty else (report.explained, *report.conclusions):
        if line:
            console.line(line)
    print_notes(report.caveats, report.files, console)


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Each table, the lines below it, and an empty line."""
    for table in tables:
        console.table(table.headings, table.lines, title=table.title, justify=table.justify, styles=table.styles)
        for note in table.notes:
            console.line(note)
        console.line()


def print_notes(caveats: Sequence[str], files: Sequence[str | Path], console: Console) -> None:
    """The caveats of a result, and the files written."""
    for caveat in caveats:
        console.line(f"note: {caveat}")
    for file in files:
        console.line(f"written: {file}")


def markdown(report: Report, raw: str | None = None) -> str:
    """The report as a page: command, machine, versions, caveats, then the tables; `raw` names the JSON beside it."""
    lines = [
        f"# {report.title}, measured on {report.date[:10]}",
        "",
        f"    {report.command}",
        "",
        f"- machine: {', '.join(f'{key} {value}' for key, value in report.machine.items())}",
        f"- versions: {', '.join(f'{key} {value}' for key, value in report.versions.items())}",
        *([f"- raw numbers: [{raw}]({raw})"] if raw else []),
        "",
        *([report.explained, ""] if report.explained else []),
        *(f"- {caveat}" for caveat in report.caveats),
    ]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", *pages.table(table.headings, table.lines, table.justify)]
        for note in table.notes:
            lines += ["", note]
    for conclusion in report.conclusions:
        lines += ["", conclusion]
    return pages.page(lines)


def write_report(report: Report, folder: Path, name: str) -> Report:
    """Write `folder/YYYY-MM-DD-name.json` and `.md`, numbered where a result of the day has that name.

    Returns the report with the files named.

    Raises:
        StorageError: the folder cannot be written.
    """
    raw = free_path(folder, report.date, name)
    page = raw.with_suffix(".md")
    report = dataclasses.replace(report, files=(*report.files, str(raw), str(page)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        raw.write_text(to_json(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        page.write_text(markdown(report, raw.name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the result to {folder}: {error}") from error
    return report


def free_path(folder: Path, date: str, name: str, suffixes: Sequence[str] = (".json",)) -> Path:
    """`folder/YYYY-MM-DD-name.json`, with a number behind the name where a file with one of `suffixes` exists."""
    stem = first = f"{date[:10]}-{name}"
    taken = 1
    while any((folder / f"{stem}{suffix}").exists() for suffix in suffixes):
        taken += 1
        stem = f"{first}-{taken}"
    return folder / f"{stem}.json"


def check_name(name: str) -> None:
    """Refuse a result name that is not a plain file name.

    Raises:
        InputError: other characters than letters, digits, `.`, `_` and `-`.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError("name", name, "use letters, digits, '.', '_' and '-' only; the date is added")


def load_average() -> float:
    """The machine's load average over the last minute; 0 where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def source_caveats(target: Path, draft: Path | None, load: float) -> list[str]:
    """Caveats of the models and the machine: widened checkpoints, and a high load average before the run (`load`)."""
    caveats = []
    for role, folder in (("target", target), ("draft", draft)):
        if folder is not None and is_widened(folder):
            caveats.append(
                f"The {role} is a small trained checkpoint, widened: the added weights cost time but cannot change "
                "its outputs. Acceptance is that of the small pair."
            )
    cores = os.cpu_count() or 1
    if load > 0.5 * cores:
        caveats.append(
            f"The machine was busy when the run began: load average {load:.1f} on {cores} cores. Use "
            "the ratios, not the absolute numbers."
        )
    return caveats


def is_widened(checkpoint: Path) -> bool:
    """Whether `foretoken widen` made this checkpoint: its config says so."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "widened" in config
