"""Rows of a grid of batch sizes and slices: ratios to plain and to the best fixed setting of each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from foretoken.measure.load.settings import BatchSetting, Turn
from foretoken.measure.options import PLAIN
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.price import PriceRow, price_rows
from foretoken.measure.report import Table
from foretoken.measure.stats import best_fixed, geometric_mean

BAR = 0.97  # of the best fixed setting and of plain: the goal of an adaptive setting

_Speed = Callable[[Turn], float]
_TurnsOf = Mapping[BatchSetting, Mapping[int, Turn]]  # by setting and repeat
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
    """A setting in a cell. `same` counts answers equal to plain's, `unexplained` greedy ones that differ without a near
    tie.

    Ratios: `speedup` to plain, `to_best_fixed` to the fastest fixed setting (`best_fixed`); `decode_...` the same for
    decoding alone, `request_...` for single requests.
    `differing_greedy` counts greedy answers that differ at all. `num_draft` is the mean number of draft tokens per
    round and request. Of `num_turns` turns `num_contended` were measured while other processes took the cores.
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
    differing_greedy: int
    unexplained: int
    num_turns: int
    num_contended: int | None

    @property
    def cell(self) -> str:
        """Its place in the grid."""
        return f"{self.batch}:{self.slice}"


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
    speeds: tuple[_Speed, ...] = (whole_speed, decode_speed, request_speed)
    best = {speed: _fastest(by_setting, speed) for speed in speeds}
    return [_row(samples[0], setting, by_setting, plain, best) for setting in settings if setting in by_setting]


def _fastest(settings: _TurnsOf, speed: _Speed) -> BatchSetting:
    found = best_fixed(settings, lambda setting: setting.adapts, lambda setting: _median(settings[setting], speed))
    assert found is not None  # plain is there
    return found


def _row(
    cell: BatchSample,
    setting: BatchSetting,
    by_setting: _TurnsOf,
    plain: Mapping[int, Turn],
    best: Mapping[_Speed, BatchSetting],
) -> BatchRow:
    turns = by_setting[setting]

    def to_best(speed: _Speed) -> float:
        return _ratio(turns, by_setting[best[speed]], speed)

    speeds = [whole_speed(turn) for turn in turns.values()]
    rounds = sum(turn.num_steps for turn in turns.values())
    drafted = sum(turn.num_drafted for turn in turns.values())
    same, differing_greedy, unexplained = compare_answers(turns.values(), next(iter(plain.values())))
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
        to_best_fixed=to_best(whole_speed),
        decode_to_best_fixed=to_best(decode_speed),
        request_tokens_per_s=_median(turns, request_speed),
        request_speedup=_ratio(turns, plain, request_speed),
        request_to_best_fixed=to_best(request_speed),
        best_fixed=best[whole_speed].name,
        acceptance_rate=sum(turn.num_accepted for turn in turns.values()) / max(1, drafted),
        emitted_per_step=sum(turn.num_tokens for turn in turns.values()) / max(1, rounds),
        num_draft=drafted / max(1, rounds),
        num_answers=sum(len(turn.answers) for turn in turns.values()),
        same=same,
        differing_greedy=differing_greedy,
        unexplained=unexplained,
        num_turns=len(turns),
        num_contended=num_contended(turn.contended for turn in turns.values()),
    )


def num_contended(turns: Iterable[bool | None]) -> int | None:
    """Turns during which other processes took the cores; None where that is not known of any."""
    known = [is_contended for is_contended in turns if is_contended is not None]
    return sum(known) if known else None


def compare_answers(turns: Iterable[Turn], plain: Turn) -> tuple[int, int, int]:
    """(answers equal to plain's, greedy answers that differ, those of them without a near tie in either answer)."""
    pairs = [pair for turn in turns for pair in zip(turn.answers, plain.answers, strict=True)]
    differing = [(own, told) for own, told in pairs if own.token_ids != told.token_ids]
    greedy = [(own, told) for own, told in differing if own.greedy]
    unexplained = sum(not own.num_near_ties + told.num_near_ties for own, told in greedy)
    return len(pairs) - len(differing), len(greedy), unexplained


def whole_speed(turn: Turn) -> float:
    """Tokens per second, prefill included."""
    return turn.num_tokens / turn.seconds


def decode_speed(turn: Turn) -> float:
    """Tokens per second from the moment when every request has its first token."""
    return turn.decode_tokens / turn.decode_s if turn.decode_s > 0 else 0.0


def request_speed(turn: Turn) -> float:
    """Tokens per second of a request after its first token, the mean over requests."""
    return fmean(turn.request_speeds)


def _median(turns: Mapping[int, Turn], speed: _Speed) -> float:
    return median(speed(turn) for turn in turns.values())


def _ratio(turns: Mapping[int, Turn], others: Mapping[int, Turn], speed: _Speed) -> float:
    """Median over the repeats that both have; 0 where there is none."""
    pairs = [(speed(turn), speed(others[repeat])) for repeat, turn in turns.items() if repeat in others]
    ratios = [own / other for own, other in pairs if other > 0]
    return median(ratios) if ratios else 0.0


def grid_summary(rows: Sequence[BatchRow]) -> dict[str, dict[str, object]]:
    """For every setting: its worst cells and geometric means, against plain and the best fixed setting of each cell.

    `single_fixed` is the fixed setting with the best geometric mean over all cells, `to_single_fixed` the ratio of the
    means.
    """
    by_setting: dict[str, list[BatchRow]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    means = {name: geometric_mean([row.speedup for row in own]) for name, own in by_setting.items()}
    single = best_fixed(by_setting, lambda name: by_setting[name][0].adapts, means.__getitem__)
    found: dict[str, dict[str, object]] = {}
    for name, own in by_setting.items():
        worst, worst_fixed = min(own, key=lambda row: row.speedup), min(own, key=lambda row: row.to_best_fixed)
        found[name] = {
            "adapts": own[0].adapts,
            "cells": len(own),
            "speedup": means[name],
            "worst_speedup": worst.speedup,
            "worst_speedup_at": worst.cell,
            "to_best_fixed": geometric_mean([row.to_best_fixed for row in own]),
            "worst_to_best_fixed": worst_fixed.to_best_fixed,
            "worst_to_best_fixed_at": worst_fixed.cell,
            "cells_below_bar": sum(row.to_best_fixed < BAR for row in own),
            "single_fixed": single,
            "to_single_fixed": means[name] / means[single] if single is not None and means[single] else 0.0,
            "decode_speedup": geometric_mean([row.decode_speedup for row in own]),
            "decode_worst_speedup": min(row.decode_speedup for row in own),
            "decode_to_best_fixed": geometric_mean([row.decode_to_best_fixed for row in own]),
            "decode_worst_to_best_fixed": min(row.decode_to_best_fixed for row in own),
            "request_speedup": geometric_mean([row.request_speedup for row in own]),
            "request_worst_speedup": min(row.request_speedup for row in own),
            "request_to_best_fixed": geometric_mean([row.request_to_best_fixed for row in own]),
            "request_worst_to_best_fixed": min(row.request_to_best_fixed for row in own),
            "request_cells_below_bar": sum(row.request_to_best_fixed < BAR for row in own),
            "differing": sum(row.num_answers - row.same for row in own),
            "unexplained": sum(row.unexplained for row in own),
        }
    return found


def grid_tables(rows: Sequence[BatchRow]) -> list[Table]:
    """By setting and batch size, a table per slice each: throughput, the speed of single requests, draft tokens."""

    def request_cell(row: BatchRow) -> str:
        return f"{row.request_tokens_per_s:.1f} {row.request_speedup:.2f} {row.request_to_best_fixed:.2f}"

    def choice_cell(row: BatchRow) -> str:
        return f"{row.num_draft:.1f} {row.emitted_per_step:.2f}"

    drafting = [row for row in rows if row.setting != PLAIN]
    return [
        *_tables(rows, "tokens/s, ratio to plain, ratio to best fixed", _speed_cell),
        *_tables(rows, "a request's own tokens/s, ratio to plain, ratio to best fixed", request_cell),
        *_tables(drafting, "draft tokens per round, tokens per round", choice_cell),
    ]


def batch_prices(rows: Sequence[BatchRow], price_per_hour: float | None) -> tuple[PriceRow, ...]:
    """The price of tokens in every cell."""
    return price_rows(price_per_hour, [(row.cell, row.setting, row.tokens_per_s) for row in rows], PLAIN)


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


def _tables(rows: Sequence[BatchRow], title: str, cell: Callable[[BatchRow], str]) -> list[Table]:
    tables = []
    for name in _slices(rows):
        own = {(row.setting, row.batch): cell(row) for row in rows if row.slice == name}
        batches = sorted({batch for _, batch in own})
        settings = dict.fromkeys(setting for setting, _ in own)
        lines = tuple((setting, *(own.get((setting, batch), "") for batch in batches)) for setting in settings)
        tables.append(Table(f"{name}: {title}", ("setting", *(f"batch {batch}" for batch in batches)), lines))
    return tables


def _speed_cell(row: BatchRow) -> str:
    speed = f"{row.tokens_per_s:.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.1f}"
    return f"{speed} {row.speedup:.2f} {row.to_best_fixed:.2f}" + ("!" if row.num_contended else "")


def summary_table(rows: Sequence[BatchRow]) -> Table:
    """Every setting over all cells: geometric means and worst cells."""
    lines = []
    for name, one in grid_summary(rows).items():
        cells = [one[key] for _, key in _SUMMARY]
        lines.append((name, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)))
    headings = ("setting", *(heading for heading, _ in _SUMMARY))
    return Table("summary: geometric means over all cells", headings, tuple(lines))
