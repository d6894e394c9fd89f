"""The report of an evaluation: a table of rates, one of positions, the comparison, and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.measure.eval.compare import EvalComparison
from foretoken.measure.eval.result import EvalResult
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.price import PriceRow, price_tables
from foretoken.measure.report import Report, Table
from foretoken.measure.stats import FEW_PROMPTS, MIN_GROUPS
from foretoken.measure.stats import ends as ends_of

_EXPLAINED = (
    "acceptance: accepted / drafted tokens; per step: emitted tokens per forward pass of the target; in brackets 95 % "
    "intervals by a bootstrap over prompts. By position: the chance that the token there is accepted, given that the "
    "one before it was; per draft: accepted tokens; at full length: the same, expected of drafts that have all "
    "positions."
)
_OUTCOME_STYLES = {"lost": "bold red", "undecided": "yellow", "kept": None}
_MAX_POSITIONS = 8
_UNKNOWN = "not reported"
_PRICED = (
    "Whole answers, their prompts included, one request at a time, drafters without what they learnt of other answers. "
    "A machine under load costs less."
)


def eval_report(
    result: EvalResult, rows: Sequence[Mapping[str, Any]], found: EvalComparison | None, prices: Sequence[PriceRow] = ()
) -> Report:
    """The report of an evaluation, with the comparison where there is one, whose verdict is then its heading."""
    few = (FEW_PROMPTS,) if any(row["num_prompts"] < MIN_GROUPS for row in rows) else ()
    kept = result.options.get("resume")
    remedy = f"; go on with the same options and --resume {kept}" if kept else ""
    changed = ["target, drafts and versions are those of the earlier file"]
    if found is not None and found.changed:
        changed = [f"changed: {text}" for text in found.changed]
    stopped = () if result.complete else (f"incomplete, the run was interrupted{remedy}",)
    return Report(
        title="Acceptance",
        command=result.command,
        options=result.options,
        results={"rows": rows, "prices": tuple(prices), "interrupted": not result.complete},
        tables=(
            *_rate_tables(rows),
            *price_tables(prices, "slice, temperature", _PRICED, result.options.get("slo_ms")),
            *(() if found is None else (_comparison_table(found),)),
        ),
        explained=_EXPLAINED,
        caveats=(*few, *result.notes, *stopped, *(() if found is None else found.notes)),
        conclusions=() if found is None else tuple(changed),
        verdict="" if found is None else found.verdict,
        passed=found is None or not found.lost,
        plots=_plots(rows),
        machine=result.machine,
        versions=result.versions,
        date=result.date,
    )


def _rate_tables(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, Table]:
    """The rates of every cell with their intervals, and by position."""
    rates = ("drafter", "slice", "temperature", "rule", "prompts", "acceptance", "per step")
    columns = min(
        _MAX_POSITIONS, max((1 if row["positions"] is None else len(row["positions"]) for row in rows), default=0)
    )
    places = map(str, range(1, columns + 1))
    headings = ("drafter", "slice", "temperature", *places, "per draft", "at full length")
    return (
        Table("Acceptance", rates, tuple(map(_rates, rows)), justify="llrlr"),
        Table("By position", headings, tuple(_positions(row, columns) for row in rows), justify="llr"),
    )


def _comparison_table(found: EvalComparison) -> Table:
    """The change of every cell."""
    headings = ("outcome", "drafter", "slice", "temperature", "prompts", "before", "after", "lost")
    lines = tuple(
        (
            change.outcome,
            change.cell.drafter,
            change.cell.slice,
            f"{change.cell.temperature:g}",
            str(change.num_prompts) + ("" if change.paired else ", others"),
            _rate(change.before),
            _rate(change.after),
            _rate(change.loss) + _brackets(ends_of(change.interval)),
        )
        for change in found.cells
    )
    styles = tuple(_OUTCOME_STYLES[change.outcome] for change in found.cells)
    return Table("Against the earlier file", headings, lines, justify="lllrr", styles=styles)


def _plots(rows: Sequence[Mapping[str, Any]]) -> tuple[Plot, ...]:
    """Acceptance rates of all drafters by slice and temperature, then for each of these the chance by position."""
    rates: dict[str, list[Point]] = {}
    by_place: dict[str, list[Series]] = {}
    for row in rows:
        where = f"{row['slice'] or 'all prompts'}, temperature {row['temperature']:g}"
        if row["acceptance_rate"] is not None:
            ends = row["acceptance_interval"] or (None, None)
            rates.setdefault(row["drafter"], []).append(Point(where, row["acceptance_rate"], *ends))
        chances = tuple(
            Point(str(one["position"]), one["rate"], *(one["interval"] or (None, None)))
            for one in row["positions"] or ()
            if one["rate"] is not None
        )
        by_place.setdefault(where, []).append(Series(row["drafter"], chances))
    return (
        Plot("Acceptance rate", "accepted / drafted", tuple(Series(name, tuple(own)) for name, own in rates.items())),
        *(
            Plot(f"Acceptance by position: {where}", "chance", tuple(own), "lines", "position in the draft")
            for where, own in by_place.items()
        ),
    )


def _rates(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *_place(row),
        "+".join(row["rules"]) or "-",
        str(row["num_prompts"]),
        _rate(row["acceptance_rate"]) + _brackets(row["acceptance_interval"]),
        _rate(row["emitted_per_step"]) + _brackets(row["emitted_per_step_interval"]),
    )


def _positions(row: Mapping[str, Any], columns: int) -> tuple[str, ...]:
    positions = row["positions"]
    chances = [_UNKNOWN] if positions is None else [_rate(one["rate"]) for one in positions[:columns]]
    full = (row["accepted_at_length"] or [])[-1:]
    return (
        *_place(row),
        *chances,
        *[""] * (columns - len(chances)),
        _rate(row["accepted_per_draft"]),
        *([_rate(one["expected"]) + _brackets(one["interval"]) for one in full] or ["-"]),
    )


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["drafter"], row["slice"], f"{row['temperature']:g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _brackets(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
