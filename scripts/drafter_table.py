"""The table of docs/drafters.md from a raw result of `foretoken bench`.

python scripts/drafter_table.py benchmarks/DATE-NAME.json                        print it
python scripts/drafter_table.py benchmarks/DATE-NAME.json --into docs/drafters.md    replace what stands between the
marks
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.measure.speed.plan import ALL_SLICES, ENGINE
from foretoken.measure.speed.report import against_peer, by_position, kind_of
from foretoken.measure.speed.rows import SpeedRow
from foretoken.printing import console as markdown

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


def drafter_table(rows: Sequence[SpeedRow]) -> list[str]:
    """Markdown: for every slice our drafters, greedy, each at its fastest setting, best first, with what it cost and
    what it gained.
    """
    lines: list[str] = []
    for name in dict.fromkeys(row.slice for row in rows if row.temperature == 0.0):
        here = [row for row in rows if (row.slice, row.temperature) == (name, 0.0)]
        kinds: dict[str, list[SpeedRow]] = {}
        for row in here:
            if row.engine == ENGINE and row.drafter is not None:
                kinds.setdefault(kind_of(row), []).append(row)
        fastest = sorted(
            (max(own, key=lambda row: row.tokens_per_s) for own in kinds.values()), key=lambda row: -row.tokens_per_s
        )
        lines += ["", f"### {'all slices together' if name == ALL_SLICES else name}", "", *_slice_table(fastest, here)]
    return lines[1:]


_HEADINGS = (
    "drafter",
    "draft tokens",
    "against plain",
    "tokens a step",
    "accepted by position",
    "draft ms a step",
    "against the same elsewhere",
)


def _slice_table(fastest: Sequence[SpeedRow], here: Sequence[SpeedRow]) -> list[str]:
    lines = []
    for row in fastest:
        peer = against_peer(row, here)
        cells = (
            f"`{kind_of(row)}`",
            "" if row.num_draft is None else str(row.num_draft),
            "" if row.speedup is None else f"{row.speedup:.2f}x",
            "" if row.emitted_per_step is None else f"{row.emitted_per_step:.2f}",
            by_position(row),
            "" if row.draft_ms_per_step is None else f"{row.draft_ms_per_step:.1f}",
            "" if peer is None else f"{peer[0]:.2f}x {peer[1]}",
        )
        lines.append(cells)
    return markdown.table(_HEADINGS, lines)


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
