"""How soon the number of draft tokens follows a change of acceptance, under the engine's and other policies.

    python -m studies.recovery --batches 1,4 --target DIR --out results

docs/batching.md describes the columns.
"""

from __future__ import annotations

import argparse
import sys

from foretoken.errors import InputError
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.report import Report
from studies.command import arguments, command_line, run, whole_numbers
from studies.recovery.recovery import run_recovery
from studies.rivals.policies import MEASURED, TABLE, parse_table, table_text


def main() -> int:
    """Measure, and print or write the report."""
    parser = arguments("recovery", __doc__, "recovery", drafts=False)
    parser.add_argument("--batches", type=whole_numbers, default=(1, 4), help="batch sizes with commas")
    parser.add_argument("--table", default=table_text(TABLE), help="draft tokens by batch size, as 1:5,4:3")
    parser.add_argument("--repeats", type=int, default=LoadOptions.repeats)
    parser.add_argument("--seed", type=int, default=LoadOptions.seed)
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """Recovery at the given batch sizes.

    Raises:
        InputError: a table that is to be measured.
        ForetokenError: see `run_recovery`.
    """
    table = parse_table(given.table)
    if table is None:
        raise InputError("table", MEASURED, "this study has no texts to measure a table on; write it out")
    names = ("target", "dtype", "device", "threads", "batches", "repeats", "seed")
    return run_recovery(LoadOptions(**{name: getattr(given, name) for name in names}), table, command_line("recovery"))


if __name__ == "__main__":
    sys.exit(main())
