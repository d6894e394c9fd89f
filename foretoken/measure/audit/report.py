"""The result of an audit, and its report: for a terminal, as JSON, and as a page to attach to a change request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.errors import InputError
from foretoken.files import check_file, check_folder
from foretoken.measure.checks import Check, check_table, failed, verdict
from foretoken.measure.report import Report, now
from foretoken.measure.write import SUFFIXES


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
        return failed(self.checks)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        line = verdict(self.checks)
        return line if self.passed or self.failed else f"No verdict: no check could be made; {line}"

    @property
    def passed(self) -> bool:
        """Whether a check was made, and none failed."""
        return not self.failed and any(check.result == "pass" for check in self.checks)


def audit_report(audit: AuditReport) -> Report:
    """The report of an audit, with the verdict as its heading."""
    return Report(
        title="Audit",
        command=audit.command,
        options=audit.options,
        results={
            "verdict": audit.verdict,
            "passed": audit.passed,
            "checks": audit.checks,
            "false_alarm_rate": audit.false_alarm_rate,
        },
        tables=(check_table(audit.checks),),
        explained=(
            "A correct engine fails any of the statistical checks with probability "
            f"{audit.false_alarm_rate:g} at most; the other checks never fail by chance."
        ),
        verdict=audit.verdict,
        passed=audit.passed,
        machine=audit.machine,
        versions=audit.versions,
        date=audit.date,
    )


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
