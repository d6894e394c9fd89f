"""From the requests that a client saw to percentiles, throughput and goodput, with bootstrap intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.bench.url_client import UrlSample
from foretoken.bench.url_options import UrlOptions

SHARES = (0.50, 0.95, 0.99)
COVERAGE = 0.95
_NUM_DRAWS = 500
_LEAST = 5  # requests, below which an interval says nothing
_WINDOWS = 20  # of the run, drawn again for the interval of the throughput

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure with the ends of its interval; None where there is too little to tell."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class UrlRow:
    """One run. `ttft_s`, `itl_s`, `tpot_s` and `e2e_s` map mean, p50, p95 and p99 to figures, over requests that
    succeeded.

    `lag_s_p99`: how late requests were sent. `errors` counts by code, `first_error` is what the endpoint said of the
    first. `goodput_per_s`: requests within all deadlines.
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
    seed = options.seed
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
        tokens_per_s=throughput(samples, span, seed),
        num_tokens=sum(sample.num_tokens for sample in samples),
        ttft_s=percentiles([[s.ttft_s] if s.ttft_s is not None else [] for s in done], seed),
        itl_s=percentiles([s.itl_s for s in done], seed),
        tpot_s=percentiles([[s.tpot_s] if s.tpot_s is not None else [] for s in done], seed),
        e2e_s=percentiles([[s.e2e_s] for s in done], seed),
        lag_s_p99=float(np.quantile([max(0.0, s.sent_s - s.arrival_s) for s in samples] or [0.0], 0.99)),
        num_drafted=drafted,
        num_accepted=accepted,
        acceptance_rate=accepted / drafted if drafted and accepted is not None else None,
    )


def is_good(sample: UrlSample, options: UrlOptions) -> bool:
    """Whether a complete answer met every deadline that is set."""
    limits = (
        (sample.ttft_s, options.ttft_deadline_s),
        (sample.tpot_s, options.tpot_deadline_s),
        (sample.e2e_s, options.e2e_deadline_s),
    )
    return all(limit is None or taken is None or taken <= limit for taken, limit in limits)


def percentiles(values: Sequence[Sequence[float]], seed: int) -> dict[str, Estimate]:
    """Mean, p50, p95 and p99 of all values, those of each request in a list of its own; {} without values.

    Whole requests are drawn again with replacement: the gaps of one answer are not independent.
    """
    owners = np.repeat(np.arange(len(values)), [len(own) for own in values])
    flat: _Array = np.array([value for own in values for value in own], dtype=np.float64)
    if not flat.size:
        return {}
    order = np.argsort(flat, kind="stable")
    flat, owners = flat[order], owners[order]
    names = ["mean", *(f"p{round(100 * share)}" for share in SHARES)]
    points = _figures(flat, np.ones(len(flat)))
    if sum(1 for own in values if own) < _LEAST:
        return {name: Estimate(point) for name, point in zip(names, points, strict=True)}
    rng = np.random.default_rng(seed)
    drawn = np.array([_figures(flat, _weights(rng, len(values))[owners]) for _ in range(_NUM_DRAWS)])
    lows, highs = np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0)
    return {
        name: Estimate(point, float(low), float(high))
        for name, point, low, high in zip(names, points, lows, highs, strict=True)
    }


def throughput(samples: Sequence[UrlSample], span_s: float, seed: int) -> Estimate:
    """Tokens per second over the run; the interval draws equal parts of the run again."""
    pieces = [(at, count) for sample in samples for at, count in sample.pieces]
    if span_s <= 0 or not pieces:
        return Estimate(0.0)
    start = min(sample.arrival_s for sample in samples)
    times, counts = (np.array(column, dtype=np.float64) for column in zip(*pieces, strict=True))
    parts, _ = np.histogram(times - start, bins=_WINDOWS, range=(0.0, span_s), weights=counts)
    value = float(sum(sample.num_tokens for sample in samples)) / span_s
    if len(samples) < _LEAST:
        return Estimate(value)
    drawn = np.random.default_rng(seed).choice(parts, size=(_NUM_DRAWS, _WINDOWS)).sum(axis=1) / span_s
    low, high = np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(value, float(low), float(high))


def _weights(rng: np.random.Generator, count: int) -> _Array:
    """How often each of `count` requests comes in a draw of as many."""
    return np.bincount(rng.integers(count, size=count), minlength=count).astype(np.float64)


def _figures(ordered: _Array, weights: _Array) -> list[float]:
    """The mean, and the smallest values at or below which at least a share of the weight lies."""
    passed = np.cumsum(weights)
    if passed[-1] == 0:  # a draw of requests without values
        weights, passed = np.ones(len(ordered)), np.arange(1.0, len(ordered) + 1)
    places = np.searchsorted(passed, [share * passed[-1] for share in SHARES])
    mean = float(ordered @ weights / passed[-1])
    return [mean, *(float(ordered[min(place, len(ordered) - 1)]) for place in places)]


def _drafted(done: Sequence[UrlSample], counters: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """By the requests' own reports where there are any, else by the endpoint's metrics."""
    known = [(s.num_drafted, s.num_accepted) for s in done if s.num_drafted is not None and s.num_accepted is not None]
    if known:
        return sum(drafted for drafted, _ in known), sum(accepted for _, accepted in known)
    return counters if counters is not None else (None, None)
