"""The `foretoken` command: verbs, settings from flags, environment and `foretoken.toml`, errors as exit codes.

Exit codes: 0 ok; 1 failure; 2 usage; 3 a model that cannot be used, or does not fit its draft; 4 input or output; 5 a
gate not met; 130 Ctrl-C; 129 SIGHUP and 143 SIGTERM, after cleaning up; 141 standard output was closed by its reader,
as of any program under `| head`.
"""

from __future__ import annotations

import functools
import os
import warnings
from contextlib import suppress
from typing import Annotated

import typer
from typer.core import TyperGroup

from foretoken.cli import origins
from foretoken.cli.exits import CLOSED_PIPE, INTERRUPTED, io_failure, print_version
from foretoken.cli.usage import USAGE_ERROR, show_usage_error
from foretoken.cli.verbs import Root
from foretoken.errors import ForetokenError
from foretoken.printing.console import Console, tolerate_encoding

_COMPLETION = "_FORETOKEN_COMPLETE"  # set by the shell while it asks for completions

app = typer.Typer(
    cls=Root,
    name="foretoken",
    help="Run a language model with exact speculative decoding: faster answers, same distribution.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Options of the command itself."""


@functools.cache
def _command() -> TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; a known error becomes one line on stderr."""
    tolerate_encoding()
    errors = Console(stderr=True)

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        errors.message(f"warning: {message}", style="yellow")

    warnings.showwarning = show_warning
    command = _command()
    try:
        defaults = {}
        if _COMPLETION not in os.environ:  # settings change nothing about it, and a mistake in them is shown later
            origins.check_environment(command)
            defaults = origins.default_map(command)
        code = command.main(args=arguments, prog_name="foretoken", standalone_mode=False, default_map=defaults)
        if code == INTERRUPTED:  # typer makes an exit of Ctrl-C
            raise KeyboardInterrupt
        return int(code or 0)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except USAGE_ERROR as error:
        with suppress(OSError):
            show_usage_error(error, errors)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        with suppress(OSError):
            errors.line("interrupted; what was written until then is kept")
        return INTERRUPTED
    except ForetokenError as error:
        origin = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        with suppress(OSError):
            errors.message(f"error: {error}{origin}", style="red")
        return error.exit_code
    except OSError as error:
        return io_failure(error)
    except SystemExit as stop:  # what typer and rich make of a closed pipe
        if isinstance(stop.__context__, BrokenPipeError):
            return CLOSED_PIPE
        raise
