"""`foretoken advise`: should I speculate, with which drafter, how many tokens, up to which load, at which cost."""

from __future__ import annotations

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish
from foretoken.measure.advise.options import AdviseOptions


@takes(AdviseOptions)
def advise(context: typer.Context, target: str = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Say whether to speculate on your texts and load: with which drafter and how many tokens, and at what cost.

    Acceptance is measured on the prompts, steps at the numbers of requests at once; "don't" is an answer.
    """
    from foretoken.measure.advise.run import run_advise

    options = config_from(AdviseOptions, context.params)
    fetch_models(target)
    finish(run_advise(options, command_line()), as_json)
