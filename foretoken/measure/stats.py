"""Every published interval: of ratios of totals, of two settings on the same prompts, of means and of quantiles.

What varies is the prompt or the request, here a *group*, never the token: an answer that loops is accepted whole, and
an interval on its tokens would be several times too narrow. The methods, whose coverage for 5 to 100 groups
`tests/measure/test_stats.py` measures:

- a ratio of totals, or another function of drawn groups: bootstrap over groups with percentiles expanded for few groups
  (Hesterberg, What Teachers Should Know about the Bootstrap, 2015, section 4.1);
- the ratio of two settings on the same prompts: bootstrap-t of its logarithm (Efron and Tibshirani, An Introduction to
  the Bootstrap, 1993, section 12.5), and with fewer than `_MIN_STUDENTISED` prompts Student's t in its place;
- a quantile of values in groups: the interval of the share of values below it (Korn and Graubard, 1998), inverted
  (Woodruff, 1952);
- the ratio of a quantile under two settings in the same blocks: the bootstrap over blocks, drawn for both together.

Intervals that hold while one looks at them again and again are in `measure.sequential`. Draws are the same in every
run: an interval is a function of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2  # outside an interval at either end
MIN_GROUPS = 5  # below, an interval says nothing about another sample of groups
FEW_PROMPTS = f"Fewer than {MIN_GROUPS} prompts have no interval: how far others differ is not known."
_MAX_DRAWS, _MIN_DRAWS = 10_000, 1000
_MAX_DRAWN = 4_000_000  # groups in all draws together: so many requests need fewer draws, and would take minutes
_DRAWS_AT_ONCE = 500  # of quantiles: a matrix of draws and values is held
_MIN_BEYOND = 10  # draws beyond an end of an interval, with fewer of which they do not tell it
_SEED = 20_150_000
_MIN_STUDENTISED = 8  # with fewer prompts too many draws hold only two or three different ones, and have no error
_SAME = 1e-9  # relative error of a ratio, below which all prompts have the same one
_GRID = np.linspace(0.0, np.pi / 2, 20_001)
_LOG_SIN = np.log(np.maximum(np.sin(_GRID), np.finfo(np.float64).tiny))
_LOG_COS = _LOG_SIN[::-1]

Array = NDArray[np.float64]
_Setting = TypeVar("_Setting")
Counts = Array  # [n, 2]: numerator and denominator of each group
Measured = Mapping[tuple[int, int], tuple[float, float]]  # (amount, cost) by (prompt, repeat): tokens and seconds


@dataclass(frozen=True)
class Interval:
    """The ends of an interval."""

    low: float
    high: float


def ends(found: Interval | None) -> list[float] | None:
    """The ends of an interval as a file holds them; None without one."""
    return None if found is None else [found.low, found.high]


@dataclass(frozen=True)
class Estimate:
    """A figure with the ends of its interval; None where there is too little to tell that end."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(value: float, found: Interval | None) -> Estimate:
        """A figure with its interval."""
        return Estimate(value) if found is None else Estimate(value, found.low, found.high)


def ratio_text(found: Estimate) -> str:
    """A ratio with its interval."""
    ends = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}x{ends}"


@dataclass(frozen=True)
class PairedRatio:
    """One setting's rate over another's, its interval (None: less than `MIN_GROUPS` prompts), and each prompt's."""

    ratio: float
    low: float | None
    high: float | None
    by_prompt: Mapping[int, float]


def geometric_mean(values: Sequence[float]) -> float:
    """Of numbers of at least 0; NaN of none."""
    if not values:
        return math.nan
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def best_fixed(
    settings: Iterable[_Setting], adapts: Callable[[_Setting], bool], speed: Callable[[_Setting], float]
) -> _Setting | None:
    """The fastest of the settings that do not adapt, the first of equal ones; None where all adapt."""
    return max((setting for setting in settings if not adapts(setting)), key=speed, default=None)


@lru_cache(maxsize=4)
def drawn(num_groups: int, stream: int = 0) -> Array:
    """How often each group is in each draw of as many groups, [draws, n]; another `stream` gives other draws."""
    generator = np.random.default_rng([_SEED, stream])
    num_draws = max(_MIN_DRAWS, min(_MAX_DRAWS, _MAX_DRAWN // num_groups))
    return generator.multinomial(num_groups, [1 / num_groups] * num_groups, size=num_draws).astype(np.float64)


def drawn_ratios(counts: Counts, weights: Array) -> Array:
    """The ratio of totals in each draw [draws]; NaN where its denominator is 0."""
    sums = weights @ counts
    return _quotients(sums[:, 0], sums[:, 1])


def _quotients(above: Array, below: Array) -> Array:
    """NaN where the denominator is not above 0."""
    found = np.full(above.shape, np.nan)
    np.divide(above, below, out=found, where=below > 0)
    return found


def expanded_interval(
    values: Array, num_groups: int, tail: float = TAIL, freedom: int | None = None
) -> Interval | None:
    """The interval of a figure from its `values` in draws of `num_groups` groups; None without any.

    `freedom`: degrees of freedom, where the draws are of several sets of `num_groups` each.
    """
    values = values[np.isfinite(values)]  # a draw of prompts in which nothing was drafted has no ratio
    if not len(values) or num_groups < 2:
        return None
    tail = _expanded_tail(num_groups, tail, freedom or num_groups - 1)
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


@lru_cache
def _expanded_tail(num_groups: int, tail: float, freedom: int) -> float:
    """The share of a bootstrap distribution to leave out at either end, so that about `tail` of the sampling
    distribution is.

    A bootstrap of n groups is too narrow by sqrt((n - 1) / n), and takes a normal quantile for one of Student's t.
    """
    factor = (num_groups / (num_groups - 1)) ** 0.5
    return NormalDist().cdf(-factor * student_quantile(1 - tail, freedom))


def ratio(counts: Counts) -> float | None:
    """Sum of the numerators over that of the denominators; None if that is 0."""
    above, below = counts.sum(axis=0).tolist()
    return above / below if below else None


def ratio_interval(counts: Counts) -> Interval | None:
    """The interval of a ratio of totals; None for fewer than `MIN_GROUPS` groups with a denominator."""
    counts = _used(counts)
    if len(counts) < MIN_GROUPS:
        return None
    return expanded_interval(drawn_ratios(counts, drawn(len(counts))), len(counts))


def difference_interval(first: Counts, second: Counts, paired: bool, tail: float = TAIL) -> Interval | None:
    """The interval of ratio(first) - ratio(second); None for fewer than two groups with a denominator.

    With `paired` row i of both is the same group, and both are drawn together. Draws of few groups end at their most
    extreme group: a tail that lies so far out is that of Student's t with the error of the ratios, where it is wider.
    """
    if paired:
        kept = (first[:, 1] > 0) | (second[:, 1] > 0)
        first, second = first[kept], second[kept]
    else:
        first, second = _used(first), _used(second)
    num_groups = min(len(first), len(second))
    if num_groups < 2:
        return None
    ratios = drawn_ratios(first, drawn(len(first))), drawn_ratios(second, drawn(len(second), stream=int(not paired)))
    num_draws = min(map(len, ratios))
    found = expanded_interval(ratios[0][:num_draws] - ratios[1][:num_draws], num_groups, tail)
    if found is None or _expanded_tail(num_groups, tail, num_groups - 1) * num_draws >= _MIN_BEYOND:
        return found
    middle, half = _difference(first, second), student_quantile(1 - tail, num_groups - 1)
    half *= _difference_error(first, second, paired)
    return Interval(min(found.low, middle - half), max(found.high, middle + half))


def _difference(first: Counts, second: Counts) -> float:
    return (ratio(first) or 0.0) - (ratio(second) or 0.0)


def _difference_error(first: Counts, second: Counts, paired: bool) -> float:
    """Standard error of ratio(first) - ratio(second), by the delta method."""
    own, other = _deviations(first), _deviations(second)
    sides = [own - other] if paired else [own, other]
    return math.sqrt(sum(len(one) / (len(one) - 1) * float(one @ one) for one in sides))


def _deviations(counts: Counts) -> Array:
    """What each group [n] moves the ratio of totals by; zeros without a denominator."""
    total = float(counts[:, 1].sum())
    found: Array = (counts[:, 0] - (ratio(counts) or 0.0) * counts[:, 1]) / total if total else 0.0 * counts[:, 0]
    return found


def _used(counts: Counts) -> Counts:
    return counts[counts[:, 1] > 0]


def estimate(counts: Counts) -> Estimate:
    """The ratio of totals with its interval."""
    return Estimate.of(ratio(counts) or 0.0, ratio_interval(counts))


def paired_ratio(own: Measured, base: Measured) -> PairedRatio | None:
    """The rate of `own` over that of `base`, on the (prompt, repeat) pairs that both have; None where there is none.

    A rate is the sum of amounts over the sum of costs, of each prompt its medians over the repeats that it has: so each
    prompt counts once, also where a run ended within a repeat, and no repeat stands for all.
    """
    common = own.keys() & base.keys()
    prompts = sorted({prompt for prompt, _ in common})
    totals = np.concatenate([_medians(measured, prompts, common) for measured in (own, base)], axis=1)
    alone = dict(zip(prompts, _paired_ratios(totals, np.eye(len(prompts))).tolist(), strict=True))
    whole = float(_paired_ratios(totals, np.ones((1, len(prompts))))[0])
    if math.isnan(whole):
        return None
    by_prompt = {prompt: value for prompt, value in alone.items() if not math.isnan(value)}
    found = None if whole <= 0 or len(by_prompt) < MIN_GROUPS else _log_t_interval(whole, totals)
    low, high = (None, None) if found is None else (found.low, found.high)
    return PairedRatio(whole, low, high, by_prompt)


def _medians(measured: Measured, prompts: list[int], common: set[tuple[int, int]]) -> Array:
    """Amount and cost of each prompt [prompts, 2], the medians over its repeats."""
    by_prompt: dict[int, list[tuple[float, float]]] = {prompt: [] for prompt in prompts}
    for prompt, repeat in common:
        by_prompt[prompt].append(measured[prompt, repeat])
    found = [np.median(np.array(values, dtype=np.float64), axis=0) for values in by_prompt.values()]
    return np.array(found, dtype=np.float64).reshape(len(prompts), 2)


def _paired_ratios(totals: Array, weights: Array) -> Array:
    """The ratio of rates for each row of `weights` [draws, prompts]; NaN where one of them is unknown or 0."""
    sums = weights @ totals
    return _quotients(_quotients(sums[:, 0], sums[:, 1]), _quotients(sums[:, 2], sums[:, 3]))


def _log_t_interval(whole: float, totals: Array) -> Interval:
    """ratio * exp(-t * error), with t from draws of prompts, each with its answers under both settings."""
    num_prompts = len(totals)
    error = float(_log_errors(totals, np.ones((1, num_prompts)))[0])
    if error < _SAME:
        return Interval(whole, whole)
    if num_prompts < _MIN_STUDENTISED:
        most = student_quantile(1 - TAIL, num_prompts - 1)
        limits = (-most, most)
    else:
        weights = drawn(num_prompts)
        with np.errstate(divide="ignore", invalid="ignore"):  # a draw of nothing, or of one prompt only
            t = np.log(_paired_ratios(totals, weights) / whole) / _log_errors(totals, weights)
        limits = tuple(np.quantile(t[np.isfinite(t)], [TAIL, 1 - TAIL]).tolist())
    return Interval(whole * math.exp(-limits[1] * error), whole * math.exp(-limits[0] * error))


def _log_errors(totals: Array, weights: Array) -> Array:
    """Standard errors [draws] of log(ratio), by the delta method from each prompt's four totals [prompts, 4]: amount
    and cost under one setting, amount and cost under the other.
    """
    num_prompts = len(totals)
    means = weights @ totals / num_prompts  # [draws, 4]
    products = (weights @ (totals[:, :, None] * totals[:, None, :]).reshape(num_prompts, 16)).reshape(-1, 4, 4)
    signs = np.array([1.0, -1.0, -1.0, 1.0])
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = signs / means
        squares = np.einsum("dij,di,dj->d", products, scaled, scaled)
    errors: Array = np.sqrt(np.maximum(squares, 0.0) / (num_prompts * (num_prompts - 1)))
    return errors


def mean_estimate(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, those of each request in a group of its own; there must be one."""
    return estimate(np.array([(math.fsum(own), len(own)) for own in groups], dtype=np.float64).reshape(-1, 2))


def quantile_estimate(groups: Sequence[Sequence[float]], share: float) -> Estimate:
    """The smallest value that at least `share` of all values do not exceed, those of each request in a group of its
    own; there must be one.

    An end is None where even the smallest or largest value lies within it: the 99th percentile of 100 requests has no
    upper end.
    """
    groups = [own for own in groups if len(own)]
    values, owners = _in_order(groups)
    place = _place(share, len(values))
    value = float(values[place])
    if len(groups) < MIN_GROUPS:
        return Estimate(value)
    size = _effective_size(owners, place + 1, share)
    low = high = None
    if (1 - share) ** size <= TAIL:
        low = float(values[_place(beta_quantile(TAIL, share * size, (1 - share) * size + 1), len(values))])
    if share**size <= TAIL:
        high = float(values[_place(beta_quantile(1 - TAIL, share * size + 1, (1 - share) * size), len(values))])
    return Estimate(value, low, high)


def quantile_ratio(base: Sequence[Sequence[float]], own: Sequence[Sequence[float]], share: float) -> Estimate | None:
    """The quantile of `base` over that of `own`, of positive values in blocks that both have in the same order; None
    without a value.

    Blocks are drawn for both together; the interval is left out for fewer than `MIN_GROUPS` blocks.
    """
    kept = [(one, other) for one, other in zip(base, own, strict=True) if one and other]
    if not kept:
        return None
    every = np.ones((1, len(kept)))
    sides = [[list(block) for block in side] for side in zip(*kept, strict=True)]
    above, below = (_weighted_quantiles(side, every, share) for side in sides)
    value = float(above[0] / below[0])
    if len(kept) < MIN_GROUPS:
        return Estimate(value)
    weights = drawn(len(kept))
    above, below = (_weighted_quantiles(side, weights, share) for side in sides)
    return Estimate.of(value, expanded_interval(_quotients(above, below), len(kept)))


def _weighted_quantiles(blocks: Sequence[Sequence[float]], weights: Array, share: float) -> Array:
    """The quantile [draws] of values in blocks, each as often as its block's weight [draws, blocks] says."""
    values, owners = _in_order(blocks)
    found: Array = np.empty(len(weights))
    for begin in range(0, len(weights), _DRAWS_AT_ONCE):
        counts = np.cumsum(weights[begin : begin + _DRAWS_AT_ONCE, owners], axis=1)
        places = (counts >= share * counts[:, -1:] - _SAME).argmax(axis=1)
        found[begin : begin + _DRAWS_AT_ONCE] = values[places]
    return found


def _in_order(groups: Sequence[Sequence[float]]) -> tuple[Array, NDArray[np.int64]]:
    """All values of groups, ascending, and the number of each one's group."""
    values = np.concatenate([np.asarray(own, dtype=np.float64) for own in groups])
    owners = np.repeat(np.arange(len(groups)), [len(own) for own in groups])
    order = np.argsort(values, kind="stable")
    return values[order], owners[order]


def _place(share: float, count: int) -> int:
    return min(count - 1, max(0, math.ceil(share * count - _SAME) - 1))


def _effective_size(owners: NDArray[np.int64], num_below: int, share: float) -> float:
    """How many independent values tell as much of the share of values below a place as these, which stand in groups.

    `owners` [values] are the groups of the values in order, the first `num_below` lie below the place.
    """
    sizes = np.bincount(owners)
    num_groups, total = len(sizes), len(owners)
    if num_groups == total:  # independent, and their count is binomial
        return float(total)
    below = np.bincount(owners[:num_below], minlength=num_groups)
    rest = below - num_below / total * sizes
    variance = num_groups / (num_groups - 1) * float(rest @ rest) / total**2
    size = min(total, share * (1 - share) / variance) if variance > 0 else total
    return float(size * (NormalDist().inv_cdf(1 - TAIL) / student_quantile(1 - TAIL, num_groups - 1)) ** 2)


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for a probability above 0.5.

    The density is integrated over t = sqrt(freedom) * tan(angle), where it is cos(angle) ** (freedom - 1).
    """
    density = np.cos(_GRID) ** (freedom - 1)
    angle = _quantile_angle(density, (probability - 0.5) * 2)
    return float(np.sqrt(freedom) * np.tan(min(angle, float(_GRID[-2]))))


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The quantile of the beta distribution with `a` and `b` of at least 1.

    The density is integrated over x = sin(angle) ** 2, where it is sin(angle) ** (2a - 1) * cos(angle) ** (2b - 1).
    """
    log_density = (2 * a - 1) * _LOG_SIN + (2 * b - 1) * _LOG_COS
    return float(np.sin(_quantile_angle(np.exp(log_density - log_density.max()), probability)) ** 2)


def _quantile_angle(density: Array, probability: float) -> float:
    """The angle below which `probability` of a density over `_GRID` lies, which need not be normalised."""
    total = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.interp(probability * total[-1], total, _GRID))
