"""A result as a few tables with all that is needed to judge them: for the terminal, for programs, and for the
record.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.report import as_plain, free_stem, print_notes
from foretoken.errors import StorageError
from foretoken.printing import markdown
from foretoken.printing.console import Console


@dataclass(frozen=True)
class Sheet:
    """One table of text: the first column names the line, the others hold numbers."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SheetReport:
    """Rows of one kind, a summary of them, and the tables to show; `files` are those that were written.

    `explained` says what the columns mean. `interrupted`: the run was stopped, and this is what there was by then.
    """

    kind: str
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    rows: tuple[Any, ...]
    summary: Mapping[str, Any]
    sheets: tuple[Sheet, ...]
    explained: str
    caveats: tuple[str, ...]
    interrupted: bool = False
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    files: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the tables can be made from the rows again and are left out."""
        return {
            f.name: as_plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("sheets", "explained")
        }

    def json_line(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)


def print_sheets(report: SheetReport, console: Console | None = None) -> None:
    """The tables, then what their columns mean, caveats and the files written."""
    console = console or Console()
    for sheet in report.sheets:
        console.table(sheet.headings, sheet.lines, title=sheet.title)
        console.line()
    console.line(report.explained)
    print_notes(console, report.caveats, report.files)


def markdown_of(report: SheetReport, raw: str) -> str:
    """The report as a page: command, machine, versions, caveats, then the tables; `raw` names the JSON beside it."""
    lines = [
        f"# Measured on {report.date[:10]}: {report.kind}",
        "",
        f"    {report.command}",
        "",
        f"- machine: {', '.join(f'{key} {value}' for key, value in report.machine.items())}",
        f"- versions: {', '.join(f'{key} {value}' for key, value in report.versions.items())}",
        f"- raw numbers: [{raw}]({raw})",
        "",
        report.explained,
        "",
        *(f"- {caveat}" for caveat in report.caveats),
    ]
    for sheet in report.sheets:
        lines += ["", f"## {sheet.title}", "", *markdown.table(sheet.headings, sheet.lines)]
    return markdown.page(lines)


def write_sheets(report: SheetReport, folder: Path, name: str) -> SheetReport:
    """Write `folder/YYYY-MM-DD-name.json` and `.md`; an earlier result of the day is kept, and this one numbered.

    Raises:
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stem = free_stem(folder, report.date, name)
        files = (folder / f"{stem}.json", folder / f"{stem}.md")
        report = dataclasses.replace(report, files=tuple(map(str, files)))
        files[0].write_text(json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files[1].write_text(markdown_of(report, files[0].name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the result to {folder}: {error}") from error
    return report
