"""A report as text: printed on a terminal, and as a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.measure.report import Report, Table
from foretoken.printing import text as pages
from foretoken.printing.console import Console


def print_report(report: Report, console: Console | None = None) -> None:
    """The tables, what their columns mean, conclusions, caveats, the files written, and the verdict as the last line:
    on a narrow terminal the tables scroll away. Of an interrupted run without any figure nothing is explained.
    """
    console = console or Console()
    print_tables(report.tables, console)
    is_empty = report.interrupted and not any(table.lines for table in report.tables)
    for line in () if is_empty else (report.explained, *report.conclusions):
        if line:
            console.line(line)
    print_notes(report.caveats, report.files, console)
    if report.verdict:
        console.line(report.verdict, style="bold green" if report.passed else "bold red")


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
        f"# {report.heading}",
        "",
        f"    {report.command}",
        "",
        *(f"- {name}: {text}" for name, text in provenance(report).items()),
        *([f"- raw numbers: [{raw}]({raw})"] if raw else []),
        "",
        *([report.explained, ""] if report.explained else []),
        *(f"- {caveat}" for caveat in report.caveats),
    ]
    for table in report.tables:
        lines += ["", *([f"## {table.title}", ""] if table.title else [])]
        lines += pages.table(table.headings, table.lines, table.justify)
        for note in table.notes:
            lines += ["", note]
    for conclusion in report.conclusions:
        lines += ["", conclusion]
    return pages.page(lines)


def provenance(report: Report) -> dict[str, str]:
    """Where and when a report was measured, by name."""
    return {"machine": _listed(report.machine), "versions": _listed(report.versions), "date": report.date}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
