"""What a simulation comes to: throughput, waiting, use of the machines, and money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.simulate.simulate import Ended


@dataclass(frozen=True)
class SimMetrics:
    """One setting's figures; times in seconds from a request's arrival.

    `makespan_s` runs from the first arrival to the last token. `ttft` is the time to the first token, `inter_token`
    each request's mean time between its tokens after that, `latency` the time to the last. `utilisation` is the share
    of the makespan in which an engine computed, `mean_in_system` the average number of requests that were there,
    waiting or running. `price_per_million_tokens` is None when no price was named.
    """

    setting: str
    num_requests: int
    num_tokens: int
    num_steps: int
    makespan_s: float
    tokens_per_s: float
    latency_s_p50: float
    latency_s_p95: float
    ttft_s_p50: float
    ttft_s_p95: float
    inter_token_s_p50: float
    inter_token_s_p95: float
    utilisation: float
    mean_in_system: float
    emitted_per_step: float
    num_drafted: int
    num_accepted: int
    price_per_million_tokens: float | None


@dataclass(frozen=True)
class Served:
    """What became of one request, simulated or real; times in seconds on one clock, tokens as counts."""

    arrival_s: float
    first_s: float
    finish_s: float
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int


def outcome(ended: Ended, price_per_hour: float | None = None) -> SimMetrics:
    """The figures of a simulation; `price_per_hour` is what one engine costs, busy or not."""
    served = []
    for one in ended.requests:
        assert one.first_s is not None, "a request was never finished"
        assert one.finish_s is not None, "a request was never finished"
        counts = one.num_emitted, one.num_steps, one.num_drafted, one.num_accepted
        served.append(Served(one.job.arrival_s, one.first_s, one.finish_s, *counts))
    busy_s, num_steps = sum(one.busy_s for one in ended.engines), sum(one.num_steps for one in ended.engines)
    return figures(ended.setting.name, served, busy_s, num_steps, len(ended.engines), price_per_hour)


def figures(
    setting: str,
    served: Sequence[Served],
    busy_s: float,
    num_steps: int,
    replicas: int = 1,
    price_per_hour: float | None = None,
) -> SimMetrics:
    """The figures of requests that `replicas` engines served, computing for `busy_s` in `num_steps` steps."""
    arrivals, finishes = [one.arrival_s for one in served], [one.finish_s for one in served]
    tokens = sum(one.num_tokens for one in served)
    makespan_s = max(finishes) - min(arrivals)
    latencies = [one.finish_s - one.arrival_s for one in served]
    waits = [one.first_s - one.arrival_s for one in served]
    between = [(one.finish_s - one.first_s) / (one.num_tokens - 1) for one in served if one.num_tokens > 1]
    hours = makespan_s / 3600 * replicas
    return SimMetrics(
        setting=setting,
        num_requests=len(served),
        num_tokens=tokens,
        num_steps=num_steps,
        makespan_s=makespan_s,
        tokens_per_s=tokens / makespan_s if makespan_s > 0 else 0.0,
        latency_s_p50=percentile(latencies, 0.5),
        latency_s_p95=percentile(latencies, 0.95),
        ttft_s_p50=percentile(waits, 0.5),
        ttft_s_p95=percentile(waits, 0.95),
        inter_token_s_p50=percentile(between, 0.5),
        inter_token_s_p95=percentile(between, 0.95),
        utilisation=busy_s / (makespan_s * replicas) if makespan_s > 0 else 0.0,
        mean_in_system=_mean_in_system(arrivals, finishes, makespan_s),
        emitted_per_step=tokens / max(1, sum(one.num_steps for one in served)),
        num_drafted=sum(one.num_drafted for one in served),
        num_accepted=sum(one.num_accepted for one in served),
        price_per_million_tokens=None if price_per_hour is None else price_per_hour * hours / tokens * 1e6,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie, straight between neighbours; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _mean_in_system(arrivals: Sequence[float], finishes: Sequence[float], makespan_s: float) -> float:
    """The count of requests, integrated over time as they come and go."""
    events = sorted([(time, 1) for time in arrivals] + [(time, -1) for time in finishes])
    area, count, before = 0.0, 0, events[0][0]
    for time, change in events:
        area += count * (time - before)
        count, before = count + change, time
    return area / makespan_s if makespan_s > 0 else 0.0
