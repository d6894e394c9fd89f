"""Help and usage errors: what typer makes of an option's text, shown as the rest of the output is."""

from __future__ import annotations

import codecs
import sys
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.printing.console import Console
from foretoken.printing.text import map_texts, shortened, visible

_MOST_DEFAULT = 200  # characters of a default in the help, which may come from a settings file


class Command(TyperCommand):
    """A verb, whose help holds whatever a settings file says and whatever encoding the terminal has."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401 - typer's own click
        """Write the help."""
        _make_printable(self, ctx)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """The same for what has verbs below it."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401 - typer's own click
        """Write the help."""
        _make_printable(self, ctx)
        super().format_help(ctx, formatter)


def show_usage_error(error: typer.BadParameter, console: Console) -> None:
    """Where help is, and what is wrong, a line each; the help itself where typer answers with that."""
    if type(error).__name__ == "NoArgsIsHelpError":  # typer does not export it; its boxes are on standard output already, plain help is its message
        console.block(error.format_message())
        return
    if error.ctx is not None:
        console.line(f"{' '.join(error.ctx.get_usage().split())}; try {error.ctx.command_path} --help")
    console.message(f"error: {error.format_message()}", style="red")


def _make_printable(command: TyperCommand | TyperGroup, ctx: typer.Context) -> None:
    """Escape the defaults that help shows (nothing runs afterwards), and draw boxes only where the encoding has them."""
    ctx.default_map = cast("dict[str, Any] | None", map_texts(ctx.default_map, lambda text: shortened(visible(text), _MOST_DEFAULT)))
    if not codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf"):
        command.rich_markup_mode = None
