"""A measurement with everything needed to judge it, and the same as text on a terminal or a Markdown page."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.files import as_plain
from foretoken.machine.identity import machine, versions
from foretoken.measure.plots import Plot
from foretoken.printing import console as pages
from foretoken.printing.console import Console

_BUSY_LOAD = 0.9  # load average per core
ABOUT = ("command", "machine", "versions", "options", "caveats", "date", "files")  # of a report, beside its results
_ON_PAGES = ("title", "tables", "explained", "conclusions", "verdict", "passed", "plots")


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
        found = {name: as_plain(getattr(self, name)) for name in ABOUT}
        return found | {str(name): as_plain(value) for name, value in self.results.items()}

    def page_values(self) -> dict[str, Any]:
        """What a page shows beside `as_dict`, as plain values: with both the report can be made again."""
        return {name: as_plain(getattr(self, name)) for name in _ON_PAGES}

    def json_line(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)


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


def interruption_notes(interrupted: bool, resume: Path | None) -> list[str]:
    """What the report of a run that was interrupted says of that; `resume` is the file that keeps what was measured."""
    if not interrupted:
        return []
    remedy = "" if resume is None else f" Go on with the same options and --resume {resume}."
    return [f"The run was interrupted: this is what had been measured by then.{remedy}"]


def load_average() -> float:
    """The machine's load average over the last minute; 0 where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def busy_caveats(load: float) -> list[str]:
    """A caveat where the load average before the run says that a client beside servers may have been too slow."""
    is_busy = load > _BUSY_LOAD * (os.cpu_count() or 1)
    return [f"The machine was busy when the run began: load average {load:.1f}."] if is_busy else []


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
    """Whether `studies.widen` made this checkpoint: its config says so."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "widened" in config
