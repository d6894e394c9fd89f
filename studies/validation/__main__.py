"""Validation of the simulator: arrivals are predicted, then run in real time, and compared.

    python -m studies.validation --target DIR --draft DIR --arrivals steady,bursts,ramp --out results

`--arrivals` takes what `foretoken simulate` takes, and several built-in names with commas. The profile is measured on
this machine first. docs/simulate.md describes the columns.
"""

from __future__ import annotations

import argparse
import sys

from foretoken.cli.simulate import arrival_names, check_arrivals, jobs_of
from foretoken.control.queue import SchedulerConfig
from foretoken.field_text import words
from foretoken.measure.report import Report
from foretoken.printing.console import Console
from foretoken.simulate.inputs import parse_setting
from studies.command import arguments, command_line, run
from studies.validation.run import ValidationOptions, run_validation

_SLICE = "code"  # of prompts of requests that name none


def main(given: list[str] | None = None) -> int:
    """Measure, and print or write the report."""
    parser = arguments("validation", __doc__, "validation")
    parser.add_argument("--arrivals", required=True, help="requests, as for `foretoken simulate`")
    parser.add_argument("--settings", help="settings with commas; by default plain, ngram-4 and draft_model-4")
    parser.add_argument("--requests", type=int, help="how many, of a file or with poisson")
    parser.add_argument("--prompt-tokens", help="prompt lengths with poisson: N, or LOW-HIGH")
    parser.add_argument("--output-tokens", help="answer lengths with poisson: N, or LOW-HIGH")
    parser.add_argument("--duration-s", type=float, help="seconds that built-in arrivals last")
    parser.add_argument("--acceptance", help="slice of the prompts, of a file or with poisson (code)")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--max-prompt-tokens", type=int, default=512)
    parser.add_argument("--max-step-tokens", type=int)
    parser.add_argument("--cache-tokens", type=int)
    parser.add_argument("--cache-reserve", type=float, default=SchedulerConfig.cache_reserve)
    parser.add_argument("--seed", type=int, default=0)
    return run(study, parser.parse_args(given))


def study(given: argparse.Namespace) -> Report:
    """The comparison of every setting on all arrivals; progress goes to stderr.

    Raises:
        ForetokenError: see `run_validation`.
    """
    check_arrivals(vars(given) | {"replicas": 1})
    console, said = Console(stderr=True), ""
    with console.bar("", None) as bar:

        def tell(words: str, finished: int) -> None:
            nonlocal said
            if words != said and not console.is_terminal:
                console.line(words)
            said = words
            bar.update(words, advance=finished)

        return run_validation(_options(given), command_line("validation"), tell)


def _options(given: argparse.Namespace) -> ValidationOptions:
    names = arrival_names(given.arrivals)
    usual = "plain,ngram-4" + ("" if given.draft is None else ",draft_model-4")
    same = ("target", "draft", "dtype", "device", "threads", "seed")
    limits = ("max_batch_size", "max_prompt_tokens", "max_step_tokens", "cache_reserve", "cache_tokens")
    return ValidationOptions(
        settings=tuple(
            map(parse_setting, dict.fromkeys(words("settings", usual if given.settings is None else given.settings)))
        ),
        traces=dict.fromkeys(names) or {given.arrivals: jobs_of(vars(given), _SLICE)},
        seconds=given.duration_s,
        **{name: getattr(given, name) for name in (*same, *limits)},
    )


if __name__ == "__main__":
    sys.exit(main())
