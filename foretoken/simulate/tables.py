"""The report of a simulation: a row for each setting, and ratios to plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Report, Table
from foretoken.plan.profile import Profile
from foretoken.simulate.metrics import SimMetrics
from foretoken.simulate.setting import PLAIN

_HEADINGS = (
    *("setting", "tok/s", "first token", "p95", "per token", "p95", "whole answer", "p95"),
    *("busy", "there", "tok/step", "price/M"),
)


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
