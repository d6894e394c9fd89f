"""What an evaluation prints: a table of rates, one of positions, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.evaluate.compare import EvalComparison
from foretoken.evaluate.intervals import Interval
from foretoken.printing.console import Console

_EXPLAINED = (
    "acceptance: accepted / drafted tokens; per step: emitted tokens per forward pass of the target; in brackets 95 % "
    "intervals by a bootstrap over prompts.",
    "By position: the chance that the token there is accepted, given that the one before it was; per draft: accepted "
    "tokens; at full length: the same, expected of drafts that have all positions.",
)
_OUTCOME_STYLES = {"lost": "bold red", "undecided": "yellow", "kept": None}
_MOST_POSITIONS = 8


def print_rows(rows: Sequence[Mapping[str, Any]], notes: Sequence[str], complete: bool, console: Console) -> None:
    """The rates of every cell with their intervals, and what the columns mean."""
    rates = ("drafter", "slice", "temperature", "rule", "prompts", "acceptance", "per step")
    console.table(rates, [_rates(row) for row in rows], title="Acceptance", justify="llrlr")
    console.line()
    columns = min(_MOST_POSITIONS, max((len(row["positions"]) for row in rows), default=0))
    places = map(str, range(1, columns + 1))
    headings = ("drafter", "slice", "temperature", *places, "per draft", "at full length")
    console.table(headings, [_positions(row, columns) for row in rows], title="By position", justify="llr")
    for line in _EXPLAINED:
        console.line(line)
    if any(row["num_prompts"] < 2 for row in rows):
        console.line("note: one prompt has no interval")
    for note in notes:
        console.line(f"note: {note}")
    if not complete:
        console.line("note: incomplete, the run was interrupted", style="yellow")


def print_comparison(found: EvalComparison, console: Console) -> None:
    """The change of every cell, the verdict, and what differs in the identities."""
    console.line()
    headings = ("outcome", "drafter", "slice", "temperature", "prompts", "before", "after", "lost")
    lines = [
        (
            change.outcome,
            change.cell.drafter,
            change.cell.slice,
            f"{change.cell.temperature:g}",
            str(change.num_prompts) + ("" if change.paired else ", others"),
            _rate(change.before),
            _rate(change.after),
            _rate(change.loss) + _brackets(_ends(change.interval)),
        )
        for change in found.cells
    ]
    console.table(
        headings,
        lines,
        title="Against the earlier file",
        justify="lllrr",
        styles=[_OUTCOME_STYLES[c.outcome] for c in found.cells],
    )
    console.line(found.verdict, style="bold red" if found.lost else "bold green")
    for text in found.changed or ("target, drafts and versions are those of the earlier file",):
        console.line(f"changed: {text}" if found.changed else text)
    for note in found.notes:
        console.line(f"note: {note}")


def _rates(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *_place(row),
        "+".join(row["rules"]),
        str(row["num_prompts"]),
        _rate(row["acceptance_rate"]) + _brackets(row["acceptance_interval"]),
        _rate(row["emitted_per_step"]) + _brackets(row["emitted_per_step_interval"]),
    )


def _positions(row: Mapping[str, Any], columns: int) -> tuple[str, ...]:
    chances = [_rate(one["rate"]) for one in row["positions"][:columns]]
    full = row["accepted_at_length"][-1:]
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


def _ends(found: Interval | None) -> tuple[float, float] | None:
    return None if found is None else (found.low, found.high)


def _brackets(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
