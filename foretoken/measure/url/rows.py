"""From the requests that a client saw to percentiles, throughput and goodput, with intervals."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.backend.http_stream import Stream
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.price import PriceRow, price_rows, price_tables
from foretoken.measure.report import Table
from foretoken.measure.stats import MIN_GROUPS, Estimate, estimate, mean_estimate, quantile_estimate
from foretoken.measure.url.plan import UrlOptions

SHARES = (0.50, 0.95, 0.99)
_WINDOWS = 20  # of the run, drawn again for the interval of the throughput
EXPLAINED = (
    "Times count from when a request was due, so a client or server that falls behind shows. ttft: to the first text. "
    "itl: between two pieces of text, which may hold several tokens. tpot: per token after the first piece. e2e: to "
    "the end. In brackets: 95 % intervals over requests, for tokens/s over equal parts of the run; `-`: too few "
    "requests to tell that end."
)
_TIMES = ("ttft_s", "itl_s", "tpot_s", "e2e_s")
_COLUMNS = ("mean", "p50", "p95", "p99")


@dataclass
class UrlSample(Stream):
    """One request as the client saw it; times in seconds since the start of the run, `arrival_s` when it was due."""

    index: int = 0
    slice: str = ""
    arrival_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def ttft_s(self) -> float | None:
        """Time from when the request was due to the first text."""
        return self.pieces[0][0] - self.arrival_s if self.pieces else None

    @property
    def e2e_s(self) -> float:
        """Time from when the request was due to its end."""
        return self.ended_s - self.arrival_s

    @property
    def itl_s(self) -> list[float]:
        """Times between two pieces of text."""
        times = [at for at, _ in self.pieces]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first piece; None without one."""
        if len(self.pieces) < 2:
            return None
        later = self.num_tokens - self.counted_pieces()[0][1]
        return (self.pieces[-1][0] - self.pieces[0][0]) / later if later > 0 else None


@dataclass(frozen=True)
class UrlRow:
    """One run. `ttft_s`, `itl_s`, `tpot_s` and `e2e_s` map mean, p50, p95 and p99 to figures, over requests that
    succeeded.

    `lag_s_p99`: how late requests were sent. `errors` counts by code, `first_error` is what the endpoint said of the
    first. `goodput_per_s`: requests within all deadlines, which have `num_good_tokens`.
    `num_drafted`, `num_accepted` and `acceptance_rate` (of drafted tokens) are None where the endpoint does not report
    them.
    """

    setting: str
    num_requests: int
    num_ok: int
    num_good: int
    errors: Mapping[str, int]
    first_error: str
    span_s: float
    requests_per_s: float
    goodput_per_s: float
    tokens_per_s: Estimate
    num_tokens: int
    num_good_tokens: int
    ttft_s: Mapping[str, Estimate]
    itl_s: Mapping[str, Estimate]
    tpot_s: Mapping[str, Estimate]
    e2e_s: Mapping[str, Estimate]
    lag_s_p99: float
    num_drafted: int | None
    num_accepted: int | None
    acceptance_rate: float | None


def summarise_url(
    setting: str, samples: Sequence[UrlSample], options: UrlOptions, counters: tuple[int, int] | None
) -> UrlRow:
    """The row of a run; `counters` are drafted and accepted tokens by the endpoint's own metrics, if it has them."""
    done = [sample for sample in samples if sample.is_ok]
    span = max((sample.ended_s for sample in samples), default=0.0) - min((s.arrival_s for s in samples), default=0.0)
    good = [sample for sample in done if is_good(sample, options)]
    drafted, accepted = _drafted(done, counters)
    return UrlRow(
        setting=setting,
        num_requests=len(samples),
        num_ok=len(done),
        num_good=len(good),
        errors=dict(sorted(Counter(sample.error for sample in samples if sample.error).items())),
        first_error=next((sample.said for sample in samples if sample.said), ""),
        span_s=span,
        requests_per_s=len(done) / span if span > 0 else 0.0,
        goodput_per_s=len(good) / span if span > 0 else 0.0,
        tokens_per_s=throughput(samples, span),
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_good_tokens=sum(sample.num_tokens for sample in good),
        ttft_s=percentiles([[s.ttft_s] if s.ttft_s is not None else [] for s in done]),
        itl_s=percentiles([s.itl_s for s in done]),
        tpot_s=percentiles([[s.tpot_s] if s.tpot_s is not None else [] for s in done]),
        e2e_s=percentiles([[s.e2e_s] for s in done]),
        lag_s_p99=float(np.quantile([max(0.0, s.sent_s - s.arrival_s) for s in samples] or [0.0], 0.99)),
        num_drafted=drafted,
        num_accepted=accepted,
        acceptance_rate=accepted / drafted if drafted and accepted is not None else None,
    )


def is_good(sample: UrlSample, options: UrlOptions) -> bool:
    """Whether a complete answer met every deadline that is set; tokens without a time to the first did not."""
    if options.ttft_deadline_s is not None and sample.ttft_s is None and sample.num_tokens:
        return False
    limits = (
        (sample.ttft_s, options.ttft_deadline_s),
        (sample.tpot_s, options.tpot_deadline_s),
        (sample.e2e_s, options.e2e_deadline_s),
    )
    return all(limit is None or taken is None or taken <= limit for taken, limit in limits)


def percentiles(values: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """Mean, p50, p95 and p99 of all values, those of each request in a list of its own; {} without values.

    Intervals are over whole requests: the gaps of one answer are not independent.
    """
    if not any(values):
        return {}
    return {"mean": mean_estimate(values)} | {f"p{round(100 * one)}": quantile_estimate(values, one) for one in SHARES}


def throughput(samples: Sequence[UrlSample], span_s: float) -> Estimate:
    """Tokens per second over the run; the interval is over equal parts of the run."""
    pieces = [piece for sample in samples for piece in _counted(sample)]
    if span_s <= 0 or not pieces:
        return Estimate(0.0)
    start = min(sample.arrival_s for sample in samples)
    times, counts = (np.array(column, dtype=np.float64) for column in zip(*pieces, strict=True))
    parts, _ = np.histogram(times - start, bins=_WINDOWS, range=(0.0, span_s), weights=counts)
    value = float(sum(sample.num_tokens for sample in samples)) / span_s
    if len(samples) < MIN_GROUPS:
        return Estimate(value)
    return replace(estimate(np.stack([parts, np.full(_WINDOWS, span_s / _WINDOWS)], axis=1)), value=value)


def _counted(sample: UrlSample) -> list[tuple[float, float]]:
    """The pieces of a request, or its end where it has tokens and none of them."""
    if not any(count for _, count in sample.pieces):
        return [(sample.ended_s, float(sample.num_tokens))] if sample.num_tokens else []
    return sample.counted_pieces()


def _drafted(done: Sequence[UrlSample], counters: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """By the requests' own reports where there are any, else by the endpoint's metrics."""
    known = [(s.num_drafted, s.num_accepted) for s in done if s.num_drafted is not None and s.num_accepted is not None]
    if known:
        return sum(drafted for drafted, _ in known), sum(accepted for _, accepted in known)
    return counters if counters is not None else (None, None)


def url_prices(rows: Sequence[UrlRow], price_per_hour: float | None) -> tuple[PriceRow, ...]:
    """The price of tokens by load; of answers within all deadlines only."""
    speeds = [(row.setting, "served", row.num_good_tokens / row.span_s if row.span_s else None) for row in rows]
    return price_rows(price_per_hour, speeds)


def url_tables(rows: Sequence[UrlRow], options: UrlOptions, prices: Sequence[PriceRow]) -> tuple[Table, ...]:
    """Throughput by run, then the percentiles in milliseconds, then prices."""
    note = "Tokens of answers within all deadlines; the machine is paid for the whole run."
    lines = tuple(tuple(cell(row) for cell in _THROUGHPUT.values()) for row in rows)
    throughput = Table("Throughput", tuple(_THROUGHPUT), lines, (_deadlines(options),))
    return throughput, _latency(rows), *price_tables(prices, "load", note)


def url_plots(rows: Sequence[UrlRow]) -> tuple[Plot, ...]:
    """Throughput by load, then for each time its percentiles by load."""
    rates = [(row.setting, row.tokens_per_s) for row in rows]
    speeds = tuple(Point(load, rate.value, rate.low, rate.high) for load, rate in rates)
    plots = [Plot("Throughput", "tokens per second", (Series("tokens/s", speeds),))]
    for time in _TIMES:
        series = []
        for name in _COLUMNS:
            found = [(row.setting, getattr(row, time).get(name)) for row in rows]
            known = [(load, one) for load, one in found if one is not None]
            points = (Point(load, 1000 * one.value, _ms(one.low), _ms(one.high)) for load, one in known)
            series.append(Series(name, tuple(points)))
        plots.append(Plot(time.removesuffix("_s"), "milliseconds", tuple(series)))
    return tuple(plots)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


_THROUGHPUT: Mapping[str, Callable[[UrlRow], str]] = {  # by heading
    "load": lambda row: row.setting,
    "requests": lambda row: str(row.num_requests),
    "ok": lambda row: str(row.num_ok),
    "within deadlines": lambda row: f"{row.num_good / row.num_requests:.0%}",
    "requests/s": lambda row: f"{row.requests_per_s:.2f}",
    "goodput/s": lambda row: f"{row.goodput_per_s:.2f}",
    "tokens/s": lambda row: _told(row.tokens_per_s),
    "accepted": lambda row: (
        "not reported" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%} of {row.num_drafted}"
    ),
}


def _latency(rows: Sequence[UrlRow]) -> Table:
    lines = []
    for row, time in itertools.product(rows, _TIMES):
        found: Mapping[str, Estimate] = getattr(row, time)
        cells = (_told(found[name], 1000.0) if name in found else "" for name in _COLUMNS)
        lines.append((row.setting, time.removesuffix("_s"), *cells))
    return Table("Latency, ms", ("load", "time", *_COLUMNS), tuple(lines), justify="llr")


def _told(figure: Estimate, scale: float = 1.0) -> str:
    value = f"{scale * figure.value:.1f}"
    if figure.low is None and figure.high is None:
        return value
    low, high = ("-" if end is None else f"{scale * end:.1f}" for end in (figure.low, figure.high))
    return f"{value} [{low}, {high}]"


def _deadlines(options: UrlOptions) -> str:
    named = {name: getattr(options, f"{name}_deadline_s") for name in ("ttft", "tpot", "e2e")}
    limits = [f"{name} {limit:g} s" for name, limit in named.items() if limit is not None]
    return f"deadlines: {', '.join(limits)}" if limits else "deadlines: none, every complete answer is good"
