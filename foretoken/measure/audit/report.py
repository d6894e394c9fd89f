"""The report of an audit: for a terminal, as JSON, and as a page to attach to a change request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretoken.errors import InputError
from foretoken.files import check_file, check_folder
from foretoken.measure.audit.options import AuditOptions, BackendAuditOptions
from foretoken.measure.checks import Check, check_table, verdict
from foretoken.measure.report import Report
from foretoken.measure.write import SUFFIXES


def audit_report(
    options: AuditOptions | BackendAuditOptions,
    checks: Sequence[Check],
    command: str,
    **about: Any,  # noqa: ANN401 - versions, machine and date, where they are known
) -> Report:
    """The report of all checks, with the verdict as its heading."""
    line, passed = verdict(checks)
    return Report(
        title="Audit",
        command=command,
        options=asdict(options),
        results={"verdict": line, "passed": passed, "checks": tuple(checks), "false_alarm_rate": options.alpha},
        tables=(check_table(checks),),
        explained=(
            "A correct engine fails any of the statistical checks with probability "
            f"{options.alpha:g} at most; the other checks never fail by chance."
        ),
        verdict=line,
        passed=passed,
        **about,
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
