"""The tables of a speed measurement, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.compare import SUMMARY_NOTE, against_peer, by_position, ratios, summary
from foretoken.bench.measure import PLAIN, SpeedRow
from foretoken.bench.report import Report, Table

EXPLAINED = (
    "tok/s is the median over repeats of the tokens after the prompt's forward pass; speedup is against `plain` on "
    "the same slice in the same run. `repeats` is the share of 4-grams that an output had used before: repetition "
    "raises the acceptance of every drafter. `same` says whether all greedy outputs equal those of plain decoding. "
    "`by position` is the acceptance in per cent at the 1st, 2nd, ... draft token; `vs peer` compares with the fastest "
    "other engine that drafts in the same way."
)
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


def speed_report(
    rows: Sequence[SpeedRow],
    options: Mapping[str, Any],
    command: str,
    caveats: Sequence[str],
    **about: Any,  # noqa: ANN401 - versions, machine and date, where they are known
) -> Report:
    """The report of `rows`, with a table per slice and temperature and a summary per temperature."""
    found = ratios(rows)
    return Report(
        title="Speed",
        command=command,
        options=options,
        results={"rows": tuple(rows), "ratios": found},
        tables=speed_tables(rows, found),
        explained=EXPLAINED,
        caveats=tuple(caveats),
        **about,
    )


def speed_tables(rows: Sequence[SpeedRow], found: Mapping[str, Mapping[str, float]]) -> tuple[Table, ...]:
    """A table per slice and temperature with its ratios (`found`, by slice, greedy), and a summary per temperature."""
    tables = []
    for (name, temperature), own in _groups(rows).items():
        lines = tuple(_cells(row, own) for row in own)
        notes = (*_position_notes(own), *_difference_notes(own))
        if temperature == 0.0 and found.get(name):
            notes += ("Ratios: " + ", ".join(f"{key} {value:.2f}x" for key, value in found[name].items()) + ".",)
        tables.append(Table(f"{name}, temperature {temperature:g}", _COLUMNS, lines, notes))
    for temperature in dict.fromkeys(row.temperature for row in rows):
        short = summary(rows, temperature)
        if short:
            lines = tuple(map(tuple, short[1:]))
            tables.append(Table(f"Summary, temperature {temperature:g}", tuple(short[0]), lines, (SUMMARY_NOTE,)))
    return tuple(tables)


def _groups(rows: Sequence[SpeedRow]) -> dict[tuple[str, float], list[SpeedRow]]:
    groups: dict[tuple[str, float], list[SpeedRow]] = {}
    for row in rows:
        groups.setdefault((row.slice, row.temperature), []).append(row)
    return groups


def _cells(row: SpeedRow, rows: Sequence[SpeedRow]) -> tuple[str, ...]:
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


def _identical(row: SpeedRow) -> str:
    if row.identical is None or (row.identical and row.setting == PLAIN):
        return ""
    return "yes" if row.identical else f"no ({len(row.differences)})"


def _position_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    """Acceptance at every position, where a row has any."""
    found = [
        f"{row.setting} {' '.join(f'{share:.2f}' for share in row.acceptance_per_position)}"
        for row in rows
        if row.acceptance_per_position
    ]
    return (f"Accepted by position: {'; '.join(found)}.",) if found else ()


def _difference_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    told = [
        (
            f"{row.setting} at "
            f"{', '.join(' '.join(f'{key} {value}' for key, value in place.items()) for place in row.differences)}"
        )
        for row in rows
        if row.differences
    ]
    return (f"Greedy outputs that differ from plain decoding: {'; '.join(told)}.",) if told else ()
