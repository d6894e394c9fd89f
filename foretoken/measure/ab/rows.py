"""From pairs to figures: ratios with intervals by metric and by slice, shares of equal texts, errors, costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.backend.answering import Question
from foretoken.measure.ab.options import AbOptions
from foretoken.measure.ab.pairs import METRICS, Observed, Pair, block_means, in_blocks
from foretoken.measure.price import counted_tokens, million_price
from foretoken.measure.sequential import Verdict, blocks_to_decide, confidence_sequence, judge
from foretoken.measure.stats import Estimate, Measured, PairedRatio, estimate, paired_ratio, quantile_ratio, ratio

PRIMARY = "e2e"  # the metric that the verdict is about
SHARES = {"p50": 0.50, "p95": 0.95}


@dataclass(frozen=True)
class Outcome:
    """What the blocks say of one metric: B's speed over A's with an interval that holds at every look (None: too few
    blocks), and about how many blocks in all would decide where they do not yet.
    """

    verdict: Verdict
    num_blocks: int
    speedup: Estimate | None
    blocks_to_decide: int | None = None


@dataclass(frozen=True)
class MetricRow:
    """One metric over all pairs. `a` and `b` hold its p50 and p95 on each side, `quantiles` A's over B's, in seconds
    or, for `tokens_per_s`, tokens per second and B's over A's: above 1 B is always the faster one.
    """

    metric: str
    num_pairs: int
    outcome: Outcome
    a: Mapping[str, float]
    b: Mapping[str, float]
    quantiles: Mapping[str, Estimate]


@dataclass(frozen=True)
class SliceRow:
    """One kind of text ("": all). `tokens_per_s` are totals over totals, `ratio` B's over A's with an interval by
    prompts. `equal_texts` is a share of the pairs without an error. `cost_per_million` is None without prices, and
    holds no side of which no token was in time.
    """

    slice: str
    num_pairs: int
    num_ok: int
    errors: Mapping[str, int]
    num_tokens: Mapping[str, int]
    tokens_per_s: Mapping[str, float | None]
    ratio: PairedRatio | None
    equal_texts: float | None
    equal_lengths: float | None
    cost_per_million: Mapping[str, Estimate] | None


def outcome_of(means: Sequence[float], margin: float) -> Outcome:
    """What the mean log-ratios of blocks say so far; the margin is a share."""
    margin = math.log1p(margin)
    if not means:
        return Outcome("go on", 0, None)
    mean = math.exp(math.fsum(means) / len(means))
    found = confidence_sequence(means)
    if found is None:
        return Outcome("go on", len(means), Estimate(mean))
    verdict = judge(found, margin)
    speedup = Estimate(mean, math.exp(found.low), math.exp(found.high))
    more = blocks_to_decide(means, margin) if verdict == "go on" else None
    return Outcome(verdict, len(means), speedup, more)


def metric_rows(pairs: Sequence[Pair], options: AbOptions) -> list[MetricRow]:
    """A row for each metric that both sides have."""
    by_metric = {name: [pair for pair in pairs if pair.log_ratio(name) is not None] for name in METRICS}
    return [_metric_row(name, usable, options.margin) for name, usable in by_metric.items() if usable]


def _metric_row(metric: str, pairs: Sequence[Pair], margin: float) -> MetricRow:
    a, b = in_blocks(pairs, lambda pair: _value(pair.a, metric)), in_blocks(pairs, lambda pair: _value(pair.b, metric))
    above, below = (b, a) if metric == "tokens_per_s" else (a, b)
    quantiles = {name: quantile_ratio(above, below, share) for name, share in SHARES.items()}
    return MetricRow(
        metric=metric,
        num_pairs=len(pairs),
        outcome=outcome_of(block_means(pairs, metric), margin),
        a=_quantiles(a),
        b=_quantiles(b),
        quantiles={name: one for name, one in quantiles.items() if one is not None},
    )


def _value(one: Observed, metric: str) -> float | None:
    if metric == "tokens_per_s":
        return one.num_tokens / one.e2e_s
    return {"e2e": one.e2e_s, "ttft": one.ttft_s, "itl": one.itl_s}[metric]


def _quantiles(blocks: Sequence[Sequence[float]]) -> dict[str, float]:
    values = [value for block in blocks for value in block]
    return {name: float(np.quantile(values, share, method="inverted_cdf")) for name, share in SHARES.items()}


def slice_rows(pairs: Sequence[Pair], options: AbOptions) -> list[SliceRow]:
    """A row for each kind of text, and above them one of all where there are several."""
    names = list(dict.fromkeys(sorted(pair.plan.slice for pair in pairs)))
    found = [_slice_row(name, [pair for pair in pairs if pair.plan.slice == name], options) for name in names]
    return found if len(found) == 1 else [_slice_row("", pairs, options), *found]


def _slice_row(name: str, pairs: Sequence[Pair], options: AbOptions) -> SliceRow:
    done = [pair for pair in pairs if pair.is_ok]
    sides: dict[str, list[Observed]] = {"a": [pair.a for pair in done], "b": [pair.b for pair in done]}
    tokens = {side: sum(one.num_tokens for one in own) for side, own in sides.items()}
    seconds = {side: math.fsum(one.e2e_s for one in own) for side, own in sides.items()}
    return SliceRow(
        slice=name,
        num_pairs=len(pairs),
        num_ok=len(done),
        errors={side: sum(bool(getattr(pair, side).error) for pair in pairs) for side in ("a", "b")},
        num_tokens=tokens,
        tokens_per_s={side: tokens[side] / seconds[side] if seconds[side] > 0 else None for side in sides},
        ratio=paired_ratio(_measured(done, lambda pair: pair.b), _measured(done, lambda pair: pair.a)),
        equal_texts=_share([equal for pair in done if (equal := pair.has_equal_texts) is not None]),
        equal_lengths=_share([pair.has_equal_lengths for pair in done]),
        cost_per_million=_costs(sides, options.prices, options.slo_ms),
    )


def _measured(pairs: Sequence[Pair], side: Callable[[Pair], Observed]) -> Measured:
    """(tokens, seconds) of one side; the same request asked again, with another seed, is another repeat of one prompt.
    Names alone do not tell: requests of two files may share them.
    """
    repeats: dict[tuple[str, Question], int] = {}
    numbers: dict[tuple[str, Question], int] = {}
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in pairs:
        request = pair.plan.name, replace(pair.plan.question, seed=None)
        prompt = numbers.setdefault(request, len(numbers))
        repeat = repeats[request] = repeats.get(request, -1) + 1
        one = side(pair)
        found[prompt, repeat] = (float(one.num_tokens), one.e2e_s)
    return found


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _costs(
    sides: Mapping[str, Sequence[Observed]], prices: tuple[float, float] | None, slo_ms: float | None
) -> dict[str, Estimate] | None:
    """Price of a million tokens on each side, answered one request at a time; a side is missing where none counts."""
    if prices is None:
        return None
    found = {}
    for price, (side, own) in zip(prices, sides.items(), strict=True):
        paid = [million_price(price, one.e2e_s) for one in own]
        counted = [counted_tokens(one.num_tokens, one.itl_s, slo_ms) for one in own]
        counts = np.array([paid, counted], dtype=np.float64).T
        if len(counts) and counts[:, 1].sum() > 0:
            is_whole = bool((counts[:, 1] > 0).all())  # an interval leaves out what has no tokens, and that is paid for
            found[side] = estimate(counts) if is_whole else Estimate(ratio(counts) or 0.0)
    return found


@dataclass(frozen=True)
class OrderEffect:
    """By how much the second answer of a pair was faster than the first, whoever gave it, with its interval."""

    speedup: float
    low: float
    high: float


def order_effect(pairs: Sequence[Pair]) -> OrderEffect | None:
    """How the order within a pair mattered; None with fewer than two pairs in either order."""
    values = {True: [], False: []}  # type: dict[bool, list[float]]
    for pair in pairs:
        ratio = pair.log_ratio(PRIMARY)
        if ratio is not None:
            values[pair.plan.a_first].append(ratio)
    if min(map(len, values.values())) < 2:
        return None
    first, second = (np.array(values[order]) for order in (True, False))
    half = float(first.mean() - second.mean()) / 2  # B second against B first: half of it is the order's
    error = math.sqrt(float(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second))) / 2
    return OrderEffect(math.exp(half), math.exp(half - 2 * error), math.exp(half + 2 * error))
