"""The report of live traffic that was divided between two servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from foretoken.measure.ab.live import LiveOptions, live_outcome, pair_means
from foretoken.measure.ab.live_sums import LiveBlock, LiveSide, LiveSums
from foretoken.measure.ab.report import metric_figure
from foretoken.measure.ab.rows import SHARES, Outcome
from foretoken.measure.report import Report, Table
from foretoken.measure.sequential import MIN_BLOCKS
from foretoken.measure.stats import ratio_text

EXPLAINED = (
    "B over A: A's time per token as a multiple of B's, by the mean difference of logarithms between the two blocks of "
    "a pair, without what lengths of prompts and answers explain; above 1 B is faster. In brackets a 95 % interval "
    "that holds however often one looks. p50 and p95 are those of counted requests as they came, to 1 %."
)


def live_report(
    options: LiveOptions, compared: Sequence[LiveBlock], sums: LiveSums, ended: str, command: str
) -> Report:
    """The report: `compared` are the blocks of whole pairs, `ended` says why the comparison was over."""
    outcome = live_outcome(compared, options.margin)
    return Report(
        title="A/B on live traffic",
        command=command,
        options=asdict(options),
        results={
            "kind": "ab live",
            "verdict": outcome.verdict,
            "outcome": outcome,
            "ended": ended,
            "pair_means": pair_means(compared),
            "sides": {side: asdict(one) for side, one in sums.sides.items()},
            "rows": [asdict(one) for one in sums.blocks()],
        },
        tables=(_table(sums.sides),),
        explained=EXPLAINED,
        caveats=_caveats(options, sums),
        verdict=_verdict(outcome, ended),
        passed=outcome.verdict != "slower" and not ended.startswith("B fails"),
    )


def _verdict(outcome: Outcome, ended: str) -> str:
    asked = f"{outcome.num_blocks} pairs of blocks"
    if outcome.speedup is None:
        return f"No verdict: no pair of blocks has requests on both sides{f'; {ended}' if ended else ''}."
    found = f"B runs at {ratio_text(outcome.speedup)} of A's speed, {asked}"
    if ended:
        return f"{ended[0].upper()}{ended[1:]}: {found}."
    if outcome.num_blocks < MIN_BLOCKS:
        return f"Go on: {found}, and {MIN_BLOCKS} are the fewest for a verdict."
    more = "" if outcome.blocks_to_decide is None else f"; about {outcome.blocks_to_decide} pairs would decide"
    return f"Go on: {found}, which decides nothing yet{more}."


def _caveats(options: LiveOptions, sums: LiveSums) -> tuple[str, ...]:
    found = []
    if unknown := sum(one.num_unknown for one in sums.sides.values()):
        found.append(f"{unknown} answers did not say how many tokens they have, and are not compared.")
    if early := sum(one.num_early for one in sums.sides.values()):
        found.append(f"{early} requests arrived in the first {options.washout_s:g} s of a block, and are not compared.")
    found.append("Requests are not the same on both sides: a report of `foretoken ab` on recorded ones decides sooner.")
    return tuple(found)


def _table(sides: Mapping[str, LiveSide]) -> Table:
    lines = []
    for side, own in sides.items():
        quantiles = [(name, times.quantile(share)) for name, times in own.times.items() for share in SHARES.values()]
        cells = ("" if value is None else metric_figure(name, value) for name, value in quantiles)
        lines.append((side.upper(), *map(str, (own.num_requests, own.num_errors, own.num_compared)), *cells))
    headings = [f"{name} {share}" for name in ("ttft", "e2e", "per token") for share in SHARES]
    return Table("Requests", ("", "requests", "errors", "counted", *headings), tuple(lines))
