"""Tables of the comparison of layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.measure.report import Table
from studies.layouts.layouts import LayoutRow

_COLUMNS = (
    *(
        "way",
        "tok/s",
        "min-max",
        "whole run",
        "rounds",
        "tok/round",
        "accepted",
        "ms/round",
        "forward",
        "realign",
        "draft",
        "rest",
    ),
    *("realign share", "rows moved", "grouped", "prompts s", "same"),
)
EXPLAINED = (
    "tok/s, ms/round and its parts are of rounds without prefill, medians over repeats; `whole run` is tokens per "
    "second with prefill. `realign share` is the part of the decoding time that moving keys and values takes, `rows "
    "moved` the rows that a round copied, `grouped` the part of EXSPEC's rounds with a batch of equal lengths, `same` "
    "how many answers equal the engine's plain ones. Ratios `per round` compare the time of a round, whatever it "
    "accepted."
)


def layout_tables(
    rows: Sequence[LayoutRow], ratios: Mapping[int, Mapping[str, float]], prompt_tokens: Mapping[int, Sequence[int]]
) -> tuple[Table, ...]:
    """A table per batch size; `prompt_tokens` holds the lengths of its prompts."""
    tables = []
    for size, found in ratios.items():
        lengths = prompt_tokens[size]
        title = f"batch {size}: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens"
        note = "Ratios: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.items()) + "."
        lines = tuple(_cells(row) for row in rows if row.batch_size == size)
        tables.append(Table(title, _COLUMNS, lines, (note,)))
    return tuple(tables)


def _cells(row: LayoutRow) -> tuple[str, ...]:
    return (
        row.mode,
        f"{row.tokens_per_s:.1f}",
        f"{row.tokens_per_s_min:.1f}-{row.tokens_per_s_max:.1f}",
        f"{row.whole_tokens_per_s:.1f}",
        str(row.num_rounds),
        f"{row.emitted_per_round:.1f}",
        _percent(row.acceptance_rate),
        f"{row.round_ms:.2f}",
        f"{row.forward_ms:.2f}",
        f"{row.realign_ms:.2f}",
        f"{row.draft_ms:.2f}",
        f"{row.rest_ms:.2f}",
        "" if row.moved_per_round is None else _percent(row.realign_share),
        "" if row.moved_per_round is None else f"{row.moved_per_round:.1f}",
        _percent(row.grouped_share),
        f"{row.prompt_s:.2f}",
        f"{row.num_identical} of {row.num_answers}",
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
