"""Figures in prose of what was measured on Zen 5 beside llama.cpp, with what their raw files say (`CLAIMS`)."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.raw_files import raw

ZEN_5_CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "docs/goals.md",
        "on Zen 5, earlier kernels, at most #",
        lambda: [
            max(row["ratio"]["foretoken-auto"] for row in raw("2026-11-28-zen5-serving-rivals")["at_p95_of_plain"])
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
