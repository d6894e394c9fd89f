"""`foretoken advise`, `diagnose` and `acceptance`: whether to speculate, and why acceptance is low or has fallen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish
from foretoken.errors import ConfigError, GateError
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.params import check_number


@takes(AdviseOptions)
def advise(context: typer.Context, target: str = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Say whether to speculate on your texts and load: with which drafter and how many tokens, and at what cost.

    Acceptance is measured on the prompts, steps at the numbers of requests at once; "don't" is an answer.
    """
    from foretoken.measure.advise.run import run_advise

    options = config_from(AdviseOptions, context.params)
    fetch_models(target)
    finish(run_advise(options, command_line()), as_json)


@takes(DiagnoseOptions)
def diagnose(context: typer.Context, as_json: JsonOption = False) -> None:
    """Say why the acceptance rate of a head or draft model is low, by trying repairs on the target's answers."""
    from foretoken.measure.diagnose.run import run_diagnose

    options = config_from(DiagnoseOptions, context.params)
    fetch_models(options.target, options.draft)
    finish(run_diagnose(options, command_line()), as_json)


@takes(DiagnoseOptions, fields=("target", "head", "draft", "prompts", "chat", "out", "name"))
def acceptance(
    context: typer.Context,
    history: Annotated[Path, typer.Argument(help="The file that `foretoken serve --history` writes.")],
    alpha: Annotated[float, typer.Option(help="Probability of a false alarm over all days together.")] = 0.05,
    target: str | None = None,
    name: str = "acceptance",
    as_json: JsonOption = False,
) -> None:
    """Say whether acceptance has fallen over the days that a server has served; exit code 5 if it has.

    With --target and --head or --draft the cause is looked for by `foretoken diagnose`, only where it has fallen.
    """
    from foretoken.measure.diagnose.run import run_diagnose
    from foretoken.measure.write import check_out, write_report
    from foretoken.server.observe.acceptance import acceptance_report
    from foretoken.server.observe.history import acceptance_series

    given = context.params
    check_number("alpha", alpha, low=0.0, high=0.5, open_low=True)
    if target is None and any(given[one] is not None for one in ("head", "draft", "prompts")):
        raise ConfigError("target", target, "give the target that the head or the draft belongs to")
    options = None if target is None else config_from(DiagnoseOptions, given, out=None)
    check_out(given["out"])
    series = acceptance_series(history, alpha)
    fallen = [one for one in series if one.has_fallen]
    found = None
    if fallen and options is not None:
        fetch_models(options.target, options.draft)
        found = run_diagnose(options, command_line())
    report = acceptance_report(series, {"history": history.name, "alpha": alpha}, command_line(), found)
    finish(write_report(report, given["out"], name), as_json)
    if fallen:
        raise GateError(f"acceptance fell: {', '.join(' on '.join(filter(None, one.name[1:])) for one in fallen)}")
