"""`foretoken bench`: the group of measurements, of which `speed` runs where none is named."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.backend.drafting import parse_drafters
from foretoken.cli.common import DEFAULT_MODEL, JsonOption, is_set, print_json, was_given
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import DEFAULT_DRAFTERS, check_common, command_line, drafters_of, finish
from foretoken.cli.usage import DefaultGroup
from foretoken.cli.verb import EngineVerb
from foretoken.errors import ConfigError
from foretoken.field_text import words
from foretoken.files import check_folder
from foretoken.measure.load.options import DEFAULT_SETTINGS, LoadOptions, slice_names
from foretoken.measure.options import ALL
from foretoken.measure.speed.options import ProfileOptions, SpeedOptions
from foretoken.measure.url.plan import UrlOptions
from foretoken.measure.write import check_name
from foretoken.printing.console import Console


@takes(LoadOptions)
def load(context: typer.Context, target: str = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Measure throughput of whole batches; settings alternate in one run.

    With --url ADDRESS: requests to a server at random times, see `foretoken bench url --help`.
    """
    from foretoken.measure.load.run import run_batches

    check_common(context.params)
    finish(run_batches(_load_options(context), command_line()), as_json)


def _load_options(context: typer.Context) -> LoadOptions:
    """`LoadOptions` from the options by name; without a draft, the default settings are those that need none."""
    given = context.params
    derived: dict[str, Any] = {}
    if given["draft"] is None and not is_set(context, "settings"):
        derived["settings"] = tuple(name for name in DEFAULT_SETTINGS if not name.startswith("draft_model"))
    chosen = words("slices", given["slices"]) if is_set(context, "slices") or given["prompts"] is None else (ALL,)
    derived["slices"] = slice_names(chosen, given["prompts"])
    return config_from(LoadOptions, given, **derived)


@takes(SpeedOptions, fields=("name",))
@takes(ProfileOptions)
def profile(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    drafters: str = DEFAULT_DRAFTERS,
    out: Annotated[Path | None, typer.Option(help="Folder for the dated profile.")] = None,
    name: str = "profile",
    as_json: JsonOption = False,
) -> None:
    """Measure the seconds of target steps and of drafters by size, for `foretoken simulate`; under a minute."""
    from foretoken.measure.speed.profile import print_profile, run_profile, write_profile

    check_common(context.params)
    choices = parse_drafters(drafters_of(context))
    check_name(name)
    if out is not None:
        check_folder(out)
    asked = config_from(ProfileOptions, context.params, drafters=choices)
    with Console(stderr=True).bar("measuring", 1.0) as bar:
        found = run_profile(asked, command=command_line(), tell=lambda words, share: bar.update(words, completed=share))
    file = None if out is None else write_profile(found, out, name)
    if as_json:
        print_json(found.as_dict() | {"file": None if file is None else str(file)})
    else:
        print_profile(found, file)


_OF_RATES = ("rate", "requests")  # options without effect on a trace


@takes(UrlOptions)
def url(context: typer.Context, as_json: JsonOption = False) -> None:
    """Measure latency, throughput and goodput of an OpenAI-compatible server under an open-loop load."""
    from foretoken.measure.url.run import run_url

    finish(run_url(_url_options(context), command_line()), as_json)


def _url_options(context: typer.Context) -> UrlOptions:
    """`UrlOptions` from the options by name.

    Raises:
        ConfigError: options that have no effect together.
    """
    given = context.params
    if given["trace"] is not None:
        for option in _OF_RATES:
            if was_given(context, option):
                raise ConfigError(option, given[option], "does not apply to --trace, which says it; leave it out")
    return config_from(UrlOptions, given)


class _BenchGroup(DefaultGroup):
    default_command = "speed"
    moved: Mapping[str, str] = {
        "--peers": "foretoken bench speed --backends local,transformers,llama.cpp",
        "--profile": "foretoken bench profile",
        "--load": "python -m studies.changing_load --load",
        "--phase-s": "python -m studies.changing_load --phase-s",
        "--trace": "python -m studies.changing_load --load",
        "--recovery": "python -m studies.recovery",
        "--table": "python -m studies.rivals --table",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of the click inside typer
        """With --url `url` is meant where no command is named, and by `load`."""
        if "--url" in {arg.partition("=")[0] for arg in args}:
            if args[0] == "load":
                args = ["url", *args[1:]]
            elif args[0].startswith("-") and args[0] not in ctx.help_option_names:
                args = ["url", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_BenchGroup,
    help=("Measure speed, throughput under load, the cost of steps, or (--url) a server; without a command, speed."),
)


@app.command("speed", cls=EngineVerb)
@takes(SpeedOptions)
def speed(
    context: typer.Context, target: str = DEFAULT_MODEL, drafters: str = DEFAULT_DRAFTERS, as_json: JsonOption = False
) -> None:
    """Measure tokens per second, time per step and acceptance of one request at a time; settings alternate."""
    from foretoken.measure.speed.run import run_speed

    check_common(context.params)
    options = config_from(SpeedOptions, context.params, drafters=drafters_of(context))
    finish(run_speed(options, command=command_line()), as_json)


app.command("load", cls=EngineVerb)(load)
app.command("profile", cls=EngineVerb)(profile)
app.command("url", cls=EngineVerb)(url)
