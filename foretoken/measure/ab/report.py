"""The report of an A/B replay: the verdict in a sentence, then metrics, slices and what was compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken.measure.ab.options import AbOptions
from foretoken.measure.ab.pairs import Pair, block_means
from foretoken.measure.ab.rows import (
    PRIMARY,
    MetricRow,
    OrderEffect,
    Outcome,
    SliceRow,
    metric_rows,
    order_effect,
    outcome_of,
    slice_rows,
)
from foretoken.measure.plots import Plot, Point, Series, shown
from foretoken.measure.price import NEVER
from foretoken.measure.report import Report, Table, busy_caveats, interruption_notes
from foretoken.measure.sequential import MIN_BLOCKS
from foretoken.measure.sides import side_table
from foretoken.measure.stats import Estimate, ratio_text
from foretoken.printing.console import seconds_text

EXPLAINED = (
    "B over A: the speed of B as a multiple of A's, by the mean of log-ratios of a request on both; above 1 B is "
    "faster. In brackets a 95 % interval that holds however often one looks (confidence sequence on blocks); those of "
    "p50, p95 and of slices hold once, at the end. e2e: the whole answer, per token where lengths differ; ttft: up to "
    "the first text; itl: mean time between tokens behind it."
)
_WORDS = {"e2e": "e2e", "ttft": "ttft", "itl": "itl", "tokens_per_s": "tokens/s"}
_MAX_ERRORS = 3


def ab_report(
    options: AbOptions,
    about: Mapping[str, Mapping[str, str]],
    pairs: Sequence[Pair],
    aa_pairs: Sequence[Pair],
    command: str,
    notes: Iterable[str],
    load: float,
    interrupted: bool,
    is_resumed: bool,
) -> Report:
    """The report of the pairs that were observed; `about` says of each side what it is."""
    outcome = outcome_of(block_means(pairs, PRIMARY), options.margin)
    aa_outcome = outcome_of(block_means(aa_pairs, PRIMARY), options.margin) if aa_pairs else None
    metrics, slices, order = metric_rows(pairs, options), slice_rows(pairs, options), order_effect(pairs)
    caveats = [
        *_of_run(options, outcome, load, interrupted, is_resumed),
        *_of_errors(pairs),
        *_of_comparison(options, pairs, aa_outcome, order),
        *notes,
    ]
    results = {
        "kind": "ab",
        "verdict": outcome.verdict,
        "outcome": outcome,
        "aa_outcome": aa_outcome,
        "sides": about,
        "order_effect": order,
        "rows": metrics,
        "slices": slices,
        "pairs": [_pair_values(pair) for pair in pairs],
        "aa_pairs": [_pair_values(pair) for pair in aa_pairs],
        "interrupted": interrupted,
    }
    return Report(
        title="A/B replay",
        command=command,
        options=asdict(options),
        results=results,
        tables=(_metric_table(metrics), _slice_table(slices, options), side_table(about)),
        explained=EXPLAINED,
        caveats=tuple(caveats),
        verdict=verdict_line(outcome, len(pairs), options),
        passed=outcome.verdict != "slower",
        plots=_plots(metrics, slices),
    )


def verdict_line(outcome: Outcome, num_pairs: int, options: AbOptions) -> str:
    """The verdict in one sentence."""
    counts = {"request": num_pairs, "block": outcome.num_blocks}
    asked = " in ".join(f"{count} {word}{'s' if count != 1 else ''}" for word, count in counts.items())
    if outcome.speedup is None:
        return f"No verdict: no request was answered by both ({asked})."
    found = f"B runs at {ratio_text(outcome.speedup)} of A's speed"
    if outcome.verdict == "equivalent":
        return f"Equivalent: {found}, within {options.margin:.2g} of it; {asked}."
    if outcome.verdict != "go on":
        return f"B is {outcome.verdict}: {found}; {asked}."
    if outcome.num_blocks < MIN_BLOCKS:
        return f"Go on: {found}, but {MIN_BLOCKS} blocks are the fewest for a verdict; {asked}."
    more = "more than can be said"
    if outcome.blocks_to_decide is not None:
        more = f"about {outcome.blocks_to_decide * options.pairs_per_block} requests in all"
    return f"Go on: {found}, which decides nothing yet; {asked}, {more} would. Give --repeats, or a longer file."


def _of_run(options: AbOptions, outcome: Outcome, load: float, interrupted: bool, is_resumed: bool) -> list[str]:
    found = interruption_notes(interrupted, options.resume)
    if is_resumed:
        found.append("The run was stopped and resumed: a server may have been started again meanwhile.")
    found += busy_caveats(load)
    if options.stop_early and outcome.verdict != "go on":
        found.append("The run stopped at its verdict; --no-stop-early replays the whole file, for slices and p95.")
    return found


def _of_errors(pairs: Sequence[Pair]) -> list[str]:
    found = []
    for side in ("a", "b"):
        said = [f"{pair.plan.name}: {error}" for pair in pairs if (error := getattr(pair, side).error)]
        if said:
            failed, kinds = f"{len(said)} of {len(pairs)} requests", "; ".join(list(dict.fromkeys(said))[:_MAX_ERRORS])
            found.append(f"{side.upper()} failed {failed}, left out of every ratio: {kinds}")
    return found


def _of_comparison(
    options: AbOptions, pairs: Sequence[Pair], aa_outcome: Outcome | None, order: OrderEffect | None
) -> list[str]:
    """What restricts the comparison itself."""
    found = ["Requests were sent one at a time: under load the ratio is another one (foretoken bench url)."]
    done = [pair for pair in pairs if pair.is_ok]
    uneven = sum(not pair.has_equal_lengths for pair in done)
    if uneven:
        found.append(
            f"In {uneven} of {len(done)} pairs the answers differ in length: their e2e is compared per token. "
            "--ignore-eos asks for equal lengths."
        )
    uncounted = sum(not (pair.a.is_counted and pair.b.is_counted) for pair in done)
    if uncounted:
        found.append(
            f"In {uncounted} of {len(done)} pairs a server did not say how many tokens its answer has "
            "(stream_options.include_usage): there a quarter of the characters counts as the tokens, on both sides."
        )
    if aa_outcome is not None:
        found.append(_of_aa(aa_outcome))
    if order is not None and not order.low <= 1 <= order.high and abs(order.speedup - 1) > options.margin:
        found.append(
            f"The second answer of a pair came {order.speedup:.2f}x as fast as the first, whoever gave it: a cache is "
            "shared. Half of each block begins with A, so the ratio is not moved by it, only widened."
        )
    return found


def _of_aa(outcome: Outcome) -> str:
    if outcome.speedup is None or outcome.num_blocks < MIN_BLOCKS:
        return f"A against itself: {outcome.num_blocks} blocks, too few to tell; give --aa-blocks {MIN_BLOCKS} or more."
    if outcome.verdict in ("faster", "slower"):
        return (
            f"A against itself ran at {ratio_text(outcome.speedup)}: something other than the backends decides here, "
            "and no verdict of this run can be relied on."
        )
    ran = f"A against itself ran at {ratio_text(outcome.speedup)} of its own speed"
    return f"{ran}: no difference was found, as must be."


def _metric_table(rows: Sequence[MetricRow]) -> Table:
    headings = ("", "pairs", "A p50", "B p50", "A p95", "B p95", "B over A", "at p50", "at p95")
    lines = tuple(
        (
            _WORDS[row.metric],
            str(row.num_pairs),
            *(metric_figure(row.metric, side[name]) for name in ("p50", "p95") for side in (row.a, row.b)),
            "" if row.outcome.speedup is None else ratio_text(row.outcome.speedup),
            *(ratio_text(row.quantiles[name]) if name in row.quantiles else "" for name in ("p50", "p95")),
        )
        for row in rows
    )
    return Table("B against A", headings, lines)


def _slice_table(rows: Sequence[SliceRow], options: AbOptions) -> Table:
    costs = ("A per 1M tokens", "B per 1M tokens") if options.prices else ()
    headings = ("slice", "pairs", "errors A, B", "A tok/s", "B tok/s", "B over A", "equal texts", *costs)
    notes = () if options.slo_ms is None else (f"Costs: only of answers with at most {options.slo_ms:g} ms a token.",)
    return Table("By slice", headings, tuple(_slice_line(row, bool(costs)) for row in rows), notes)


def _slice_line(row: SliceRow, has_costs: bool) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else ratio_text(Estimate(row.ratio.ratio, row.ratio.low, row.ratio.high))
    costs = row.cost_per_million or {}
    missing = NEVER if row.num_ok else ""
    cells = [f"{costs[side].value:.3g}" if side in costs else missing for side in ("a", "b")] if has_costs else []
    speeds = ["" if row.tokens_per_s[side] is None else shown(row.tokens_per_s[side] or 0.0) for side in ("a", "b")]
    texts = "" if row.equal_texts is None else f"{row.equal_texts:.0%}"
    errors = f"{row.errors['a']}, {row.errors['b']}"
    return (row.slice or "all", str(row.num_pairs), errors, *speeds, ratio, texts, *cells)


def _plots(metrics: Sequence[MetricRow], slices: Sequence[SliceRow]) -> tuple[Plot, ...]:
    by_metric = [(_WORDS[row.metric], row.outcome.speedup) for row in metrics if row.outcome.speedup is not None]
    by_slice = [(row.slice or "all", row.ratio) for row in slices if row.ratio is not None]
    bars = tuple(Series(name, (Point("all pairs", one.value, one.low, one.high),)) for name, one in by_metric)
    ratios = tuple(Series(name, (Point("tokens/s", one.ratio, one.low, one.high),)) for name, one in by_slice)
    return (
        Plot("B over A by metric", "speed of B / speed of A", bars, baseline=1.0),
        Plot("B over A by slice", "tokens/s of B / of A", ratios, baseline=1.0),
    )


def _pair_values(pair: Pair) -> dict[str, Any]:
    """A pair without its texts."""
    sides = {"a": asdict(pair.a), "b": asdict(pair.b)}
    for side in sides.values():
        del side["text"]
    about = {"name": pair.plan.name, "slice": pair.plan.slice, "block": pair.plan.block, "a_first": pair.plan.a_first}
    return about | sides | {"equal_text": pair.has_equal_texts}


def metric_figure(metric: str, value: float) -> str:
    """A value of a metric with its unit."""
    return shown(value) if metric == "tokens_per_s" else seconds_text(value)
