"""Block verification against rejection: what it gains in tokens a step and in speed, with intervals over prompts.

    python -m studies.rules --target DIR --draft DIR --num-drafts 3,5,8 --resume rules.jsonl --out benchmarks

Both rules answer the same prompts with the same seeds, in turns, at each temperature. A run that was stopped goes on
with the same arguments and `--resume`. See docs/studies.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foretoken.measure.options import ALL
from foretoken.measure.report import Report
from foretoken.measure.speed.options import SpeedOptions
from studies.command import arguments, command_line, run, whole_numbers, words
from studies.rules.compare import compare_rules


def main() -> int:
    """Measure, and print or write the report."""
    parser = arguments("rules", __doc__, "rules")
    parser.add_argument("--rules", type=words, default=("rejection", "block"), help="two; the first is the base")
    parser.add_argument("--drafters", type=words, default=("draft_model",), help="as for foretoken bench speed")
    parser.add_argument("--num-drafts", type=whole_numbers, default=(5,), help="numbers, separated by commas")
    parser.add_argument("--temperatures", type=_numbers, default=(0.3, 0.6, 1.0), help="numbers, separated by commas")
    parser.add_argument("--slices", type=words, default=(ALL,))
    parser.add_argument("--prompts", type=Path, help="file or folder of prompts, as for foretoken bench speed")
    parser.add_argument("--prompts-per-slice", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="file that keeps each answer; a stopped run resumes from it")
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """The comparison of two rules.

    Raises:
        ForetokenError: see `compare_rules`.
    """
    draft = "reference:draft" if given.draft is None and given.target == "reference:target" else given.draft
    options = SpeedOptions(
        target=given.target,
        draft=draft,
        drafters=given.drafters,
        num_drafts=given.num_drafts,
        rules=given.rules,
        slices=given.slices,
        prompts=given.prompts,
        prompts_per_slice=given.prompts_per_slice,
        max_tokens=given.max_tokens,
        repeats=given.repeats,
        temperatures=given.temperatures,
        dtype=given.dtype,
        device=given.device,
        threads=given.threads,
        resume=given.resume,
        seed=given.seed,
    )
    return compare_rules(options, command_line("rules"))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
