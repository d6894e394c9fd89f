"""`foretoken simulate`: throughput, latency and price of settings, from a measured profile and arrivals."""

# ruff: noqa: ARG001 - some options are read from the context, by name

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.common import JsonOption, print_json, progress
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line
from foretoken.errors import ConfigError, InputError
from foretoken.files import read_json, read_text
from foretoken.measure.options import check_price
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Report, Table, print_report
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.write import check_out, write_report
from foretoken.params import check_number, check_whole, is_count
from foretoken.plan.profile import Profile
from foretoken.printing.console import seconds_text
from foretoken.simulate import simulate as simulation
from foretoken.simulate.inputs import (
    MAX_REQUESTS,
    MAX_TOKENS,
    PLAIN,
    Chances,
    Job,
    Lengths,
    Limits,
    SimSetting,
    chances_from_bench,
    parse_acceptance,
    parse_setting,
    parse_trace,
    poisson,
)
from foretoken.simulate.loads import SHAPES, Server, built_in
from foretoken.simulate.metrics import SimMetrics, outcome
from foretoken.simulate.simulate import Fleet

_POISSON = "poisson:"
_NUM_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 200, "256", "128"
# Each request of a batch and each replica is an object; built-in arrivals fill the batch eight times to find the
# capacity.
_BOUNDS = (("max_batch_size", 1, 4096), ("replicas", 1, 1024), ("seed", 0, 2**63))
_MAX_SECONDS = 1e6
_OF_REQUESTS = ("requests", "prompt_tokens", "output_tokens", "acceptance")
ACCEPTANCE = "0.7"
ASSUMED = (
    f"No --acceptance was given: a draft token is taken to be accepted with probability {ACCEPTANCE} where nothing "
    "else says it, and every figure of a drafter follows from that. Measure yours with `foretoken eval`."
)
_HEADINGS = (
    *("setting", "tok/s", "first token", "p95", "per token", "p95", "whole answer", "p95"),
    *("busy", "there", "tok/step", "price/M"),
)


def arrival_names(text: str) -> tuple[str, ...]:
    """The built-in arrivals that `text` names, separated by commas; none where it names anything else."""
    words = words_of(text)
    return tuple(words) if words and all(word in SHAPES for word in words) else ()


def check_arrivals(given: Mapping[str, Any]) -> None:
    """Check the bounds of numbers, and that only options that have an effect are given.

    Raises:
        ConfigError: an option without effect on these arrivals; InputError: a number that cannot be simulated.
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
            remedy = f"the built-in arrivals {built_ins[0]} set it for each request; leave it out, or use poisson:RATE"
            raise ConfigError(name, given[name], remedy)
    if given["duration_s"] is not None and not built_ins:
        remedy = f"applies to the built-in arrivals {', '.join(SHAPES)} only; leave it out"
        raise ConfigError("duration_s", given["duration_s"], remedy)


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
                remedy = "the file of arrivals sets it for each request; leave it out, or use --arrivals poisson:RATE"
                raise ConfigError(name, given[name], remedy)
        if not Path(arrivals).suffix and not os.path.exists(arrivals):
            remedy = f"is no file and no built-in name; choose one of {', '.join(SHAPES)}, poisson:RATE, or a file"
            raise InputError("arrivals", arrivals, remedy)
        lines = read_text("arrivals", Path(arrivals)).split("\n")
        try:
            return parse_trace(lines, chances)[:requests]
        except InputError as error:
            raise InputError(error.field, error.value, f"{error.remedy} (in {arrivals})") from error
    try:
        rate = float(arrivals.removeprefix(_POISSON))
    except ValueError:
        remedy = "must be poisson:RATE with a number of requests per second, or a file"
        raise InputError("arrivals", arrivals, remedy) from None
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


def settings_of(text: str | None, profile: Profile) -> tuple[SimSetting, ...]:
    """The settings that are named, each once; without a text plain decoding and each drafter of the profile.

    Raises:
        ConfigError: none is named, or one that does not exist.
    """
    if text is None:
        return (SimSetting(), *(SimSetting((drafter,), None) for drafter in profile.drafters))
    words = words_of(text)
    if not words:
        raise ConfigError("settings", text, "name at least one, such as plain or ngram-auto, or leave it out")
    return tuple(map(parse_setting, words))


def words_of(text: str) -> list[str]:
    """The words between commas, each once."""
    return [word for word in dict.fromkeys(word.strip() for word in text.split(",")) if word]


def lengths_of(field: str, text: str) -> Lengths:
    """A number of tokens, or LOW-HIGH.

    Raises:
        InputError: neither, or more than can be simulated.
    """
    low, found, high = text.partition("-")
    if not is_count(low) or (found and not is_count(high)) or not 1 <= int(low) <= int(high or low):
        raise InputError(field, text, "must be a number of tokens, or LOW-HIGH")
    check_whole(field, int(high or low), low=1, high=MAX_TOKENS)
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
    Path | None, typer.Option(help="Cost profile of steps: the JSON file of `foretoken bench profile --out DIR`.")
]
_Requests = Annotated[
    int | None, typer.Option(help="Number of requests: 200 with poisson; of a file the first ones, or all.")
]
_PromptTokens = Annotated[str | None, typer.Option(help="Prompt lengths with poisson: N, or LOW-HIGH; 256.")]
_OutputTokens = Annotated[str | None, typer.Option(help="Answer lengths with poisson: N, or LOW-HIGH; 128.")]
_DurationS = Annotated[
    float | None, typer.Option(help="Seconds that built-in arrivals last; without it, what suits the profile.")
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "Acceptance probability of a draft token: one, one per position with commas, or a slice of --bench. "
            f"Without it {ACCEPTANCE} is assumed, and a note says so."
        )
    ),
]
BenchOption = Annotated[
    Path | None, typer.Option(help="A result of `foretoken bench` whose slices can be named as acceptance.")
]
SettingsOption = Annotated[
    str | None,
    typer.Option(help="Settings, separated by commas: plain, ngram-5, draft_model-auto. Without it plain and auto."),
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
    from foretoken.engine.startup.profiling import load_profile

    given = context.params
    check_arrivals(given)
    if profile is None:
        raise ConfigError("profile", None, "give the file of `foretoken bench profile --out DIR`")
    check_out(given["out"])
    measured = load_profile(profile)
    known = {} if bench is None else chances_from_bench(read_json("bench", bench))
    limits, chosen = _limits(given, measured), settings_of(settings, measured)
    fleet, price = config_from(Fleet, given), given["price_per_hour"]
    check_price(price)
    names = arrival_names(arrivals)
    if len(names) > 1:
        raise InputError("arrivals", arrivals, "name one; several are not simulated in one run")
    _check_slices(names, bench, chosen)
    jobs = (
        built_in(names[0], Server(measured, limits, chosen, known), seed, duration_s)
        if names
        else jobs_of(given, ACCEPTANCE)
    )
    with progress("simulating") as status:
        found = []
        for setting in chosen:
            status.update(f"simulating {setting.name}")
            ended = simulation.simulate(measured, jobs, setting, limits, seed, fleet, known)
            found.append(outcome(ended, price))
    about = {
        "profile": str(profile),
        "trace": arrivals,
        "limits": asdict(limits),
        "fleet": asdict(fleet),
        "seed": seed,
        "acceptance": None if names else ACCEPTANCE if acceptance is None else acceptance,
    }
    is_assumed = acceptance is None and any(job.acceptance == acceptance_of(ACCEPTANCE) for job in jobs)
    caveats = (*drafts_assumed(is_assumed, chosen), *measured.caveats)
    report = write_report(_report(found, measured, about, caveats), given["out"], "simulate")
    if as_json:
        machine = {"machine": measured.machine, "target": measured.target, "caveats": caveats}
        print_json({**about, **machine, "rows": [asdict(row) for row in found]})
    else:
        print_report(report)


def _check_slices(names: Sequence[str], bench: Path | None, settings: Sequence[SimSetting]) -> None:
    """Refuse built-in arrivals whose acceptance nothing tells."""
    if names and bench is None and any(one.drafters for one in settings):
        slices = ", ".join(SHAPES[names[0]].slices)
        remedy = (
            f"requests of {names[0]} are of the slices {slices}, whose acceptance is looked up in a result of "
            "`foretoken bench --out DIR`: give its JSON file, or only --settings plain"
        )
        raise ConfigError("bench", None, remedy)


def drafts_assumed(is_assumed: bool, settings: Sequence[SimSetting]) -> tuple[str, ...]:
    """A caveat where drafts are accepted as nobody said."""
    return (ASSUMED,) if is_assumed and any(one.drafters for one in settings) else ()


def _limits(given: Mapping[str, Any], profile: Profile) -> Limits:
    return config_from(
        Limits,
        given,
        block_tokens=_target_number(profile, "block_tokens") or 32,
        max_context_tokens=_target_number(profile, "max_context_tokens"),
    )


def _target_number(profile: Profile, name: str) -> int | None:
    value = profile.target.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"profile.target.{name}", value, "must be a whole number of at least 1")
    return value


def _report(rows: Sequence[SimMetrics], profile: Profile, about: Mapping[str, Any], caveats: tuple[str, ...]) -> Report:
    """The report of settings simulated on a profile; `about` is what was asked for."""
    cpu = profile.machine.get("cpu", "unknown machine")
    speeds = tuple(Series(row.setting, (Point("all requests", row.tokens_per_s),)) for row in rows)
    return Report(
        title="Simulation",
        command=command_line(),
        options=about,
        results={"target": profile.target, "rows": tuple(rows)},
        tables=(Table("", _HEADINGS, tuple(map(_cells, rows))),),
        plots=(Plot("Throughput", "tokens per second", speeds),),
        conclusions=(*_against_plain(rows), f"predicted from {profile.date or 'an undated profile'}, {cpu}"),
        caveats=caveats,
        machine=profile.machine,
        versions=profile.versions,
    )


def _against_plain(rows: Sequence[SimMetrics]) -> tuple[str, ...]:
    """Both speeds: below capacity arrivals alone decide how many tokens a second there are."""
    plain = next((row for row in rows if row.setting == PLAIN), None)
    if plain is None or plain.tokens_per_s <= 0 or len(rows) < 2:
        return ()
    others = [row for row in rows if row is not plain]
    found = [("tokens per second", [(row.setting, row.tokens_per_s / plain.tokens_per_s) for row in others])]
    if plain.latency_s_p50 > 0:
        ratios = [(row.setting, row.latency_s_p50 / plain.latency_s_p50) for row in others]
        found.append(("median time of a whole answer", ratios))
    return tuple(
        f"{words} against plain: {', '.join(f'{name} {ratio:.2f}x' for name, ratio in ratios)}"
        for words, ratios in found
    )


def _cells(row: SimMetrics) -> tuple[str, ...]:
    times = (
        row.ttft_s_p50,
        row.ttft_s_p95,
        row.inter_token_s_p50,
        row.inter_token_s_p95,
        row.latency_s_p50,
        row.latency_s_p95,
    )
    price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
    shares = (f"{row.utilisation:.0%}", f"{row.mean_in_system:.1f}", f"{row.emitted_per_step:.2f}")
    return (row.setting, f"{row.tokens_per_s:.4g}", *map(seconds_text, times), *shares, price)
