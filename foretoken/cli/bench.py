"""`foretoken bench`: plain against speculative decoding, and against other engines."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.drafting import parse_drafters
from foretoken.bench.load_options import DEFAULT_SETTINGS, LoadOptions, table_text
from foretoken.bench.offline import BenchOptions, run_bench
from foretoken.bench.peers import EVERY, KINDS
from foretoken.bench.profile import ProfileOptions, print_profile, run_profile, write_profile
from foretoken.bench.prompts import ALL
from foretoken.bench.report import check_name, print_report
from foretoken.bench.rival_policies import TABLE
from foretoken.bench.workload import SLICES
from foretoken.cli.bench_load import LOAD, load_kind, measure_load, refuse_others
from foretoken.cli.common import (
    AllowLossyOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    print_json,
)
from foretoken.cli.lists import number, whole, words
from foretoken.config import DRAFTERS, RULES
from foretoken.files import check_folder
from foretoken.model.open import model_folder
from foretoken.params import check_whole
from foretoken.printing.console import Console

_PROFILE_OPTIONS = frozenset(
    {"profile", "target", "draft", "drafters", "dtype", "device", "threads", "out", "name", "seed", "as_json"}
)
_DEFAULT = BenchOptions(target="reference:target", draft="reference:draft")


def bench(
    context: typer.Context,
    target: TargetOption = "reference:target",
    draft: DraftOption = None,
    drafters: Annotated[
        str,
        typer.Option(
            help=(
                f"Drafters, separated by commas: {', '.join(DRAFTERS)}; or all. NAME:field=value;field=value "
                "sets options of one."
            )
        ),
    ] = "draft_model,ngram",
    num_drafts: Annotated[
        str, typer.Option(help="Numbers of guesses to measure, separated by commas; auto is one of them.")
    ] = "3,5",
    rule: Annotated[str, typer.Option(help=f"Rules to measure, separated by commas: {', '.join(RULES)}.")] = "auto",
    allow_lossy: AllowLossyOption = False,
    slices: Annotated[
        str, typer.Option(help=f"Kinds of text: {', '.join(SLICES)} (or those of --prompts); or all.")
    ] = ALL,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File or folder of prompts: JSON lines with `prompt` and maybe `slice` and `prediction`, or "
                "public evaluation sets."
            )
        ),
    ] = None,
    prompts_per_slice: Annotated[int, typer.Option(help="Prompts of each slice.")] = _DEFAULT.prompts_per_slice,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = _DEFAULT.max_tokens,
    repeats: Annotated[int, typer.Option(help="Times everything is measured; the median counts.")] = _DEFAULT.repeats,
    warmup: Annotated[int, typer.Option(help="Answers of each setting that do not count, first.")] = _DEFAULT.warmup,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end early; by default all have the same length.")
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Only measure what steps and drafters cost, for `foretoken simulate`; under a minute."
        ),
    ] = False,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also run transformers, and llama.cpp if FORETOKEN_LLAMA_CPP names its folder."),
    ] = False,
    peer_drafters: Annotated[
        str, typer.Option(help=f"Which of the other engines' ways to speculate to run: {', '.join(KINDS)}; or all.")
    ] = EVERY,
    peer_num_drafts: Annotated[
        str, typer.Option(help="Numbers of guesses the other engines are swept over.")
    ] = "2,3,4,5,6,7,8",
    plot: Annotated[Path | None, typer.Option(help="Draw tokens per second into this .png or .svg file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a dated result: raw JSON and a table.")] = None,
    name: Annotated[str, typer.Option(help="End of the result's file name.")] = _DEFAULT.name,
    seed: Annotated[int, typer.Option(help="Seed of the sampled answers.")] = 0,
    batches: Annotated[
        str | None,
        typer.Option(
            help="Measure whole batches of these sizes instead, as 1,4,16, one result for each slice.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help=(
                "Measure a load that changes instead: BATCH:SLICE,... one after the other, as "
                "1:code,16:random; or mixed."
            ),
            rich_help_panel=LOAD,
        ),
    ] = None,
    recovery: Annotated[
        bool,
        typer.Option(
            "--recovery",
            help="Measure how soon the number of guesses follows a text that changes.",
            rich_help_panel=LOAD,
        ),
    ] = False,
    settings: Annotated[
        str,
        typer.Option(
            help=(
                "With --batches, --trace: plain, DRAFTER-N, DRAFTER-auto, auto, auto-slices, or a rule: "
                "table, ema, heuristic."
            ),
            rich_help_panel=LOAD,
        ),
    ] = ",".join(DEFAULT_SETTINGS),
    table: Annotated[
        str,
        typer.Option(
            help="Guesses by batch size for the setting table, as 1:5,4:3; or measured (at the start).",
            rich_help_panel=LOAD,
        ),
    ] = table_text(TABLE),
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens kept of a prompt.", rich_help_panel=LOAD)
    ] = LoadOptions.prompt_tokens,
    phase_s: Annotated[
        float, typer.Option(help="Seconds that plain decoding takes for each part of a trace.", rich_help_panel=LOAD)
    ] = LoadOptions.phase_s,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the key/value cache holds; without it, enough for the largest batch.",
            rich_help_panel=LOAD,
        ),
    ] = LoadOptions.cache_tokens,
    cache_reserve: Annotated[
        float, typer.Option(help="Share of the cache that stays free when an answer begins.", rich_help_panel=LOAD)
    ] = LoadOptions.cache_reserve,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Answers that run at once, others wait; without it, the largest batch.", rich_help_panel=LOAD
        ),
    ] = LoadOptions.max_batch_size,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that a step takes.", rich_help_panel=LOAD)
    ] = LoadOptions.max_prompt_tokens,
    max_step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Rows of a step altogether: prompts, guesses, and one for each answer; no bound.", rich_help_panel=LOAD
        ),
    ] = LoadOptions.max_step_tokens,
    min_tokens_to_speculate: Annotated[
        int,
        typer.Option(
            help="Where the number of guesses is open: answers of fewer tokens are not guessed for.",
            rich_help_panel=LOAD,
        ),
    ] = LoadOptions.min_tokens_to_speculate,
    max_speculating_requests: Annotated[
        int | None,
        typer.Option(
            help="Where it is open: nobody guesses while more answers run than this; no limit.", rich_help_panel=LOAD
        ),
    ] = LoadOptions.max_speculating_requests,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens per second, time per step and acceptance, everything interleaved in one run."""
    check_whole("seed", seed, low=0, high=2**63)  # every answer adds its number
    if draft is not None:
        model_folder(draft)
    kind = load_kind(context)
    if kind is not None:
        measure_load(context, kind)
        return
    names = words("drafters", drafters)
    if (
        draft is None
        and target == "reference:target"
        and any("draft" in choice.needs for choice in parse_drafters(names))
    ):
        draft = "reference:draft"
    if profile:
        _measure_profile(context, draft, names)
        return
    report = run_bench(_options(context.params, draft), command=shlex.join(["foretoken", *sys.argv[1:]]))
    if not as_json:
        print_report(report)
    else:
        Console().json_line(report.json_line())


def _options(given: Mapping[str, Any], draft: str | None) -> BenchOptions:
    """What to measure, from the options by name; lists are written with commas."""
    as_given = {field.name: given[field.name] for field in fields(BenchOptions) if field.name in given}
    return BenchOptions(
        **as_given
        | {
            "draft": draft,
            "num_drafts": tuple(
                "auto" if word == "auto" else whole("num_drafts", word)
                for word in words("num_drafts", given["num_drafts"])
            ),
            "rules": words("rule", given["rule"]),
            "temperatures": tuple(
                number("temperatures", word) for word in words("temperatures", given["temperatures"])
            ),
            "ignore_eos": not given["stop_at_eos"],
            "peer_num_drafts": tuple(
                whole("peer_num_drafts", word) for word in words("peer_num_drafts", given["peer_num_drafts"])
            ),
        }
        | {name: words(name, given[name]) for name in ("drafters", "slices", "peer_drafters")}
    )


def _measure_profile(context: typer.Context, draft: str | None, drafters: tuple[str, ...]) -> None:
    """The short measurement behind `simulate`; options of the long one are refused."""
    given, options = refuse_others(context, "profile", _PROFILE_OPTIONS), context.params
    out, name = options["out"], options["name"]
    choices = parse_drafters(drafters)
    if "drafters" not in given and draft is None:
        choices = tuple(choice for choice in choices if "draft" not in choice.needs)
    check_name(name)
    if out is not None:
        check_folder(out)
    asked = ProfileOptions(
        options["target"], draft, choices, options["dtype"], options["device"], options["threads"], seed=options["seed"]
    )
    with Console(stderr=True).bar("measuring", 1.0) as bar:
        found = run_profile(
            asked,
            command=shlex.join(["foretoken", *sys.argv[1:]]),
            tell=lambda words, share: bar.update(words, completed=share),
        )
    file = None if out is None else write_profile(found, out, "profile" if "name" not in given else name)
    if options["as_json"]:
        print_json(found.as_dict() | {"file": None if file is None else str(file)})
    else:
        print_profile(found, file)
