"""Figures in prose of what was measured on Zen 5 beside llama.cpp, with what their raw files say (`CLAIMS`)."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.raw_files import raw


def _served_over_plain(quantile: str) -> list[float]:
    """The least and the largest ratio of `auto` to plain serving, over the rates, of a request's time."""
    rows = {one["server"]: one["rows"] for one in raw("2026-11-28-zen5-serving-rivals")["servers"]}
    pairs = zip(rows["foretoken-auto"], rows["foretoken"], strict=True)
    ratios = [auto["e2e_s"][quantile]["value"] / plain["e2e_s"][quantile]["value"] for auto, plain in pairs]
    return [min(ratios), max(ratios)]


ZEN_5_CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "docs/goals.md",
        "1.5 requests/s, 36 each) # times the tokens/s within it, with n-gram lookups; the median of a request # to # "
        "of plain's, its 95th percentile # to #",
        lambda: [
            max(row["ratio"]["foretoken-auto"] for row in raw("2026-11-28-zen5-serving-rivals")["at_p95_of_plain"]),
            *_served_over_plain("p50"),
            *_served_over_plain("p95"),
        ],
    ),
    (
        "docs/goals.md",
        "one row of SmolLM2 #, # and #, at 1.0 B #, # and # (Q4_0, Q4_K_M, Q8_0)",
        lambda: [
            raw(f"2026-11-28-{source}-rivals")["files"][f"{model}-{kind}.gguf"]["rows"][0]["theirs_over_ours"]
            for source, model in (("zen5", "smollm2"), ("zen5-1b", "smollm2-1b"))
            for kind in ("Q4_0", "Q4_K_M", "Q8_0")
        ],
    ),
    (
        "docs/goals.md",
        "Zen 5, 1.0 B, 8 rows: met; 16 rows: Q8_0 #, Q4_K_M #, Q4_0 #",
        lambda: [
            row["ours_over_one_row"]
            for kind in ("Q8_0", "Q4_K_M", "Q4_0")
            for row in raw("2026-11-28-zen5-1b-rivals")["files"][f"smollm2-1b-{kind}.gguf"]["rows"]
            if row["rows"] == 16
        ],
    ),
)
