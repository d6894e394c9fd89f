"""The report of a validation: predicted, measured and error of each figure, and where errors come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken.measure.report import Report, Table
from foretoken.plan.profile import Profile
from studies.validation.validate import FIGURES, JUDGED, TOLERANCE, Causes, Comparison

_WORDS = {
    "tokens_per_s": "tok/s",
    "latency_s_p50": "whole answer",
    "latency_s_p95": "p95",
    "ttft_s_p50": "first token",
    "ttft_s_p95": "p95",
}


def validation_report(
    rows: Sequence[Comparison], profile: Profile, options: Mapping[str, Any], command: str, caveats: Sequence[str]
) -> Report:
    """The report of all comparisons."""
    held = sum(row.holds for row in rows)
    return Report(
        title="Validation of the simulator",
        command=command,
        options=options,
        results={
            "tolerance": TOLERANCE,
            "judged": JUDGED,
            "profile": profile.as_dict(),
            "rows": tuple(map(_row, rows)),
        },
        tables=(_figures_table(rows), _causes_table(rows)),
        conclusions=(f"within {TOLERANCE:.0%} in throughput and p95 latency: {held} of {len(rows)}",),
        caveats=tuple(caveats),
    )


def _row(row: Comparison) -> dict[str, Any]:
    return {
        "trace": row.trace,
        "setting": row.predicted.setting,
        "holds": row.holds,
        "errors": {name: row.error(name) for name in FIGURES},
        **{name: asdict(getattr(row, name)) for name in ("predicted", "measured", "causes")},
        "jobs": [asdict(one) for one in row.jobs],
        "requests": [asdict(one) for one in row.requests],
    }


def _figures_table(rows: Sequence[Comparison]) -> Table:
    lines = tuple((row.trace, row.predicted.setting, *(_cell(row, figure) for figure in FIGURES)) for row in rows)
    headings = ("arrivals", "setting", *(_WORDS[figure] for figure in FIGURES))
    styles = tuple(None if row.holds else "red" for row in rows)
    return Table("predicted | measured  error", headings, lines, justify="llr", styles=styles)


def _causes_table(rows: Sequence[Comparison]) -> Table:
    lines = tuple((row.trace, row.predicted.setting, *_errors(row.causes)) for row in rows)
    headings = ("arrivals", "setting", "steps", "drafter", "tok/round", "rows", "requests", "pace", "between steps")
    return Table("sources of the error", headings, lines, justify="llr")


def _errors(causes: Causes) -> tuple[str, ...]:
    errors = (causes.step, causes.draft, causes.emitted, causes.rows, causes.batch, causes.pace)
    return (*("" if error is None else f"{error:+.0%}" for error in errors), f"{causes.outside_share:.1%}")


def _cell(row: Comparison, name: str) -> str:
    unit, scale = ("", 1.0) if name == "tokens_per_s" else ("ms", 1e3)
    predicted, measured = (scale * getattr(side, name) for side in (row.predicted, row.measured))
    return f"{predicted:.4g} | {measured:.4g} {unit} {row.error(name):+.0%}".replace("  ", " ")
