"""The statistics of several workers as those of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A mean over workers says nothing about rates: these are computed anew from their sums, numerator by denominator.
_RATES: Mapping[str, tuple[str, str]] = {"acceptance_rate": ("num_accepted", "num_drafted")}
# Of values that cannot be added, what describes all workers: the largest.
_LARGEST = ("near_tie_gap", "longest_gap_s", "kv_cache_usage", "draft_kv_cache_usage", "max_greedy_gap", "e_value")
# Means by request or token: weighed by what they are means of.
_MEANS: Mapping[str, str] = {"inter_token_s": "num_emitted", "estimated_speedup": "num_emitted"}


def merged(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of all workers together: counts and times are added, rates computed anew, extremes kept; those of a
    single worker are returned as they are.
    """
    if len(stats) == 1:
        return dict(stats[0])
    found: dict[str, Any] = _merge(stats)
    for name, (over, under) in _RATES.items():
        if name in found:
            found[name] = found[over] / found[under] if found[under] else 0.0
    for name, weight in _MEANS.items():
        known = [(one[name], one[weight]) for one in stats if one.get(name) is not None]
        total = sum(count for _, count in known)
        if known:
            found[name] = sum(value * count for value, count in known) / total if total else known[0][0]
    return found


def _merge(values: Sequence[Any]) -> Any:  # noqa: ANN401 - JSON of any shape
    first = next((value for value in values if value is not None), None)
    if isinstance(first, Mapping):
        given = [value for value in values if value is not None]
        names = dict.fromkeys(name for value in given for name in value)
        return {name: _merge_named(name, [value.get(name) for value in given]) for name in names}
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        return sum(value for value in values if value is not None)
    if isinstance(first, list):
        return _merge_lists([value for value in values if value is not None])
    return first


def _merge_named(name: str, values: Sequence[Any]) -> Any:  # noqa: ANN401
    if name in _LARGEST:
        return max((value for value in values if value is not None), default=None)
    return _merge(values)


def _merge_lists(lists: Sequence[list[Any]]) -> list[Any]:
    """Counts by position: entry by entry, the longest list wins."""
    longest = max(map(len, lists))
    return [_merge([one[place] for one in lists if place < len(one)]) for place in range(longest)]
