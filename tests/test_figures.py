"""Figures of the README and of `docs/` against the raw files that they name: each is computed again from the JSON.

`CLAIMS` (`tests/helpers/figure_claims.py`) has every ratio that stands in prose, the table tests the tables. A ratio
that neither of them knows fails `test_no_ratio_stands_without_a_raw_file`: add it there with its file, or withdraw it
(docs/goals.md).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.figure_claims import CLAIMS
from tests.helpers.raw_files import ROOT, grid, raw, speed_row

PAGES = ("README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("**/*.md"))))
# Reasons of past decisions, and what was withdrawn: no claims (docs/goals.md says so).
NO_CLAIMS = ("docs/decisions/",)
RATIO = re.compile(r"\b\d+\.\d+(?:x\b| times\b)")
NUMBER = r"(\d+(?:\.\d+)?)"
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
SETTINGS = {
    "`auto`": "auto-auto",
    "`ngram`": "ngram-auto",
    "`draft_model`, best-first trees": "draft_model(tree=best_first)-auto",
    "`draft_model(tree=best_first)`": "draft_model(tree=best_first)-auto",
}


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
