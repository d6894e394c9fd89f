"""The record of a run: raw numbers as JSON and tables as Markdown."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.startup.machine import machine, versions
from foretoken.printing import markdown
from studies.before_after.grid import Cell, Grid, Ratio, Sample
from studies.before_after.mixed import PHASE_NAMES, Traces, TraceSample
from studies.before_after.pair import AFTER, BEFORE, Pair

_IDLE_BOUND = 0.02  # of a core, beyond which the waiting child disturbs the other
EXPLAINED = (
    "Two processes, one per checkout, have the model open and take turns on the same requests; while one works the "
    "other waits in a read. A ratio is the median over repeats of ratios of neighbouring turns, with the smallest and "
    "the largest. Tokens per second are those of the whole batch, prompts included, medians over repeats. `requests` "
    "is the mean over requests of their own tokens per second after the first token. Means are geometric, over cells; "
    "their intervals hold 95 % of the means when the repeats of each cell are drawn anew with replacement."
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


def write(run: Run, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `YYYY-MM-DD-name.json` and `.md`; an earlier result of the day is kept, and this one numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    stem, taken = f"{date}-{name}", 1
    while (folder / f"{stem}.json").exists():
        taken += 1
        stem = f"{date}-{name}-{taken}"
    raw, page = folder / f"{stem}.json", folder / f"{stem}.md"
    raw.write_text(json.dumps(_record(run, date), indent=1) + "\n", encoding="utf-8")
    page.write_text(_page(run, date, raw.name), encoding="utf-8")
    return raw, page


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


def _record(run: Run, date: str) -> dict[str, Any]:
    grid = Grid(run.samples)
    return {
        "kind": "before_after",
        "command": run.command,
        "date": date,
        "machine": machine(),
        "versions": versions(),
        "checkouts": run.pair.about,
        "options": dict(run.options),
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


def _page(run: Run, date: str, raw: str) -> str:
    lines = [
        f"# Two checkouts compared on {date}",
        "",
        f"    {run.command}",
        "",
        f"- machine: {_listed(machine())}",
        f"- versions: {_listed(versions())}",
        *(f"- {name}: {_checkout(about)}" for name, about in run.pair.about.items()),
        f"- raw numbers: [{raw}]({raw})",
        "",
        EXPLAINED,
        "",
        *(f"- {caveat}" for caveat in _caveats(run)),
    ]
    grid = Grid(run.samples)
    if run.samples:
        lines += _summary_lines(grid)
        for name in grid.settings:
            lines += _setting_lines(grid, name)
        lines += _answer_lines(grid) + _policy_lines(grid)
    if run.traces:
        lines += _trace_lines(Traces(list(run.traces)))
    return markdown.page(lines)


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
        found.append("What chooses numbers of guesses began anew for each setting and learnt from cell to cell.")
    return found


def _summary_lines(grid: Grid) -> list[str]:
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
    return ["", "## Summary over all cells", "", *markdown.table(headings, rows)]


def _setting_lines(grid: Grid, name: str) -> list[str]:
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
        rows.append(row)
    return ["", f"## {name}: tokens/s", "", *markdown.table(headings, rows)]


def _answer_lines(grid: Grid) -> list[str]:
    rows = []
    for name in grid.settings:
        counts = [grid.answers(cell, name) for cell in grid.cells]
        total, same, unexplained = (sum(column) for column in zip(*counts, strict=True))
        rows.append((name, str(total), str(same), str(total - same), str(unexplained)))
    headings = ("setting", "answers", "equal", "different", "different without a near tie")
    return ["", "## Answers of both checkouts compared", "", *markdown.table(headings, rows)]


def _policy_lines(grid: Grid) -> list[str]:
    headings = ("setting", "checkout", "batch", "ms per step", "beyond plain's", "share of a step")
    rows = []
    for name in grid.settings:
        for side in (BEFORE, AFTER):
            for batch in dict.fromkeys(batch for batch, _ in grid.cells):
                found = grid.policy(side, name, batch)
                if found is not None:
                    rows.append((name, side, str(batch), *(f"{ms:.3f}" for ms in found[:2]), f"{100 * found[2]:.1f} %"))
    note = "Time of the engine's phases schedule and observe, and of previews, wherever they are counted."
    return ["", "## Time that scheduling and the policy take", "", note, "", *markdown.table(headings, rows, "llr")]


def _trace_lines(traces: Traces) -> list[str]:
    lines = ["", "## A changing load", ""]
    best = traces.best_fixed
    if traces.turns:
        headings = ["checkout", "setting", "tokens/s", "times plain", "times best fixed", *PHASE_NAMES]
        rows = []
        for side, name in traces.turns:
            plain = traces.ratio((side, name), (side, "plain"))
            fixed = None if best is None else traces.ratio((side, name), (AFTER, best))
            speeds = [_number(speed) for speed in traces.phase_speeds((side, name))]
            rows.append([side, name, _number(traces.speed((side, name))), _text_of(plain), _text_of(fixed), *speeds])
        lines += [f"Best fixed setting: {best}.", "", *markdown.table(headings, rows, "llr")]
    rows = [[one.setting, _number(one.tokens_per_s)] for one in traces.screened]
    return [*lines, "", "Screening, one run of each fixed setting:", "", *markdown.table(["setting", "tokens/s"], rows)]


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


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
