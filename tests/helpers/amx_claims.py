"""Figures in prose of what was measured on a processor with AMX, with what their raw files say (`CLAIMS`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.helpers.raw_files import raw

SERVED = ("2026-11-29-amx-serving-rivals", "2026-11-29-amx-serving-rivals-2")


def served_over_plain(name: str, quantile: str) -> list[float]:
    """Ratios of a request's time, `auto` to plain serving, at each rate."""
    rows = {one["server"]: one["rows"] for one in raw(name)["servers"]}
    pairs = zip(rows["foretoken-auto"], rows["foretoken"], strict=True)
    return [auto["e2e_s"][quantile]["value"] / plain["e2e_s"][quantile]["value"] for auto, plain in pairs]


def served_within_p95(name: str) -> list[float]:
    """The most tokens per second of `auto` within plain serving's 95th percentile at each rate, over plain's."""
    return [row["ratio"]["foretoken-auto"] for row in raw(name)["at_p95_of_plain"]]


def _served() -> list[float]:
    first, second = map(served_within_p95, SERVED)
    tails = [ratio for name in SERVED for ratio in served_over_plain(name, "p95")]
    return [min(first), max(first), min(second), max(second), min(tails), max(tails)]


_KINDS = ("Q4_0", "Q4_K_M", "Q8_0")


def _of_kinds(name: str, model: str, num_rows: int, field: str, kinds: Sequence[str] = _KINDS) -> list[float]:
    """A field of the row of `num_rows`, for each of `kinds`."""
    files = raw(name)["files"]
    found: list[dict[str, Any]] = [
        row for kind in kinds for row in files[f"{model}-{kind}.gguf"]["rows"] if row["rows"] == num_rows
    ]
    return [float(row[field]) for row in found]


def _beside_llama_cpp() -> list[float]:
    small = [
        value
        for name, model, num_rows in (
            ("2026-11-30-amx-rivals", "smollm2", 1),
            ("2026-11-30-amx-prompts-rivals", "smollm2", 512),
            ("2026-11-30-amx-1b-rivals", "smollm2-1b", 1),
            ("2026-11-30-amx-prompts-1b-rivals", "smollm2-1b", 512),
        )
        for value in _of_kinds(name, model, num_rows, "theirs_over_ours")
    ]
    return small + _of_kinds("2026-11-30-amx-8b-rivals", "smollm2-8b", 1, "theirs_over_ours", ("Q4_0",))


def _the_day_before() -> list[float]:
    """Of one row, SmolLM2 and 1.0 B: Q4_0, Q8_0, Q4_K_M."""
    kinds = ("Q4_0", "Q8_0", "Q4_K_M")
    return [
        value
        for name, model in (
            ("2026-11-29-amx-steady-rivals", "smollm2"),
            ("2026-11-29-amx-steady-1b-rivals", "smollm2-1b"),
        )
        for value in _of_kinds(name, model, 1, "theirs_over_ours", kinds)
    ]


def _over_one_row() -> list[float]:
    """Of 8 and 16 rows, SmolLM2 and 1.0 B: Q8_0, Q4_K_M, Q4_0."""
    return [
        value
        for name, model in (
            ("2026-11-30-amx-rivals", "smollm2"),
            ("2026-11-30-amx-1b-rivals", "smollm2-1b"),
        )
        for num_rows in (8, 16)
        for value in reversed(_of_kinds(name, model, num_rows, "ours_over_one_row"))
    ]


_STAGES = ("2026-11-30-amx-stages-prompts-1b-rivals", "2026-12-01-amx-stages-prompts-1b-rivals")
_STAGED_ROWS = "2026-11-30-amx-stages-1b-rivals"
_LATEST_ROWS = "2026-12-01-rows-1b-rivals"
_BY_SIZE = ("Q4_0", "Q8_0", "Q4_K_M")


def _latest_row() -> list[float]:
    """Of one row at 1.0 B, with intervals."""
    values = _of_kinds(_LATEST_ROWS, "smollm2-1b", 1, "theirs_over_ours", _BY_SIZE)
    files = raw(_LATEST_ROWS)["files"]
    ends = [files[f"smollm2-1b-{kind}.gguf"]["rows"][0]["theirs_over_ours_interval"] for kind in _BY_SIZE]
    return [float(one) for value, (low, high) in zip(values, ends, strict=True) for one in (value, low, high)]


def _prompts_in_stages(name: str) -> list[float]:
    """Of 512 rows at 1.0 B, with intervals: Q4_0, Q8_0, Q4_K_M."""
    files = raw(name)["files"]
    rows = [files[f"smollm2-1b-{kind}.gguf"]["rows"][0] for kind in ("Q4_0", "Q8_0", "Q4_K_M")]
    return [float(value) for row in rows for value in (row["theirs_over_ours"], *row["theirs_over_ours_interval"])]


_MORNING, _EVENING = "2026-11-30-smollm2-amx", "2026-11-30-smollm2-amx-3"


def _auto_over_plain(*fields: str, name: str = _EVENING) -> list[float]:
    return [value for temperature in (0.0, 0.7) for value in _auto_on("all", temperature, *fields, name=name)]


def _auto_on(kind: str, temperature: float, *fields: str, name: str = _EVENING) -> list[float]:
    wanted = (kind, "auto", temperature)
    return [
        float(row[field])
        for row in raw(name)["rows"]
        if (row["kind"], row["setting"], row["temperature"]) == wanted
        for field in fields
    ]


_WITH_INTERVAL = ("over_plain", "over_plain_low", "over_plain_high")


def _large_pages() -> list[float]:
    summary = raw("2026-11-29-large-pages-before-after")["summary"]
    means = [summary[f"{setting}: after/before"]["mean"] for setting in ("plain", "auto")]
    return [float(mean[key]) for mean in means for key in ("median", "low", "high")]


AMX_CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "docs/quantised.md",
        "prompts of 512 tokens at 1.0 B are # (# to #), # (# to #) and # (# to #) times as fast as llama.cpp's",
        lambda: _prompts_in_stages(_STAGES[0]),
    ),
    (
        "docs/quantised.md",
        "in a second run # (# to #), # (# to #) and # (# to #)",
        lambda: _prompts_in_stages(_STAGES[1]),
    ),
    (
        "docs/quantised.md",
        "A pass over 16 rows takes #, # and # times as long as one row",
        lambda: _of_kinds(_STAGED_ROWS, "smollm2-1b", 16, "ours_over_one_row", ("Q4_0", "Q8_0", "Q4_K_M")),
    ),
    (
        "docs/quantised.md",
        "one row at 1.0 B is # (# to #), # (# to #) and # (# to #) times as fast as llama.cpp's",
        _latest_row,
    ),
    (
        "docs/quantised.md",
        "8 rows take #, # and # times as long as one, 16 rows #, # and #",
        lambda: [
            value
            for num_rows in (8, 16)
            for value in _of_kinds(_LATEST_ROWS, "smollm2-1b", num_rows, "ours_over_one_row", _BY_SIZE)
        ],
    ),
    (
        "docs/goals.md",
        "since then prompts at 1.0 B #, # and #",
        lambda: _of_kinds(_STAGES[1], "smollm2-1b", 512, "theirs_over_ours"),
    ),
    (
        "docs/goals.md",
        "since then #, #, # |",
        lambda: _of_kinds(_STAGED_ROWS, "smollm2-1b", 16, "ours_over_one_row", ("Q8_0", "Q4_K_M", "Q4_0")),
    ),
    (
        "docs/quantised.md",
        "one row of SmolLM2 was #, # and # times as fast as llama.cpp's (Q4_0, Q8_0, Q4_K_M), of 1.0 B #, # and # "
        "times",
        _the_day_before,
    ),
    (
        "docs/goals.md",
        "by the rate offered, # to # times the tokens/s within it in one run and # to # in another; its 95th "
        "percentile # to # of plain's",
        _served,
    ),
    (
        "docs/goals.md",
        "Intel with AMX, SmolLM2: one row #, # and #, prompts of 512 tokens #, # and #; at 1.0 B one row #, # and #, "
        "prompts #, # and #; at 8 B one row of Q4_0 #, where memory is the limit of both",
        _beside_llama_cpp,
    ),
    (
        "docs/goals.md",
        "Intel with AMX, SmolLM2, 8 rows: Q8_0 #, Q4_K_M #, Q4_0 #; 16 rows: #, #, #; 1.0 B, 8 rows: Q8_0 #, Q4_K_M #, "
        "Q4_0 #; 16 rows: #, #, #",
        _over_one_row,
    ),
    (
        "docs/quantised.md",
        "plain decoding of the Q4_1 file is # times as fast (# to #), and `auto` # times (# to #); no answer differs",
        _large_pages,
    ),
    ("docs/goals.md", "on an Intel Xeon with AMX #, at temperature 0.7 #;", lambda: _auto_over_plain("over_plain")),
    (
        "docs/drafters.md",
        "30 prompts a kind: # (# to #) of plain decoding, # (# to #) at temperature 0.7",
        lambda: _auto_over_plain(*_WITH_INTERVAL),
    ),
    (
        "docs/drafters.md",
        "while the machine's pace changed from turn to turn, # (# to #) and # (# to #)",
        lambda: _auto_over_plain(*_WITH_INTERVAL, name=_MORNING),
    ),
    (
        "docs/drafters.md",
        "two thirds of retrieval's, where `auto` makes # (# to #) and # (# to #)",
        lambda: [value for kind in ("summarisation", "retrieval") for value in _auto_on(kind, 0.0, *_WITH_INTERVAL)],
    ),
)
