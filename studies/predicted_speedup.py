"""Does `foretoken advise` predict the speed-up that is then measured, by drafter and load?

    python -m studies.predicted_speedup --target smollm2 --drafts ngram,suffix,recycling --concurrency 1,4,8

The adviser measures acceptance and the costs of steps, and predicts the best number of draft tokens of each drafter at
each load, with its speed-up. Then the same prompts are answered with so many at once, a new one whenever one ends, by
plain decoding and by each drafter with that fixed number, in turns; what counts is tokens per second while as many run
as asked for, prompts included. Prompts come again where they are fewer than three times as many, each time under
another tenant, so that nothing is cached. No figure of the one goes into the other but the number of draft tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.machine.neighbours import OtherLoad
from foretoken.measure.advise.candidates import AdviseCandidate, candidates_of
from foretoken.measure.advise.cells import ALL_SLICES, SpeedCell, best_cells, cells_of
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.advise.run import measured
from foretoken.measure.eval.prompts import own_prompts, prompts_of
from studies.command import record, record_file, setting_of, whole_numbers, words

TOLERANCE = 0.15
_MIN_ROUNDS = 3  # of requests at each load: with one, prompts of those that join count, and their answers hardly


@dataclass(frozen=True)
class Compared:
    """A drafter at a load: the predicted speed-up, the measured ones by repeat and their median, and the difference."""

    drafter: str
    concurrency: int
    num_draft: int
    predicted: float
    low: float | None
    high: float | None
    measured: float
    by_repeat: tuple[float, ...]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--drafts", type=words, default=("ngram", "suffix"))
    parser.add_argument("--concurrency", type=whole_numbers, default=(1, 4, 8))
    parser.add_argument("--prompts", type=Path, help="without it, the library's own texts")
    parser.add_argument("--prompts-per-slice", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    asked = AdviseOptions(
        options.target,
        drafts=options.drafts,
        prompts=options.prompts,
        prompts_per_slice=options.prompts_per_slice,
        concurrency=options.concurrency,
        max_tokens=options.max_tokens,
        budget_s=options.budget_s,
        weights=options.weights,
    )
    others = OtherLoad()
    rows = compared(asked, options.repeats)
    within = sum(abs(row.error) <= TOLERANCE for row in rows)
    for row in rows:
        print(
            f"{row.drafter:12s} {row.concurrency:3d} at once, {row.num_draft:2d} draft tokens: predicted "
            f"{row.predicted:.2f}x, measured {row.measured:.2f}x ({row.error:+.0%})"
        )
    found = {
        "setting": setting_of(options),
        "rows": [asdict(row) | {"error": row.error} for row in rows],
        "within_15_percent": within,
        "num_cells": len(rows),
        "others_share": others.share(),
    }
    print(json.dumps(record("predicted_speedup", found, options.out)))


def compared(asked: AdviseOptions, repeats: int) -> list[Compared]:
    """Every drafter at every load, predicted and then measured."""
    candidates = candidates_of(asked)
    prompts = (
        own_prompts(asked.slices, asked.prompts_per_slice)
        if asked.prompts is None
        else prompts_of(asked.prompts, asked.slices, asked.prompts_per_slice)
    )
    found = measured(asked, candidates, prompts)
    sweep = cells_of(found.answers, found.costs, asked.loads, asked.lengths, {})
    best = [cell for cell in best_cells(sweep) if cell.slice == ALL_SLICES]
    texts = [one.content for one in prompts if isinstance(one.content, str)]
    room = max(one.num_prompt_tokens for own in found.answers.values() for one in own) + asked.max_tokens + 64
    with LLM(
        asked.target,
        SpecConfig(drafter=None),
        profile="off",
        weights=asked.weights,
        cache_tokens=2 * asked.loads[-1] * room,
        max_batch_size=asked.loads[-1],
    ) as llm:
        rates = _rates(llm, asked, found.candidates, best, texts, repeats)
    return [_row(cell, rates) for cell in best]


def _rates(
    llm: LLM,
    asked: AdviseOptions,
    candidates: Sequence[AdviseCandidate],
    best: Sequence[SpeedCell],
    texts: Sequence[str],
    repeats: int,
) -> dict[tuple[str, int], list[float]]:
    """Tokens per second by drafter ("": plain) and load, for each repeat; all in turns, the order rotating."""
    specs = {one.name: one.spec for one in candidates}
    found: dict[tuple[str, int], list[float]] = {}
    for load in asked.loads:
        settings = {"": SpecConfig()} | {
            cell.candidate: replace(specs[cell.candidate], num_draft=cell.num_draft)
            for cell in best
            if cell.concurrency == load
        }
        for spec in settings.values():
            tokens_per_s(llm, spec, texts[:load], load, min(16, asked.max_tokens), "warm-up")
        names, asked_texts = list(settings), [*texts] * -(-_MIN_ROUNDS * load // len(texts))
        for repeat in range(repeats):
            first = repeat % len(names)
            for name in (*names[first:], *names[:first]):
                tenant = f"{name} {load} {repeat}"
                rate = tokens_per_s(llm, settings[name], asked_texts, load, asked.max_tokens, tenant)
                found.setdefault((name, load), []).append(rate)
    return found


def tokens_per_s(llm: LLM, spec: SpecConfig, texts: Sequence[str], load: int, max_tokens: int, tenant: str) -> float:
    """Tokens per second with `load` requests at once, from the first step until fewer run because no text is left."""
    llm.reset_drafters(spec)
    waiting = list(texts)
    num_tokens = num_begun = num_ended = 0
    began = time.perf_counter()
    ended = began
    while num_ended < num_begun or waiting:
        while waiting and num_begun - num_ended < load:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, tenant=f"{tenant} {num_begun}")
            llm.submit(waiting.pop(0), params, spec)
            num_begun += 1
        is_full = num_begun - num_ended == min(load, len(texts))
        for output in llm.step():
            num_tokens += len(output.token_ids) if is_full else 0
            num_ended += output.finish_reason is not None
        if is_full:
            ended = time.perf_counter()
    return num_tokens / (ended - began)


def _row(cell: SpeedCell, rates: Mapping[tuple[str, int], Sequence[float]]) -> Compared:
    own, plain = rates[cell.candidate, cell.concurrency], rates["", cell.concurrency]
    ratios = tuple(one / other for one, other in zip(own, plain, strict=True))
    found = cell.speedup
    return Compared(
        cell.candidate, cell.concurrency, cell.num_draft, found.value, found.low, found.high, median(ratios), ratios
    )


if __name__ == "__main__":
    main()
