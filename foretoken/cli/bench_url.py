"""`foretoken bench --url`: load on an OpenAI-compatible endpoint."""

from __future__ import annotations

import typer

from foretoken.cli.bench_options import command_line, finish
from foretoken.cli.common import JsonOption, was_given
from foretoken.cli.flags import config_from, takes
from foretoken.errors import ConfigError
from foretoken.measure.url.plan import UrlOptions

_OF_RATES = ("rate", "requests")  # options without effect on a trace


@takes(UrlOptions)
def url(
    context: typer.Context,
    as_json: JsonOption = False,
) -> None:
    """Measure latency, throughput and goodput of an OpenAI-compatible server under an open-loop load."""
    from foretoken.measure.url.run import run_url

    finish(run_url(_options(context), command_line()), as_json)


def _options(context: typer.Context) -> UrlOptions:
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
