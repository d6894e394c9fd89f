"""Every ratio that stands in the prose of the README and of `docs/`, with what its raw file says."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from tests.helpers.amx_claims import AMX_CLAIMS
from tests.helpers.gpu_claims import GPU_CLAIMS
from tests.helpers.ngram_table_claims import NGRAM_TABLE_CLAIMS
from tests.helpers.raw_files import grid, mean, ratios, raw, speed_row, turns
from tests.helpers.zen_5_claims import ZEN_5_CLAIMS

_1B, _SHIPPED = "2026-11-22-before-after-1b", "2026-11-22-before-after-reference"
_HEADS = "2026-11-23-heads-1b"
_Q4_K_M, _Q8_0 = "2026-11-23-gguf-Q4_K_M-3-repeats", "2026-11-23-gguf-Q8_0"
_ADAPTATION = "2026-11-23-adaptation-code-head"
_COMPILED_HEADS = "2026-11-23-heads-1b-compiled"


def _real(requests: int, kind: str, setting: str = "auto", name: str = "2026-11-25-smollm2-real-30") -> float:
    rows = raw(name)["rows"]
    (row,) = (one for one in rows if (one["num_requests"], one["kind"], one["setting"]) == (requests, kind, setting))
    return float(row["over_plain"])


def _rank_cost(side: str, day: int) -> list[float]:
    """With 1 and 16 requests at once."""
    results = {one["requests"]: one for one in raw(f"2026-11-{day}-rank-cost")["results"]}
    return [statistics.median(results[requests]["tokens_per_s"][side]) for requests in (1, 16)]


def _vllm(metric: str) -> float:
    (row,) = [one for one in raw("2026-11-27-vllm-ngram")["rows"] if one["metric"] == metric]
    return float(row["outcome"]["speedup"]["value"])


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


def _kernels(setting: str, name: str = "2026-11-27-avx2-kernels-before-after") -> Mapping[str, float]:
    return dict(raw(name)["summary"][f"{setting}: after/before"]["mean"])


def _amx_tiles() -> list[float]:
    found = [_kernels(setting, "2026-11-29-amx-tiles-before-after") for setting in ("plain", "auto")]
    return [own[key] for own in found for key in ("median", "low", "high")]


def _summary(side: str) -> list[float]:
    """Cells of the shipped pair in which `auto` is below 0.97 of plain decoding, the worst, and the mean."""
    values = list(ratios(_SHIPPED, (side, "auto"), (side, "plain")).values())
    return [sum(value < 0.97 for value in values), min(values), mean(values)]


def _head_cells(drafter: str, *names: str) -> list[float]:
    """Speedup with its interval, and tokens a step, of a drafter in runs with trained heads."""
    found: list[float] = []
    for name in names:
        (row,) = (row for row in raw(name)["rows"] if row["drafter"] == drafter and row["slice"] == "code")
        found += [row[key] for key in ("speedup", "speedup_low", "speedup_high", "emitted_per_step")]
    return found


def _compiled_head(drafter: str) -> Mapping[str, Any]:
    """A chain of this drafter with a head in 4 bits."""
    folder = "block" if drafter == "block" else "eagle"
    return speed_row(f"{drafter}(head=out/wide/{folder};draft_dtype=int4)-auto", "code", _COMPILED_HEADS)


def _auto_over_llama_cpp(name: str) -> list[float]:
    """Our `auto` over llama.cpp's best setting on one GGUF file, on AMD, with its interval, by slice."""
    rows = [speed_row("auto-auto", slice_, name) for slice_ in ("code", "edit", "json", "chat")]
    return [row[field] for row in rows for field in ("over_rival", "over_rival_low", "over_rival_high")]


def _llama_cpp_over_plain(name: str) -> list[float]:
    """llama.cpp's plain decoding over ours on one GGUF file, on AMD, with its interval."""
    return [speed_row("llama.cpp", "all", name)[key] for key in ("speedup", "speedup_low", "speedup_high")]


def _eight_rows(name: str) -> list[float]:
    """A pass over 8 rows against one row, by GGUF file."""
    files = raw("2026-11-23-gguf-rivals")["files"].values()
    return [row[f"{name}_over_one_row"] for file in files for row in file["rows"] if row["rows"] == 8]


def _beside_llama_cpp(rows: int) -> list[float]:
    """llama.cpp's pass over so many rows against ours, by GGUF file."""
    files = raw("2026-11-23-gguf-rivals")["files"].values()
    return [row["theirs_over_ours"] for file in files for row in file["rows"] if row["rows"] == rows]


def _ray(figure: str, factor: float = 1.0) -> list[float]:
    medians = raw("2026-11-26-ray-overhead")["median"]
    return [factor * medians[server][figure] for server in ("serve", "ray")]


# Page, words with a gap for each figure (#), what the raw files say.
CLAIMS: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
    (
        "docs/guarantees.md",
        "# of # greedy answers in bf16 differed",
        lambda: [
            sum(
                speed_row(name, "all", "2026-11-22-drafters-1b")[key]
                for name in ("auto-auto", "ngram-auto", "draft_model(tree=best_first)-auto")
            )
            for key in ("num_differing", "num_compared")
        ],
    ),
    (
        "docs/tensor-parallel.md",
        "at # and # tokens/s, one process with two threads at # and #,",
        lambda: [*_rank_cost("ranks", 27), *_rank_cost("one process", 27)],
    ),
    (
        "docs/tensor-parallel.md",
        "made # and # beside # and # ([raw data]",
        lambda: [*_rank_cost("ranks", 26), *_rank_cost("one process", 26)],
    ),
    ("docs/ab.md", "B runs at #x [", lambda: [_vllm("e2e")]),
    (
        "docs/ab.md",
        "as late as without (#x), the gap between tokens is # times shorter",
        lambda: [_vllm("ttft"), _vllm("itl")],
    ),
    ("docs/controller.md", "is # to # % of a step.", lambda: _policy_shares("after")),
    ("docs/goals.md", "# of 24 cells below, worst #; mean of all cells # |", lambda: _summary("after")),
    (
        "docs/goals.md",
        "`eagle` #x and `auto` with it #x, # and # times the fastest drafting setting of llama.cpp; "
        "a block takes # ms, a pass of the target #",
        lambda: [
            *(_compiled_head(name)[key] for key in ("speedup", "over_rival") for name in ("eagle", "auto")),
            *(_compiled_head("block")[f"{part}_ms_per_step"] for part in ("draft", "verify")),
        ],
    ),
    (
        "docs/guarantees.md",
        "On an AMD EPYC that costs # to # % for steps of 1 to 4 rows and # to # % from 8 rows on",
        lambda: [_strict(1), _strict(4), _strict(16), _strict(8)],
    ),
    (
        "docs/drafters.md",
        "`auto` makes #x of plain decoding over all kinds at one request and #x with 4, where chat is at #x",
        lambda: [
            _real(n, kind, name="2026-11-25-smollm2-beside-loop") for n, kind in ((1, "all"), (4, "all"), (4, "chat"))
        ],
    ),
    (
        "docs/drafters.md",
        "`lookahead` makes #x of plain decoding over all of them, `early_exit` #x",
        lambda: [
            _real(1, "all", one, "2026-11-25-smollm2-lookahead-early-exit") for one in ("lookahead", "early_exit")
        ],
    ),
    (
        "docs/goals.md",
        "at one request # times plain over all prompts, # as the mean of the kinds; with 4, code # and edits #",
        lambda: [
            _real(1, "all"),
            statistics.fmean(_real(1, kind) for kind in ("chat", "code", "edit", "summarisation", "retrieval", "math")),
            _real(4, "code"),
            _real(4, "edit"),
        ],
    ),
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
    ("docs/goals.md", "| mean # (# to #); three cells below", lambda: _before_after()[:3]),
    ("docs/goals.md", "| # to # % at 1 to 32 requests", lambda: _policy_shares("after")),
    (
        "docs/goals.md",
        "# on the reference pair (# times plain decoding, `suffix` with 8 tokens # times",
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
    (
        "docs/goals.md",
        "emitted tokens a step in the engine: `eagle` #, `block` #, draft model #;",
        lambda: [_head_cells(name, _HEADS)[3] for name in ("eagle", "block", "draft_model")],
    ),
    (
        "docs/adaptation.md",
        "lost # tokens a step; adaptation brought #, with # changes of weights and # s of processor time",
        lambda: [
            *(raw(_ADAPTATION)[name] for name in ("lost", "regained")),
            raw(_ADAPTATION)["adaptations"][0]["num_swaps"],
            raw(_ADAPTATION)["learning_s"],
        ],
    ),
    (
        "docs/adaptation.md",
        "made # tokens a step in the first half minute, # in the third and # in the fifth",
        lambda: [raw(_ADAPTATION)["by_time"][number]["emitted_per_step"] for number in (0, 2, 4)],
    ),
    (
        "docs/adaptation.md",
        "in ms a token, rose from # to # (# %)",
        lambda: [
            *(raw(_ADAPTATION)["plain_ms_per_token"][f"{name}_learning"]["p95"] for name in ("without", "while")),
            100 * (raw(_ADAPTATION)["plain_p95_ratio"] - 1),
        ],
    ),
    (
        "docs/heads.md",
        "passes take # ms of a step of #, a block # ms beside # of the target",
        lambda: [
            *(_compiled_head("eagle")[key] for key in ("draft_ms_per_step", "step_ms")),
            *(_compiled_head("block")[key] for key in ("draft_ms_per_step", "verify_ms_per_step")),
        ],
    ),
    (
        "docs/heads.md",
        "# % of the 4-grams of plain answers repeat. No answer of ours differs from plain decoding's (# answers)",
        lambda: [
            100 * speed_row("plain", "code", _COMPILED_HEADS)["repeated_4grams"],
            sum(
                row["num_compared"]
                for row in raw(_COMPILED_HEADS)["rows"]
                if row["engine"] == "foretoken" and row["drafter"]
            ),
        ],
    ),
    (
        "docs/quantised.md",
        "pass over 8 rows takes # to # times as long as over one, where llama.cpp's takes # to # times as long",
        lambda: [bound(_eight_rows(name)) for name in ("ours", "theirs") for bound in (min, max)],
    ),
    (
        "docs/quantised.md",
        "end to end with 1 and 16 requests, is # times as fast as before these kernels",
        lambda: [mean([*ratios("2026-11-26-avx2-before-after", ("after", "plain"), ("before", "plain")).values()])],
    ),
    (
        "docs/quantised.md",
        "on this machine is # times (# to #) as fast as before products were computed in tiles and scales fetched "
        "ahead, and `auto` # times (# to #)",
        _amx_tiles,
    ),
    (
        "docs/quantised.md",
        "requests, # times as fast once more (# to #), and `auto` # times (# to #)",
        lambda: [_kernels(setting)[key] for setting in ("plain", "auto") for key in ("median", "low", "high")],
    ),
    (
        "docs/quantised.md",
        "Plainly llama.cpp runs at # of foretoken's speed (# to #)",
        lambda: _llama_cpp_over_plain(_Q4_K_M),
    ),
    (
        "docs/quantised.md",
        "No answer of `auto` differs from plain decoding's (# answers)",
        lambda: [speed_row("auto-auto", "all", "2026-11-23-gguf-Q4_K_M-3-repeats")["num_compared"]],
    ),
    (
        "docs/goals.md",
        "AMD, 8 rows: Q8_0 #, Q4_K_M #, Q4_0 #; 16 rows: #, #, #",
        lambda: [
            next(one["over_first"] for one in model["rows"] if one["rows"] == rows)
            for rows in (8, 16)
            for kind in ("Q8_0", "Q4_K_M", "Q4_0")
            for model in raw("2026-11-23-step-cost-1b-compiled")["models"]
            if model["model"] == f"gguf/target-{kind}.gguf"
        ],
    ),
    (
        "docs/quantised.md",
        "plain decoding runs at # of foretoken's speed (# to #), and `auto` reaches # (# to #) times "
        "llama.cpp's fastest on code, # (# to #) on edits, # (# to #) on JSON, # (# to #) on chat",
        lambda: [*_llama_cpp_over_plain(_Q8_0), *_auto_over_llama_cpp(_Q8_0)],
    ),
    (
        "docs/quantised.md",
        "best setting: # (# to #) times on code, # (# to #) on edits, # (# to #) on JSON, # (# to #) on chat",
        lambda: _auto_over_llama_cpp(_Q4_K_M),
    ),
    *ZEN_5_CLAIMS,
    *AMX_CLAIMS,
    *NGRAM_TABLE_CLAIMS,
    *GPU_CLAIMS,
    ("docs/scale-out.md", "| tokens/s | # | # |", lambda: _ray("tokens_per_s")),
    ("docs/scale-out.md", "first token, ms | # | # |", lambda: _ray("ttft_median_s", 1e3)),
    ("docs/scale-out.md", "between two events, ms | # | # |", lambda: _ray("gap_median_s", 1e3)),
    ("docs/scale-out.md", "(cold start) | # | # |", lambda: _ray("first_token_s")),
    ("docs/scale-out.md", "costs # % here", lambda: [100 * (1 - raw("2026-11-26-ray-overhead")["share"])]),
)
