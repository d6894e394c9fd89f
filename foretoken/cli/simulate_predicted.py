"""`foretoken simulate`: every setting on a virtual clock, and a table of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken.cli.common import print_json, progress
from foretoken.cli.flags import config_from
from foretoken.cli.measuring import command_line
from foretoken.cli.simulate import arrival_names, jobs_of, settings_of
from foretoken.errors import InputError
from foretoken.files import read_json
from foretoken.measure.options import check_price
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Report, Table, print_report
from foretoken.measure.write import check_out, write_report
from foretoken.plan.profile import Profile
from foretoken.simulate.inputs import PLAIN, Limits, SimSetting, chances_from_bench
from foretoken.simulate.loads import Server, built_in
from foretoken.simulate.metrics import SimMetrics, outcome
from foretoken.simulate.simulate import Fleet, simulate

_ACCEPTANCE = "0.7"
_HEADINGS = (
    *("setting", "tok/s", "first token", "p95", "per token", "p95", "whole answer", "p95"),
    *("busy", "there", "tok/step", "price/M"),
)


def predict(given: Mapping[str, Any]) -> None:
    """Simulate what the command's options ask for, and print it.

    Raises:
        ForetokenError: an option that is wrong, a file that cannot be read, or requests that cannot run.
    """
    from foretoken.measure.speed.profile import load_profile

    check_out(given["out"])
    profile = load_profile(given["profile"])
    known = chances_from_bench(read_json("bench", given["bench"])) if given["bench"] is not None else {}
    limits, chosen = _limits(given, profile), _settings(given["settings"], profile)
    fleet, price, seed = config_from(Fleet, given), given["price_per_hour"], given["seed"]
    check_price(price)
    names = arrival_names(given["arrivals"])
    if len(names) > 1:
        raise InputError("arrivals", given["arrivals"], "name one; several are not simulated in one run")
    jobs = (
        built_in(names[0], Server(profile, limits, chosen, known), seed, given["duration_s"])
        if names
        else jobs_of(given, _ACCEPTANCE)
    )
    with progress("simulating") as status:
        found = []
        for setting in chosen:
            if status is not None:
                status.update(f"simulating {setting.name}")
            found.append(outcome(simulate(profile, jobs, setting, limits, seed, fleet, known), price))
    about = {
        "profile": str(given["profile"]),
        "trace": given["arrivals"],
        "limits": asdict(limits),
        "fleet": asdict(fleet),
        "seed": seed,
    }
    report = write_report(simulate_report(found, profile, about, command_line()), given["out"], "simulate")
    if given["as_json"]:
        print_json(
            {**about, "machine": profile.machine, "target": profile.target, "rows": [asdict(row) for row in found]}
        )
    else:
        print_report(report)


def _limits(given: Mapping[str, Any], profile: Profile) -> Limits:
    return config_from(
        Limits,
        given,
        block_tokens=_target_number(profile, "block_tokens") or 32,
        max_context_tokens=_target_number(profile, "max_context_tokens"),
    )


def _settings(text: str | None, profile: Profile) -> tuple[SimSetting, ...]:
    if text is None:
        return (SimSetting(), *(SimSetting((drafter,), None) for drafter in profile.drafters))
    return tuple(settings_of(text))


def _target_number(profile: Profile, name: str) -> int | None:
    value = profile.target.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"profile.target.{name}", value, "must be a whole number of at least 1")
    return value


def simulate_report(rows: Sequence[SimMetrics], profile: Profile, about: Mapping[str, Any], command: str) -> Report:
    """The report of settings simulated on a profile; `about` is what was asked for."""
    cpu = profile.machine.get("cpu", "unknown machine")
    speeds = tuple(Series(row.setting, (Point("all requests", row.tokens_per_s),)) for row in rows)
    return Report(
        title="Simulation",
        command=command,
        options=about,
        results={"target": profile.target, "rows": tuple(rows)},
        tables=(Table("", _HEADINGS, tuple(map(_cells, rows))),),
        plots=(Plot("Throughput", "tokens per second", speeds),),
        conclusions=(*_against_plain(rows), f"predicted from {profile.date or 'an undated profile'}, {cpu}"),
        caveats=tuple(profile.caveats),
        machine=profile.machine,
        versions=profile.versions,
    )


def _against_plain(rows: Sequence[SimMetrics]) -> tuple[str, ...]:
    plain = next((row for row in rows if row.setting == PLAIN), None)
    if plain is None or plain.tokens_per_s <= 0 or len(rows) < 2:
        return ()
    ratios = [f"{row.setting} {row.tokens_per_s / plain.tokens_per_s:.2f}x" for row in rows if row is not plain]
    return (f"against plain: {', '.join(ratios)}",)


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
    return (row.setting, f"{row.tokens_per_s:.4g}", *map(_time, times), *shares, price)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
