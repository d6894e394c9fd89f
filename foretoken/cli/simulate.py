"""`foretoken simulate`: throughput, latency and price of settings, from a measured profile and arrivals."""

# ruff: noqa: ARG001 - options are read from the context, by name

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.common import JsonOption
from foretoken.cli.flags import takes
from foretoken.errors import ConfigError, InputError
from foretoken.files import read_text
from foretoken.measure.speed.options import SpeedOptions
from foretoken.params import check_number, check_whole, is_count
from foretoken.simulate.inputs import (
    MAX_REQUESTS,
    Chances,
    Job,
    Lengths,
    Limits,
    SimSetting,
    parse_acceptance,
    parse_setting,
    parse_trace,
    poisson,
)
from foretoken.simulate.loads import SHAPES
from foretoken.simulate.simulate import Fleet

_POISSON = "poisson:"
_NUM_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 200, "256", "128"
# Each request of a batch and each replica is an object; built-in arrivals fill the batch eight times to find the
# capacity.
_BOUNDS = (("max_batch_size", 1, 4096), ("replicas", 1, 1024), ("seed", 0, 2**63))
_MAX_SECONDS = 1e6
_OF_REQUESTS = ("requests", "prompt_tokens", "output_tokens", "acceptance")


def arrival_names(text: str) -> tuple[str, ...]:
    """The built-in arrivals that `text` names, separated by commas; none where it names anything else."""
    words = words_of(text)
    return tuple(words) if words and all(word in SHAPES for word in words) else ()


def check_arrivals(given: Mapping[str, Any]) -> None:
    """Check the bounds of numbers, and that only options that have an effect are given.

    Raises:
        ConfigError: an option without effect on these arrivals.
        InputError: a number that cannot be simulated.
    """
    for name, low, high in _BOUNDS:
        check_whole(name, given[name], low, high)
    if given["duration_s"] is not None:
        check_number("duration_s", given["duration_s"], low=0.0, high=_MAX_SECONDS, open_low=True)
    built_ins = arrival_names(given["arrivals"])
    if not words_of(given["arrivals"]):
        raise InputError("arrivals", given["arrivals"], f"name one of {', '.join(SHAPES)}, poisson:RATE, or a file")
    for name in _OF_REQUESTS:
        if built_ins and given[name] is not None:
            raise ConfigError(
                name,
                given[name],
                f"the built-in arrivals {built_ins[0]} set it for each request; leave it out, or use poisson:RATE",
            )
    if given["duration_s"] is not None and not built_ins:
        raise ConfigError(
            "duration_s",
            given["duration_s"],
            f"applies to the built-in arrivals {', '.join(SHAPES)} only; leave it out",
        )


def jobs_of(given: Mapping[str, Any], acceptance: str) -> list[Job]:
    """The requests of a file or of random arrivals; `acceptance` is that of requests without their own.

    Raises:
        InputError, ConfigError: an option that makes no requests, or has no effect on these arrivals.
        StorageError: a file that cannot be read.
    """
    arrivals, requests, chances = (
        given["arrivals"],
        given["requests"],
        acceptance_of(acceptance if given["acceptance"] is None else given["acceptance"]),
    )
    if requests is not None:
        check_whole("requests", requests, low=1, high=MAX_REQUESTS)
    if not arrivals.startswith(_POISSON):
        for name in ("prompt_tokens", "output_tokens"):
            if given[name] is not None:
                raise ConfigError(
                    name,
                    given[name],
                    "the file of arrivals sets it for each request; leave it out, or use --arrivals poisson:RATE",
                )
        if not Path(arrivals).suffix and not os.path.exists(arrivals):
            raise InputError(
                "arrivals",
                arrivals,
                f"is no file and no built-in name; choose one of {', '.join(SHAPES)}, poisson:RATE, or a file",
            )
        lines = read_text("arrivals", Path(arrivals)).split("\n")
        try:
            return parse_trace(lines, chances)[:requests]
        except InputError as error:
            raise InputError(error.field, error.value, f"{error.remedy} (in {arrivals})") from error
    try:
        rate = float(arrivals.removeprefix(_POISSON))
    except ValueError:
        raise InputError(
            "arrivals", arrivals, "must be poisson:RATE with a number of requests per second, or a file"
        ) from None
    prompts, outputs = (
        lengths_of(name, usual if given[name] is None else given[name])
        for name, usual in (("prompt_tokens", _PROMPT_TOKENS), ("output_tokens", _OUTPUT_TOKENS))
    )
    return poisson(rate, requests or _NUM_REQUESTS, prompts, outputs, chances, given["seed"])


def acceptance_of(text: str) -> Chances | str:
    """Numbers if they look like numbers, else a name."""
    words = [word.strip() for word in text.split(",")]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return parse_acceptance(text)
    return parse_acceptance(numbers)


def settings_of(text: str) -> list[SimSetting]:
    """The settings that are named, each once.

    Raises:
        ConfigError: none is named, or one that does not exist.
    """
    words = words_of(text)
    if not words:
        raise ConfigError("settings", text, "name at least one, such as plain or ngram-auto, or leave it out")
    return [parse_setting(word) for word in words]


def words_of(text: str) -> list[str]:
    """The words between commas, each once."""
    return [word for word in dict.fromkeys(word.strip() for word in text.split(",")) if word]


def lengths_of(field: str, text: str) -> Lengths:
    """A number of tokens, or LOW-HIGH.

    Raises:
        InputError: neither.
    """
    low, found, high = text.partition("-")
    if not is_count(low) or (found and not is_count(high)) or not 1 <= int(low) <= int(high or low):
        raise InputError(field, text, "must be a number of tokens, or LOW-HIGH")
    return Lengths(int(low), int(high or low))


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
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "Acceptance probability of a draft token: one (0.7), one per position with commas, or a slice of --bench."
        )
    ),
]
BenchOption = Annotated[
    Path | None, typer.Option(help="A result of `foretoken bench` whose slices can be named as acceptance.")
]
SettingsOption = Annotated[
    str | None, typer.Option(help="Settings with commas: plain, ngram-5, draft_model-auto. Without it plain and auto.")
]
_Seed = Annotated[int, typer.Option(help="Seed of arrivals, lengths and acceptance.")]


@takes(Fleet)
@takes(SpeedOptions, fields=("out", "price_per_hour"))
@takes(Limits)
def simulate(
    context: typer.Context,
    arrivals: _Arrivals,
    profile: _Profile = None,
    requests: _Requests = None,
    prompt_tokens: _PromptTokens = None,
    output_tokens: _OutputTokens = None,
    duration_s: _DurationS = None,
    acceptance: AcceptanceOption = None,
    bench: BenchOption = None,
    settings: SettingsOption = None,
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
