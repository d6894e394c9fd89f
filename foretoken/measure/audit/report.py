"""The report of an audit: for a terminal, as JSON, and as a page to attach to a change request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foretoken.measure.audit.options import AuditOptions, BackendAuditOptions
from foretoken.measure.checks import Check, check_table, verdict
from foretoken.measure.report import Report, interruption_notes


def audit_report(
    options: AuditOptions | BackendAuditOptions,
    checks: Sequence[Check],
    command: str,
    interrupted: bool = False,
    notes: Sequence[str] = (),
    **about: Any,  # noqa: ANN401 - versions, machine and date, where they are known
) -> Report:
    """The report of the checks that were made, with the verdict as its heading."""
    line, passed = verdict(checks, interrupted)
    return Report(
        title="Audit",
        command=command,
        options=asdict(options),
        results={
            "verdict": line,
            "passed": passed,
            "checks": tuple(checks),
            "false_alarm_rate": options.alpha,
            "interrupted": interrupted,
        },
        tables=(check_table(checks),),
        explained=(
            "A correct engine fails any of the statistical checks with probability "
            f"{options.alpha:g} at most; the other checks never fail by chance."
        ),
        caveats=(*interruption_notes(interrupted, options.resume), *notes),
        verdict=line,
        passed=passed,
        **about,
    )
