"""From the requests that a client saw to percentiles, throughput and goodput, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.bench.url_client import UrlSample
from foretoken.bench.url_options import UrlOptions
from foretoken.measure.stats import MIN_GROUPS, Estimate, estimate, mean_estimate, quantile_estimate

SHARES = (0.50, 0.95, 0.99)
_WINDOWS = 20  # of the run, drawn again for the interval of the throughput


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
    """Whether a complete answer met every deadline that is set."""
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
    pieces = [(at, count) for sample in samples for at, count in sample.pieces]
    if span_s <= 0 or not pieces:
        return Estimate(0.0)
    start = min(sample.arrival_s for sample in samples)
    times, counts = (np.array(column, dtype=np.float64) for column in zip(*pieces, strict=True))
    parts, _ = np.histogram(times - start, bins=_WINDOWS, range=(0.0, span_s), weights=counts)
    value = float(sum(sample.num_tokens for sample in samples)) / span_s
    if len(samples) < MIN_GROUPS:
        return Estimate(value)
    return replace(estimate(np.stack([parts, np.full(_WINDOWS, span_s / _WINDOWS)], axis=1)), value=value)


def _drafted(done: Sequence[UrlSample], counters: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """By the requests' own reports where there are any, else by the endpoint's metrics."""
    known = [(s.num_drafted, s.num_accepted) for s in done if s.num_drafted is not None and s.num_accepted is not None]
    if known:
        return sum(drafted for drafted, _ in known), sum(accepted for _, accepted in known)
    return counters if counters is not None else (None, None)
