"""The report of live traffic that was divided between two servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from foretoken.measure.ab.live import LiveOptions, LiveRequest, counted, live_outcome, pair_means
from foretoken.measure.ab.report import metric_figure, ratio_text
from foretoken.measure.ab.rows import SHARES, Outcome
from foretoken.measure.report import Report, Table
from foretoken.measure.sequential import MIN_BLOCKS

EXPLAINED = (
    "B over A: A's time per token as a multiple of B's, by the mean difference of logarithms between the two blocks of "
    "a pair, without what lengths of prompts and answers explain; above 1 B is faster. In brackets a 95 % interval "
    "that holds however often one looks. p50 and p95 are those of counted requests as they came."
)


def live_report(
    options: LiveOptions, compared: Sequence[LiveRequest], requests: Sequence[LiveRequest], ended: str, command: str
) -> Report:
    """The report: `compared` are the requests of whole pairs of blocks, `ended` says why the comparison was over."""
    outcome = live_outcome(compared, options.margin)
    sides = {side: [one for one in requests if one.turn.side == side] for side in ("a", "b")}
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
            "rows": [asdict(one) for one in requests],
        },
        tables=(_table(sides),),
        explained=EXPLAINED,
        caveats=_caveats(options, requests),
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


def _caveats(options: LiveOptions, requests: Sequence[LiveRequest]) -> tuple[str, ...]:
    found = []
    unknown = sum(not one.error and not one.num_tokens for one in requests)
    if unknown:
        found.append(f"{unknown} answers did not say how many tokens they have, and are not compared.")
    early = sum(not one.turn.is_counted for one in requests)
    if early:
        found.append(f"{early} requests arrived in the first {options.washout_s:g} s of a block, and are not compared.")
    found.append("Requests are not the same on both sides: a report of `foretoken ab` on recorded ones decides sooner.")
    return tuple(found)


def _table(sides: dict[str, list[LiveRequest]]) -> Table:
    lines = []
    for side, own in sides.items():
        used = counted(own)
        cells = [
            metric_figure(name, float(np.quantile(values, share, method="inverted_cdf"))) if values else ""
            for name, values in (
                ("ttft", [one.ttft_s for one in used]),
                ("e2e", [one.e2e_s for one in used]),
                ("itl", [one.e2e_s / one.num_tokens for one in used]),
            )
            for share in SHARES.values()
        ]
        errors = sum(bool(one.error) for one in own)
        lines.append((side.upper(), str(len(own)), str(errors), str(len(used)), *cells))
    quantiles = [f"{name} {share}" for name in ("ttft", "e2e", "per token") for share in SHARES]
    return Table("Requests", ("", "requests", "errors", "counted", *quantiles), tuple(lines))
