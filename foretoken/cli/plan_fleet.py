"""`foretoken plan --fleet PROFILE`: replicas, waiting and price of a day, with and without speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretoken.cli.common import print_json, progress
from foretoken.cli.flags import config_from
from foretoken.cli.measuring import command_line
from foretoken.cli.simulate import ACCEPTANCE, acceptance_of, drafts_assumed, lengths_of, settings_of
from foretoken.errors import CapacityError, ConfigError, InputError
from foretoken.files import read_json
from foretoken.measure.options import check_price
from foretoken.measure.report import Report, Table, print_report
from foretoken.params import check_whole
from foretoken.plan.profile import Profile
from foretoken.printing.console import seconds_text
from foretoken.simulate.fleet.options import FleetOptions
from foretoken.simulate.fleet.plan import FleetPlanner, FleetRow
from foretoken.simulate.fleet.speed import RequestMix, replica_speed
from foretoken.simulate.inputs import PLAIN, Chances, Limits, SimSetting, chances_from_bench

_USUAL = {"prompt_tokens": "256", "output_tokens": "128", "acceptance": ACCEPTANCE}
_HEADINGS = (
    *("setting", "replicas", "aim", "mean", "most", "busy"),
    *("first p95", "worst hour", "token p95", "late", "refused", "price/M"),
)
_EXPLAINED = (
    "aim: queued tokens of a replica that the autoscaler aims at, the best of those tried; default: without an aim, "
    "four fifths of a full batch; mean, most: paid replicas; "
    "busy: share of their time with a request; late: share of the requests beyond the promise, at most 5 %"
)


def plan_fleet(given: Mapping[str, Any]) -> None:
    """Plan what the command's options ask for, and print it.

    Raises:
        ForetokenError: an option that is wrong, or a file that cannot be read; CapacityError: no setting keeps the
            promise.
    """
    from foretoken.engine.startup.profiling import load_profile

    check_price(given["price_per_hour"])
    check_whole("max_batch_size", given["max_batch_size"], low=1, high=1024)
    options, limits = config_from(FleetOptions, given), config_from(Limits, given)
    profile = load_profile(given["fleet"])
    chosen = settings_of(given["settings"], profile)
    mix = _mix(given, chosen)
    speeds = {one.name: replica_speed(profile, one, mix, limits) for one in chosen}
    planner = FleetPlanner(options, given["price_per_hour"], given["seed"])
    with progress("planning") as status:
        rows = [
            plan(name, speed, status.say)
            for name, speed in speeds.items()
            for plan in (planner.autoscaled, planner.default, planner.fixed)
        ]
    about = {
        "profile": str(given["fleet"]),
        "fleet": asdict(options),
        "prompt_tokens": asdict(mix.prompts),
        "output_tokens": asdict(mix.outputs),
        "acceptance": dict(mix.chances),
        "max_batch_size": limits.max_batch_size,
        "max_prompt_tokens": limits.max_prompt_tokens,
        "price_per_hour": given["price_per_hour"],
        "seed": given["seed"],
    }
    caveats = (*drafts_assumed(given["acceptance"] is None, chosen), *profile.caveats)
    if given["as_json"]:
        machine = {"machine": profile.machine, "target": profile.target, "caveats": caveats}
        print_json({**about, **machine, "rows": [asdict(row) for row in rows]})
    else:
        print_report(_report(rows, profile, about, caveats))
    if not any(row.meets for row in rows):
        best = min(rows, key=lambda row: row.late_share)
        raise CapacityError(
            f"no setting keeps the promise with at most {options.max_replicas} replicas: of {best.setting}, "
            f"{best.late_share:.1%} of the requests are late; raise max_replicas, p95_first_s or p95_token_ms"
        )


def _mix(given: Mapping[str, Any], settings: Sequence[SimSetting]) -> RequestMix:
    prompts, outputs = (
        lengths_of(name, _USUAL[name] if given[name] is None else given[name])
        for name in ("prompt_tokens", "output_tokens")
    )
    acceptance = acceptance_of(_USUAL["acceptance"] if given["acceptance"] is None else given["acceptance"])
    if given["bench"] is None:
        if isinstance(acceptance, str):
            remedy = "is no number: a slice needs --bench FILE, which it is looked up in"
            raise InputError("acceptance", acceptance, remedy)
        return RequestMix(prompts, outputs, {"": acceptance})
    if not isinstance(acceptance, str):
        remedy = "gives the acceptance of a slice: name it with --acceptance SLICE"
        raise ConfigError("bench", str(given["bench"]), remedy)
    known = chances_from_bench(read_json("bench", given["bench"]))
    found: dict[str, Chances] = {
        drafter: slices[acceptance] for drafter, slices in known.items() if acceptance in slices
    }
    missing = [drafter for one in settings for drafter in one.drafters if drafter not in found]
    if missing:
        names = ", ".join(sorted(known.get(missing[0], ()))) or "none"
        remedy = f"no chances of this name were measured for {missing[0]}; known: {names}"
        raise InputError("acceptance", acceptance, remedy)
    return RequestMix(prompts, outputs, found)


def _report(rows: Sequence[FleetRow], profile: Profile, about: Mapping[str, Any], caveats: tuple[str, ...]) -> Report:
    cpu = profile.machine.get("cpu", "unknown machine")
    return Report(
        title="Fleet",
        command=command_line(),
        options=about,
        results={"target": profile.target, "rows": tuple(rows)},
        tables=(Table("", _HEADINGS, tuple(map(_cells, rows)), justify="llr"),),
        explained=_EXPLAINED,
        conclusions=(*_against_plain(rows), f"computed from {profile.date or 'an undated profile'}, {cpu}"),
        caveats=caveats,
    )


def _against_plain(rows: Sequence[FleetRow]) -> tuple[str, ...]:
    """What a million tokens cost with each setting, the cheaper of its fleets, against plain decoding."""
    prices: dict[str, float] = {}
    for row in rows:
        if row.meets:
            prices[row.setting] = min(row.price_per_million_tokens, prices.get(row.setting, float("inf")))
    plain = prices.pop(PLAIN, None)
    if plain is None or not prices:
        return ()
    shares = [f"{name} {price / plain - 1:+.0%}" for name, price in prices.items()]
    return (f"price of a million tokens against plain: {', '.join(shares)}",)


def _cells(row: FleetRow) -> tuple[str, ...]:
    return (
        row.setting,
        row.scaling,
        "" if row.replica_tokens is None else str(row.replica_tokens),
        f"{row.replica_hours / 24:.4g}",
        str(row.replicas_max),
        f"{row.busy:.0%}",
        *map(_time, (row.first_s_p95, row.worst_first_s_p95, row.token_s_p95)),
        f"{row.late_share:.1%}" if row.meets else f"{row.late_share:.1%}: missed",
        f"{row.refused_share:.1%}",
        f"{row.price_per_million_tokens:.3g}",
    )


def _time(seconds: float | None) -> str:
    return "refused" if seconds is None else seconds_text(seconds)
