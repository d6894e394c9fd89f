"""The engine's policy for the number of draft tokens against those of vLLM (table), SGLang (ema) and transformers
(heuristic).

    python -m studies.rivals --batches 1,8,32 --target DIR --draft DIR --out results
    python -m studies.rivals --load mixed --table measured

A `foretoken bench load` or `studies.changing_load` run with three more settings, alone (`table`, `ema`, `heuristic`,
with the draft model where there is one) or behind a drafter (`ngram-ema`). docs/studies.md describes settings.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from foretoken.measure.load.options import DEFAULT_SETTINGS, LoadOptions, slice_names
from foretoken.measure.load.rows import BatchRow
from foretoken.measure.load.run import announce, run_batches
from foretoken.measure.options import PLAIN
from foretoken.measure.report import Report
from studies.changing_load.measure import run_changing_load
from studies.changing_load.options import ChangingLoadOptions, parse_phases
from studies.command import arguments, command_line, run, whole_numbers, words
from studies.rivals.policies import TABLE, measured_table, parse_table, rival_policies, table_text

_TABLE_NUMBERS = (1, 3, 5)  # of draft tokens that a measured table chooses from, and 0
_RIVALS = ("table", "ema")


def main() -> int:
    """Measure, and print or write the report."""
    default = ChangingLoadOptions("reference:target")
    parser = arguments("rivals", __doc__, "rivals")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--batches", type=whole_numbers, default=default.batches, help="batch sizes with commas")
    kind.add_argument("--load", help="a load that changes: BATCH:SLICE,..., or mixed")
    parser.add_argument("--settings", type=words, help="with commas, also table, ema, heuristic, DRAFTER-ema, ...")
    parser.add_argument("--slices", type=words, default=default.slices, help="slices of the batches, with commas")
    parser.add_argument(
        "--table", default=table_text(TABLE), help="draft tokens by batch size, as 1:5,4:3; or measured, first"
    )
    parser.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens)
    parser.add_argument("--prompts-per-slice", type=int, default=default.prompts_per_slice)
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument("--phase-s", type=float, default=default.phase_s)
    parser.add_argument("--seed", type=int, default=default.seed)
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """The load measurement with the rival policies.

    Raises:
        ForetokenError: see `run_batches`.
    """
    table = parse_table(given.table)
    draft = given.draft
    if draft is None and given.target == "reference:target":
        draft = "reference:draft"
    known = (*DEFAULT_SETTINGS[:-3], *_RIVALS, *DEFAULT_SETTINGS[-3:])
    settings = given.settings or tuple(name for name in known if draft is not None or "draft_model" not in name)
    same = ("target", "dtype", "device", "threads", "prompt_tokens", "prompts_per_slice", "max_tokens", "repeats")
    values = {name: getattr(given, name) for name in (*same, "seed", "batches")}
    values |= {"draft": draft, "settings": settings, "slices": slice_names(given.slices, None)}
    changing = None
    options = LoadOptions(**values)
    if given.load is not None:
        options = changing = ChangingLoadOptions(**values, phases=parse_phases(given.load), phase_s=given.phase_s)
    source = "given"
    if table is None:
        announce("measuring the table")
        source, table = "measured first, on all slices", measure_table(options)
    remark = f"The table of draft tokens by batch size, {source}: {table_text(table)}."
    rest = (command_line("rivals"), rival_policies(table), (remark,))
    return run_batches(options, *rest) if changing is None else run_changing_load(changing, *rest)


def measure_table(options: LoadOptions) -> dict[int, int]:
    """The fastest fixed number of draft tokens at each batch size of the run, over all of its slices."""
    drafter = "ngram" if options.draft is None else "draft_model"
    if isinstance(options, ChangingLoadOptions):
        options = replace(
            options,
            batches=tuple(dict.fromkeys(phase.batch for phase in options.phases)),
            slices=tuple(dict.fromkeys(phase.slice for phase in options.phases)),
        )
    settings = (PLAIN, *(f"{drafter}-{number}" for number in _TABLE_NUMBERS))
    rows: tuple[BatchRow, ...] = run_batches(replace(options, settings=settings, repeats=1)).results["rows"]
    speeds: dict[int, dict[int, float]] = {}
    for row in rows:
        number = 0 if row.setting == PLAIN else int(row.setting.rpartition("-")[2])
        by_number = speeds.setdefault(row.batch, {})
        by_number[number] = by_number.get(number, 0.0) + row.tokens_per_s
    return measured_table(speeds)


if __name__ == "__main__":
    sys.exit(main())
