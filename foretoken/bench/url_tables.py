"""Tables of a load on an endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.bench.url_options import UrlOptions
from foretoken.bench.url_rows import UrlRow
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Table
from foretoken.measure.stats import Estimate

EXPLAINED = (
    "Times count from when a request was due, so a client or server that falls behind shows. ttft: to the first text. "
    "itl: between two pieces of text, which may hold several tokens. tpot: per token after the first piece. e2e: to "
    "the end. In brackets: 95 % intervals over requests, for tokens/s over equal parts of the run; `-`: too few "
    "requests to tell that end."
)
_TIMES = ("ttft_s", "itl_s", "tpot_s", "e2e_s")
_COLUMNS = ("mean", "p50", "p95", "p99")


def url_tables(rows: Sequence[UrlRow], options: UrlOptions) -> tuple[Table, ...]:
    """Throughput by run, then the percentiles in milliseconds."""
    return _throughput(rows, options), _latency(rows)


def url_plots(rows: Sequence[UrlRow]) -> tuple[Plot, ...]:
    """Throughput by load, then for each time its percentiles by load."""
    speeds = tuple(
        Point(row.setting, row.tokens_per_s.value, row.tokens_per_s.low, row.tokens_per_s.high) for row in rows
    )
    plots = [Plot("Throughput", "tokens per second", (Series("tokens/s", speeds),))]
    for time in _TIMES:
        series = []
        for name in _COLUMNS:
            found = [(row.setting, getattr(row, time).get(name)) for row in rows]
            points = tuple(
                Point(load, 1000 * one.value, _ms(one.low), _ms(one.high)) for load, one in found if one is not None
            )
            series.append(Series(name, points))
        plots.append(Plot(time.removesuffix("_s"), "milliseconds", tuple(series)))
    return tuple(plots)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _throughput(rows: Sequence[UrlRow], options: UrlOptions) -> Table:
    headings = ("load", "requests", "ok", "within deadlines", "requests/s", "goodput/s", "tokens/s", "accepted")
    lines = tuple(
        (
            row.setting,
            str(row.num_requests),
            str(row.num_ok),
            f"{row.num_good / row.num_requests:.0%}",
            f"{row.requests_per_s:.2f}",
            f"{row.goodput_per_s:.2f}",
            _told(row.tokens_per_s, 1.0, 1),
            "not reported" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%} of {row.num_drafted}",
        )
        for row in rows
    )
    return Table("Throughput", headings, lines, (_deadlines(options),))


def _latency(rows: Sequence[UrlRow]) -> Table:
    lines = tuple(
        (row.setting, name.removesuffix("_s"), *_cells(getattr(row, name))) for row in rows for name in _TIMES
    )
    return Table("Latency, ms", ("load", "time", *_COLUMNS), lines, justify="llr")


def _cells(found: Mapping[str, Estimate]) -> tuple[str, ...]:
    return tuple(_told(found[name], 1000.0, 1) if name in found else "" for name in _COLUMNS)


def _told(figure: Estimate, scale: float, digits: int) -> str:
    value = f"{scale * figure.value:.{digits}f}"
    if figure.low is None and figure.high is None:
        return value
    low, high = ("-" if end is None else f"{scale * end:.{digits}f}" for end in (figure.low, figure.high))
    return f"{value} [{low}, {high}]"


def _deadlines(options: UrlOptions) -> str:
    limits = [
        f"{name} {limit:g} s"
        for name, limit in (
            ("ttft", options.ttft_deadline_s),
            ("tpot", options.tpot_deadline_s),
            ("e2e", options.e2e_deadline_s),
        )
        if limit is not None
    ]
    return f"deadlines: {', '.join(limits)}" if limits else "deadlines: none, every complete answer is good"
