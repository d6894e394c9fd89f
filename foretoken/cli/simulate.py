"""`foretoken simulate`: throughput, latency and price of settings, from a measured profile and arrivals."""

# ruff: noqa: ARG001 - options are read from the context, by name

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import JsonOption
from foretoken.cli.flags import takes
from foretoken.cli.simulate_requests import check_arrivals
from foretoken.errors import ConfigError
from foretoken.measure.speed.options import SpeedOptions
from foretoken.simulate.loads import SHAPES
from foretoken.simulate.setting import Limits
from foretoken.simulate.simulate import Fleet

_Arrivals = Annotated[
    str,
    typer.Option(
        help=(
            "Requests: a file of JSON lines, poisson:RATE for RATE per second on average, or "
            f"{', '.join(SHAPES)}, scaled to the profile."
        )
    ),
]
_Profile = Annotated[
    Path | None, typer.Option(help="What steps cost: the JSON file of `foretoken bench profile --out DIR`.")
]
_Requests = Annotated[int | None, typer.Option(help="How many: with poisson, 200; of a file the first ones, or all.")]
_PromptTokens = Annotated[str | None, typer.Option(help="Prompt lengths with poisson: N, or LOW-HIGH; 256.")]
_OutputTokens = Annotated[str | None, typer.Option(help="Answer lengths with poisson: N, or LOW-HIGH; 128.")]
_DurationS = Annotated[
    float | None, typer.Option(help="Seconds that built-in arrivals last; without it, what suits the profile.")
]
_Acceptance = Annotated[
    str | None,
    typer.Option(
        help=(
            "Acceptance probability of a draft token: one (0.7), one per position with commas, or a slice of --bench."
        )
    ),
]
_Bench = Annotated[
    Path | None, typer.Option(help="A result of `foretoken bench` whose slices can be named as acceptance.")
]
_Settings = Annotated[
    str | None, typer.Option(help="Settings with commas: plain, ngram-5, draft_model-auto. Without it plain and auto.")
]
_PricePerHour = Annotated[
    float | None, typer.Option(help="Price of one engine per hour, for the price of a million tokens.")
]
_Seed = Annotated[int, typer.Option(help="Seed of arrivals, lengths and acceptance.")]


@takes(Fleet)
@takes(SpeedOptions, fields=("out",))
@takes(Limits)
def simulate(
    context: typer.Context,
    arrivals: _Arrivals,
    profile: _Profile = None,
    requests: _Requests = None,
    prompt_tokens: _PromptTokens = None,
    output_tokens: _OutputTokens = None,
    duration_s: _DurationS = None,
    acceptance: _Acceptance = None,
    bench: _Bench = None,
    settings: _Settings = None,
    price_per_hour: _PricePerHour = None,
    seed: _Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the scheduler and the controller on a virtual clock, once per setting, with the same requests and random
    numbers.
    """
    from foretoken.cli.simulate_predicted import predict

    check_arrivals(context.params)
    if profile is None:
        raise ConfigError("profile", None, "give the file of `foretoken bench profile --out DIR`")
    predict(context.params)
