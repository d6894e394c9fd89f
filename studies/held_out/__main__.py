"""How many draft tokens agree with text that people wrote, beside the target's own greedy and sampled answers.

    python -m studies.held_out --target DIR --draft DIR --settings ngram-5,draft_model-5 --out benchmarks

Small models repeat themselves at temperature 0, which flatters every drafter. Here each drafter also goes along the
text that really follows a prompt. Counts only: nothing is timed. See docs/studies.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import torch

from foretoken import LLM, SpecConfig
from foretoken.measure.progress import progress
from foretoken.measure.report import Report
from studies.command import arguments, command_line, run, words
from studies.held_out.measure import prompts_of, run_held_out
from studies.held_out.options import HeldOutOptions


def main() -> int:
    """Measure, and print or write the report."""
    default = HeldOutOptions("reference:target")
    parser = arguments("held_out", __doc__, "held-out")
    parser.add_argument("--settings", type=words, default=default.settings, help="DRAFTER-NUMBER, or sweep")
    parser.add_argument("--slices", type=words, default=default.slices)
    parser.add_argument("--prompts", type=Path, help="file or folder of prompts with known continuations")
    parser.add_argument("--prompts-per-slice", type=int, default=default.prompts_per_slice)
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--ways", type=words, default=default.ways, help="forced, greedy, sampled")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="of sampled answers")
    parser.add_argument("--seed", type=int, default=default.seed)
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """The study of held-out text.

    Raises:
        ForetokenError: see `run_held_out`.
    """
    values = {field.name: getattr(given, field.name) for field in fields(HeldOutOptions)}
    if given.draft is None and given.target == "reference:target":
        values["draft"] = "reference:draft"
    options = HeldOutOptions(**values)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    total = len(prompts_of(options)[0]) * len(options.ways) * len(options.settings)
    with LLM(options.target, SpecConfig(), dtype=options.dtype, device=options.device) as llm, progress(total) as tell:
        return run_held_out(options, command_line("held_out"), llm, tell)


if __name__ == "__main__":
    sys.exit(main())
