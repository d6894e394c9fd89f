"""`foretoken bench`: the group of measurements, and `speed`, which runs where none is named."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Mapping

import typer

from foretoken.cli.bench_load import load
from foretoken.cli.bench_options import DEFAULT_DRAFTERS, check_common, command_line, drafters_of, finish
from foretoken.cli.bench_profile import profile
from foretoken.cli.bench_url import url
from foretoken.cli.common import DEFAULT_MODEL, JsonOption
from foretoken.cli.flags import config_from, takes
from foretoken.cli.usage import DefaultGroup
from foretoken.cli.verb import EngineVerb
from foretoken.measure.speed.options import SpeedOptions


class _BenchGroup(DefaultGroup):
    default_command = "speed"
    chosen_by: Mapping[str, str] = {"--url": "url"}
    chosen_within: Mapping[tuple[str, str], str] = {("load", "--url"): "url"}
    moved: Mapping[str, str] = {
        "--peers": "foretoken bench speed --backends local,transformers,llama.cpp",
        "--profile": "foretoken bench profile",
        "--load": "python -m studies.changing_load --load",
        "--phase-s": "python -m studies.changing_load --phase-s",
        "--trace": "python -m studies.changing_load --load",
        "--recovery": "python -m studies.recovery",
        "--table": "python -m studies.rivals --table",
    }


app = typer.Typer(
    cls=_BenchGroup,
    help=("Measure speed, throughput under load, the cost of steps, or (--url) a server; without a command, speed."),
)


@app.command("speed", cls=EngineVerb)
@takes(SpeedOptions)
def speed(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    drafters: str = DEFAULT_DRAFTERS,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens per second, time per step and acceptance of one request at a time; settings take turns."""
    from foretoken.measure.speed.run import run_speed

    check_common(context.params)
    options = config_from(SpeedOptions, context.params, drafters=drafters_of(context))
    finish(run_speed(options, command=command_line()), as_json)


app.command("load", cls=EngineVerb)(load)
app.command("profile", cls=EngineVerb)(profile)
app.command("url", cls=EngineVerb)(url)
