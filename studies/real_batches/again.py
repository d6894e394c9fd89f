"""Computes rows and tables of records again from their turns, after a change of how a ratio is computed.

    python -m studies.real_batches.again benchmarks/2026-11-28-smollm2-ngram-table.json ...

Turns, options, machine and date stay as they were measured; the record and the page beside it are written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretoken.measure.report import Report
from foretoken.measure.write import rendered
from studies.real_batches.tables import EXPLAINED, Row, rows, tables


def main() -> int:
    """Write each record again."""
    parser = argparse.ArgumentParser("studies.real_batches.again", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="JSON files that studies.real_batches wrote")
    for record in parser.parse_args().records:
        report = again(json.loads(record.read_text(encoding="utf-8")))
        record.write_text(rendered(report, ".json"), encoding="utf-8")
        record.with_suffix(".md").write_text(rendered(report, ".md", record.name), encoding="utf-8")
    return 0


def rows_of(record: dict[str, Any]) -> list[Row]:
    """The rows that the turns of a record give."""
    return rows(record["turns"], list(record["options"]["prompts"]))


def again(record: dict[str, Any]) -> Report:
    """The report of a record, from its turns."""
    found = rows_of(record)
    about = {name: record[name] for name in ("command", "options", "machine", "versions", "date")}
    return Report(
        **about,
        title="Real prompts, several at once",
        results={
            "rows": [asdict(row) for row in found],
            "turns": record["turns"],
            "interrupted": record.get("interrupted", False),
        },
        tables=tables(found),
        explained=EXPLAINED,
        caveats=tuple(record["caveats"]),
        files=tuple(record["files"]),
    )


if __name__ == "__main__":
    sys.exit(main())
