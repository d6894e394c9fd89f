"""Settings on a load that changes in batch size and slice while it runs, against the best single fixed setting.

    python -m studies.changing_load --load mixed --phase-s 4 --target DIR --draft DIR --out results
    python -m studies.changing_load --load 1:code,16:random,4:edit

Settings are those of `foretoken bench load`; docs/studies.md describes the load.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foretoken.measure.load.options import DEFAULT_SETTINGS
from foretoken.measure.report import Report
from studies.changing_load.measure import run_changing_load
from studies.changing_load.options import ChangingLoadOptions, parse_phases
from studies.command import arguments, command_line, run, words

# Options of the measurement that are flags under their own names, with their types.
_FLAGS = {
    "phase_s": float,
    "prompts": Path,
    "prompt_tokens": int,
    "max_tokens": int,
    "repeats": int,
    "seed": int,
    "numerics": str,
    "weights": str,
    "resume": Path,
    "cache_tokens": int,
    "cache_reserve": float,
    "max_batch_size": int,
    "max_prompt_tokens": int,
    "max_step_tokens": int,
    "min_tokens_to_speculate": int,
    "max_speculating_requests": int,
}


def main() -> int:
    """Measure, and print or write the report."""
    default = ChangingLoadOptions("reference:target")
    parser = arguments("changing_load", __doc__, default.name)
    parser.add_argument("--load", default="mixed", help="BATCH:SLICE,... in sequence, or mixed")
    parser.add_argument("--settings", type=words, help="with commas: plain, DRAFTER-N, DRAFTER-auto, auto, ...")
    for name, kind in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(default, name))
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """The measurement.

    Raises:
        ForetokenError: see `run_changing_load`.
    """
    usual = [name for name in DEFAULT_SETTINGS if given.draft is not None or not name.startswith("draft_model")]
    options = ChangingLoadOptions(
        **{name: getattr(given, name) for name in ("target", "draft", "dtype", "device", "threads", *_FLAGS)},
        settings=given.settings or tuple(usual),
        phases=parse_phases(given.load),
    )
    return run_changing_load(options, command_line("changing_load"))


if __name__ == "__main__":
    sys.exit(main())
