"""Markdown tables and lines with foreign text in them."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.printing.text import visible


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], justify: str = "lr") -> list[str]:
    """The lines of a table; `justify` holds l or r for each column, its last letter goes on."""
    rules = ["---:" if justify[min(place, len(justify) - 1)] == "r" else "---" for place in range(len(headings))]
    return [_row(headings), f"|{'|'.join(rules)}|", *map(_row, rows)]


def page(lines: Sequence[str]) -> str:
    """The page as one text: line ends and control characters within a line are escaped."""
    return "\n".join(map(visible, lines)) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
