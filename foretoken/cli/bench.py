"""`foretoken bench`: the group of measurements, and `speed`, which runs where none is named."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from foretoken.bench.peer_kinds import EVERY, KINDS
from foretoken.bench.prompts import ALL
from foretoken.bench.speed_options import SpeedOptions
from foretoken.bench.workload import SLICES
from foretoken.cli.bench_load import load
from foretoken.cli.bench_options import (
    DEFAULT_DRAFTERS,
    DraftersOption,
    NameOption,
    OutOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    check_common,
    command_line,
    drafters_of,
    finish,
)
from foretoken.cli.bench_profile import profile
from foretoken.cli.bench_url import url
from foretoken.cli.common import (
    DEFAULT_MODEL,
    AllowLossyOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    WeightsOption,
)
from foretoken.cli.lists import number, whole, words
from foretoken.cli.usage import DefaultGroup
from foretoken.cli.verb import EngineVerb
from foretoken.config import RULES


class _BenchGroup(DefaultGroup):
    default_command = "speed"
    chosen_by: Mapping[str, str] = {"--url": "url"}
    chosen_within: Mapping[tuple[str, str], str] = {("load", "--url"): "url"}
    moved: Mapping[str, str] = {
        "--profile": "foretoken bench profile",
        "--trace": "foretoken bench load --load",
        "--recovery": "python -m studies.recovery",
        "--table": "python -m studies.rivals --table",
    }


app = typer.Typer(
    cls=_BenchGroup,
    help=("Measure speed, throughput under load, the cost of steps, or (--url) a server; without a command, speed."),
)


@app.command("speed", cls=EngineVerb)
def speed(
    context: typer.Context,
    target: TargetOption = DEFAULT_MODEL,
    draft: DraftOption = None,
    drafters: DraftersOption = DEFAULT_DRAFTERS,
    num_drafts: Annotated[
        str, typer.Option(help="Numbers of draft tokens to measure, separated by commas; auto is one of them.")
    ] = "3,5",
    rule: Annotated[str, typer.Option(help=f"Rules to measure, separated by commas: {', '.join(RULES)}.")] = "auto",
    allow_lossy: AllowLossyOption = False,
    slices: Annotated[
        str, typer.Option(help=f"Kinds of text: {', '.join(SLICES)} (or those of --prompts); or all.")
    ] = ALL,
    prompts: PromptsOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send texts as a user's message through the target's chat template.")
    ] = False,
    prompts_per_slice: Annotated[int, typer.Option(help="Prompts of each slice.")] = SpeedOptions.prompts_per_slice,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = SpeedOptions.max_tokens,
    repeats: RepeatsOption = SpeedOptions.repeats,
    warmup: Annotated[int, typer.Option(help="Warm-up answers of each setting.")] = SpeedOptions.warmup,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm", help="Let drafters remember earlier prompts of a repeat; otherwise each answer is cold."
        ),
    ] = False,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end early; by default all have the same length.")
    ] = False,
    numerics: Annotated[
        str, typer.Option(help="default, strict (no greedy output may differ from plain), or both: default,strict.")
    ] = "default",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also run transformers, and llama.cpp if FORETOKEN_LLAMA_CPP names its folder."),
    ] = False,
    peer_drafters: Annotated[
        str, typer.Option(help=f"Drafting methods of the other engines to run: {', '.join(KINDS)}; or all.")
    ] = EVERY,
    peer_num_drafts: Annotated[
        str, typer.Option(help="Numbers of draft tokens for the other engines, separated by commas.")
    ] = "2,3,4,5,6,7,8",
    peer_lookup_num_drafts: Annotated[
        str, typer.Option(help="The same for their n-gram lookups, whose guesses cost nothing.")
    ] = "4,8,12,16,24,32",
    plot: Annotated[Path | None, typer.Option(help="Draw tokens per second into this .png or .svg file.")] = None,
    out: OutOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="File that keeps each answer; a run that was stopped goes on from it with the same options."),
    ] = None,
    name: NameOption = SpeedOptions.name,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens per second, time per step and acceptance of one request at a time; settings take turns."""
    from foretoken.bench.offline import run_speed

    check_common(context.params)
    finish(run_speed(_options(context), command=command_line()), as_json)


def _options(context: typer.Context) -> SpeedOptions:
    """`SpeedOptions` from the options by name; lists are written with commas."""
    given = context.params
    as_given = {field.name: given[field.name] for field in fields(SpeedOptions) if field.name in given}
    read = {
        "drafters": drafters_of(context),
        "num_drafts": tuple(
            "auto" if word == "auto" else whole("num_drafts", word) for word in words("num_drafts", given["num_drafts"])
        ),
        "rules": words("rule", given["rule"]),
        "numerics": words("numerics", given["numerics"]),
        "slices": words("slices", given["slices"]),
        "temperatures": tuple(number("temperatures", word) for word in words("temperatures", given["temperatures"])),
        "ignore_eos": not given["stop_at_eos"],
        "peer_drafters": words("peer_drafters", given["peer_drafters"]),
    } | {
        field: tuple(whole(field, word) for word in words(field, given[field]))
        for field in ("peer_num_drafts", "peer_lookup_num_drafts")
    }
    return SpeedOptions(**as_given | read)


app.command("load", cls=EngineVerb)(load)
app.command("profile", cls=EngineVerb)(profile)
app.command("url", cls=EngineVerb)(url)
