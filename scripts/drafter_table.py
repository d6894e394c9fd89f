"""The table of docs/drafters.md from a raw result of `foretoken bench`.

python scripts/drafter_table.py benchmarks/DATE-NAME.json                        print it
python scripts/drafter_table.py benchmarks/DATE-NAME.json --into docs/drafters.md    replace what stands between the
marks
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from foretoken.measure.speed.compare import drafter_table
from foretoken.measure.speed.rows import SpeedRow

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# Defaults of fields that older results do not have; other missing fields are None.
_LATER = {"options": "", "free": False, "lossy": False, "numerics": "default", "prompt_speedups": ()}


def rows_of(report: dict[str, Any]) -> list[SpeedRow]:
    """The rows of a raw result."""
    lists = {"acceptance_per_position", "differences", "prompt_speedups"}
    names = [field.name for field in dataclasses.fields(SpeedRow)]
    known = [dict.fromkeys(names) | _LATER | row for row in report["rows"]]
    return [SpeedRow(**{name: tuple(row[name]) if name in lists else row[name] for name in names}) for row in known]


def table(report: dict[str, Any], source: str) -> str:
    """Markdown: where the numbers come from, then a table per slice, greedy."""
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [
        f"Measured on {report['date'][:10]} ({machine}; raw numbers: {source}), greedy:",
        "",
        f"    {report['command']}",
        "",
    ]
    lines += [f"- {caveat}" for caveat in report["caveats"]]
    return "\n".join([*lines, "", *drafter_table(rows_of(report))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a .json file that `foretoken bench --out` wrote")
    parser.add_argument("--into", type=Path, help="a page with the two marks")
    args = parser.parse_args()
    made = table(json.loads(args.result.read_text(encoding="utf-8")), f"`{args.result.as_posix()}`")
    if args.into is None:
        print(made)
        return
    page = args.into.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{args.into} has no {BEGIN} ... {END}")
    args.into.write_text(f"{before}{BEGIN}\n{made}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
