"""Figures of the README and of `docs/` against the raw files that they name: each is computed again from the JSON.

`CLAIMS` has every ratio that stands in prose, the table tests the tables. A ratio that neither of them knows fails
`test_no_ratio_stands_without_a_raw_file`: add it here with its file, or withdraw it (docs/goals.md).
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("**/*.md"))))
# Reasons of past decisions, and what was withdrawn: no claims (docs/goals.md says so).
NO_CLAIMS = ("docs/decisions/",)
RATIO = re.compile(r"\b\d+\.\d+(?:x\b| times\b)")
SPEED = "2026-11-22-drafters-1b"
SLICES = {"code": "code", "edits": "edit", "JSON": "json", "all": "all"}
CELL_SLICES = {"code": "code", "edits": "edit", "chat": "chat", "random words": "random"}
ABLATIONS = {
    "gains kept for later losses": "no_kept_gains",
    "correction of the chances that lookups name": "no_chance_rates",
    "acceptance by place": "no_place_rates",
    "long-run token rate": "no_rate_memory",
    "drafters that take little left unweighed": "no_cheap_share",
    "few first guesses of a drafter of unknown cost": "no_first_guesses",
    "counts for each request": "no_request_rates",
    "bound on rows that were never run": "no_first_rows",
    "steps without guesses to learn their cost": "no_plain_steps",
    "trials": "no_trials",
    "common speed factor": "no_speed_factor",
    "bound on slow steps": "no_outlier_bound",
    "account": "no_slack",
}


@functools.cache
def raw(name: str) -> Any:
    """A raw file of `benchmarks/`."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def page(name: str) -> str:
    """A page, with its line ends as blanks: a sentence may run over several lines."""
    return re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8"))


def is_printed_of(printed: str, value: float) -> bool:
    """Whether `value` is printed like this at this number of decimals."""
    decimals = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-decimals + 1e-9


def tables(name: str) -> Iterator[list[dict[str, str]]]:
    """The tables of a page, rows by heading."""
    rows: list[list[str]] = []
    for line in [*(ROOT / name).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            yield [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]
            rows = []


def table_with(name: str, *headings: str, last: bool = False) -> list[dict[str, str]]:
    """The first (or last) table of a page that has these headings."""
    found = [table for table in tables(name) if table and set(headings) <= set(table[0])]
    return found[-1 if last else 0]


def speed_row(drafter: str, slice_: str) -> Mapping[str, Any]:
    """A row of the drafter table."""
    (row,) = (row for row in raw(SPEED)["rows"] if row["slice"] == slice_ and row["setting"] == drafter)
    return row  # type: ignore[no-any-return]


SETTINGS = {
    "`auto`": "auto-auto",
    "`ngram`": "ngram-auto",
    "`draft_model`, best-first trees": "draft_model(tree=best_first)-auto",
    "`draft_model(tree=best_first)`": "draft_model(tree=best_first)-auto",
}


# ---- the drafter table


def test_the_table_of_the_readme() -> None:
    found = table_with("README.md", "drafter", "code", "answers that differ from plain")
    assert len(found) == 3
    for row in found:
        for heading, name in SLICES.items():
            source = speed_row(SETTINGS[row["drafter"]], name)
            assert source["num_prompts"] >= 10
            assert source["repeats"] >= 3
            ratio, low, high = re.findall(r"\d+\.\d+", row[heading])
            plain = speed_row("plain", name)["tokens_per_s"]
            assert is_printed_of(ratio, source["tokens_per_s"] / plain), (row["drafter"], heading)
            assert is_printed_of(low, source["speedup_low"])
            assert is_printed_of(high, source["speedup_high"])
        counts = speed_row(SETTINGS[row["drafter"]], "all")
        assert row["answers that differ from plain"] == f"{counts['num_differing']} of {counts['num_compared']}"


def test_the_tables_of_the_drafters_page() -> None:
    found = [table for table in tables("docs/drafters.md") if table and "against plain" in table[0]]
    assert len(found) == len(SLICES)
    for table, name in zip(found, SLICES.values(), strict=True):
        for row in table:
            source = speed_row(SETTINGS[row["drafter"]], name)
            ratio = source["tokens_per_s"] / speed_row("plain", name)["tokens_per_s"]
            assert is_printed_of(row["against plain"].rstrip("x"), ratio)
            assert is_printed_of(row["tokens a step"], source["num_emitted"] / source["num_steps"])
            assert is_printed_of(row["draft ms a step"], source["draft_ms_per_step"])


def test_tokens_per_step_of_the_other_drafters() -> None:
    found = table_with("docs/drafters.md", "docstring")
    rows = {(row["setting"], row["slice"]): row for row in raw("2026-11-21-drafters-1b")["rows"]}
    for row in found:
        for heading in ("code", "docstring", "edit", "json", "text"):
            if row[heading]:
                source = rows[f"{row['drafter'].strip('`')}-auto", heading]
                assert is_printed_of(row[heading], source["num_emitted"] / source["num_steps"])


# ---- grids of the controller


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


@pytest.mark.parametrize("name", ["2026-11-22-before-after-1b", "2026-11-22-before-after-reference"])
def test_the_grids_of_the_controllers_page(name: str) -> None:
    headings = ("code", "random words") if name.endswith("1b") else tuple(CELL_SLICES)
    found = table_with("docs/controller.md", "requests", *headings)
    cells = grid(name)
    assert len(found) * len(headings) == len(cells)
    for row in found:
        for heading in headings:
            value = cells[int(row["requests"]), CELL_SLICES[heading]]
            assert is_printed_of(row[heading], value), (row["requests"], heading)


def test_the_ablations() -> None:
    summary = raw("2026-11-22-worlds")["summary"]["auto"]
    found = table_with("docs/controller.md", "without", "worst world")
    assert {row["without"] for row in found} == set(ABLATIONS)
    for row in found:
        source = summary[ABLATIONS[row["without"]]]["full"]
        assert is_printed_of(row["to the full policy, mean"], source["mean"]), row
        assert is_printed_of(row["worst world"].split(",")[0], source["worst"]), row


# ---- the simulator


def test_the_table_of_the_simulator() -> None:
    found = table_with("docs/simulate.md", "steady", "bursts", "ramp")
    first, again = (
        {(row["setting"], row["trace"]): row for row in raw(name)["rows"]}
        for name in ("2026-11-22-simulate-reference", "2026-11-22-simulate-reference-disturbed")
    )
    settings = ("plain", "ngram-4", "draft_model-4", "ngram-auto")
    p95 = "latency_s_p95"
    for index, row in enumerate(found):
        setting = settings[index % 4]
        for trace in ("steady", "bursts", "ramp"):
            real, other = first[setting, trace]["measured"][p95], again[setting, trace]["measured"][p95]
            value = first[setting, trace]["predicted"][p95] / real - 1 if index < 4 else other / real - 1
            assert is_printed_of(row[trace].removesuffix(" %"), 100 * value), (row, trace)
    judged = ("tokens_per_s", p95)
    same = [
        all(abs(again[key]["measured"][w] / first[key]["measured"][w] - 1) <= 0.15 for w in judged) for key in first
    ]
    held = [all(abs(first[key]["errors"][w]) <= 0.15 for w in judged) for key in first]
    assert (sum(held), sum(same), len(held)) == (8, 6, 12)
    assert max(abs(row["errors"]["tokens_per_s"]) for row in first.values()) < 0.035


# ---- prose


def _strict(rows: int) -> float:
    times = raw("2026-11-21-strict-cost-1b")["times_ms"][f"{rows} rows"]
    return 100 * (statistics.median(times["strict"]) / statistics.median(times["default"]) - 1)


def _plain(requests: int) -> float:
    found = turns("2026-11-22-before-after-1b")
    return statistics.median(found["after", "plain", requests, "code", i] for i in (0, 1))


def _policy_shares(side: str) -> list[float]:
    """Per cent of a step of `auto`, beyond the same phases of plain decoding, by number of requests."""
    totals: dict[tuple[str, int], list[float]] = {}
    for sample in raw("2026-11-22-before-after-reference")["samples"]:
        if sample["side"] == side:
            phases = sample["phases"]
            of = totals.setdefault((sample["setting"], sample["batch"]), [0.0, 0.0, 0.0])
            own = phases["schedule_s"] + phases["observe_s"] + phases["preview_s"]
            for i, value in enumerate((own, phases["step_s"], phases["num_steps"])):
                of[i] += value
    batches = sorted({batch for _, batch in totals})
    shares = []
    for batch in batches:
        (own, step, num), (base, _, base_num) = totals["auto", batch], totals["plain", batch]
        shares.append(100 * (own / num - base / base_num) / (step / num))
    return [min(shares), max(shares)]


def _mixed(over: str, setting: str = "auto") -> float:
    speeds = {
        (trace["setting"], trace["repeat"]): sum(trace["tokens"]) / sum(trace["seconds"])
        for trace in raw("2026-11-22-mixed-reference")["traces"]
        if trace["side"] == "after" and trace["repeat"] >= 0
    }
    return statistics.median(speeds[setting, i] / speeds[over, i] for i in (0, 1))


def _before_after() -> list[float]:
    found = ratios("2026-11-22-before-after-reference", ("after", "auto"), ("before", "auto"))
    low_high = raw("2026-11-22-before-after-reference")["summary"]["auto: after/before"]["mean"]
    return [mean(list(found.values())), low_high["low"], low_high["high"], min(found.values()), max(found.values())]


def _requests_mean(name: str) -> float:
    return float(raw(name)["summary"]["auto/plain: after"]["requests_mean"]["median"])


def _many(name: str) -> list[float]:
    return [value for (requests, _), value in grid(name).items() if requests >= 8]


def _gather(tokens: int) -> float:
    (cell,) = (c for c in raw("2026-11-21-gather-cost")["results"] if (c["context"], c["rows"]) == (512, 1))
    return float(cell["steps_that_eat_up_an_adopted_prefix_of"][str(tokens)]["steps"])


def _recovery(requests: int, change: str) -> list[float]:
    (row,) = (
        row
        for row in raw("2026-11-21-recovery-reference")["rows"]
        if (row["setting"], row["batch"], row["change"]) == ("auto", requests, change)
    )
    return [min(row["steps"]), max(row["steps"])]


def _rules(temperature: float, rule: str) -> float:
    (row,) = (
        row
        for row in raw("2026-11-21-rules-reference")["rows"]
        if row["slice"] == "all" and row["setting"] == f"draft_model-5 {rule}" and row["temperature"] == temperature
    )
    return float(row["num_emitted"] / row["num_steps"])


def _worlds(over: str, what: str) -> float:
    return float(raw("2026-11-22-worlds")["summary"]["auto"]["full"][over][what])


def _summary(side: str) -> list[float]:
    """Cells of the shipped pair in which `auto` is below 0.97 of plain decoding, the worst, and the mean."""
    values = list(ratios(_SHIPPED, (side, "auto"), (side, "plain")).values())
    return [sum(value < 0.97 for value in values), min(values), mean(values)]


_1B, _SHIPPED = "2026-11-22-before-after-1b", "2026-11-22-before-after-reference"
NUMBER = r"(\d+(?:\.\d+)?)"

# Page, words with a gap for each figure (#), what the raw files say.
CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "README.md",
        "plain decoding against its own first repeat: # of #)",
        lambda: [speed_row("plain", "all")[key] for key in ("num_differing", "num_compared")],
    ),
    (
        "README.md",
        "(# % of the 4-grams of plain answers on code)",
        lambda: [100 * speed_row("plain", "code")["repeated_4grams"]],
    ),
    (
        "README.md",
        "Strict costs # to # % for steps of 1 to 4 rows and # to # % from 8 rows on",
        lambda: [_strict(1), _strict(4), _strict(16), _strict(8)],
    ),
    ("README.md", '`drafter="auto"` runs at #x to #x of plain decoding', lambda: [min(_many(_1B)), max(_many(_1B))]),
    ("README.md", "#x in the [worst case]", lambda: [min(grid(_SHIPPED).values())]),
    (
        "docs/controller.md",
        "(plain decoding of code: # tokens/s with one request, # with 8, # with 32)",
        lambda: [_plain(1), _plain(8), _plain(32)],
    ),
    (
        "docs/controller.md",
        "own tokens per second is # times that of plain decoding in the second table, and # times in the first",
        lambda: [_requests_mean(_SHIPPED), _requests_mean(_1B)],
    ),
    (
        "docs/controller.md",
        "in the same run: # times as fast in the mean (# to #), # to # in single cells",
        _before_after,
    ),
    (
        "docs/controller.md",
        "is # to # % of a step (# to # % before)",
        lambda: [*_policy_shares("after"), *_policy_shares("before")],
    ),
    (
        "docs/controller.md",
        "`auto` # times plain decoding, the best fixed setting, `suffix` with 8 tokens, # times",
        lambda: [_mixed("plain"), _mixed("plain", "suffix-8")],
    ),
    (
        "docs/controller.md",
        "runs at # times plain decoding (# worlds below 0.97, worst #) and at # of the fastest",
        lambda: [
            _worlds("plain", "mean"),
            _worlds("plain", "num_below"),
            _worlds("plain", "worst"),
            _worlds("best_fixed", "mean"),
        ],
    ),
    (
        "docs/controller.md",
        "with one request # to # steps after acceptance rises and # or # after it falls, with four requests # to # and "
        "# to #",
        lambda: [*_recovery(1, "rise"), *_recovery(1, "fall"), *_recovery(4, "rise"), *_recovery(4, "fall")],
    ),
    (
        "docs/scheduling.md",
        "# tokens breaks even after # steps and one of # tokens after #",
        lambda: [32, _gather(32), 128, _gather(128)],
    ),
    (
        "docs/goals.md",
        "# of 24 cells below, worst #; mean of all cells # (the code before: # cells, worst #, #)",
        lambda: [*_summary("after"), *_summary("before")],
    ),
    ("docs/goals.md", "| mean # (# to #); three cells below", lambda: _before_after()[:3]),
    ("docs/goals.md", "| # to # % at 1 to 32 requests", lambda: _policy_shares("after")),
    (
        "docs/goals.md",
        "# on the shipped pair (# times plain decoding, `suffix` with 8 tokens # times",
        lambda: [_mixed("suffix-8"), _mixed("plain"), _mixed("plain", "suffix-8")],
    ),
    (
        "docs/goals.md",
        "# of 144 below, worst # (random words); mean #",
        lambda: [_worlds("plain", what) for what in ("num_below", "worst", "mean")],
    ),
    (
        "docs/goals.md",
        "block verification # against rejection # tokens per step",
        lambda: [_rules(1.0, "block"), _rules(1.0, "rejection")],
    ),
    ("docs/goals.md", "has # against #, the other way round", lambda: [_rules(0.6, "block"), _rules(0.6, "rejection")]),
)


def claimed(name: str, words: str) -> re.Match[str]:
    """Where a page says `words`, with its figures as groups."""
    found = re.search(NUMBER.join(re.escape(part) for part in words.split("#")), page(name))
    assert found is not None, f"{name} does not say: {words}"
    return found


@pytest.mark.parametrize(
    ("name", "words", "values"), CLAIMS, ids=[f"{name}: {words[:40]}" for name, words, _ in CLAIMS]
)
def test_a_figure_in_prose(name: str, words: str, values: Callable[[], list[float]]) -> None:
    printed, expected = claimed(name, words).groups(), values()
    assert len(printed) == len(expected)
    for text, value in zip(printed, expected, strict=True):
        assert is_printed_of(text, value), f"{name} says {text}, its file {value:.4f}: {words}"


def test_no_ratio_stands_without_a_raw_file() -> None:
    """Tables have tests of their own; what is withdrawn is no claim."""
    unknown = []
    for name in PAGES:
        if name.startswith(NO_CLAIMS):
            continue
        text = (ROOT / name).read_text(encoding="utf-8").partition("\n## Withdrawn")[0]
        prose = re.sub(r"\s+", " ", "\n".join(_without_tables(name, line) for line in text.splitlines()))
        spans = [claimed(name, words).group() for page_, words, _ in CLAIMS if page_ == name]
        for span in spans:
            prose = prose.replace(span, "")
        unknown += [f"{name}: {prose[max(0, m.start() - 60) : m.end() + 20]}" for m in RATIO.finditer(prose)]
    assert not unknown, "\n".join(unknown)


def _without_tables(name: str, line: str) -> str:
    """A line, unless a test above reads it; a missed goal without what was asked, and without what `LOG.md` has."""
    if line.startswith("| `") and name in ("README.md", "docs/drafters.md"):
        return ""
    if name == "docs/goals.md" and line.startswith("|"):
        return "" if "`LOG.md`" in line else line.split("|", 2)[2]
    return line
