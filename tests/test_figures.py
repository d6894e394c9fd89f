"""Figures of the README and of `docs/` against the raw files that they name: each is computed again from the JSON.

`CLAIMS` (`tests/helpers/figure_claims.py`) has every ratio that stands in prose, the table tests the tables. A ratio
that neither of them knows fails `test_no_ratio_stands_without_a_raw_file`: add it there with its file, or withdraw it
(docs/goals.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.helpers.amx_claims import SERVED, served_over_plain, served_within_p95
from tests.helpers.figure_claims import CLAIMS
from tests.helpers.pages import is_printed_of, page, table_with, tables
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
    "few first draft tokens of a drafter of unknown cost": "no_first_guesses",
    "counts for each request": "no_request_rates",
    "bound on rows that were never run": "no_first_rows",
    "steps without drafting to learn their cost": "no_plain_steps",
    "trials": "no_trials",
    "common speed factor": "no_speed_factor",
    "bound on slow steps": "no_outlier_bound",
    "account": "no_slack",
}
SETTINGS = {
    "`auto`": "auto-auto",
    "`eagle`": "eagle(head=out/wide/eagle)-auto",
    "`eagle(head=out/wide/eagle)`": "eagle(head=out/wide/eagle)-auto",
    "`draft_model`, best-first trees": "draft_model(tree=best_first)-auto",
    "`draft_model(tree=best_first)`": "draft_model(tree=best_first)-auto",
}


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


def test_the_table_of_the_server_under_load() -> None:
    (found,) = [table for table in tables("docs/serving/operations.md") if "figure" in table[0]]
    printed = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", row["figure"])] for row in found]
    soak, slow, cost = (raw("2026-11-23-serving-load")[part] for part in ("soak", "slow", "cost"))
    expected = [
        [round(soak["rate"] / 0.8, 1)],
        [soak["num_requests"], soak["num_left"]],
        [soak["files_after"] - soak["files_before"], soak["threads_after"] - soak["threads_before"], len(soak["kept"])],
        [100 * soak["loop_lag_share_over_50_ms"]],
        [round(1000 * soak["itl_p99_first_s"]), round(1000 * soak["itl_p99_last_s"])],
        [round(100 * cost["cost_median"], 1)],
        [round(1000 * slow["itl_p99_beside_slow_s"]), round(1000 * slow["itl_p99_beside_quick_s"])],
    ]
    assert printed == expected
    assert not soak["errors"]


def test_the_table_of_formats() -> None:
    (found,) = [table for table in tables("docs/models.md") if "1 row" in table[0]]
    for row, source in zip(found, raw("2026-11-23-step-cost-1b-compiled")["models"], strict=True):
        format_name = source["model"].removesuffix(".gguf").replace("out/wide/target@", "").removeprefix("gguf/target-")
        assert format_name.replace("out/wide/target", "bf16") in row["weights"]
        values = [source["step_bytes"] / 1e6, *(one["median_ms"] for one in source["rows"])]
        assert all(map(is_printed_of, list(row.values())[1:], values))


def test_the_speeds_beside_llama_cpp_on_amd() -> None:
    (found,) = [table for table in tables("docs/quantised.md") if "tokens/s on AMD" in table[0]]
    lookups = (f"llama.cpp-{kind}{number}" for kind in ("lookup", "ngram-mod") for number in ("", "-16"))
    settings = ("plain", "auto-auto", "llama.cpp", *lookups)
    for row, setting in zip(found, settings, strict=True):
        for heading in ("code", "edits", "JSON", "chat"):
            source = speed_row(setting, SLICES.get(heading, heading), "2026-11-23-gguf-Q4_K_M-3-repeats")
            assert source["num_prompts"] == 10
            assert is_printed_of(row[heading], source["tokens_per_s"])


def test_the_table_beside_a_loop() -> None:
    (found,) = [table for table in tables("docs/command-line.md") if "beside a loop" in table[0]]
    rows = raw("2026-11-24-neighbour-1b")["rows"]
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    for printed, name in zip(found, names, strict=True):
        alone, beside = (
            next(row for row in rows if (row["drafter"], row["beside"]) == (name, is_)) for is_ in (False, True)
        )
        values = [one[key] for one in (alone, beside) for key in ("tokens_per_s", "over_plain")]
        cells = [cell.removesuffix("x") for cell in list(printed.values())[1:]]
        assert all(map(is_printed_of, cells, values))


@pytest.mark.parametrize(("title", "size"), [("3 B", "3b"), ("8 B", "8b")])
def test_the_tables_of_3_b_and_8_b(title: str, size: str) -> None:
    (found,) = [table for table in tables("docs/quantised.md") if title in table[0]]
    head = f"head=out/wide/eagle{size}"
    ours = ("plain", "ngram-auto", f"eagle({head})-auto", "auto-auto", f"auto({head})-auto")
    theirs = ("llama.cpp", "llama.cpp-lookup", "llama.cpp-lookup-4")
    for row, setting in zip(found, (*ours, *theirs), strict=True):
        source = speed_row(setting, "code", f"2026-11-24-gguf-{size}-Q4_0")
        assert (source["num_prompts"], source["repeats"]) == (10, 3)
        assert setting in theirs or source["num_differing"] == 0
        assert is_printed_of(row["tokens/s"], source["tokens_per_s"])
        assert is_printed_of(row["tokens a step"], source["emitted_per_step"])
        assert not row["first token, s"] or is_printed_of(row["first token, s"], source["ttft_s"])
        for heading, name in (("over plain", "speedup"), ("over llama.cpp's `lookup`", "over_rival")):
            values = [source[name + end] for end in ("", "_low", "_high")]
            is_ratio = setting != "plain" and values[0] is not None
            printed = re.findall(r"\d+\.\d+", row[heading])
            assert len(printed) == (3 if is_ratio else 0)
            assert all(map(is_printed_of, printed, values))


def test_the_sentences_behind_the_tables_of_3_b_and_8_b() -> None:
    sizes = ("3b", "8b")
    answers = [row for size in sizes for row in raw(f"2026-11-24-gguf-{size}-Q4_0")["rows"] if row["drafter"]]
    ours = sum(row["num_compared"] for row in answers if row["engine"] == "foretoken")
    theirs = [speed_row("llama.cpp-lookup", "code", f"2026-11-24-gguf-{size}-Q4_0")["num_differing"] for size in sizes]
    assert f"({ours} answers)" in page("docs/quantised.md")
    assert f"{theirs[0]} of 30 do on 3 B and {theirs[1]} of 30 on 8 B" in page("docs/quantised.md")
    three, eight = raw("2026-11-24-loading-memory-8b")["rows"]
    printed = re.findall(r"(\d\.\d+) GB for the . B file of (\d\.\d+) GB", page("docs/quantised.md"))
    values = [one[name] / 1e9 for one in (three, eight) for name in ("peak_bytes", "file_bytes")]
    assert len(printed) == 2
    assert all(map(is_printed_of, [number for pair in printed for number in pair], values))


def test_the_table_of_compiled_heads() -> None:
    (found,) = [table for table in tables("docs/heads.md") if "drafter, compiled layers" in table[0]]
    eagle, block = "head=out/wide/eagle;draft_dtype=int4", "head=out/wide/block;draft_dtype=int4"
    ours = ("eagle({})", "eagle({};tree=best_first)", "block({})", "draft_model(tree=best_first)", "auto({})")
    names = (f"{name.format(block if name.startswith('block') else eagle)}-auto" for name in ours)
    theirs = ("llama.cpp", "llama.cpp-ngram-mod-16", "llama.cpp-lookup-16", "transformers", "transformers-lookup-10")
    for row, setting in zip(found, ("plain", *names, *theirs), strict=True):
        source = speed_row(setting, "code", "2026-11-23-heads-1b-compiled")
        assert (source["num_prompts"], source["repeats"]) == (10, 3)
        assert is_printed_of(row["tokens/s"], source["tokens_per_s"])
        assert is_printed_of(row["tokens a step"], source["emitted_per_step"])
        for heading, name in (("over plain", "speedup"), (list(row)[-1], "over_rival")):
            values = [source[name + end] for end in ("", "_low", "_high")]
            assert all(map(is_printed_of, re.findall(r"\d+\.\d+", row[heading]), values))


def test_the_table_of_trees_with_a_drawn_child() -> None:
    (found,) = [table for table in tables("docs/heads.md") if "one drawn child" in table[0]]
    for row, source in zip(found, raw("2026-11-23-heads-trees")["trees"], strict=True):
        values = [source[name] for name in ("sampled_child", "deterministic", "ratio", "low", "high")]
        assert row["drafter"] == f"`{source['drafter']}`"
        printed = re.findall(r"\d+\.\d+", " ".join(list(row.values())[1:]))
        assert all(map(is_printed_of, printed, values))
        assert source["num_prompts"] == 20


def test_the_table_of_adaptation() -> None:
    (found,) = [table for table in tables("docs/adaptation.md") if "before adaptation" in table[0]]
    rates = raw("2026-11-23-adaptation-code-head")["emitted_per_step"]
    for row, kind in zip(found, ("code", "json"), strict=True):
        for printed, name in zip(list(row.values())[1:], ("not_adapted", "adapted"), strict=True):
            assert is_printed_of(printed, rates[name][kind])


@pytest.mark.parametrize(
    ("place", "name_of_file", "source_name"),
    [
        (0, "target-{}.gguf", "2026-11-23-gguf-rivals"),
        (1, "smollm2-{}.gguf", "2026-11-30-amx-rivals"),
        (2, "smollm2-1b-{}.gguf", "2026-11-30-amx-1b-rivals"),
        (3, "smollm2-8b-{}.gguf", "2026-11-30-amx-8b-rivals"),
        (4, "smollm2-{}.gguf", "2026-11-30-amx-prompts-rivals"),
        (5, "smollm2-1b-{}.gguf", "2026-11-30-amx-prompts-1b-rivals"),
        (6, "smollm2-{}.gguf", "2026-11-28-zen5-rivals"),
        (7, "smollm2-1b-{}.gguf", "2026-11-28-zen5-1b-rivals"),
        (8, "SmolLM2-135M-{}.gguf", "2026-11-27-avx2-rivals"),
    ],
)
def test_the_tables_beside_llama_cpp(place: int, name_of_file: str, source_name: str) -> None:
    found = [table for table in tables("docs/quantised.md") if "engine" in table[0]][place]
    source = raw(source_name)["files"]
    assert len(found) == 3 * len(source)
    for row in found:
        own = source[name_of_file.format(row["file"])]
        name = {"foretoken": "ours", "llama.cpp": "theirs"}.get(row["engine"])
        if name is not None and "bits per byte" in row:
            assert is_printed_of(row["bits per byte"], own["bits"][name])
        by_rows = {measured["rows"]: measured for measured in own["rows"]}
        columns = {heading: cell for heading, cell in list(row.items())[2:] if heading != "bits per byte"}
        assert columns
        for heading, cell in columns.items():
            measured = by_rows[int(heading.split()[0])]
            if name is not None:
                assert is_printed_of(cell, measured[f"{name}_ms"])
            else:
                values = (measured["theirs_over_ours"], *measured["theirs_over_ours_interval"])
                assert all(map(is_printed_of, re.findall(r"\d+\.\d+", cell), values))


def test_the_table_of_long_texts() -> None:
    (found,) = [table for table in tables("docs/quantised.md") if "at 4,096, ms" in table[0]]
    models = [
        model
        for name in ("2026-11-30-amx-context-cost", "2026-11-30-amx-8b-context-cost")
        for model in raw(name)["models"]
    ]
    measured = [
        (model, {cell["context"]: cell for cell in model["cells"] if (cell["layers"], cell["rows"]) == ("now", rows)})
        for model in models
        for rows in (1, 8)
    ]
    for row, (model, by_context) in zip(found, measured, strict=True):
        long = by_context[4096]
        assert int(row["rows"]) == long["rows"]
        assert is_printed_of(row["at 128, ms"], by_context[128]["median_ms"])
        assert is_printed_of(row["at 4,096, ms"], long["median_ms"])
        spread = [long["over_shortest"][quantile] for quantile in ("median", "low", "high")]
        assert all(map(is_printed_of, re.findall(r"\d+\.\d+", row["ratio"]), spread))
        assert is_printed_of(row["weights"].split()[0], model["step_bytes"] / 1e6)
        assert is_printed_of(row["keys and values"].split()[0], long["cache_bytes"] / 1e6)


def test_the_table_of_the_servers() -> None:
    (found,) = [table for table in tables("docs/serving/operations.md") if "server" in table[0]]
    servers = raw("2026-11-29-amx-serving-rivals")["servers"]
    measured = [(server["server"], row) for server in servers for row in server["rows"]]
    for row, (name, source) in zip(found, measured, strict=True):
        assert row["server"] == f"`{name}`"
        assert f"{row['requests/s offered']}/s" == source["setting"]
        assert is_printed_of(row["tokens/s"], source["tokens_per_s"]["value"])
        assert is_printed_of(row["median of a request, s"], source["e2e_s"]["p50"]["value"])
        assert is_printed_of(row["95th percentile, s"], source["e2e_s"]["p95"]["value"])


def test_the_table_of_serving_over_plain() -> None:
    (found,) = [table for table in tables("docs/serving/operations.md") if "run" in table[0]]
    for row, name in zip(found, (*SERVED, "2026-11-28-zen5-serving-rivals"), strict=True):
        rows = {one["server"]: one["rows"] for one in raw(name)["servers"]}
        pairs = list(zip(rows["foretoken-auto"], rows["foretoken"], strict=True))
        rates = [plain["tokens_per_s"]["value"] for _, plain in pairs]
        assert row["requests/s offered"].split(", ") == [plain["setting"].removesuffix("/s") for _, plain in pairs]
        columns = {
            "median of a request": served_over_plain(name, "p50"),
            "95th percentile": served_over_plain(name, "p95"),
            "tokens/s": [auto["tokens_per_s"]["value"] / rate for (auto, _), rate in zip(pairs, rates, strict=True)],
            "tokens/s within plain's 95th percentile": served_within_p95(name),
        }
        for heading, values in columns.items():
            assert all(map(is_printed_of, row[heading].split(", "), values)), (name, heading)


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


# ---- the adviser


@pytest.mark.parametrize(
    ("name", "heading"), [("predicted-speedup-smollm2", "drafter"), ("predicted-speedup-1b", "drafter, 1.0 B")]
)
def test_the_tables_of_the_advisers_predictions(name: str, heading: str) -> None:
    files = [f"2026-11-27-{name}-{load}" for load in (1, 4, 8)]
    files += ["2026-11-27-predicted-speedup-1b-8-again"] if name == "predicted-speedup-1b" else []
    known = {(f"`{row['drafter']}`", row["concurrency"]): row for file in files for row in raw(file)["rows"]}
    rows = list(known.values())
    (table,) = [one for one in tables("docs/advise.md") if heading in one[0]]
    assert len(table) * 3 == len(rows)
    within = sum(abs(row["error"]) <= 0.15 for row in rows)
    assert f"{within} of {len(rows)} cells within 15 %" in page("docs/advise.md")
    for load in (1, 4, 8):
        for line in table:
            row = known[line[heading], load]
            for key in ("predicted", "measured"):
                assert is_printed_of(line[f"{key}, {load} at once"], row[key]), (line, load)


def test_the_table_of_another_engine_with_and_without_drafts() -> None:
    known = {row["slice"] or "all": row for row in raw("2026-11-27-vllm-ngram")["slices"]}
    (table,) = [one for one in tables("docs/ab.md") if "B over A" in one[0]]
    assert {line["slice"] for line in table} == known.keys()
    for line in table:
        row = known[line["slice"]]
        for side in ("a", "b"):
            assert is_printed_of(line[f"{side.upper()} tokens/s"], row["tokens_per_s"][side])
        printed = re.findall(NUMBER, line["B over A"])
        for text, key in zip(printed, ("ratio", "low", "high"), strict=True):
            assert is_printed_of(text, row["ratio"][key]), (line, key)
        assert line["equal texts"] == f"{row['equal_texts']:.0%}".replace("%", " %")


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
    if line.startswith("|") and name == "README.md":
        return ""
    if line.startswith("|") and name in (
        "docs/ab.md",
        "docs/command-line.md",
        "docs/drafters.md",
        "docs/heads.md",
        "docs/quantised.md",
        "docs/serving/tools.md",
    ):
        return ""
    if name == "docs/goals.md" and line.startswith("|"):
        return "" if "`LOG.md`" in line else line.split("|", 2)[2]
    return line
