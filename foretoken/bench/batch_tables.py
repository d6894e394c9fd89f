"""Tables of a grid of batch sizes and slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretoken.bench.batch_rows import BAR, BatchRow, grid_summary
from foretoken.bench.measure import PLAIN
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Table

_SUMMARY = (  # heading, key of the summary
    ("ratio to plain", "speedup"),
    ("worst", "worst_speedup"),
    ("at", "worst_speedup_at"),
    ("ratio to best fixed", "to_best_fixed"),
    ("worst", "worst_to_best_fixed"),
    ("at", "worst_to_best_fixed_at"),
    (f"cells below {BAR}", "cells_below_bar"),
    ("ratio to best single fixed", "to_single_fixed"),
    ("decoding: ratio to plain", "decode_speedup"),
    ("worst", "decode_worst_speedup"),
    ("ratio to best fixed", "decode_to_best_fixed"),
    ("worst", "decode_worst_to_best_fixed"),
    ("requests: ratio to plain", "request_speedup"),
    ("worst", "request_worst_speedup"),
    ("ratio to best fixed", "request_to_best_fixed"),
    ("worst", "request_worst_to_best_fixed"),
    (f"cells below {BAR}", "request_cells_below_bar"),
    ("differing", "differing"),
    ("unexplained", "unexplained"),
)


def slice_tables(rows: Sequence[BatchRow]) -> list[Table]:
    """Throughput of every setting by batch size, a table per slice."""
    return [
        _table(rows, name, f"{name}: tokens/s, ratio to plain, ratio to best fixed", _speed_cell)
        for name in _slices(rows)
    ]


def request_tables(rows: Sequence[BatchRow]) -> list[Table]:
    """Speed of single requests by batch size, a table per slice."""
    return [
        _table(rows, name, f"{name}: a request's own tokens/s, ratio to plain, ratio to best fixed", _request_cell)
        for name in _slices(rows)
    ]


def choice_tables(rows: Sequence[BatchRow]) -> list[Table]:
    """Draft tokens and emitted tokens per round, a table per slice."""
    drafting = [row for row in rows if row.setting != PLAIN]
    return [
        _table(drafting, name, f"{name}: draft tokens per round, tokens per round", _choice_cell)
        for name in _slices(drafting)
    ]


def batch_plots(rows: Sequence[BatchRow]) -> tuple[Plot, ...]:
    """Throughput of every setting by batch size, a plot per slice."""
    plots = []
    for name in _slices(rows):
        series: dict[str, list[Point]] = {}
        for row in sorted((row for row in rows if row.slice == name), key=lambda row: row.batch):
            series.setdefault(row.setting, []).append(Point(str(row.batch), row.tokens_per_s))
        lines = tuple(Series(setting, tuple(points)) for setting, points in series.items())
        plots.append(Plot(f"Throughput: {name}", "tokens per second", lines, "lines", "requests at once"))
    return tuple(plots)


def _slices(rows: Sequence[BatchRow]) -> list[str]:
    return list(dict.fromkeys(row.slice for row in rows))


def _table(rows: Sequence[BatchRow], name: str, title: str, cell: Callable[[BatchRow], str]) -> Table:
    own = {(row.setting, row.batch): row for row in rows if row.slice == name}
    batches = sorted({batch for _, batch in own})
    lines = [
        (setting, *("" if (setting, batch) not in own else cell(own[setting, batch]) for batch in batches))
        for setting in dict.fromkeys(setting for setting, _ in own)
    ]
    return Table(title, ("setting", *(f"batch {batch}" for batch in batches)), tuple(lines))


def _speed_cell(row: BatchRow) -> str:
    speed = f"{row.tokens_per_s:.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.1f}"
    return f"{speed} {row.speedup:.2f} {row.to_best_fixed:.2f}" + ("!" if row.num_contended else "")


def _request_cell(row: BatchRow) -> str:
    return f"{row.request_tokens_per_s:.1f} {row.request_speedup:.2f} {row.request_to_best_fixed:.2f}"


def _choice_cell(row: BatchRow) -> str:
    return f"{row.num_draft:.1f} {row.emitted_per_step:.2f}"


def summary_table(rows: Sequence[BatchRow]) -> Table:
    """Every setting over all cells: geometric means and worst cells."""
    lines = []
    for name, one in grid_summary(rows).items():
        cells = [one[key] for _, key in _SUMMARY]
        lines.append((name, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)))
    headings = ("setting", *(heading for heading, _ in _SUMMARY))
    return Table("summary: geometric means over all cells", headings, tuple(lines))
