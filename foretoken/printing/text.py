"""Escaping of foreign text (paths, model names, answers, errors of libraries) for a terminal or a page.

A character that must not be printed unchanged becomes its Python backslash escape, as in \x1b, \n or \u202e.
Backslashes in the text are not doubled, so the form is for readers; `--json` is lossless.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NOT_IN_A_BLOCK = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_CUT = " ... ({} characters left out) ... "


def visible(text: str) -> str:
    """`text` on one line: what `str.isprintable` refuses is escaped, line ends, tabs and direction marks among it."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def visible_block(text: str) -> str:
    """`text` with its line ends and tabs: control characters and lone surrogates are escaped, nothing else."""
    return _NOT_IN_A_BLOCK.sub(lambda found: _escape(found.group()), text)


def encodable(text: str, encoding: str | None) -> str:
    """`text` with an escape for each character that `encoding` lacks; None lacks nothing."""
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)


def shortened(text: str, most: int) -> str:
    """`text` cut in the middle to about `most` characters: the end of a message often holds its remedy."""
    if len(text) <= most:
        return text
    head = most * 3 // 4
    tail = most - head
    return text[:head] + _CUT.format(len(text) - most) + text[len(text) - tail :]


def seconds_text(seconds: float) -> str:
    """Seconds in three figures, as milliseconds below one second."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _escape(character: str) -> str:
    return repr(character)[1:-1]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], justify: str = "lr") -> list[str]:
    """The lines of a table; `justify` holds l or r for each column, its last letter goes on."""
    rules = ["---:" if justify[min(place, len(justify) - 1)] == "r" else "---" for place in range(len(headings))]
    return [_row(headings), f"|{'|'.join(rules)}|", *map(_row, rows)]


def page(lines: Sequence[str]) -> str:
    """The page as one text: line ends and control characters within a line are escaped."""
    return "\n".join(map(visible, lines)) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
