"""`foretoken simulate`: throughput, waiting and money of settings that never ran, from a measured profile and a
trace.
"""

# ruff: noqa: ARG001 - options are read from the context, by name

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import (
    CacheOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
)
from foretoken.cli.simulate_measured import measure_for_real
from foretoken.cli.simulate_predicted import predict
from foretoken.cli.simulate_requests import check_trace
from foretoken.control.queue import SchedulerConfig
from foretoken.errors import ConfigError
from foretoken.simulate.loads import SHAPES

_ONLY_SIMULATED = frozenset({"profile", "bench", "replicas", "dispatch", "price_per_hour"})
_ONLY_MEASURED = frozenset({"target", "draft", "dtype", "device", "threads", "out", "name"})

_Trace = Annotated[
    str,
    typer.Option(
        help=(
            "Requests: a file of JSON lines, poisson:RATE for RATE per second on average, or "
            f"{', '.join(SHAPES)}, scaled to the machine."
        )
    ),
]
_Profile = Annotated[
    Path | None, typer.Option(help="What steps cost: the JSON file of `foretoken bench --profile --out DIR`.")
]
_Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Also run the trace for real, and compare; minutes. Several built-in traces may be named, with commas.",
    ),
]
_Requests = Annotated[
    int | None, typer.Option(help="How many: of a poisson trace, 200; of a file the first ones, or all.")
]
_PromptTokens = Annotated[str | None, typer.Option(help="Prompt lengths of a poisson trace: N, or LOW-HIGH; 256.")]
_OutputTokens = Annotated[str | None, typer.Option(help="Answer lengths of a poisson trace: N, or LOW-HIGH; 128.")]
_TraceSeconds = Annotated[
    float | None, typer.Option(help="How long a built-in trace lasts; without it, what suits the machine.")
]
_Acceptance = Annotated[
    str | None,
    typer.Option(
        help=(
            "Chance that a guess stands: one (0.7), one per place with commas, or a slice of --bench; with "
            "--measure a slice (code)."
        )
    ),
]
_Bench = Annotated[
    Path | None, typer.Option(help="A result of `foretoken bench` whose slices can be named as acceptance.")
]
_Settings = Annotated[
    str | None, typer.Option(help="Settings with commas: plain, ngram-5, draft_model-auto. Without it plain and auto.")
]
_MaxBatchSize = Annotated[int, typer.Option(help="Requests at once.")]
_MaxPromptTokens = Annotated[int, typer.Option(help="Prompt tokens that a step takes.")]
_MaxStepTokens = Annotated[
    int | None,
    typer.Option(
        help="Rows of a step altogether, prompts, guesses and one for each that decodes; without it, no bound."
    ),
]
_CacheReserve = Annotated[float, typer.Option(help="Share of the cache that stays free when a request joins.")]
_Replicas = Annotated[int, typer.Option(help="Engines that share the requests.")]
_Dispatch = Annotated[str, typer.Option(help="Who gets a request: round_robin, or least_loaded.")]
_PricePerHour = Annotated[
    float | None, typer.Option(help="Price of one engine's hour, for the price of a million tokens.")
]
_Seed = Annotated[int, typer.Option(help="Seed of arrivals, lengths and chances.")]
_Out = Annotated[Path | None, typer.Option(help="Folder for the dated result of --measure.")]
_Name = Annotated[str, typer.Option(help="End of the result's file name.")]


def simulate(
    context: typer.Context,
    trace: _Trace,
    profile: _Profile = None,
    measure: _Measure = False,
    target: TargetOption = "reference:target",
    draft: DraftOption = None,
    requests: _Requests = None,
    prompt_tokens: _PromptTokens = None,
    output_tokens: _OutputTokens = None,
    trace_seconds: _TraceSeconds = None,
    acceptance: _Acceptance = None,
    bench: _Bench = None,
    settings: _Settings = None,
    max_batch_size: _MaxBatchSize = 16,
    max_prompt_tokens: _MaxPromptTokens = 512,
    max_step_tokens: _MaxStepTokens = None,
    cache_tokens: CacheOption = None,
    cache_reserve: _CacheReserve = SchedulerConfig.cache_reserve,
    replicas: _Replicas = 1,
    dispatch: _Dispatch = "round_robin",
    price_per_hour: _PricePerHour = None,
    seed: _Seed = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    out: _Out = None,
    name: _Name = "simulate",
    as_json: JsonOption = False,
) -> None:
    """Run the scheduler and the controller on a virtual clock, once for each setting, with the same requests and the
    same luck.
    """
    _check_options(context, context.params["measure"])
    check_trace(context.params)
    if context.params["measure"]:
        measure_for_real(context.params)
    elif context.params["profile"] is None:
        raise ConfigError(
            "profile",
            None,
            "give the file of `foretoken bench --profile --out DIR`, or --measure, which measures one itself",
        )
    else:
        predict(context.params)


def _check_options(context: typer.Context, measure: bool) -> None:
    """Refuse what only the other way of running reads."""
    for name in sorted(_ONLY_SIMULATED if measure else _ONLY_MEASURED):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            remedy = (
                "does not go with --measure, which profiles one engine itself"
                if measure
                else "is read with --measure only"
            )
            raise ConfigError(name, context.params[name], f"{remedy}; leave it out")
