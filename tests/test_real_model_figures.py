"""Tables of SmolLM2 in the README and in `docs/` against the raw files that they name."""

from __future__ import annotations

import re
from typing import Any

from tests.helpers.pages import is_printed_of, page, table_with, tables
from tests.helpers.raw_files import raw


def test_the_table_of_the_real_model() -> None:
    source = raw("2026-11-25-smollm2-real-30")
    rows = {(row["num_requests"], row["kind"], row["setting"]): row for row in source["rows"]}
    found = table_with("docs/drafters.md", "text", "plain tokens/s")
    assert len(found) == 7
    for row in found:
        kind = row["text"]
        assert is_printed_of(row["plain tokens/s"], rows[1, kind, "plain"]["tokens_per_s"])
        for setting in ("auto", "ngram"):
            for requests, where in ((1, "1 request"), (4, "4 at once"), (16, "16 at once")):
                of = rows[requests, kind, setting]
                printed = re.findall(r"\d+\.\d+", row[f"`{setting}`, {where}"])
                for text, field in zip(printed, ("over_plain", "over_plain_low", "over_plain_high"), strict=True):
                    assert is_printed_of(text, of[field]), (kind, setting, requests)
    compared = [row for row in source["rows"] if row["kind"] != "all" and row["setting"] != "plain"]
    differing, of_all = re.findall(
        r"No answer differs from plain decoding \((\d+) of (\d+)\)", page("docs/drafters.md")
    )[0]
    assert int(differing) == sum(row["num_differing"] for row in compared)
    assert int(of_all) == sum(row["num_prompts"] for row in compared)


# ---- the drafter table


def test_the_table_of_the_readme() -> None:
    (found,) = tables("README.md")
    sources = (
        ("2026-11-28-smollm2-ngram-table-avx512", 0.0),
        ("2026-11-28-smollm2-ngram-table-avx512", 0.7),
        ("2026-11-28-smollm2-1b-ngram-table-avx512", 0.0),
        ("2026-11-28-smollm2-ngram-table", 0.0),
        ("2026-11-30-smollm2-amx-3", 0.0),
        ("2026-11-28-smollm2-1b-ngram-table", 0.0),
    )
    headings = {"code": "code", "edits": "edit", "all six kinds": "all"}
    for row, (name, temperature) in zip(found, sources, strict=True):
        rows = one_request(name, temperature)
        for heading, kind in headings.items():
            check_ratio(row[heading], rows[kind, "auto"])


def one_request(name: str, temperature: float = 0.0) -> dict[tuple[str, str], dict[str, Any]]:
    """What one request at a time was measured with and without the n-gram table, by kind and setting."""
    rows = raw(name)["rows"]
    return {
        (row["kind"], row["setting"]): row
        for row in rows
        if (row["num_requests"], row["temperature"]) == (1, temperature)
    }


def check_ratio(cell: str, row: dict[str, Any]) -> None:
    """A cell has the ratio of a row to plain decoding with its interval, and no answer differs."""
    values = [row["over_plain"], row["over_plain_low"], row["over_plain_high"]]
    assert row["num_differing"] == 0
    for text, value in zip(re.findall(r"\d+\.\d+", cell), values, strict=True):
        assert is_printed_of(text, value), (cell, row)


def test_the_tables_of_the_n_gram_table() -> None:
    for model, name in (("SmolLM2", "2026-11-28-smollm2-ngram-table"), ("1.0 B", "2026-11-28-smollm2-1b-ngram-table")):
        zen_5, zen_3 = one_request(f"{name}-avx512"), one_request(name)
        columns = {
            "`auto`": (zen_5, "auto"),
            "`auto` without the table": (zen_5, "auto-without-table"),
            "Zen 3: `auto`": (zen_3, "auto"),
            "Zen 3: without the table": (zen_3, "auto-without-table"),
        }
        if name == "smollm2-ngram-table":
            columns["`auto` at temperature 0.7"] = (one_request(f"{name}-avx512", 0.7), "auto")
        found = table_with("docs/drafters.md", f"{model}, one request", "`auto` without the table")
        assert len(found) == 7
        for row in found:
            kind = row[f"{model}, one request"]
            assert is_printed_of(row["plain, tokens/s"], zen_5[kind, "plain"]["tokens_per_s"])
            for heading, (rows, setting) in columns.items():
                check_ratio(row[heading], rows[kind, setting])
            printed = re.findall(r"\d+\.\d+", row["tokens a step, with and without"])
            for text, setting in zip(printed, ("auto", "auto-without-table"), strict=True):
                assert is_printed_of(text, zen_5[kind, setting]["emitted_per_step"])


def test_the_table_of_smollm2_at_a_larger_size() -> None:
    rows = {(one["kind"], one["setting"]): one for one in raw("2026-11-27-smollm2-1b-end-to-end")["rows"]}
    found = table_with("docs/drafters.md", "kind", "with `auto`")
    assert len(found) == 7
    for row in found:
        plain, of = rows[row["kind"], "plain"], rows[row["kind"], "auto"]
        assert of["num_differing"] == 0
        assert is_printed_of(row["plain, tokens/s"], plain["tokens_per_s"])
        values = [of["over_plain"], of["over_plain_low"], of["over_plain_high"]]
        assert all(map(is_printed_of, re.findall(r"\d+\.\d+", row["with `auto`"]), values)), row


def test_the_table_of_the_head_of_smollm2_at_a_larger_size() -> None:
    rows = {(one["kind"], one["setting"]): one for one in raw("2026-11-27-smollm2-1b-head")["rows"]}
    kinds = {"edits": "edit", "mathematics": "math"}
    columns = {
        "`auto`, lookups only, over plain": ("auto-lookups", "over_plain"),
        "`auto` with the head, over plain": ("auto", "over_plain"),
        "with the head, over lookups only": ("auto", "over_best_lookup"),
    }
    found = table_with("docs/heads.md", "kind", "with the head, over lookups only")
    assert len(found) == 7
    for row in found:
        for heading, (setting, field) in columns.items():
            of = rows[kinds.get(row["kind"], row["kind"]), setting]
            assert of["num_differing"] == 0
            values = [of[field], of[f"{field}_low"], of[f"{field}_high"]]
            assert all(map(is_printed_of, re.findall(r"\d+\.\d+", row[heading]), values)), (row, heading)


def test_the_table_of_answers_under_a_schema() -> None:
    rows = raw("2026-11-27-structured-cost")["rows"]
    by = {(row["setting"], row["num_requests"], row["temperature"]): row for row in rows if row["form"] == "schema"}
    columns = {
        "1 request, greedy": (1, 0.0),
        "1, temperature 1": (1, 1.0),
        "4, greedy": (4, 0.0),
        "4, temperature 1": (4, 1.0),
    }
    found = table_with("docs/serving/tools.md", "over plain decoding", "4, greedy")
    assert len(found) == 2
    for row in found:
        for heading, load in columns.items():
            values = by[row["over plain decoding"].strip("`"), *load]["to_plain"]
            assert all(map(is_printed_of, re.findall(r"\d+\.\d+", row[heading]), values)), (row, heading)
