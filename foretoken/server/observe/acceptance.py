"""Acceptance by day: what the history keeps of it beside single requests, whether it has fallen, and the report.

A row holds the drafted and accepted tokens of one day (UTC), model, drafter and slice, by place in the draft. Its size
and the number of rows are bounded, so that days stay longer than the requests that they are sums of.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Report, Table
from foretoken.server.observe.figures import RequestFigures, added_places

SCHEMA = """
    CREATE TABLE acceptance (
        day TEXT NOT NULL, model TEXT NOT NULL, drafter TEXT NOT NULL, slice TEXT NOT NULL,
        num_requests INTEGER NOT NULL, places TEXT NOT NULL,
        PRIMARY KEY (day, model, drafter, slice)
    ) WITHOUT ROWID;
"""

MAX_ROWS = 8192  # about 2 MiB; the oldest days go first

MAX_SERIES = 64  # of a day; slices are named by clients, and those beyond count as `OTHER`

OTHER = "other"

MIN_DRAFTED = 200  # tokens at a place, for its share to count as that of a day

JUDGED_PLACES = 4  # the first ones: few drafts have more

SHOWN_DAYS = 60

_RECENT_DAYS = 7  # what a drop is stated by

ALPHA = 0.05  # probability of a false alarm, in all days and series together

Places = tuple[tuple[int, int], ...]


class SeriesName(NamedTuple):
    """What is compared with its own past."""

    model: str
    drafter: str
    slice: str


@dataclass(frozen=True)
class AcceptanceDay:
    """One day of a series; `places` has (drafted, accepted) by place in the draft."""

    day: str
    name: SeriesName
    num_requests: int
    places: Places

    def share(self, place: int) -> float | None:
        """Accepted of drafted tokens at a place from 0; None where fewer than `MIN_DRAFTED` were drafted."""
        if place >= len(self.places) or self.places[place][0] < MIN_DRAFTED:
            return None
        drafted, accepted = self.places[place]
        return accepted / drafted

    @property
    def rate(self) -> float | None:
        """Accepted of all drafted tokens; None where nothing was drafted."""
        drafted, accepted = (sum(column) for column in zip(*self.places, strict=True)) if self.places else (0, 0)
        return accepted / drafted if drafted else None


@dataclass(frozen=True)
class AcceptanceSeries:
    """The days of a series, and what they say: `evidence` is the wealth of bets on a drop (1 at first), `needed` what
    it must reach, `fell_on` the first day on which it did ("": never). `place` from 1 is the one with the largest drop,
    `before` and `after` its mean share in the days before the last seven and in those; None where too little is known.
    """

    name: SeriesName
    days: tuple[AcceptanceDay, ...]
    evidence: float
    needed: float
    fell_on: str
    place: int | None
    before: float | None
    after: float | None

    @property
    def has_fallen(self) -> bool:
        """Whether the alarm holds today: it ends when acceptance recovers, or when the lower one has become usual."""
        return self.evidence >= self.needed


def add_to_days(connection: sqlite3.Connection, batch: Iterable[RequestFigures]) -> None:
    """Add requests that drafted to their days, inside the caller's transaction."""
    own: dict[tuple[str, SeriesName], list[Places]] = {}
    for figures in batch:
        if figures.places and figures.drafter:
            name = SeriesName(figures.model, figures.drafter, figures.slice)
            own.setdefault((day_of(figures.began_unix_s), name), []).append(figures.places)
    for (day, name), added in own.items():
        _add_to_day(connection, day, name, added)


def _add_to_day(connection: sqlite3.Connection, day: str, name: SeriesName, added: Sequence[Places]) -> None:
    where = "day = ? AND model = ? AND drafter = ? AND slice = ?"
    found = _row(connection, where, (day, *name))
    if found is None:
        count = connection.execute("SELECT count(*) FROM acceptance WHERE day = ?", (day,)).fetchone()[0]
        if count >= MAX_SERIES:
            name = SeriesName("", "", OTHER)
            found = _row(connection, where, (day, *name))
    number, places = found or (0, ())
    connection.execute(
        "INSERT OR REPLACE INTO acceptance VALUES (?, ?, ?, ?, ?, ?)",
        (day, *name, number + len(added), json.dumps(added_places(places, *added))),
    )


def _row(connection: sqlite3.Connection, where: str, key: tuple[str, ...]) -> tuple[int, Places] | None:
    found = connection.execute(f"SELECT num_requests, places FROM acceptance WHERE {where}", key).fetchone()
    return None if found is None else (int(found[0]), _places(found[1]))


def _places(text: str) -> Places:
    """Raises sqlite3.DataError, as for other damage of the file, where `text` does not hold counts."""
    try:
        places = tuple((int(drafted), int(accepted)) for drafted, accepted in json.loads(text))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise sqlite3.DataError(f"the table acceptance holds {str(text)[:40]!r} where places belong") from error
    if not all(0 <= accepted <= drafted for drafted, accepted in places):
        raise sqlite3.DataError(f"the table acceptance holds {str(text)[:40]!r}: more accepted than drafted tokens")
    return places


def delete_old_days(connection: sqlite3.Connection) -> None:
    """Delete the oldest days of a table with more than `MAX_ROWS`."""
    connection.execute(
        "DELETE FROM acceptance WHERE day < (SELECT day FROM acceptance ORDER BY day DESC LIMIT 1 OFFSET ?)",
        (MAX_ROWS - 1,),
    )


def series_of(connection: sqlite3.Connection, today: str, alpha: float = ALPHA) -> tuple[AcceptanceSeries, ...]:
    """What the whole days before `today` say; the probability of a false alarm in any of them is about `alpha`. Raises
    sqlite3.Error: the file is damaged.
    """
    found: dict[SeriesName, list[AcceptanceDay]] = {}
    rows = connection.execute(
        "SELECT day, model, drafter, slice, num_requests, places FROM acceptance WHERE day < ? ORDER BY day", (today,)
    )
    for day, model, drafter, slice_, number, places in rows:
        name = SeriesName(model, drafter, slice_)
        found.setdefault(name, []).append(AcceptanceDay(day, name, number, _places(places)))
    needed = len(found) / alpha
    return tuple(judge_days(days, needed) for _, days in sorted(found.items()))


def judge_days(days: Sequence[AcceptanceDay], needed: float) -> AcceptanceSeries:
    """The days of one series, judged by the mean of what is won at each place: that too starts at 1 and can be read at
    any time. A place whose share is not known on a day does not move.
    """
    columns = [_wealth(days, place) for place in range(JUDGED_PLACES)]
    wealth = [math.fsum(own) / JUDGED_PLACES for own in zip(*columns, strict=True)]
    fell_on = next((day.day for day, one in zip(days, wealth, strict=True) if one >= needed), "")
    changes = {place: found for place in range(JUDGED_PLACES) if (found := _change(days, place)) is not None}
    place = min(changes, key=lambda one: changes[one][1] - changes[one][0], default=None)
    before, after = (None, None) if place is None else changes[place]
    return AcceptanceSeries(
        days[0].name, tuple(days), wealth[-1], needed, fell_on, None if place is None else place + 1, before, after
    )


def _wealth(days: Sequence[AcceptanceDay], place: int) -> list[float]:
    from foretoken.measure.sequential import drop_evidence  # needs numpy, which a front has no other use for

    shares = [day.share(place) for day in days]
    moved = iter(drop_evidence([share for share in shares if share is not None]).tolist())
    now, found = 1.0, []
    for share in shares:
        now = now if share is None else next(moved)
        found.append(now)
    return found


def _change(days: Sequence[AcceptanceDay], place: int) -> tuple[float, float] | None:
    """The mean share of the days before the last seven, and of those."""
    before = [share for day in days[:-_RECENT_DAYS] if (share := day.share(place)) is not None]
    after = [share for day in days[-_RECENT_DAYS:] if (share := day.share(place)) is not None]
    return (math.fsum(before) / len(before), math.fsum(after) / len(after)) if before and after else None


def as_values(series: AcceptanceSeries, every: Sequence[AcceptanceSeries]) -> dict[str, Any]:
    """A series as plain values for JSON, with the rate of its last `SHOWN_DAYS` days, and a cause where it fell."""
    return {
        **series.name._asdict(),
        "has_fallen": series.has_fallen,
        "fell_on": series.fell_on,
        "evidence": min(series.evidence, 1e12),
        "needed": series.needed,
        "place": series.place,
        "before": series.before,
        "after": series.after,
        "cause": cause_of(series, every) if series.has_fallen else "",
        "days": [
            {"day": one.day, "requests": one.num_requests, "rate": one.rate, "places": one.places}
            for one in series.days[-SHOWN_DAYS:]
        ],
    }


def day_of(unix_s: float) -> str:
    """The day in UTC, as 2026-01-31."""
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def cause_of(series: AcceptanceSeries, every: Sequence[AcceptanceSeries]) -> str:
    """Where to look, by which other series of the same model fell as well."""
    model, drafter, slice_ = series.name
    others = [one for one in every if one.name.model == model and one is not series]
    same_drafter = [one for one in others if one.name.drafter == drafter]
    same_slice = [one for one in others if one.name.slice == slice_]
    if others and all(one.has_fallen for one in others):
        return "every drafter and slice of this model fell: look for a change of the target, its template or sampling"
    if same_slice and not any(one.has_fallen for one in same_slice):
        return f"other drafters did not fall on these requests: look at {drafter} itself (`foretoken diagnose`)"
    if same_drafter and not any(one.has_fallen for one in same_drafter):
        return f"{drafter} did not fall on other slices: the requests of this slice have changed"
    return (
        "nothing to compare it with: `foretoken diagnose` tells a fault of a head or a draft model from other traffic"
    )


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
