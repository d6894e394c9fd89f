"""The result of an audit, and its report: for a terminal, as JSON, and as a page to attach to a change request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foretoken.errors import InputError
from foretoken.files import check_file, check_folder
from foretoken.measure.report import Report, Table, now
from foretoken.measure.write import SUFFIXES

Result = Literal["pass", "fail", "undecided", "not claimed", "info", "not asked"]
_COLUMNS = ("result", "check", "where", "tokens", "found", "demanded", "sees with probability 0.99")
_JUSTIFY = "lllrl"
_STYLES: Mapping[str, str] = {
    "pass": "green",
    "fail": "bold red",
    "undecided": "yellow",
    "not claimed": "yellow",
    "info": "dim",
    "not asked": "dim",
}


@dataclass(frozen=True)
class Check:
    """One check.

    `found` is the measured value, `demanded` the required one, `sees` the smallest error that the check misses with
    probability 0.01 at most. "undecided" had too few tokens, "not claimed" is what a lossy rule does not guarantee,
    "info" is reported without a verdict. "not asked" cannot be asked of another engine; `found` says why.
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
    date: str = field(default_factory=now)

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
        if count["not asked"]:
            text += f"; {count['not asked']} could not be asked"
        return text


def audit_report(audit: AuditReport) -> Report:
    """The report of an audit, with the verdict as its heading."""
    styles = tuple(None if check.result == "pass" else _STYLES[check.result] for check in audit.checks)
    details = tuple(f"{check.name} ({check.where}): {check.detail}" for check in audit.checks if check.detail)
    return Report(
        title="Audit",
        command=audit.command,
        options=audit.options,
        results={
            "verdict": audit.verdict,
            "passed": not audit.failed,
            "checks": audit.checks,
            "false_alarm_rate": audit.false_alarm_rate,
        },
        tables=(Table("", _COLUMNS, tuple(map(_cells, audit.checks)), details, _JUSTIFY, styles),),
        explained=(
            "A correct engine fails any of the statistical checks with probability "
            f"{audit.false_alarm_rate:g} at most; the other checks never fail by chance."
        ),
        verdict=audit.verdict,
        passed=not audit.failed,
        machine=audit.machine,
        versions=audit.versions,
        date=audit.date,
    )


def _cells(check: Check) -> tuple[str, ...]:
    return (check.result, check.name, check.where, str(check.num_tokens or ""), check.found, check.demanded, check.sees)


def check_out(path: Path) -> None:
    """Check that a report file can be written, before minutes of work.

    Raises:
        InputError: an unknown suffix.
        StorageError: the folder cannot be made or written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError("out", str(path), f"the file name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    check_folder(path.parent)
    check_file("out", path)
