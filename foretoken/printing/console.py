"""Standard output and standard error: lines, tables and bars that show every text completely.

Rules for all output:

- Markup is disabled. A character of a foreign text (paths, model names, answers, errors of libraries) that must not be
  printed unchanged, or that the stream's encoding lacks, becomes its Python backslash escape, as in \\x1b, \\n or
  \\u202e. Backslashes in the text are not doubled, so the form is for readers; `--json` is lossless.
- A line is never wrapped, cut or padded here: a terminal folds it, a pipe gets it whole.
- A table is drawn if it fits: the width of a terminal, or `_MAX_WIDTH` characters elsewhere. Otherwise each row is
  printed as a record, a line for each cell after its heading.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TextIO

import rich.console
from rich.cells import cell_len
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment, Segments
from rich.status import Status
from rich.table import Column
from rich.text import Text

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


Part = str | tuple[str, str]  # a text, or a text with its style

_MAX_WIDTH = 400  # of a table in a pipe or file: beyond, padding every row to the longest cell makes the output huge
_MAX_MESSAGE = 4000  # characters of an error or warning, which may quote a value of any length
_MAX_DESCRIPTION = 200  # characters beside a spinner
_GAP = "  "


class Console:
    """One stream; by default standard output. `width` is for tests: a terminal knows its own."""

    def __init__(self, *, stderr: bool = False, file: TextIO | None = None, width: int | None = None) -> None:
        self._stream: TextIO = file if file is not None else sys.stderr if stderr else sys.stdout
        self.is_terminal = self._stream.isatty()
        self._rich = rich.console.Console(file=self._stream, width=width, markup=False, emoji=False, highlight=False)

    def line(self, *parts: Part, style: str | None = None) -> None:
        """Print one line, `style` for the parts without a style."""
        self._put(*parts, style=style, block=False)

    def block(self, *parts: Part) -> None:
        """Print text, keeping line ends and tabs."""
        self._put(*parts, style=None, block=True)

    def message(self, text: str, style: str) -> None:
        """Print an error or a warning: one line, without the middle of a very long one."""
        self.line(shortened(text, _MAX_MESSAGE), style=style)

    def exact(self, text: str) -> None:
        """Write `text` unchanged, without a line end: JSON, or an answer for another program.

        Characters that the stream's encoding lacks are escaped all the same: the alternative is half an answer and a
        traceback.
        """
        self._stream.write(encodable(text, self._stream.encoding))
        self._stream.flush()

    def answer(self, text: str) -> None:
        """Write a piece of an answer: unchanged in a pipe or file; on a terminal control characters other than line
        ends and tabs are escaped.
        """
        self.exact(visible_block(text) if self.is_terminal else text)

    def piece(self, text: str, style: str | None) -> None:
        """Write a piece of an answer as `answer` does, in a style where the stream is a terminal."""
        if style is None or not self.is_terminal:
            self.answer(text)
            return
        segment = Segment(self._shown(text, block=True), self._rich.get_style(style))
        self._rich.print(Segments([segment]), soft_wrap=True, end="")
        self._stream.flush()

    def json_line(self, text: str) -> None:
        """Write one line of JSON that `json.dumps` made; its only control character, DEL, is escaped as in JSON."""
        self.exact(text.replace("\x7f", "\\u007f") + "\n")

    def table(
        self,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        justify: str = "lr",
        styles: Sequence[str | None] = (),
    ) -> None:
        """Print rows of text under headings, as a table or as records.

        `justify` holds l or r for each column, its last letter goes on; `styles` may hold one for each row.
        """
        if title:
            self.line(title, style="italic")
        shown = [[self._shown(cell, block=False) for cell in row] for row in (headings, *rows)]
        widths = self._widths(shown)
        styled = list(zip_longest(shown[1:], styles[: len(rows)]))
        if widths is None:
            for row, style in styled:
                for place, (heading, cell) in enumerate(zip(shown[0], row, strict=True)):
                    if cell or not place:
                        self.line(_GAP if place else "", f"{heading}: " if heading else "", cell, style=style)
        else:
            self.line(_drawn(shown[0], widths, justify), style="bold")
            self.line(_GAP.join("-" * width for width in widths), style="dim")
            for row, style in styled:
                self.line(_drawn(row, widths, justify), style=style)

    @contextmanager
    def spinner(self, message: str) -> Iterator[Spinner]:
        """A spinner during long work; without a terminal one plain line."""
        if not self.is_terminal:
            self.line(message)
            yield Spinner(self, None)
            return
        with self._rich.status(self._description(message), spinner="line") as status:  # ASCII: every encoding has it
            yield Spinner(self, status)

    @contextmanager
    def bar(self, description: str, total: float | None, *, counts: bool = False, stays: bool = False) -> Iterator[Bar]:
        """A progress bar on a terminal, else nothing; `counts`: counts, no percentage; `stays`: also once finished."""

        def cut() -> Column:  # rich's ellipsis is a character that not every encoding has
            return Column(no_wrap=True, overflow="crop")

        amount: ProgressColumn = (
            MofNCompleteColumn(table_column=cut()) if counts else TaskProgressColumn(table_column=cut())
        )
        words = TextColumn("{task.description}", markup=False, table_column=cut())
        columns = (words, BarColumn(), amount, TimeRemainingColumn(table_column=cut()))
        with Progress(*columns, console=self._rich, disable=not self.is_terminal, transient=not stays) as progress:
            yield Bar(self, progress, progress.add_task(self._label(description), total=total))

    def _put(self, *parts: Part, style: str | None, block: bool) -> None:
        segments = []
        for part in parts:
            text, own = (part, style) if isinstance(part, str) else part
            segments.append(Segment(self._shown(text, block), None if own is None else self._rich.get_style(own)))
        # Segments reach the stream unchanged; in text, tabs would be expanded and some characters dropped.
        self._rich.print(Segments([*segments, Segment("\n")]), soft_wrap=True)

    def _shown(self, text: str, block: bool) -> str:
        return encodable(visible_block(text) if block else visible(text), self._stream.encoding)

    def _description(self, text: str) -> Text:
        return Text(self._shown(shortened(text, _MAX_DESCRIPTION), block=False), overflow="fold")

    def _label(self, text: str) -> str:
        """The description beside a bar: half of the line at most."""
        most = max(10, self._rich.width // 2)
        return self._shown(text[:most], block=False)[:most]

    def _widths(self, rows: Sequence[Sequence[str]]) -> list[int] | None:
        """The width of each column; None if the table does not fit."""
        most = self._rich.width if self.is_terminal else _MAX_WIDTH
        if any(len(cell) > 4 * most for row in rows for cell in row):  # cannot fit
            return None
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        return widths if sum(widths) + len(_GAP) * (len(widths) - 1) <= most else None


class Spinner:
    """A running spinner, or nothing without a terminal."""

    def __init__(self, console: Console, status: Status | None) -> None:
        self._console, self._status = console, status

    def update(self, message: str) -> None:
        """Show another message."""
        if self._status is not None:
            self._status.update(self._console._description(message))

    def say(self, message: str) -> None:
        """Show what takes long: without a terminal on a line of its own."""
        if self._status is None:
            self._console.line(message)
        self.update(message)


class Bar:
    """A running bar, or nothing without a terminal."""

    def __init__(self, console: Console, progress: Progress, task: TaskID) -> None:
        self._console, self._progress, self._task = console, progress, task

    def update(
        self,
        description: str | None = None,
        *,
        advance: float | None = None,
        completed: float | None = None,
        total: float | None = None,
    ) -> None:
        """Advance it, by `advance` or to `completed`, and show another description."""
        words = None if description is None else self._console._label(description)
        self._progress.update(self._task, description=words, advance=advance, completed=completed, total=total)


def tolerate_encoding() -> None:
    """Make standard output and error escape what their encoding lacks, for text that other libraries write."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drawn(cells: Sequence[str], widths: Sequence[int], justify: str) -> str:
    """One line of a table, without trailing spaces."""
    padded = []
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - cell_len(cell))
        to_the_right = justify[min(place, len(justify) - 1)] == "r"
        padded.append(space + cell if to_the_right else cell if place == len(cells) - 1 else cell + space)
    return _GAP.join(padded)
