"""The `foretoken` command: verbs, settings from flags, environment and `foretoken.toml`, errors as exit codes."""

from __future__ import annotations

import sys
import warnings

import typer
from rich.console import Console
from typer.core import TyperGroup

from foretoken.cli import audit, bench, demo, generate, models, plan, settings, simulate, train, widen
from foretoken.errors import ForetokenError

app = typer.Typer(
    name="foretoken",
    help="Answers of a language model, faster and unchanged: guess cheaply, check exactly.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("audit")(audit.audit)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("widen")(widen.widen)
app.command("models")(models.models)
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
    errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        errors.print(f"warning: {message}", style="yellow", markup=False)

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
        error.show()
        return 2
    except (typer.Abort, KeyboardInterrupt):
        errors.print("interrupted; nothing that was finished is lost", markup=False)
        return _INTERRUPTED
    except ForetokenError as error:
        errors.print(f"error: {error}", style="red", markup=False)
        return error.exit_code
