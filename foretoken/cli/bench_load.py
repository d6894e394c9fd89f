"""`foretoken bench load`: settings under load, at fixed batch sizes or on a load that changes."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.load_options import DEFAULT_SETTINGS, LoadOptions, parse_phases, slice_names
from foretoken.bench.prompts import ALL
from foretoken.cli.bench_options import (
    OutOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    check_common,
    command_line,
    finish,
)
from foretoken.cli.common import (
    DEFAULT_MODEL,
    CacheReserveOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    MaxPromptTokensOption,
    MaxSpeculatingOption,
    MaxStepTokensOption,
    MinTokensToSpeculateOption,
    NumericsOption,
    TargetOption,
    ThreadsOption,
    WeightsOption,
    is_set,
    was_given,
)
from foretoken.cli.lists import whole, words
from foretoken.errors import ConfigError

_OF_BATCHES = (
    "batches",
    "slices",
    "prompts_per_slice",
    "warmup",
)  # options without effect on a changing load
_OF_LOAD = ("phase_s",)
_BATCHES, _SETTINGS, _SLICES = (
    ",".join(map(str, values)) for values in (LoadOptions.batches, DEFAULT_SETTINGS, LoadOptions.slices)
)

_BatchesOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas; each is measured on every slice.")]
_LoadOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "A load that changes, in place of batches: BATCH:SLICE,... in sequence, such as 1:code,16:random; or mixed."
        )
    ),
]
_SettingsOption = Annotated[
    str, typer.Option(help="Settings with commas: plain, DRAFTER-N, DRAFTER-auto, auto, auto-slices, sweep.")
]
_SlicesOption = Annotated[str, typer.Option(help="Kinds of text of the batches, or those of --prompts; or all.")]
_PromptsPerSliceOption = Annotated[int, typer.Option(help="Prompts of each slice; at least a batch.")]
_PhaseOption = Annotated[float, typer.Option(help="Seconds that plain decoding takes for each phase of --load.")]
_CacheTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens that the key/value cache holds; without it, enough for the largest batch."),
]
_MaxBatchSizeOption = Annotated[
    int | None, typer.Option(help="Requests that run at once; without it, the largest batch.")
]
_ResumeOption = Annotated[
    Path | None,
    typer.Option(help="File that keeps each turn; a run that was stopped goes on from it with the same options."),
]


def load(
    context: typer.Context,
    target: TargetOption = DEFAULT_MODEL,
    draft: DraftOption = None,
    batches: _BatchesOption = _BATCHES,
    load: _LoadOption = None,
    settings: _SettingsOption = _SETTINGS,
    slices: _SlicesOption = _SLICES,
    prompts: PromptsOption = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens that prompts are cut to.")] = LoadOptions.prompt_tokens,
    prompts_per_slice: _PromptsPerSliceOption = LoadOptions.prompts_per_slice,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = LoadOptions.max_tokens,
    repeats: RepeatsOption = LoadOptions.repeats,
    warmup: Annotated[int, typer.Option(help="Warm-up turns of each setting and batch size.")] = LoadOptions.warmup,
    phase_s: _PhaseOption = LoadOptions.phase_s,
    numerics: NumericsOption = LoadOptions.numerics,
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    cache_tokens: _CacheTokensOption = LoadOptions.cache_tokens,
    cache_reserve: CacheReserveOption = LoadOptions.cache_reserve,
    max_batch_size: _MaxBatchSizeOption = LoadOptions.max_batch_size,
    max_prompt_tokens: MaxPromptTokensOption = LoadOptions.max_prompt_tokens,
    max_step_tokens: MaxStepTokensOption = LoadOptions.max_step_tokens,
    min_tokens_to_speculate: MinTokensToSpeculateOption = LoadOptions.min_tokens_to_speculate,
    max_speculating_requests: MaxSpeculatingOption = LoadOptions.max_speculating_requests,
    out: OutOption = None,
    resume: _ResumeOption = None,
    name: Annotated[str | None, typer.Option(help="End of the result's file name; batches or load.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput of whole batches, or of a load that changes; settings take turns in one run.

    With --url ADDRESS: requests to a server at random times, see `foretoken bench url --help`.
    """
    from foretoken.bench.batches import run_batches
    from foretoken.bench.changing_load import run_changing_load

    check_common(context.params)
    if load is None:
        _refuse(context, _OF_LOAD, "applies to --load only; leave it out")
        run = run_batches
    else:
        _refuse(context, _OF_BATCHES, "does not apply to --load, whose phases say it; leave it out")
        run = run_changing_load
    finish(run(_options(context), command_line()), as_json)


def _options(context: typer.Context) -> LoadOptions:
    """`LoadOptions` from the options by name; without a draft, the default settings are those that need none."""
    given = context.params
    values: dict[str, Any] = {field.name: given[field.name] for field in fields(LoadOptions) if field.name in given}
    draft = given["draft"]
    values["batches"] = tuple(whole("batches", word) for word in words("batches", given["batches"]))
    values["settings"] = words("settings", given["settings"])
    if draft is None and not is_set(context, "settings"):
        values["settings"] = tuple(name for name in DEFAULT_SETTINGS if not name.startswith("draft_model"))
    chosen = words("slices", given["slices"]) if is_set(context, "slices") or given["prompts"] is None else (ALL,)
    values["slices"] = slice_names(chosen, given["prompts"])
    if given["load"] is not None:
        values["phases"] = parse_phases(given["load"])
    if given["name"] is None:
        values["name"] = "batches" if given["load"] is None else "load"
    return LoadOptions(**values)


def _refuse(context: typer.Context, names: Collection[str], remedy: str) -> None:
    """Refuse options on the command line that would have no effect.

    Raises:
        ConfigError: names the first of them.
    """
    for name in names:
        if was_given(context, name):
            raise ConfigError(name, context.params[name], remedy)
