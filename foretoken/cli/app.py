"""The `foretoken` command: verbs, settings from flags, environment and `foretoken.toml`, errors as exit codes."""

from __future__ import annotations

import sys
import warnings

import typer
from typer.core import TyperGroup

from foretoken.cli import audit, bench, demo, generate, models, plan, settings, simulate, train, widen
from foretoken.cli.usage import Command, Group, show_usage_error
from foretoken.errors import ForetokenError
from foretoken.printing.console import Console, tolerate_encoding

app = typer.Typer(
    cls=Group,
    name="foretoken",
    help="Answers of a language model, faster and unchanged: guess cheaply, check exactly.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("demo", cls=Command)(demo.demo)
app.command("generate", cls=Command)(generate.generate)
app.command("bench", cls=Command)(bench.bench)
app.command("audit", cls=Command)(audit.audit)
app.command("plan", cls=Command)(plan.plan)
app.command("simulate", cls=Command)(simulate.simulate)
app.command("widen", cls=Command)(widen.widen)
app.command("models", cls=Command)(models.models)
app.add_typer(train.app, name="train")
app.add_typer(settings.app, name="config")


# The base of every usage error; typer has carried click inside since 0.26 and exports only this subclass.
_USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130


def main() -> None:
    """Run a verb; a known error becomes one line on stderr and its exit code, Ctrl-C 130."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    tolerate_encoding()
    errors = Console(stderr=True)

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        errors.message(f"warning: {message}", style="yellow")

    warnings.showwarning = show_warning
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    try:
        settings.check_environment(command)
        code = command.main(args=arguments, prog_name="foretoken", standalone_mode=False, default_map=settings.default_map(command))
        if code == _INTERRUPTED:  # typer makes an exit of Ctrl-C
            raise KeyboardInterrupt
        return int(code or 0)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except _USAGE_ERROR as error:
        show_usage_error(error, errors)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        errors.line("interrupted; nothing that was finished is lost")
        return _INTERRUPTED
    except ForetokenError as error:
        errors.message(f"error: {error}", style="red")
        return error.exit_code
