"""Figures of a GPU in the docs, and how each follows from raw files (`figure_claims`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.helpers.raw_files import raw


def _h200(model: str, setting: str, rows: int) -> float:
    """Milliseconds of a pass."""
    models = raw(f"2026-11-27-h200-rounds-{model}")["models"]
    (found,) = [one for one in models if one["model"].endswith(f" {setting}")]
    return float(next(row["median_ms"] for row in found["rows"] if row["rows"] == rows))


def _h200_real(setting: str) -> list[float]:
    rows, wanted = raw("2026-11-27-h200-real-prompts")["rows"], ("all", 0.0, setting)
    (row,) = [one for one in rows if (one["kind"], one["temperature"], one["setting"]) == wanted]
    return [row["over_plain"], row["over_plain_low"], row["over_plain_high"]]


def _products(model: str) -> list[float]:
    """Milliseconds of passes of few rows, as replayed."""
    times = raw("2026-11-28-h200-products")["models"][model]["pass_ms"]
    return [times[rows] for rows in ("1", "2", "4", "8", "16")]


def _kernels(model: str) -> list[float]:
    """Milliseconds of one row by kind of kernel, products and the whole graph with their TB/s."""
    source = raw("2026-11-28-h200-products")
    of, gigabytes = source["models"][model], source["step_bytes"][model] / 1e9
    ms = {one["kernel"]: one["total_ms"] for one in of["kernels_of_one_row"]}
    product_ms, graph_ms = ms["_multiply"], of["graph_ms"]["1"]
    parts = [ms["_attend"], ms["_norm"], ms["_rotate"] + ms["_write"]]
    if model == "smollm2":
        return [product_ms, *parts, graph_ms]
    return [product_ms, gigabytes / product_ms, *parts, graph_ms, gigabytes / graph_ms]


GPU_CLAIMS: Sequence[tuple[str, str, Callable[[], Sequence[float]]]] = (
    (
        "docs/gpu.md",
        "**A tree of 64 nodes** costs # times one row of the 8 B shape, one of 128 nodes # times",
        lambda: [_h200("8b", "graphs", rows) / _h200("8b", "graphs", 1) for rows in (64, 128)],
    ),
    (
        "docs/gpu.md",
        "**Graphs** are # times as fast as the gathering path at 8 B, # times on SmolLM2",
        lambda: [_h200(model, "batched", 1) / _h200(model, "graphs", 1) for model in ("8b", "smollm2")],
    ),
    ("docs/goals.md", "`ngram` # times plain (# to #)", lambda: _h200_real("ngram")),
    ("docs/gpu.md", "| 8 B shape | # | # | # | # | # |", lambda: _products("8b")),
    ("docs/gpu.md", "| SmolLM2's shape | # | # | # | # | # |", lambda: _products("smollm2")),
    ("docs/gpu.md", "| 8 B shape | # ms, # TB/s | # ms | # ms | # ms | # ms, # TB/s |", lambda: _kernels("8b")),
    ("docs/gpu.md", "| SmolLM2's shape | # ms | # ms | # ms | # ms | # ms |", lambda: _kernels("smollm2")),
)
