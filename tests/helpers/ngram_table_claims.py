"""Ratios of the n-gram table that stand in prose, with what their raw files say (`figure_claims.CLAIMS`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.raw_files import raw


def _row(name: str, requests: int, setting: str) -> dict[str, Any]:
    """What was measured of a setting, all kinds together."""
    rows = raw(f"2026-11-28-{name}")["rows"]
    (row,) = (one for one in rows if (one["num_requests"], one["kind"], one["setting"]) == (requests, "all", setting))
    return dict(row)


def _with_over_without(name: str, requests: int = 1) -> list[float]:
    """How much faster `auto` is with the n-gram table, and its interval."""
    row = _row(name, requests, "auto")
    assert row["best_lookup"] == "auto-without-table"
    return [float(row[field]) for field in ("over_best_lookup", "over_best_lookup_low", "over_best_lookup_high")]


NGRAM_TABLE_CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "docs/drafters.md",
        "`auto` with the table is # (# to #) times as fast as without for SmolLM2",
        lambda: _with_over_without("smollm2-ngram-table"),
    ),
    ("docs/drafters.md", "no gain is shown: # (# to #), though", lambda: _with_over_without("smollm2-1b-ngram-table")),
    (
        "docs/drafters.md",
        "# (# to #) of `auto` without it with 4 requests, # (# to #) with 16 on three kinds",
        lambda: [
            *_with_over_without("smollm2-ngram-table-batches", 4),
            *_with_over_without("smollm2-ngram-table-batches", 16),
        ],
    ),
    (
        "docs/goals.md",
        "): # on a processor without AVX-512 (# without it)",
        lambda: [_row("smollm2-ngram-table", 1, one)["over_plain"] for one in ("auto", "auto-without-table")],
    ),
)
