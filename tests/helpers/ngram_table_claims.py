"""Ratios of the n-gram table that stand in prose, with what their raw files say (`figure_claims.CLAIMS`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.raw_files import raw

_ZEN_5, _ZEN_5_1B = "smollm2-ngram-table-avx512", "smollm2-1b-ngram-table-avx512"
_ZEN_3, _ZEN_3_1B = "smollm2-ngram-table", "smollm2-1b-ngram-table"
_BATCHES = "smollm2-batches-avx512"
_WARM = 0.7  # the temperature that was measured beside 0


def _rows(name: str, setting: str, requests: int = 1, temperature: float = 0.0) -> dict[str, dict[str, Any]]:
    """What was measured of a setting, by kind; `all`: the kinds together."""
    key = (setting, requests, temperature)
    rows = raw(f"2026-11-28-{name}")["rows"]
    return {row["kind"]: row for row in rows if (row["setting"], row["num_requests"], row["temperature"]) == key}


def _with_over_without(name: str, requests: int = 1, temperature: float = 0.0) -> list[float]:
    """How much faster `auto` is with the n-gram table, and its interval."""
    row = _rows(name, "auto", requests, temperature)["all"]
    assert row["best_lookup"] == "auto-without-table"
    return [float(row[field]) for field in ("over_best_lookup", "over_best_lookup_low", "over_best_lookup_high")]


def _batches() -> list[float]:
    """4 and 16 requests at once on Zen 5: with over without the table, `auto` over plain decoding, its worst kind."""
    both = (4, 16)
    rows = [_rows(_BATCHES, "auto", requests) for requests in both]
    over_plain = [own["all"][f"over_plain{end}"] for own in rows for end in ("", "_low", "_high")]
    with_over_without = [value for requests in both for value in _with_over_without(_BATCHES, requests)]
    return [*with_over_without, *over_plain, min(row["over_plain"] for own in rows for row in own.values())]


def _auto_over_plain() -> list[float]:
    """`auto` with and without the table: Zen 5, at 1.0 B, at temperature 0.7 and the least of all kinds; Zen 3."""
    settings = ("auto", "auto-without-table")
    zen_5 = [
        _rows(name, setting, temperature=temperature)["all"]["over_plain"]
        for name, temperature in ((_ZEN_5, 0.0), (_ZEN_5_1B, 0.0), (_ZEN_5, _WARM))
        for setting in settings
    ]
    kinds = [*_rows(_ZEN_5, "auto").values(), *_rows(_ZEN_5, "auto", temperature=_WARM).values()]
    least = min(row["over_plain"] for row in [*kinds, *_rows(_ZEN_5_1B, "auto").values()])
    zen_3 = [_rows(name, setting)["all"]["over_plain"] for name in (_ZEN_3, _ZEN_3_1B) for setting in settings]
    return [*zen_5, least, *zen_3]


NGRAM_TABLE_CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "docs/goals.md",
        "with 4 and 16 requests on Zen 5 # and # (",
        lambda: [_rows(_BATCHES, "auto", requests)["all"]["over_plain"] for requests in (4, 16)],
    ),
    (
        "docs/drafters.md",
        "`auto` with the table is # (# to #) times as fast as without on Zen 5 and # (# to #) times at temperature 0.7",
        lambda: [*_with_over_without(_ZEN_5), *_with_over_without(_ZEN_5, temperature=_WARM)],
    ),
    ("docs/drafters.md", ", # (# to #) times on Zen 3 (nearly two", lambda: _with_over_without(_ZEN_3)),
    ("docs/drafters.md", "at most 96 tokens: # (# to #) times on Zen 5", lambda: _with_over_without(_ZEN_5_1B)),
    ("docs/drafters.md", "no gain is shown: # (# to #) with 8 prompts", lambda: _with_over_without(_ZEN_3_1B)),
    (
        "README.md",
        "requests (Zen 5) `auto` makes #x and #x",
        lambda: [_rows(_BATCHES, "auto", requests)["all"]["over_plain"] for requests in (4, 16)],
    ),
    (
        "docs/drafters.md",
        "on Zen 5 # (# to #) of `auto` without it with 4 requests, # (# to #) with 16, and # (# to #) and # (# to #) "
        "of plain decoding, # at worst",
        _batches,
    ),
    (
        "docs/drafters.md",
        "gains nothing: # (# to #) of `auto` without it with 4 requests, # (# to #) with 16 on three kinds",
        lambda: [
            *_with_over_without("smollm2-ngram-table-batches", 4),
            *_with_over_without("smollm2-ngram-table-batches", 16),
        ],
    ),
    (
        "docs/goals.md",
        "on Zen 5 # (# without it), at 1.0 B # (#), at temperature 0.7 # (#), no kind below #; "
        "on Zen 3 # (#), at 1.0 B # (#)",
        _auto_over_plain,
    ),
)
