"""`foretoken bench --batches`: how settings fare by size of the batch and kind of text, against plain and the best
fixed number.

A cell is a batch size and a slice. In it the settings take turns, in an order that rotates, and each answers the same
requests together, greedily (the slice `random` at temperature 1.5 under seeds). What chooses numbers of guesses begins
anew for each setting and then learns from cell to cell, as it would in a server that runs for long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from foretoken.bench.batch_prompts import Ask
from foretoken.bench.batch_settings import BatchSetting, Stage, Turn, parse_batch_settings, together
from foretoken.bench.load_options import (
    LoadOptions,
    Tell,
    announce,
    load_now,
    make_report,
    opened,
    progress,
    settle_table,
)
from foretoken.bench.measure import PLAIN
from foretoken.bench.sheets import Sheet, SheetReport

BAR = 0.97  # of the best fixed setting, and of plain: what an adaptive setting is held to
EXPLAINED = (
    "A cell: tokens per second of the whole batch, reading the prompts included (median over repeats); "
    "how many times plain's; how many times "
    "those of the best setting with a fixed number of guesses, plain among them, on that batch and "
    "slice. Ratios are medians over repeats of "
    "neighbouring turns. `decoding` counts from where every request had its first token. "
    "`requests` is the mean of what each request itself saw after its first token, tokens per second: "
    "requests that guess well end early, and the "
    "whole then waits for the others, as a server with more to do would not. The best fixed setting is "
    "picked after the fact from "
    "the same noisy turns, which flatters it a little. `differing` counts answers that are not plain's; "
    "in 16-bit arithmetic an answer may differ "
    "where a choice hung on rounding, and `unexplained` counts greedy ones in which none did."
)


@dataclass(frozen=True)
class BatchSample:
    """One setting's turn in a cell."""

    setting: BatchSetting
    batch: int
    slice: str
    repeat: int
    turn: Turn


@dataclass(frozen=True)
class BatchRow:
    """A setting in a cell. `same` counts answers equal to plain's, `unexplained` greedy ones that differ although no
    choice hung on rounding.

    Ratios: `speedup` to plain, `to_best_fixed` to the fastest fixed setting (`best_fixed`); `decode_...` the same for
    decoding alone, `request_...` for what the requests themselves saw.
    `num_draft` is the mean number of guesses per round and request.
    """

    setting: str
    adapts: bool
    batch: int
    slice: str
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    decode_tokens_per_s: float
    speedup: float
    decode_speedup: float
    to_best_fixed: float
    decode_to_best_fixed: float
    request_tokens_per_s: float
    request_speedup: float
    request_to_best_fixed: float
    best_fixed: str
    acceptance_rate: float
    emitted_per_step: float
    num_draft: float
    num_answers: int
    same: int
    unexplained: int

    @property
    def cell(self) -> str:
        """Its place in the grid."""
        return f"{self.batch}:{self.slice}"


def run_batches(options: LoadOptions, command: str = "foretoken bench --batches") -> SheetReport:
    """Measure the grid; Ctrl-C ends it early, and the report then holds what there is and says so.

    Raises:
        ForetokenError: a setting or model that cannot be used, a failing engine, or a folder that cannot be written.
    """
    load = load_now()
    settings, notes = parse_batch_settings(options.settings, options.draft)
    count = max(*options.batches, options.prompts_per_slice)
    samples: list[BatchSample] = []
    interrupted = False
    with opened(options, options.slices, max(options.batches), count, options.max_tokens) as (stage, found):
        try:
            num_turns = len(settings) * len(options.batches) * (len(options.slices) * options.repeats + options.warmup)
            announce(f"{num_turns} turns, {_estimate(stage, options, settings, found)}")
            notes += settle_table(stage, options, settings, options.batches, found)
            with progress(num_turns) as tell:
                measure_grid(stage, options, settings, found, samples, tell)
        except KeyboardInterrupt:
            interrupted = True
    rows = summarise_grid(samples)
    notes.append(
        "What chooses numbers of guesses began anew for each setting and learnt from cell to cell, in "
        "the order of the tables."
    )
    sheets = (*_slice_sheets(rows), *_request_sheets(rows), *_choice_sheets(rows), summary_sheet(rows))
    return make_report(
        options, "batches", command, rows, grid_summary(rows), sheets, EXPLAINED, notes, interrupted, load
    )


def measure_grid(
    stage: Stage,
    options: LoadOptions,
    settings: Sequence[BatchSetting],
    found: Mapping[str, Sequence[Ask]],
    samples: list[BatchSample],
    tell: Tell = lambda _words: None,
) -> None:
    """Add a sample for every setting, cell and repeat, the smallest batch first; a stop in the middle leaves whole
    samples.
    """
    turns = 0
    for batch in sorted(set(options.batches)):
        for setting in [setting for _ in range(options.warmup) for setting in settings]:
            tell(f"warm-up {batch}: {setting.name}")
            answer_all(stage, setting, found[options.slices[0]][:batch], batch, options.max_tokens)
        for name in options.slices:
            own = found[name][: max(batch, options.prompts_per_slice)]
            for repeat in range(options.repeats):
                first = turns % len(settings)
                turns += 1
                for setting in (*settings[first:], *settings[:first]):
                    tell(f"{batch} {name}: {setting.name}")
                    samples.append(
                        BatchSample(
                            setting, batch, name, repeat, answer_all(stage, setting, own, batch, options.max_tokens)
                        )
                    )


def answer_all(stage: Stage, setting: BatchSetting, own: Sequence[Ask], batch: int, max_tokens: int) -> Turn:
    """Answer requests, a batch at a time."""
    places = range(0, len(own), batch)
    return together(
        [stage.answer(setting, own[place : place + batch], max_tokens, first_place=place) for place in places]
    )


def _estimate(
    stage: Stage, options: LoadOptions, settings: Sequence[BatchSetting], found: Mapping[str, Sequence[Ask]]
) -> str:
    """How long all turns take if each takes as long as plain's; plain is run at the smallest and the largest batch to
    tell.
    """
    batches = sorted(set(options.batches))
    asks = found[options.slices[0]]
    took_s: dict[int, float] = {}
    stage.answer(BatchSetting(PLAIN), asks[:1], options.max_tokens)  # whatever is only done once
    for batch in dict.fromkeys((batches[0], batches[-1])):
        began = time.perf_counter()
        stage.answer(BatchSetting(PLAIN), asks[:batch], options.max_tokens)
        took_s[batch] = time.perf_counter() - began
    stage.forget()
    low, high = batches[0], batches[-1]
    slope_s = (took_s[high] - took_s[low]) / (high - low) if high > low else 0.0
    groups = {batch: math.ceil(max(batch, options.prompts_per_slice) / batch) for batch in batches}
    rounds = {batch: groups[batch] * len(options.slices) * options.repeats + options.warmup for batch in batches}
    total_s = len(settings) * sum(rounds[batch] * (took_s[low] + slope_s * (batch - low)) for batch in batches)
    return f"about {max(1, round(total_s / 60))} min if every setting takes as long as plain"


def summarise_grid(samples: Sequence[BatchSample]) -> tuple[BatchRow, ...]:
    """A row for every setting of every cell in which plain was measured."""
    cells: dict[tuple[int, str], list[BatchSample]] = {}
    for sample in samples:
        cells.setdefault((sample.batch, sample.slice), []).append(sample)
    settings = list(dict.fromkeys(sample.setting for sample in samples))
    return tuple(row for own in cells.values() for row in _cell_rows(own, settings))


def _cell_rows(samples: Sequence[BatchSample], settings: Sequence[BatchSetting]) -> list[BatchRow]:
    by_setting: dict[BatchSetting, dict[int, Turn]] = {}
    for sample in samples:
        by_setting.setdefault(sample.setting, {})[sample.repeat] = sample.turn
    plain = next((turns for setting, turns in by_setting.items() if setting.name == PLAIN), None)
    if plain is None:
        return []
    fixed = {setting.name: turns for setting, turns in by_setting.items() if not setting.adapts}
    best, best_decode, best_request = (_fastest(fixed, speed) for speed in (whole_speed, decode_speed, request_speed))
    order = [setting for setting in settings if setting in by_setting]
    return [
        _row(
            samples[0],
            setting,
            by_setting[setting],
            plain,
            (best, fixed[best]),
            fixed[best_decode],
            fixed[best_request],
        )
        for setting in order
    ]


def _fastest(settings: Mapping[str, Mapping[int, Turn]], speed: Callable[[Turn], float]) -> str:
    return max(settings, key=lambda name: _median(settings[name], speed))


def _row(
    cell: BatchSample,
    setting: BatchSetting,
    turns: Mapping[int, Turn],
    plain: Mapping[int, Turn],
    best: tuple[str, Mapping[int, Turn]],
    best_decode: Mapping[int, Turn],
    best_request: Mapping[int, Turn],
) -> BatchRow:
    speeds = [whole_speed(turn) for turn in turns.values()]
    rounds = sum(turn.num_steps for turn in turns.values())
    drafted = sum(turn.num_drafted for turn in turns.values())
    same, unexplained = compare_answers(turns.values(), next(iter(plain.values())))
    return BatchRow(
        setting=setting.name,
        adapts=setting.adapts,
        batch=cell.batch,
        slice=cell.slice,
        tokens_per_s=median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        decode_tokens_per_s=_median(turns, decode_speed),
        speedup=_ratio(turns, plain, whole_speed),
        decode_speedup=_ratio(turns, plain, decode_speed),
        to_best_fixed=_ratio(turns, best[1], whole_speed),
        decode_to_best_fixed=_ratio(turns, best_decode, decode_speed),
        request_tokens_per_s=_median(turns, request_speed),
        request_speedup=_ratio(turns, plain, request_speed),
        request_to_best_fixed=_ratio(turns, best_request, request_speed),
        best_fixed=best[0],
        acceptance_rate=sum(turn.num_accepted for turn in turns.values()) / max(1, drafted),
        emitted_per_step=sum(turn.num_tokens for turn in turns.values()) / max(1, rounds),
        num_draft=drafted / max(1, rounds),
        num_answers=sum(len(turn.answers) for turn in turns.values()),
        same=same,
        unexplained=unexplained,
    )


def compare_answers(turns: Iterable[Turn], plain: Turn) -> tuple[int, int]:
    """(answers equal to plain's, greedy answers that differ although none of plain's or their own choices hung on
    rounding).
    """
    pairs = [(own, told) for turn in turns for own, told in zip(turn.answers, plain.answers, strict=True)]
    differing = [(own, told) for own, told in pairs if own.token_ids != told.token_ids]
    return len(pairs) - len(differing), sum(
        own.greedy and not own.num_near_ties + told.num_near_ties for own, told in differing
    )


def whole_speed(turn: Turn) -> float:
    """Tokens per second, prompts included."""
    return turn.num_tokens / turn.seconds


def decode_speed(turn: Turn) -> float:
    """Tokens per second from where every request had its first token."""
    return turn.decode_tokens / turn.decode_s if turn.decode_s > 0 else 0.0


def request_speed(turn: Turn) -> float:
    """Tokens per second as requests saw them, the mean over requests."""
    return fmean(turn.request_speeds)


def _median(turns: Mapping[int, Turn], speed: Callable[[Turn], float]) -> float:
    return median(speed(turn) for turn in turns.values())


def _ratio(turns: Mapping[int, Turn], others: Mapping[int, Turn], speed: Callable[[Turn], float]) -> float:
    """Median over the repeats that both have; 0 where a run was stopped before there was one."""
    pairs = [
        speed(turn) / speed(others[repeat])
        for repeat, turn in turns.items()
        if repeat in others and speed(others[repeat]) > 0
    ]
    return median(pairs) if pairs else 0.0


def grid_summary(rows: Sequence[BatchRow]) -> dict[str, dict[str, object]]:
    """For every setting: its worst cells and geometric means, against plain and the best fixed setting of each cell.

    `single_fixed` is the fixed setting with the best geometric mean over all cells, `to_single_fixed` the ratio of the
    means.
    """
    by_setting: dict[str, list[BatchRow]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    means = {name: _geometric_mean([row.speedup for row in own]) for name, own in by_setting.items()}
    fixed = {name: means[name] for name, own in by_setting.items() if not own[0].adapts}
    single = max(fixed, key=fixed.__getitem__, default=None)
    found: dict[str, dict[str, object]] = {}
    for name, own in by_setting.items():
        worst, worst_fixed = min(own, key=lambda row: row.speedup), min(own, key=lambda row: row.to_best_fixed)
        found[name] = {
            "adapts": own[0].adapts,
            "cells": len(own),
            "speedup": means[name],
            "worst_speedup": worst.speedup,
            "worst_speedup_at": worst.cell,
            "to_best_fixed": _geometric_mean([row.to_best_fixed for row in own]),
            "worst_to_best_fixed": worst_fixed.to_best_fixed,
            "worst_to_best_fixed_at": worst_fixed.cell,
            "cells_below_bar": sum(row.to_best_fixed < BAR for row in own),
            "single_fixed": single,
            "to_single_fixed": means[name] / means[single] if single is not None and means[single] else 0.0,
            "decode_speedup": _geometric_mean([row.decode_speedup for row in own]),
            "decode_worst_speedup": min(row.decode_speedup for row in own),
            "decode_to_best_fixed": _geometric_mean([row.decode_to_best_fixed for row in own]),
            "decode_worst_to_best_fixed": min(row.decode_to_best_fixed for row in own),
            "request_speedup": _geometric_mean([row.request_speedup for row in own]),
            "request_worst_speedup": min(row.request_speedup for row in own),
            "request_to_best_fixed": _geometric_mean([row.request_to_best_fixed for row in own]),
            "request_worst_to_best_fixed": min(row.request_to_best_fixed for row in own),
            "request_cells_below_bar": sum(row.request_to_best_fixed < BAR for row in own),
            "differing": sum(row.num_answers - row.same for row in own),
            "unexplained": sum(row.unexplained for row in own),
        }
    return found


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else 0.0


def _slice_sheets(rows: Sequence[BatchRow]) -> list[Sheet]:
    return [
        _sheet(rows, name, f"{name}: tokens/s, times plain, times best fixed", _speed_cell) for name in _slices(rows)
    ]


def _request_sheets(rows: Sequence[BatchRow]) -> list[Sheet]:
    return [
        _sheet(rows, name, f"{name}: a request's own tokens/s, times plain, times best fixed", _request_cell)
        for name in _slices(rows)
    ]


def _choice_sheets(rows: Sequence[BatchRow]) -> list[Sheet]:
    drafting = [row for row in rows if row.setting != PLAIN]
    return [
        _sheet(drafting, name, f"{name}: guesses per round, tokens per round", _choice_cell)
        for name in _slices(drafting)
    ]


def _slices(rows: Sequence[BatchRow]) -> list[str]:
    return list(dict.fromkeys(row.slice for row in rows))


def _sheet(rows: Sequence[BatchRow], name: str, title: str, cell: Callable[[BatchRow], str]) -> Sheet:
    own = {(row.setting, row.batch): row for row in rows if row.slice == name}
    batches = sorted({batch for _, batch in own})
    lines = [
        (setting, *("" if (setting, batch) not in own else cell(own[setting, batch]) for batch in batches))
        for setting in dict.fromkeys(setting for setting, _ in own)
    ]
    return Sheet(title, ("setting", *(f"batch {batch}" for batch in batches)), tuple(lines))


def _speed_cell(row: BatchRow) -> str:
    speed = f"{row.tokens_per_s:.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.1f}"
    return f"{speed} {row.speedup:.2f} {row.to_best_fixed:.2f}"


def _request_cell(row: BatchRow) -> str:
    return f"{row.request_tokens_per_s:.1f} {row.request_speedup:.2f} {row.request_to_best_fixed:.2f}"


def _choice_cell(row: BatchRow) -> str:
    return f"{row.num_draft:.1f} {row.emitted_per_step:.2f}"


def summary_sheet(rows: Sequence[BatchRow]) -> Sheet:
    """All settings, worst and mean."""
    headings = (
        *(
            "setting",
            "times plain",
            "worst",
            "at",
            "times best fixed",
            "worst",
            "at",
            f"cells below {BAR}",
            "times best single fixed",
        ),
        *("decoding: times plain", "worst", "times best fixed", "worst"),
        *(
            "requests: times plain",
            "worst",
            "times best fixed",
            "worst",
            f"cells below {BAR}",
            "differing",
            "unexplained",
        ),
    )
    lines = []
    for name, one in grid_summary(rows).items():
        cells = (
            *(one["speedup"], one["worst_speedup"], one["worst_speedup_at"]),
            *(
                one["to_best_fixed"],
                one["worst_to_best_fixed"],
                one["worst_to_best_fixed_at"],
                one["cells_below_bar"],
                one["to_single_fixed"],
            ),
            *(
                one["decode_speedup"],
                one["decode_worst_speedup"],
                one["decode_to_best_fixed"],
                one["decode_worst_to_best_fixed"],
            ),
            *(
                one["request_speedup"],
                one["request_worst_speedup"],
                one["request_to_best_fixed"],
                one["request_worst_to_best_fixed"],
            ),
            *(one["request_cells_below_bar"], one["differing"], one["unexplained"]),
        )
        lines.append((name, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)))
    return Sheet("summary: geometric means over all cells", headings, tuple(lines))
