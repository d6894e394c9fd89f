"""The result of an audit: for a terminal, as JSON, and as a page to attach to a change request."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from foretoken.audit.plan import REPORT_SUFFIXES
from foretoken.errors import InputError, StorageError
from foretoken.files import check_file, check_folder, to_json
from foretoken.printing import markdown as pages
from foretoken.printing.console import Console

Result = Literal["pass", "fail", "undecided", "not claimed", "info"]
_COLUMNS = ("result", "check", "where", "tokens", "found", "demanded", "sees with probability 0.99")
_JUSTIFY = "lllrl"
_STYLES: Mapping[str, str] = {
    "pass": "green",
    "fail": "bold red",
    "undecided": "yellow",
    "not claimed": "yellow",
    "info": "dim",
}


@dataclass(frozen=True)
class Check:
    """One check.

    `found` is the measured value, `demanded` the required one, `sees` the smallest error that the check misses with
    probability 0.01 at most. "undecided" had too few tokens, "not claimed" is what a lossy rule does not guarantee,
    "info" is reported without a verdict.
    """

    name: str
    where: str
    result: Result
    num_tokens: int = 0
    found: str = ""
    demanded: str = ""
    sees: str = ""
    detail: str = ""


@dataclass(frozen=True)
class AuditReport:
    """All checks, with what is needed to assess and repeat them."""

    checks: tuple[Check, ...]
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    false_alarm_rate: float
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.result == "fail")

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        count = {result: sum(check.result == result for check in self.checks) for result in _STYLES}
        judged = count["pass"] + count["fail"]
        text = f"FAIL: {count['fail']} of {judged} checks failed" if count["fail"] else f"PASS: {judged} checks"
        if count["undecided"]:
            text += f"; {count['undecided']} undecided for lack of tokens"
        if count["not claimed"]:
            text += "; lossy rule: distribution not claimed"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        head = {"verdict": self.verdict, "passed": not self.failed, "checks": [asdict(check) for check in self.checks]}
        return head | {
            name: getattr(self, name)
            for name in ("command", "date", "machine", "versions", "options", "false_alarm_rate")
        }


def print_report(report: AuditReport, console: Console | None = None) -> None:
    """Checks for a terminal, and the verdict as the last line: on a narrow one the checks scroll away."""
    console = console or Console()
    styles = [None if check.result == "pass" else _STYLES[check.result] for check in report.checks]
    console.table(_COLUMNS, [_cells(check) for check in report.checks], justify=_JUSTIFY, styles=styles)
    details = _details(report.checks)
    if details:
        console.line()
    for line in details:
        console.line(line)
    console.line()
    console.line(report.verdict, style="bold red" if report.failed else "bold green")


def markdown(report: AuditReport) -> str:
    """The report as a page: verdict, checks, and what is needed to repeat them."""
    lines = [
        f"# {report.verdict}",
        "",
        f"    {report.command}",
        "",
        *pages.table(_COLUMNS, [_cells(check) for check in report.checks], _JUSTIFY),
        "",
        *(f"- {line}" for line in _details(report.checks)),
        "",
        f"A correct engine fails any of the statistical checks with probability {report.false_alarm_rate:g} "
        "at most; the other checks "
        "never fail by chance.",
        "",
        f"- date: {report.date}",
        f"- machine: {', '.join(f'{key} {value}' for key, value in report.machine.items())}",
        f"- versions: {', '.join(f'{key} {value}' for key, value in report.versions.items())}",
        f"- options: {to_json(report.options)}",
    ]
    return pages.page(lines)


def _cells(check: Check) -> tuple[str, ...]:
    return (check.result, check.name, check.where, str(check.num_tokens or ""), check.found, check.demanded, check.sees)


def _details(checks: Sequence[Check]) -> list[str]:
    return [f"{check.name} ({check.where}): {check.detail}" for check in checks if check.detail]


def check_out(path: Path) -> None:
    """Check that a report file can be written, before minutes of work

    Raises:
        InputError: an unknown suffix.
        StorageError: the folder cannot be made or written.
    """
    if path.suffix.lower() not in REPORT_SUFFIXES:
        raise InputError("out", str(path), f"the file name must end in {' or '.join(REPORT_SUFFIXES)}")
    check_folder(path.parent)
    check_file("out", path)


def write_report(report: AuditReport, path: Path) -> None:
    """Write the report in the format of its suffix, atomically

    Raises:
        InputError: an unknown suffix.
        StorageError: the file cannot be written.
    """
    check_out(path)
    text = markdown(report) if path.suffix.lower() == ".md" else to_json(report.as_dict(), indent=1) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write the report to {path}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
