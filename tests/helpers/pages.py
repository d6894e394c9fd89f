"""Pages of the documentation as text and tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from tests.helpers.raw_files import ROOT


@functools.cache
def page(name: str) -> str:
    """A page, with its line ends as blanks: a sentence may run over several lines."""
    return re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8"))


def is_printed_of(printed: str, value: float) -> bool:
    """Whether `value` is printed like this at this number of decimals."""
    decimals = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-decimals + 1e-9


def tables(name: str) -> Iterator[list[dict[str, str]]]:
    """The tables of a page, rows by heading."""
    rows: list[list[str]] = []
    for line in [*(ROOT / name).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            yield [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]
            rows = []


def table_with(name: str, *headings: str, last: bool = False) -> list[dict[str, str]]:
    """The first (or last) table of a page that has these headings."""
    found = [table for table in tables(name) if table and set(headings) <= set(table[0])]
    return found[-1 if last else 0]
