"""What a run found, for the eye, for programs, and for the record.

A number never travels alone: the machine, the versions, the command and what to be careful about go with it.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.compare import SUMMARY_NOTE, against_peer, by_position, summary
from foretoken.bench.measure import ALL_SLICES, PLAIN, Row
from foretoken.engine.startup.machine import machine as machine
from foretoken.engine.startup.machine import versions as versions
from foretoken.errors import InputError, StorageError
from foretoken.printing import markdown as pages
from foretoken.printing.console import Console
from foretoken.printing.text import visible

_PLOT_SUFFIXES = (".png", ".svg")
_COLUMNS = (
    *(
        "setting",
        "tok/s",
        "min-max",
        "speedup",
        "accepted",
        "by position",
        "tok/step",
        "ms/step",
        "draft+target+rest",
        "first token",
    ),
    *("repeats", "same", "vs peer"),
)


@dataclass(frozen=True)
class Report:
    """Rows with everything needed to judge them; `files` are those that were written."""

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    rows: tuple[Row, ...]
    ratios: Mapping[str, Mapping[str, float]]
    caveats: tuple[str, ...]
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    files: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that do not exist are None."""
        return {f.name: as_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def json_line(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)


def as_plain(value: object) -> object:
    """`value` as JSON takes it: dataclasses as objects, tuples as lists, paths as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def print_report(report: Report, console: Console | None = None) -> None:
    """Tables for a terminal, one per slice and temperature, then ratios, caveats and the files written."""
    console = console or Console()
    for (name, temperature), rows in _groups(report.rows).items():
        console.table(_COLUMNS, [_cells(row, rows) for row in rows], title=f"{name}, temperature {temperature:g}")
        console.line()
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        lines = summary(report.rows, temperature)
        if lines:
            console.table(lines[0], lines[1:], title=f"summary, temperature {temperature:g}")
            console.line(SUMMARY_NOTE)
            console.line()
    for name, found in report.ratios.items():
        if found:
            console.line(f"{name}: " + ", ".join(f"{key} {value:.2f}x" for key, value in found.items()))
    print_notes(console, report.caveats, report.files)


def print_notes(console: Console, caveats: Sequence[str], files: Sequence[str | Path]) -> None:
    """What to be careful about, and the files written."""
    for caveat in caveats:
        console.line(f"note: {caveat}")
    for file in files:
        console.line(f"written: {file}")


def _groups(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.slice, row.temperature), []).append(row)
    return groups


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    peer = against_peer(row, rows)
    parts = (row.draft_ms_per_step, row.verify_ms_per_step, row.rest_ms_per_step)
    return (
        row.setting + (" (lossy)" if row.lossy else ""),
        _number(row.tokens_per_s),
        f"{_number(row.tokens_per_s_min)}-{_number(row.tokens_per_s_max)}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        _percent(row.acceptance_rate),
        by_position(row),
        "" if row.emitted_per_step is None else f"{row.emitted_per_step:.2f}",
        _number(row.step_ms),
        "" if None in parts else "+".join(_number(part) for part in parts),
        "" if row.ttft_s is None else f"{1e3 * row.ttft_s:.0f} ms",
        _percent(row.repeated_4grams),
        _identical(row),
        "" if peer is None else f"{peer[0]:.2f}x {peer[1]}",
    )


def _number(value: float | None) -> str:
    """Three digits or so: what a measurement is worth."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _identical(row: Row) -> str:
    if row.identical is None or (row.identical and row.setting == PLAIN):
        return ""
    return "yes" if row.identical else f"no ({len(row.differences)})"


def write_result(report: Report, folder: Path, name: str) -> Report:
    """Write `folder/YYYY-MM-DD-name.json` and `.md`; an earlier result of the day is kept, and this one numbered.

    Returns the report with the files named.

    Raises:
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stem = free_stem(folder, report.date, name)
        files = (folder / f"{stem}.json", folder / f"{stem}.md")
        report = dataclasses.replace(report, files=(*report.files, *map(str, files)))
        files[0].write_text(json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files[1].write_text(markdown(report, files[0].name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the result to {folder}: {error}") from error
    return report


def free_stem(folder: Path, date: str, name: str) -> str:
    """`YYYY-MM-DD-name`, with a number behind it where a result of that name is already there."""
    stem = first = f"{date[:10]}-{name}"
    taken = 1
    while (folder / f"{stem}.json").exists():
        taken += 1
        stem = f"{first}-{taken}"
    return stem


def markdown(report: Report, raw: str | None = None) -> str:
    """The report as a page: command, machine, versions, caveats, then the tables; `raw` names the JSON beside it."""
    machine_line = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    lines = [
        f"# Measured on {report.date[:10]}",
        "",
        f"    {report.command}",
        "",
        f"- machine: {machine_line}",
        f"- versions: {', '.join(f'{key} {value}' for key, value in report.versions.items())}",
        *([f"- raw numbers: [{raw}]({raw})"] if raw else []),
        "",
        (
            "tok/s is the median over repeats of the tokens after the prompt's own pass; speedup is against "
            "`plain` on the same slice in the same run."
        ),
        "`repeats` is the share of 4-grams that an output had used before: loops flatter every drafter. "
        "`same` says whether all greedy outputs "
        "equal plain decoding's. `by position` is the per cent accepted at the 1st, 2nd, ... guess; `vs "
        "peer` compares with "
        "the fastest other engine that drafts the same way.",
        "",
        *(f"- {caveat}" for caveat in report.caveats),
    ]
    for (name, temperature), rows in _groups(report.rows).items():
        lines += [
            "",
            f"## {name}, temperature {temperature:g}",
            "",
            *pages.table(_COLUMNS, [_cells(row, rows) for row in rows]),
        ]
        places = [
            f"{row.setting} {' '.join(f'{share:.2f}' for share in row.acceptance_per_position)}"
            for row in rows
            if row.acceptance_per_position
        ]
        if places:
            lines += ["", f"Accepted by position: {'; '.join(places)}."]
        lines += _difference_lines(rows)
        if temperature == 0.0 and report.ratios.get(name):
            lines += [
                "",
                "Ratios: " + ", ".join(f"{key} {value:.2f}x" for key, value in report.ratios[name].items()) + ".",
            ]
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        lines += _summary_lines(summary(report.rows, temperature), temperature)
    return pages.page(lines)


def _summary_lines(lines: list[list[str]], temperature: float) -> list[str]:
    if not lines:
        return []
    return ["", f"## Summary, temperature {temperature:g}", "", SUMMARY_NOTE, "", *pages.table(lines[0], lines[1:])]


def _difference_lines(rows: Sequence[Row]) -> list[str]:
    told = [
        (
            f"{row.setting} at "
            f"{', '.join(' '.join(f'{key} {value}' for key, value in place.items()) for place in row.differences)}"
        )
        for row in rows
        if row.differences
    ]
    return ["", f"Greedy outputs that leave plain decoding's: {'; '.join(told)}."] if told else []


def check_name(name: str) -> None:
    """Refuse a result name that is not a plain file name.

    Raises:
        InputError: other characters than letters, digits, `.`, `_` and `-`.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError("name", name, "use letters, digits, '.', '_' and '-' only; the date is added")


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before anything is measured.

    Raises:
        InputError: an unknown suffix, or matplotlib is missing.
    """
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise InputError("plot", str(path), f"the file name must end in {' or '.join(_PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("plot", str(path), "plots need matplotlib: pip install 'foretoken[plot]'")


def write_plot(report: Report, path: Path) -> None:
    """Bars of greedy tokens per second by slice and setting, with the extremes over repeats as whiskers.

    Raises:
        InputError: an unknown suffix, or matplotlib is missing.
        StorageError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    lowest = min((row.temperature for row in report.rows), default=0.0)
    rows = [row for row in report.rows if row.temperature == lowest]
    names = [name for name in dict.fromkeys(row.slice for row in rows) if name != ALL_SLICES] or [ALL_SLICES]
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = Figure(figsize=(max(6.0, 1.0 + 0.25 * len(names) * (len(settings) + 1)), 4.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(settings))
    for place, setting in enumerate(settings):
        own = {row.slice: row for row in rows if row.setting == setting}
        at = [i for i, name in enumerate(names) if name in own]
        chosen = [own[names[i]] for i in at]
        spread = (
            [r.tokens_per_s - r.tokens_per_s_min for r in chosen],
            [r.tokens_per_s_max - r.tokens_per_s for r in chosen],
        )
        axes.bar(
            [i + (place + 0.5) * width - 0.4 for i in at],
            [r.tokens_per_s for r in chosen],
            width,
            yerr=spread,
            label=_label(setting),
        )
    axes.set_xticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylabel("tokens per second")
    axes.set_title(_label(f"temperature {lowest:g}, {report.machine.get('cpu', '')}"), fontsize=9)
    figure.legend(loc="outside lower center", fontsize=7, ncols=4)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise StorageError(f"cannot write the plot to {path}: {error}") from error


def _label(text: str) -> str:
    """`text` in a plot, where dollar signs would enclose a formula."""
    return visible(text).replace("$", r"\$")


def source_caveats(target: Path, draft: Path | None, load: float) -> list[str]:
    """What to be careful about: enlarged checkpoints, and a machine that is busy with something else (`load`:
    average).
    """
    caveats = []
    for role, folder in (("target", target), ("draft", draft)):
        if folder is not None and is_widened(folder):
            caveats.append(
                f"The {role} is a small trained checkpoint, widened: its added weights cost real time but "
                "cannot change its outputs. "
                "Acceptance is that of the small pair."
            )
    cores = os.cpu_count() or 1
    if load > 0.5 * cores:
        caveats.append(
            f"The machine was busy when the run began: load average {load:.1f} on {cores} cores. Trust "
            "ratios, not absolute numbers."
        )
    return caveats


def is_widened(checkpoint: Path) -> bool:
    """Whether `foretoken widen` made this checkpoint: its config says so."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "widened" in config
