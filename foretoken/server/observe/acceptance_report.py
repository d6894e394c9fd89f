"""The report of acceptance by day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Report, Table
from foretoken.server.observe.acceptance import JUDGED_PLACES, SHOWN_DAYS, AcceptanceSeries, as_values, cause_of

_EXPLAINED = (
    "Each model, drafter and slice is compared with its own days before; days are those of UTC, and today is left out. "
    "before, last week: the share accepted at the place in the draft where it changed most. evidence: what bets on a "
    "drop have made of 1; an alarm is raised where it reaches what is needed, which false alarms do with the asked "
    "probability in all days and series together."
)


def acceptance_report(
    series: Sequence[AcceptanceSeries], options: Mapping[str, Any], command: str, diagnosis: Report | None
) -> Report:
    """The report; `diagnosis` is the one of `foretoken diagnose`, None where it was not asked for."""
    fallen = [one for one in series if one.has_fallen]
    cause = () if diagnosis is None else (f"diagnose: {diagnosis.verdict}",)
    return Report(
        title="Acceptance by day",
        command=command,
        options=options,
        results={
            "kind": "acceptance",
            "rows": [as_values(one, series) for one in series],
            "diagnosis": None if diagnosis is None else diagnosis.as_dict(),
        },
        tables=(_series_table(series), *(() if diagnosis is None else diagnosis.tables)),
        explained=_EXPLAINED if series else "",
        caveats=() if series else ("The history has no whole day with drafts yet.",),
        conclusions=(*(f"{_title(one)} fell: {cause_of(one, series)}." for one in fallen), *cause),
        verdict=f"Acceptance fell: {', '.join(map(_title, fallen))}." if fallen else "No drop of acceptance.",
        passed=not fallen,
        plots=_plots(series),
    )


def _title(series: AcceptanceSeries) -> str:
    model, drafter, slice_ = series.name
    return f"{drafter or model}{f' on {slice_}' if slice_ else ''}"


def _series_table(series: Sequence[AcceptanceSeries]) -> Table:
    headings = ("model", "drafter", "slice", "days", "requests", "place", "before", "last week", "evidence", "needed")
    lines = tuple(
        (
            *one.name,
            str(len(one.days)),
            str(sum(day.num_requests for day in one.days)),
            "" if one.place is None else str(one.place),
            _percent(one.before),
            _percent(one.after),
            f"{one.evidence:.3g}",
            f"{one.needed:.3g}",
        )
        for one in series
    )
    styles = tuple("bold red" if one.has_fallen else None for one in series)
    return Table("Acceptance by day", headings, lines, justify="lllr", styles=styles)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _plots(series: Sequence[AcceptanceSeries]) -> tuple[Plot, ...]:
    """A plot for each series: the share accepted at the first places, day by day."""
    return tuple(
        Plot(
            f"Accepted by place in the draft: {_title(one)}",
            "accepted / drafted",
            tuple(found for place in range(JUDGED_PLACES) if (found := _place_series(one, place)).points),
            "lines",
            "day",
        )
        for one in series
        if any(day.share(0) is not None for day in one.days[-SHOWN_DAYS:])
    )


def _place_series(series: AcceptanceSeries, place: int) -> Series:
    days = series.days[-SHOWN_DAYS:]
    points = (Point(day.day, share) for day in days if (share := day.share(place)) is not None)
    return Series(f"token {place + 1}", tuple(points))
