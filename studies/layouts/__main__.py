"""What ragged batches gain over padded ones: the engine against realignment (EQSPEC) and length grouping (EXSPEC).

    python -m studies.layouts --target DIR --drafter ngram --num-draft 4 --batch-sizes 8,16 --out benchmarks
    python -m studies.layouts --target DIR --draft DIR --drafter draft_model

All answer the same prompts with the same weights in one process, in turns; the figures are medians. See
docs/studies.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from foretoken.measure.report import Report
from foretoken.printing.console import Console
from studies.command import arguments, command_line, run, whole_numbers
from studies.layouts.layouts import DRAFTERS, LayoutOptions
from studies.layouts.run import run_layouts


def main() -> int:
    """Measure, and print or write the report."""
    default = LayoutOptions("reference:target")
    parser = arguments("layouts", __doc__, "layouts")
    parser.add_argument("--drafter", choices=DRAFTERS, default=default.drafter)
    parser.add_argument("--num-draft", type=int, default=default.num_draft, help="draft tokens of every round")
    parser.add_argument(
        "--batch-sizes", type=whole_numbers, default=default.batch_sizes, help="numbers, separated by commas"
    )
    parser.add_argument(
        "--pool", type=int, default=default.pool, help="batches of prompts, and of them in EXSPEC's window"
    )
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument(
        "--replay", action="store_true", help="the same drafts in every layout: ngram's along plain decoding's answers"
    )
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """The comparison of layouts.

    Raises:
        ForetokenError: see `run_layouts`.
    """
    options = LayoutOptions(**{field.name: getattr(given, field.name) for field in fields(LayoutOptions)})
    with Console(stderr=True).bar("measuring", 1.0) as bar:
        return run_layouts(options, command_line("layouts"), lambda words, share: bar.update(words, completed=share))


if __name__ == "__main__":
    sys.exit(main())
