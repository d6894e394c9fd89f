"""The certificate: the verdict in a sentence, every check with what it would have seen, and the raw answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken.measure.certify.options import CertifyOptions
from foretoken.measure.certify.sampled import SETTINGS, level_of, num_answers
from foretoken.measure.checks import Check, check_table, verdict
from foretoken.measure.report import Report
from foretoken.measure.sides import side_table


def certify_report(
    options: CertifyOptions,
    about: Mapping[str, Mapping[str, str]],
    checks: Sequence[Check],
    rows: Sequence[Mapping[str, Any]],
    drafted: Mapping[str, int] | None,
    command: str,
    caveats: Sequence[str],
    interrupted: bool,
) -> Report:
    """The report of the checks; `about` says of each side what it is, `rows` are all requests with their answers,
    `drafted` what B drafted in this run and how much of it was accepted, None where it does not count.
    """
    line, passed = verdict(checks, interrupted)
    results: dict[str, Any] = {
        "kind": "certify",
        "verdict": line,
        "passed": passed,
        "checks": checks,
        "false_alarm_rate": options.alpha,
        "sides": about,
        "drafted": drafted,
        "rows": rows,
        "interrupted": interrupted,
    }
    return Report(
        title="Certificate",
        command=command,
        options=asdict(options),
        results=results,
        tables=(check_table(checks, "B against A"), side_table(about)),
        explained=_explained(options, drafted),
        caveats=tuple(caveats),
        verdict=line,
        passed=passed,
    )


def _explained(options: CertifyOptions, drafted: Mapping[str, int] | None) -> str:
    count = num_answers(options.effect, options.alpha)
    told = ""
    if drafted:
        told = f"B drafted {drafted['drafted']:,} tokens, of which {drafted['accepted']:,} were accepted. "
    drawn = (
        f"A correct B fails any of the tests of sampled answers with probability {options.alpha:g} at most: each of "
        f"the {2 * len(SETTINGS)} is made at level {level_of(options.alpha):.2g}, on {count} answers of each side. The "
        "other checks"
    )
    return told + (
        f"{drawn if 'distribution' in options.only else 'Sampled answers were not tested. The checks'} never fail by "
        "chance, if rounding moves log-probabilities by no more than "
        f"{options.tolerance:g}. sees: what a check misses with probability 0.01 at most. not asked: a side refuses "
        "the request, or does not report what the check needs. undecided: A does the same, or nothing could differ."
    )
