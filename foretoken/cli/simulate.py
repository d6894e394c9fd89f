"""`foretoken simulate`: throughput, waiting and money of settings that never ran, from a measured profile and a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from foretoken.bench.profile import load_profile
from foretoken.bench.validate_report import MeasureOptions, trace_names
from foretoken.cli.common import CacheOption, DeviceOption, DraftOption, DtypeOption, JsonOption, TargetOption, print_json, progress
from foretoken.cli.simulate_measured import measure_for_real
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.plan.arrivals import Chances, Job, Lengths, chances_from_bench, parse_acceptance, parse_trace, poisson
from foretoken.plan.outcome import Outcome, outcome
from foretoken.plan.profile import Profile
from foretoken.plan.setting import PLAIN, Limits, Setting, parse_setting
from foretoken.plan.simulate import Fleet
from foretoken.plan.simulate import simulate as run_simulation
from foretoken.plan.traces import SHAPES, built_in

_POISSON = "poisson:"
_MIN_WIDTH = 120  # below this the table would be cut to nothing; a narrower terminal wraps its lines
_NUM_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS, _ACCEPTANCE = 200, "256", "128", "0.7"
_ONLY_SIMULATED = frozenset({"profile", "bench", "replicas", "dispatch", "price_per_hour"})
_ONLY_MEASURED = frozenset({"target", "draft", "dtype", "device", "threads", "out", "name"})


def simulate(
    context: typer.Context,
    trace: Annotated[
        str,
        typer.Option(
            help=f"Requests: a file of JSON lines, poisson:RATE for RATE per second on average, or {', '.join(SHAPES)}, scaled to the machine."
        ),
    ],
    profile: Annotated[Path | None, typer.Option(help="What steps cost: the JSON file of `foretoken bench --profile --out DIR`.")] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also run the trace for real, and compare; minutes. Several built-in traces may be named, with commas."),
    ] = False,
    target: TargetOption = "reference:target",
    draft: DraftOption = None,
    requests: Annotated[int | None, typer.Option(help="How many: of a poisson trace, 200; of a file the first ones, or all.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Prompt lengths of a poisson trace: N, or LOW-HIGH; 256.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Answer lengths of a poisson trace: N, or LOW-HIGH; 128.")] = None,
    trace_seconds: Annotated[float | None, typer.Option(help="How long a built-in trace lasts; without it, what suits the machine.")] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Chance that a guess stands: one (0.7), one per place with commas, or a slice of --bench; with --measure a slice (code)."),
    ] = None,
    bench: Annotated[Path | None, typer.Option(help="A result of `foretoken bench` whose slices can be named as acceptance.")] = None,
    settings: Annotated[str | None, typer.Option(help="Settings with commas: plain, ngram-5, draft_model-auto. Without it plain and auto.")] = None,
    max_batch_size: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    max_prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens that a step takes.")] = 512,
    cache_tokens: CacheOption = None,
    replicas: Annotated[int, typer.Option(help="Engines that share the requests.")] = 1,
    dispatch: Annotated[str, typer.Option(help="Who gets a request: round_robin, or least_loaded.")] = "round_robin",
    price_per_hour: Annotated[float | None, typer.Option(help="Price of one engine's hour, for the price of a million tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and chances.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of --measure; without it, torch's own number.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the dated result of --measure.")] = None,
    name: Annotated[str, typer.Option(help="End of the result's file name.")] = "simulate",
    as_json: JsonOption = False,
) -> None:
    """Run the scheduler and the controller on a virtual clock, once for each setting, with the same requests and the same luck."""
    _check_options(context, measure)
    built_ins = trace_names(trace)
    _check_built_in(
        built_ins, {"requests": requests, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "acceptance": acceptance}, trace_seconds
    )
    if measure:
        slice_name = _acceptance(acceptance or "code")
        jobs_of = dict.fromkeys(built_ins) or {trace: _jobs(trace, requests, prompt_tokens, output_tokens, slice_name, seed)}
        wanted = [parse_setting(word) for word in _words(settings or ("plain,ngram-4" + ("" if draft is None else ",draft_model-4")))]
        options = MeasureOptions(
            target=target,
            draft=draft,
            settings=tuple(wanted),
            traces=jobs_of,
            max_batch_size=max_batch_size,
            max_prompt_tokens=max_prompt_tokens,
            cache_tokens=cache_tokens,
            seconds=trace_seconds,
            dtype=dtype,
            device=device,
            threads=threads,
            seed=seed,
        )
        measure_for_real(options, out, name, as_json)
        return
    if profile is None:
        raise ConfigError("profile", None, "give the file of `foretoken bench --profile --out DIR`, or --measure, which measures one itself")
    measured = load_profile(profile)
    known = chances_from_bench(_read_json("bench", bench)) if bench is not None else {}
    limits = Limits(
        max_batch_size=max_batch_size,
        max_prompt_tokens=max_prompt_tokens,
        cache_tokens=cache_tokens,
        block_tokens=_target_number(measured, "block_tokens") or 32,
        max_context_tokens=_target_number(measured, "max_context_tokens"),
    )
    if len(built_ins) > 1:
        raise InputError("trace", trace, "one trace at a time; several go with --measure")
    if built_ins:
        jobs = built_in(built_ins[0], measured, limits, seed, trace_seconds)
    else:
        jobs = _jobs(trace, requests, prompt_tokens, output_tokens, _acceptance(acceptance or _ACCEPTANCE), seed)
    chosen = _settings(settings, measured)
    fleet = Fleet(replicas, dispatch)
    if price_per_hour is not None and price_per_hour < 0:
        raise InputError("price_per_hour", price_per_hour, "must be at least 0")
    with progress("simulating") as status:
        found = []
        for setting in chosen:
            if status is not None:
                status.update(f"simulating {setting.name}")
            found.append(outcome(run_simulation(measured, jobs, setting, limits, seed, fleet, known), price_per_hour))
    if as_json:
        about = {"profile": str(profile), "trace": trace, "limits": asdict(limits), "fleet": asdict(fleet), "seed": seed}
        print_json({**about, "machine": measured.machine, "target": measured.target, "rows": [asdict(row) for row in found]})
    else:
        _print(found, measured)


def _check_options(context: typer.Context, measure: bool) -> None:
    """Refuse what only the other way of running reads."""
    for name in sorted(_ONLY_SIMULATED if measure else _ONLY_MEASURED):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            remedy = "does not go with --measure, which profiles one engine itself" if measure else "is read with --measure only"
            raise ConfigError(name, context.params[name], f"{remedy}; leave it out")


def _check_built_in(built_ins: Sequence[str], lengths: Mapping[str, object], trace_seconds: float | None) -> None:
    """Built-in traces say everything of their requests, other ones when these come."""
    for name, value in lengths.items():
        if built_ins and value is not None:
            raise ConfigError(name, value, f"the trace {built_ins[0]} says it for each request; leave it out, or use --trace poisson:RATE")
    if trace_seconds is not None and not built_ins:
        raise ConfigError("trace_seconds", trace_seconds, f"goes with the built-in traces {', '.join(SHAPES)} only; leave it out")


def _acceptance(text: str) -> Chances | str:
    """Numbers if they look like numbers, else a name."""
    words = [word.strip() for word in text.split(",")]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return parse_acceptance(text)
    return parse_acceptance(numbers)


def _jobs(trace: str, requests: int | None, prompt_tokens: str | None, output_tokens: str | None, acceptance: Chances | str, seed: int) -> list[Job]:
    if requests is not None and requests < 1:
        raise InputError("requests", requests, "must be at least 1")
    if not trace.startswith(_POISSON):
        for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            if value is not None:
                raise ConfigError(name, value, "the trace file says it for each request; leave it out, or use --trace poisson:RATE")
        return parse_trace(_read("trace", Path(trace)).splitlines(), acceptance)[:requests]
    try:
        rate = float(trace.removeprefix(_POISSON))
    except ValueError:
        raise InputError("trace", trace, "must be poisson:RATE with a number of requests per second, or a file") from None
    prompts, outputs = _lengths("prompt_tokens", prompt_tokens or _PROMPT_TOKENS), _lengths("output_tokens", output_tokens or _OUTPUT_TOKENS)
    return poisson(rate, requests or _NUM_REQUESTS, prompts, outputs, acceptance, seed)


def _lengths(field: str, text: str) -> Lengths:
    low, found, high = text.partition("-")
    if not low.isdigit() or (found and not high.isdigit()) or not 1 <= int(low) <= int(high or low):
        raise InputError(field, text, "must be a number of tokens, or LOW-HIGH")
    return Lengths(int(low), int(high or low))


def _settings(text: str | None, profile: Profile) -> list[Setting]:
    if text is None:
        return [Setting(), *(Setting(drafter, None) for drafter in profile.drafters)]
    return [parse_setting(word) for word in _words(text)] or [Setting()]


def _words(text: str) -> list[str]:
    return [word for word in dict.fromkeys(word.strip() for word in text.split(",")) if word]


def _target_number(profile: Profile, name: str) -> int | None:
    value = profile.target.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"profile.target.{name}", value, "must be a whole number of at least 1")
    return value


def _read(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{field}: cannot read {path}: {error}") from error


def _read_json(field: str, path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return json.loads(_read(field, path))
    except ValueError as error:
        raise StorageError(f"{field}: {path} is not JSON: {error}") from error


def _print(rows: list[Outcome], profile: Profile) -> None:
    console = Console()
    if console.width < _MIN_WIDTH:
        console.width = _MIN_WIDTH
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("setting", "tok/s", "first token", "p95", "per token", "p95", "whole answer", "p95", "busy", "there", "tok/step", "price/M"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in rows:
        times = (row.ttft_s_p50, row.ttft_s_p95, row.inter_token_s_p50, row.inter_token_s_p95, row.latency_s_p50, row.latency_s_p95)
        price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
        shares = (f"{row.utilisation:.0%}", f"{row.mean_in_system:.1f}", f"{row.emitted_per_step:.2f}")
        table.add_row(row.setting, f"{row.tokens_per_s:.4g}", *map(_time, times), *shares, price)
    console.print(table)
    plain = next((row for row in rows if row.setting == PLAIN), None)
    if plain is not None and plain.tokens_per_s > 0 and len(rows) > 1:
        console.print(
            "against plain: " + ", ".join(f"{row.setting} {row.tokens_per_s / plain.tokens_per_s:.2f}x" for row in rows if row is not plain),
            highlight=False,
        )
    console.print(f"predicted from {profile.date or 'an undated profile'}, {profile.machine.get('cpu', 'unknown machine')}", highlight=False)
    for caveat in profile.caveats:
        console.print(f"note: {caveat}", highlight=False, markup=False)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
