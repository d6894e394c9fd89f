"""What an evaluation prints: a table of rates, one of positions, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.evaluate.compare import EvalComparison
from foretoken.printing.console import Console

_EXPLAINED = (
    "acceptance: accepted / drafted tokens. per draft: accepted tokens. at full length: the same, expected of drafts "
    "that have all positions. per step: emitted tokens. In brackets 95 % intervals by a bootstrap over prompts. "
    "position: the chance that the token there is accepted, given that the one before it was."
)
_OUTCOME_STYLES = {"lost": "bold red", "undecided": "yellow", "kept": None}
_MOST_POSITIONS = 8


def print_rows(rows: Sequence[Mapping[str, Any]], notes: Sequence[str], complete: bool, console: Console) -> None:
    """The rates of every cell with their intervals, and what the columns mean."""
    columns = min(_MOST_POSITIONS, max((len(row["positions"]) for row in rows), default=0))
    headings = (
        *(
            "drafter",
            "slice",
            "temperature",
            "rule",
            "prompts",
            "acceptance",
            "per draft",
            "at full length",
            "per step",
        ),
        *(f"position {place + 1}" for place in range(columns)),
    )
    console.table(headings, [_cells(row, columns) for row in rows], justify="llrlr")
    console.line(_EXPLAINED)
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
            _rate(change.loss)
            + ("" if change.interval is None else _brackets(change.interval.low, change.interval.high)),
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


def _cells(row: Mapping[str, Any], columns: int) -> tuple[str, ...]:
    positions = [_rate(one["rate"]) for one in row["positions"][:columns]]
    return (
        row["drafter"],
        row["slice"],
        f"{row['temperature']:g}",
        "+".join(row["rules"]),
        str(row["num_prompts"]),
        _with_interval(row, "acceptance_rate"),
        _with_interval(row, "accepted_per_draft"),
        _rate(row["accepted_at_length"][-1] if row["accepted_at_length"] else None),
        _with_interval(row, "emitted_per_step"),
        *positions,
        *[""] * (columns - len(positions)),
    )


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    ends = row["acceptance_interval" if name == "acceptance_rate" else f"{name}_interval"]
    return _rate(row[name]) + ("" if ends is None else _brackets(*ends))


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _brackets(low: float, high: float) -> str:
    return f" [{low:.3f}, {high:.3f}]"
