"""`foretoken diagnose`: why is acceptance low?"""

from __future__ import annotations

import typer

from foretoken.cli.common import JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish
from foretoken.measure.diagnose.options import DiagnoseOptions


@takes(DiagnoseOptions)
def diagnose(
    context: typer.Context,
    as_json: JsonOption = False,
) -> None:
    """Say why a head or a draft model is accepted rarely, by trying each likely repair on the target's own answers."""
    from foretoken.measure.diagnose.run import run_diagnose

    options = config_from(DiagnoseOptions, context.params)
    fetch_models(options.target, options.draft)
    finish(run_diagnose(options, command_line()), as_json)
