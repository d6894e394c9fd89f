"""Help and usage errors as plain text: typer's boxes truncate words, and need characters that few encodings have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.cli.origins import WORDS
from foretoken.errors import ConfigError
from foretoken.files import map_texts
from foretoken.printing.console import Console, encodable, shortened, visible

_MAX_DEFAULT = 200  # characters of a default in the help, which may come from a settings file
# The base of every usage error; typer has carried click inside since 0.26 and exports only this subclass.
USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[1]


class _PlainHelp:
    """Help as plain text, for commands of typer."""

    rich_markup_mode: Any

    def get_help(self, ctx: Any) -> str:  # noqa: ANN401 - of the click inside typer
        """The help in characters that standard output can encode: typer would write UTF-8 to an ASCII stream."""
        self.rich_markup_mode = None
        text: str = super().get_help(ctx)  # type: ignore[misc]
        return encodable(text, sys.stdout.encoding)


class Command(_PlainHelp, TyperCommand):
    """A verb with plain-text help, options grouped by `rich_help_panel`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the help, with defaults from a settings file escaped."""
        ctx.default_map = map_texts(ctx.default_map, lambda text: shortened(visible(text), _MAX_DEFAULT))
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


class Group(_PlainHelp, TyperGroup):
    """A group of verbs, with the first paragraph of each verb's help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the verbs."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (self.commands[name].help or "").partition("\n\n")[0]) for name in self.list_commands(ctx)]
            )


class DefaultGroup(Group):
    """A group that runs `default_command` where the command line names none of its commands.

    `moved` maps options that no command has any longer to what replaces them.
    """

    default_command = ""
    moved: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Insert the default command before options; `--help` alone is that of the group."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.default_command, *args]
        if args[0] in self.commands:
            self._refuse_others(ctx, args[0], args[1:])
        return super().parse_args(ctx, args)

    def _refuse_others(self, ctx: Any, name: str, args: list[str]) -> None:  # noqa: ANN401
        """Say (`USAGE_ERROR`) which command has an option that the command `name` does not have."""
        own = _flags(self.commands[name])
        for flag in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            others = [other for other, command in self.commands.items() if flag in _flags(command)]
            use = self.moved.get(flag) or " or ".join(f"{ctx.command_path} {other} {flag}" for other in others)
            if flag not in own and use:
                raise USAGE_ERROR(f"no such option: {flag}; use {use}", ctx=ctx)


def _flags(command: Any) -> set[str]:  # noqa: ANN401 - of the click inside typer
    return {flag for parameter in command.params for flag in parameter.opts}


def show_usage_error(error: typer.BadParameter, console: Console) -> None:
    """Print the usage and the error, a line each; or the help itself if typer asks for it."""
    if type(error).__name__ == "NoArgsIsHelpError":  # not exported
        console.block(error.format_message())
        return
    if error.ctx is not None:
        console.line(f"{' '.join(error.ctx.get_usage().split())}; try {error.ctx.command_path} --help")
    console.message(f"error: {_message(error)}", style="red")


def _message(error: typer.BadParameter) -> str:
    """What is wrong, in the words of a variable or a setting of this option: typer names neither value nor remedy."""
    reasons = getattr(error.__cause__, "errors", None)  # of pydantic, which typer reads values with since 0.29
    name = str(getattr(getattr(error, "param", None), "name", ""))
    for reason in reasons() if reasons is not None else ():
        for kind, words in WORDS.items():
            if reason["type"].startswith(f"{kind.__name__}_"):
                return str(ConfigError(name, reason["input"], f"must be {words}"))
    return error.format_message()
