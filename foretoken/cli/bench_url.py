"""`foretoken bench --url`: load on an OpenAI-compatible endpoint."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.prompts import ALL
from foretoken.bench.url_options import UrlOptions
from foretoken.bench.url_run import run_url
from foretoken.bench.workload import SLICES
from foretoken.cli.bench_options import NameOption, OutOption, PromptsOption, SeedOption, command_line, finish
from foretoken.cli.common import JsonOption, was_given
from foretoken.cli.lists import number, words
from foretoken.errors import ConfigError

_OF_RATES = ("rate", "requests")  # options without effect on a trace


def url(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="Address of the server, such as http://127.0.0.1:8000, with or without /v1.")
    ],
    model: Annotated[str | None, typer.Option(help="Name of the model; without it, the first of /v1/models.")] = None,
    rate: Annotated[
        str, typer.Option(help="Requests per second of a Poisson process; several with commas are runs of their own.")
    ] = "1",
    requests: Annotated[int, typer.Option(help="Requests of each rate.")] = UrlOptions.requests,
    trace: Annotated[
        Path | None,
        typer.Option(help="File of arrivals in place of --rate: JSON lines, arrival_s [prompt, max_tokens, slice]."),
    ] = None,
    prompts: PromptsOption = None,
    slices: Annotated[
        str, typer.Option(help=f"Kinds of text: {', '.join(SLICES)} (or those of --prompts); or all.")
    ] = ALL,
    prompts_per_slice: Annotated[
        int, typer.Option(help="Prompts of each slice; requests take them in turn.")
    ] = UrlOptions.prompts_per_slice,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send prompts as a user's message to /v1/chat/completions.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = UrlOptions.max_tokens,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = UrlOptions.temperature,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end early; by default ignore_eos is sent.")
    ] = False,
    warmup: Annotated[int, typer.Option(help="Requests before the run, not counted.")] = UrlOptions.warmup,
    ttft_deadline_s: Annotated[
        float | None, typer.Option(help="A request is good if its first text comes within so many seconds.")
    ] = None,
    tpot_deadline_s: Annotated[
        float | None, typer.Option(help="The same for the mean time of each further token.")
    ] = None,
    e2e_deadline_s: Annotated[float | None, typer.Option(help="The same for the whole answer.")] = None,
    timeout_s: Annotated[
        float, typer.Option(help="A server that sends nothing for so many seconds has failed the request.")
    ] = UrlOptions.timeout_s,
    key_variable: Annotated[str, typer.Option(help="Environment variable with the API key.")] = UrlOptions.key_variable,
    out: OutOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="File that keeps each load; a run that was stopped goes on from it with the same options."),
    ] = None,
    name: NameOption = UrlOptions.name,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure latency, throughput and goodput of an OpenAI-compatible server under an open-loop load."""
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
    values: dict[str, Any] = {field.name: given[field.name] for field in fields(UrlOptions) if field.name in given}
    values["rates"] = tuple(number("rate", word) for word in words("rate", given["rate"]))
    values["slices"] = words("slices", given["slices"])
    return UrlOptions(**values)
