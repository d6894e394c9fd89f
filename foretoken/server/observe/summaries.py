"""Questions to the history: summaries by day, drafter, slice or key, and the values behind them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.server.observe.figures import quantile
from foretoken.server.observe.history import COLUMNS, connect_reading

# What requests can be grouped by, and filtered by. Days are those of UTC.
GROUPS: Mapping[str, str] = {
    "day": "date(began_unix_s, 'unixepoch')",
    **{name: name for name in ("drafter", "slice", "key", "model", "route", "rule", "why_plain", "finish_reason")},
}
QUANTILES = (0.5, 0.95, 0.99)
_MEASURED = ("ttft_s", "inter_token_s", "tokens_per_s", "duration_s", "queued_s")


@dataclass(frozen=True)
class HistorySummary:
    """Requests that share a group. `group` has a value for each name that was asked for.

    `quantiles` has by figure (`ttft_s`, `inter_token_s`, `tokens_per_s`, `duration_s`, `queued_s`) the 50th, 95th and
    99th of the successful requests; empty where none has it. `speedup` is the mean estimated speedup over plain
    decoding, None while unknown; `wasted_share` the part of drafting and verifying spent on rejected tokens.
    """

    group: tuple[str, ...]
    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    acceptance_rate: float | None
    accepted_per_draft: float | None
    wasted_share: float | None
    speedup: float | None
    quantiles: Mapping[str, Mapping[float, float]]


def summarise(
    path: Path,
    by: Sequence[str] = (),
    since_unix_s: float = 0.0,
    until_unix_s: float = 1e18,
    where: Mapping[str, str] | None = None,
) -> list[HistorySummary]:
    """The requests that began in [since, until), grouped by names of `GROUPS`; `where` keeps groups of those values.

    Raises:
        ConfigError: a name that is none of `GROUPS`.
        StorageError: the file cannot be read.
    """
    groups = [_group(name) for name in by]
    condition, values = _condition(since_unix_s, until_unix_s, where)
    names = ", ".join(groups) if groups else "''"
    with closing(connect_reading(path)) as connection:
        totals = connection.execute(
            f"SELECT {names}, count(*), sum(status >= 400), sum(num_prompt_tokens), sum(num_completion_tokens), "
            "sum(num_drafts), sum(num_drafted), sum(num_accepted), sum(wasted_s), sum(draft_s + verify_s), "
            f"avg(estimated_speedup) FROM requests WHERE {condition} GROUP BY {names} ORDER BY {names}",
            values,
        ).fetchall()
        quantiles = {name: dict(_quantiles(connection, name, names, condition, values)) for name in _MEASURED}
    width = max(1, len(groups))
    return [_summary(row[:width], row[width:], quantiles, bool(groups)) for row in totals if row[width]]


def values_of_history(
    path: Path,
    figure: str,
    since_unix_s: float = 0.0,
    until_unix_s: float = 1e18,
    where: Mapping[str, str] | None = None,
) -> list[float]:
    """One figure of every successful request that has it, oldest first: what a comparison of two settings rests on.

    Raises:
        ConfigError: no such column.
        StorageError: the file cannot be read.
    """
    if figure not in COLUMNS:
        raise ConfigError("figure", figure, f"choose one of {', '.join(COLUMNS)}")
    condition, values = _condition(since_unix_s, until_unix_s, where)
    with closing(connect_reading(path)) as connection:
        rows = connection.execute(
            f"SELECT {figure} FROM requests WHERE {condition} AND status < 400 AND {figure} IS NOT NULL "
            "ORDER BY began_unix_s, id",
            values,
        )
        return [row[0] for row in rows]


def _summary(
    group: Sequence[object],
    row: Sequence[float],
    quantiles: Mapping[str, Mapping[tuple[object, ...], Mapping[float, float]]],
    is_grouped: bool,
) -> HistorySummary:
    num_requests, num_failed, prompt, completion, drafts, drafted, accepted, wasted_s, spent_s, speedup = row
    found = {name: by_group[tuple(group)] for name, by_group in quantiles.items() if tuple(group) in by_group}
    return HistorySummary(
        group=tuple(str(value) for value in group) if is_grouped else (),
        num_requests=int(num_requests),
        num_failed=int(num_failed),
        num_prompt_tokens=int(prompt),
        num_completion_tokens=int(completion),
        num_drafts=int(drafts),
        num_drafted=int(drafted),
        num_accepted=int(accepted),
        acceptance_rate=accepted / drafted if drafted else None,
        accepted_per_draft=accepted / drafts if drafts else None,
        wasted_share=wasted_s / spent_s if spent_s else None,
        speedup=speedup,
        quantiles=found,
    )


def _quantiles(
    connection: sqlite3.Connection, figure: str, names: str, condition: str, values: Sequence[object]
) -> Iterator[tuple[tuple[object, ...], dict[float, float]]]:
    """The quantiles of a figure by group; SQLite sorts, so no more than one group is in memory."""
    rows = connection.execute(
        f"SELECT {names}, {figure} FROM requests WHERE {condition} AND status < 400 AND {figure} IS NOT NULL "
        f"ORDER BY {names}, {figure}",
        values,
    )
    for group, members in groupby(rows, key=lambda row: tuple(row[:-1])):
        ordered = [row[-1] for row in members]
        yield group, {share: found for share in QUANTILES if (found := quantile(ordered, share)) is not None}


def _group(name: str) -> str:
    if name not in GROUPS:
        raise ConfigError("by", name, f"choose from {', '.join(GROUPS)}")
    return GROUPS[name]


def _condition(since: float, until: float, where: Mapping[str, str] | None) -> tuple[str, list[object]]:
    """An SQL condition with its values; names come from `GROUPS`, so no text of a caller gets into the statement."""
    parts, values = ["began_unix_s >= ?", "began_unix_s < ?"], list[object]([since, until])
    for name, value in (where or {}).items():
        parts.append(f"{_group(name)} = ?")
        values.append(value)
    return " AND ".join(parts), values
