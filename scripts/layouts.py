"""What the ragged layout is worth: the engine against padded batches with realignment (EQSPEC) and with length grouping
(EXSPEC).

    python scripts/layouts.py --target DIR --drafter ngram --num-draft 4 --batch-sizes 8,16 --out benchmarks --name
    layouts python scripts/layouts.py --target DIR --draft DIR --drafter draft_model

All ways answer the same prompts with the same weights in one process, in turns; the figures are medians. See
docs/studies.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from foretoken.bench.layouts import DRAFTERS, LayoutOptions, run_layouts
from foretoken.bench.layouts_report import print_layouts, write_layouts
from foretoken.bench.report import check_name
from foretoken.errors import ForetokenError
from foretoken.files import check_folder
from foretoken.printing.console import Console


def main() -> int:
    """Measure, print a table or JSON, and with `--out` write both."""
    default = LayoutOptions("reference:target")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=default.target, help="folder, hub id or reference:target")
    parser.add_argument("--draft", help="folder, hub id or reference:draft, for drafter draft_model")
    parser.add_argument("--drafter", choices=DRAFTERS, default=default.drafter)
    parser.add_argument("--num-draft", type=int, default=default.num_draft, help="guesses of every round")
    parser.add_argument(
        "--batch-sizes", type=whole_numbers, default=default.batch_sizes, help="numbers, separated by commas"
    )
    parser.add_argument(
        "--pool", type=int, default=default.pool, help="batches of prompts, and how many of them EXSPEC's window holds"
    )
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="folder for a dated result: raw JSON and a table")
    parser.add_argument("--name", default="layouts", help="end of the result's file name")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    given = vars(parser.parse_args())
    out, name, as_json = (given.pop(key) for key in ("out", "name", "json"))
    try:
        check_name(name)
        if out is not None:
            check_folder(out)
        options = LayoutOptions(**given)
        with Console(stderr=True).bar("measuring", 1.0) as bar:
            report = run_layouts(
                options, shlex.join(["python", *sys.argv]), lambda words, share: bar.update(words, completed=share)
            )
        files = () if out is None else write_layouts(report, out, name)
    except ForetokenError as error:
        Console(stderr=True).message(f"error: {error}", style="red")
        return error.exit_code
    if as_json:
        Console().json_line(json.dumps(asdict(report) | {"files": [str(file) for file in files]}, allow_nan=False))
    else:
        print_layouts(report, files)
    return 0


def whole_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list with commas between them."""
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
