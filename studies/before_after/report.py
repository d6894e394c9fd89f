"""The report of a run: its tables, and its samples as results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.measure.report import Report, Table
from studies.before_after.grid import Cell, Grid, Ratio, Sample
from studies.before_after.mixed import PHASE_NAMES, Traces, TraceSample
from studies.before_after.pair import AFTER, BEFORE, Pair

_IDLE_BOUND = 0.02  # of a core, beyond which the waiting child disturbs the other
EXPLAINED = (
    "Two processes, one per checkout, have the model open and take turns on the same requests; while one works the "
    "other waits in a read. A ratio is the median over repeats of ratios of neighbouring turns, with the smallest and "
    "the largest. Tokens per second are those of the whole batch, prompts included, medians over repeats. `requests` "
    "is the mean over requests of their own tokens per second after the first token. Means are geometric, over cells; "
    "their 95 % intervals are by a bootstrap over the repeats of each cell."
)


@dataclass(frozen=True)
class Run:
    """All that a run leaves."""

    command: str
    options: Mapping[str, Any]
    pair: Pair
    samples: Sequence[Sample]
    traces: Sequence[TraceSample]
    interrupted: bool
    load: float


def report_of(run: Run) -> Report:
    """The report of a run, its samples among the results."""
    grid = Grid(run.samples)
    tables: list[Table] = []
    if run.samples:
        tables += [_summary_table(grid), *(_setting_table(grid, name) for name in grid.settings)]
        tables += [_answer_table(grid), _policy_table(grid)]
    if run.traces:
        tables += _trace_tables(Traces(list(run.traces)))
    checkouts = (f"{name}: {_checkout(about)}" for name, about in run.pair.about.items())
    return Report(
        title="Two checkouts compared",
        command=run.command,
        options=run.options,
        results=_results(run, grid),
        tables=tuple(tables),
        explained=EXPLAINED,
        caveats=(*checkouts, *_caveats(run)),
    )


def summary(grid: Grid) -> dict[str, Any]:
    """Geometric means and worst cells of every comparison, by setting."""
    found: dict[str, Any] = {}
    for title, over, under in comparisons(grid.settings):
        ratios = {cell: one for cell in grid.cells if (one := grid.ratio(cell, over, under)) is not None}
        mean = grid.mean_ratio(over, under)
        if not ratios or mean is None:
            continue
        worst = min(ratios, key=lambda cell: ratios[cell].median)
        best = max(ratios, key=lambda cell: ratios[cell].median)
        requests = grid.mean_ratio(over, under, "request_tokens_per_s")
        found[title] = {
            "cells": len(ratios),
            "mean": vars(mean),
            "worst": vars(ratios[worst]) | {"at": _cell(worst)},
            "best": vars(ratios[best]) | {"at": _cell(best)},
            "below_0.97": [_cell(cell) for cell, one in ratios.items() if one.median < 0.97],
            "requests_mean": None if requests is None else vars(requests),
        }
    return found


def comparisons(settings: Sequence[str]) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """(title, over, under) of the ratios that are reported."""
    found = [(f"{name}: after/before", (AFTER, name), (BEFORE, name)) for name in settings]
    for name in settings:
        if name != "plain":
            found += [(f"{name}/plain: {side}", (side, name), (side, "plain")) for side in (AFTER, BEFORE)]
    return found


def _results(run: Run, grid: Grid) -> dict[str, Any]:
    return {
        "kind": "before_after",
        "checkouts": run.pair.about,
        "interrupted": run.interrupted,
        "load_before": run.load,
        "idle_core_share": _idle(run.pair),
        "summary": summary(grid) if run.samples else {},
        "answers": {
            _cell(cell): {name: list(grid.answers(cell, name)) for name in grid.settings} for cell in grid.cells
        },
        "samples": [one.as_dict() for one in run.samples],
        "traces": [vars(one) | {"tokens_per_s": one.tokens_per_s} for one in run.traces],
    }


def _checkout(about: Mapping[str, Any]) -> str:
    if about["commit"] is None:
        return "not under version control"
    return f"commit {about['commit']}{'' if about['clean'] else ', with uncommitted changes'}"


def _caveats(run: Run) -> list[str]:
    found = []
    if run.interrupted:
        found.append("The run was interrupted: this is what had been measured by then.")
    if run.load > 0.5:
        found.append(f"The machine was busy when the run began: load average {run.load:.1f}.")
    idle = _idle(run.pair)
    if idle > _IDLE_BOUND:
        found.append(f"The waiting process used {100 * idle:.1f} % of a core on average.")
    shared = [name for name, about in run.pair.about.items() if not about["separate_policies"]]
    if shared:
        found.append(f"All settings shared one policy, which learnt from all of them, in: {', '.join(shared)}.")
    else:
        found.append(
            "The policy that chooses numbers of draft tokens began anew for each setting and learnt from cell to cell."
        )
    return found


def _summary_table(grid: Grid) -> Table:
    headings = ("comparison", "mean (95 %)", "worst cell", "at", "best cell", "at", "below 0.97", "requests: mean")
    rows = []
    for title, one in summary(grid).items():
        requests = one["requests_mean"]
        rows.append(
            (
                title,
                str(Ratio(**one["mean"])),
                *(text for end in ("worst", "best") for text in (_text(one[end]), one[end]["at"])),
                f"{len(one['below_0.97'])} of {one['cells']}",
                "" if requests is None else str(Ratio(**requests)),
            )
        )
    return Table("Summary over all cells", headings, tuple(rows))


def _setting_table(grid: Grid, name: str) -> Table:
    """A row for every cell: speeds of both, ratios, and what requests saw."""
    headings = ["cell", "before", "after", "after/before"]
    if name != "plain":
        headings += ["after/plain", "before/plain"]
    headings += ["requests before", "after", "after/before"]
    rows = []
    for cell in grid.cells:
        row = [_cell(cell), *(_number(grid.speed(cell, side, name)) for side in (BEFORE, AFTER))]
        row.append(_text_of(grid.ratio(cell, (AFTER, name), (BEFORE, name))))
        if name != "plain":
            row += [_text_of(grid.ratio(cell, (side, name), (side, "plain"))) for side in (AFTER, BEFORE)]
        row += [_number(grid.speed(cell, side, name, "request_tokens_per_s")) for side in (BEFORE, AFTER)]
        row.append(_text_of(grid.ratio(cell, (AFTER, name), (BEFORE, name), "request_tokens_per_s")))
        rows.append(tuple(row))
    return Table(f"{name}: tokens/s", tuple(headings), tuple(rows))


def _answer_table(grid: Grid) -> Table:
    rows = []
    for name in grid.settings:
        counts = [grid.answers(cell, name) for cell in grid.cells]
        total, same, unexplained = (sum(column) for column in zip(*counts, strict=True))
        rows.append((name, str(total), str(same), str(total - same), str(unexplained)))
    headings = ("setting", "answers", "equal", "different", "different without a near tie")
    return Table("Answers of both checkouts compared", headings, tuple(rows))


def _policy_table(grid: Grid) -> Table:
    headings = ("setting", "checkout", "batch", "ms per step", "beyond plain's", "share of a step")
    rows = []
    for name in grid.settings:
        for side in (BEFORE, AFTER):
            for batch in dict.fromkeys(batch for batch, _ in grid.cells):
                found = grid.policy(side, name, batch)
                if found is not None:
                    rows.append((name, side, str(batch), *(f"{ms:.3f}" for ms in found[:2]), f"{100 * found[2]:.1f} %"))
    note = "Time of the engine's phases schedule and observe, and of previews, wherever they are counted."
    return Table("Time that scheduling and the policy take", headings, tuple(rows), (note,), "llr")


def _trace_tables(traces: Traces) -> list[Table]:
    tables = []
    best = traces.best_fixed
    if traces.turns:
        headings = ("checkout", "setting", "tokens/s", "times plain", "times best fixed", *PHASE_NAMES)
        rows = []
        for side, name in traces.turns:
            plain = traces.ratio((side, name), (side, "plain"))
            fixed = None if best is None else traces.ratio((side, name), (AFTER, best))
            speeds = [_number(speed) for speed in traces.phase_speeds((side, name))]
            rows.append((side, name, _number(traces.speed((side, name))), _text_of(plain), _text_of(fixed), *speeds))
        tables.append(Table("A changing load", headings, tuple(rows), (f"Best fixed setting: {best}.",), "llr"))
    screened = tuple((one.setting, _number(one.tokens_per_s)) for one in traces.screened)
    return [*tables, Table("Screening, one run of each fixed setting", ("setting", "tokens/s"), screened)]


def _idle(pair: Pair) -> float:
    return sum(pair.idle) / len(pair.idle) if pair.idle else 0.0


def _cell(cell: Cell) -> str:
    return f"{cell[0]} {cell[1]}"


def _text(values: Mapping[str, Any]) -> str:
    return str(Ratio(values["median"], values["low"], values["high"]))


def _text_of(ratio: Ratio | None) -> str:
    return "" if ratio is None else str(ratio)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
