"""The raw files of `benchmarks/` that figures of the README and of `docs/` come from."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPEED = "2026-11-23-drafters-1b-amd"


@functools.cache
def raw(name: str) -> Any:
    """A raw file of `benchmarks/`."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def speed_row(drafter: str, slice_: str, name: str = SPEED) -> Mapping[str, Any]:
    """A row of a drafter table."""
    (row,) = (row for row in raw(name)["rows"] if row["slice"] == slice_ and row["setting"] == drafter)
    return row  # type: ignore[no-any-return]


@functools.cache
def turns(name: str) -> Mapping[tuple[Any, ...], float]:
    """Tokens per second of the batch by (side, setting, requests, slice, repeat)."""
    samples = raw(name)["samples"]
    return {(s["side"], s["setting"], s["batch"], s["slice"], s["repeat"]): s["tokens_per_s"] for s in samples}


def ratios(name: str, above: tuple[str, str], below: tuple[str, str]) -> dict[tuple[int, str], float]:
    """Medians over repeats of the ratios of neighbouring turns, by requests and slice."""
    found = turns(name)
    cells = sorted({key[2:4] for key in found})
    repeats = sorted({key[4] for key in found})
    return {
        cell: statistics.median(found[*above, *cell, i] / found[*below, *cell, i] for i in repeats) for cell in cells
    }


def grid(name: str) -> dict[tuple[int, str], float]:
    """`auto` over plain decoding of the same code."""
    return ratios(name, ("after", "auto"), ("after", "plain"))


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))
