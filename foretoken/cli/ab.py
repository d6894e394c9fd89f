"""`foretoken ab`: the same requests on two backends, until it is clear which is faster."""

from __future__ import annotations

import typer

from foretoken.cli.common import JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish
from foretoken.measure.ab.options import AbOptions


@takes(AbOptions)
def ab(
    context: typer.Context,
    as_json: JsonOption = False,
) -> None:
    """Replay requests on two backends in turns, and say which is faster, with an interval that holds at every look.

    A and B are asked the same with the same seed. Ctrl-C reports what was measured until then.
    """
    from foretoken.measure.ab.run import run_ab

    options = config_from(AbOptions, context.params)
    fetch_models(options.target, options.draft)
    finish(run_ab(options, command_line()), as_json)
