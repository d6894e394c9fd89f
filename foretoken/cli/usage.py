"""Help and usage errors as plain text: typer's boxes truncate words on narrow terminals, and need characters that not
every encoding has.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.printing.console import Console
from foretoken.printing.text import encodable, map_texts, shortened, visible

_MOST_DEFAULT = 200  # characters of a default in the help, which may come from a settings file


class Command(TyperCommand):
    """A verb with plain-text help, options grouped by `rich_help_panel`."""

    def get_help(self, ctx: Any) -> str:  # noqa: ANN401 - of the click inside typer
        """The help in characters that standard output can encode: typer would write UTF-8 to an ASCII stream."""
        return encodable(super().get_help(ctx), sys.stdout.encoding)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the help, with defaults from a settings file escaped."""
        self.rich_markup_mode = None
        ctx.default_map = map_texts(ctx.default_map, lambda text: shortened(visible(text), _MOST_DEFAULT))
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write arguments and options by group."""
        parts: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                parts.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, records in parts.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(TyperGroup):
    """A group of verbs, with the first paragraph of each verb's help."""

    def get_help(self, ctx: Any) -> str:  # noqa: ANN401
        """The help in characters that standard output has."""
        return encodable(super().get_help(ctx), sys.stdout.encoding)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the help."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the verbs."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (self.commands[name].help or "").partition("\n\n")[0]) for name in self.list_commands(ctx)]
            )


def show_usage_error(error: typer.BadParameter, console: Console) -> None:
    """Print the usage and the error, a line each; or the help itself if typer asks for it."""
    if type(error).__name__ == "NoArgsIsHelpError":  # not exported
        console.block(error.format_message())
        return
    if error.ctx is not None:
        console.line(f"{' '.join(error.ctx.get_usage().split())}; try {error.ctx.command_path} --help")
    console.message(f"error: {error.format_message()}", style="red")
