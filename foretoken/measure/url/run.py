"""`foretoken bench --url`: load on an OpenAI-compatible endpoint in an open loop: requests come when they are due,
whether or not earlier ones were answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from foretoken.backend.answering import Question
from foretoken.backend.http import Endpoint
from foretoken.errors import UnavailableError
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.progress import Tell, progress
from foretoken.measure.report import Report, busy_caveats, interruption_notes, load_average
from foretoken.measure.url.plan import (
    UrlOptions,
    UrlRequest,
    chosen_prompts,
    poisson_requests,
    trace_requests,
    warmup_requests,
)
from foretoken.measure.url.rows import EXPLAINED, UrlRow, UrlSample, summarise_url, url_plots, url_prices, url_tables
from foretoken.measure.write import write_report
from foretoken.printing.console import Console

_MAX_LAG_S = 0.05
_MIN_DRAFTED = 100  # tokens, below which acceptance says little
_CHANCE = 0.01
_RESUMED = "The run was stopped and resumed: the server may have been started again between two loads."


@dataclass
class UrlRun:
    """One load: what was planned, what was measured, and what the endpoint's own counters said before and after.

    `is_known`: it was measured before the run was stopped.
    """

    setting: str
    requests: Sequence[UrlRequest]
    samples: list[UrlSample] = field(default_factory=list)
    counters: list[dict[str, float] | None] = field(default_factory=list)
    is_known: bool = False


def _kept(options: UrlOptions, model: str, runs: Sequence[UrlRun]) -> KeptFile:
    """The file of whole loads, those that it holds already restored. A load that was interrupted is measured again:
    what its last requests met depends on all before them.
    """
    planned = {"requests": [[asdict(request) for request in run.requests] for run in runs]}
    file = kept_run(options.resume, "bench url", planned, options, model=model)

    def restore(line: Mapping[str, Any]) -> None:
        run, *_ = (one for one in runs if one.setting == line["setting"] and not one.is_known)  # a rate may come twice
        run.samples = [UrlSample(**one | {"pieces": list(map(tuple, one["pieces"]))}) for one in line["samples"]]
        run.counters, run.is_known = list(line["counters"]), True

    file.restored(restore)
    return file


def run_url(options: UrlOptions, command: str = "foretoken bench --url") -> Report:
    """Measure, and write the dated result where options ask for it; the caller prints the report.

    Progress goes to standard error. After Ctrl-C the report holds what was measured until then, and says so; requests
    under way count as errors "interrupted".

    Raises:
        InputError, StorageError: prompts, a trace or a file to resume that cannot be used.
        UnavailableError: the endpoint does not answer, or no request of the warm-up succeeds.
    """
    runs = plan_runs(options)
    load, found = load_average(), {"model": options.model or ""}
    try:
        asyncio.run(_measure(options, runs, found))
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    rows = [summarise_url(run.setting, run.samples, options, _between(run)) for run in runs if run.samples]
    prices = url_prices(rows, options.price_per_hour)
    known = [_RESUMED] if any(run.is_known for run in runs) else []
    stopped = interruption_notes(interrupted, options.resume)
    report = Report(
        title=f"Load on {options.base}",
        command=command,
        options=asdict(options),
        results={
            "kind": "url",
            **found,
            "rows": rows,
            "prices": prices,
            # Every request with its times and without its text, so that other figures can be computed later.
            "requests": [{"setting": run.setting, **asdict(sample)} for run in runs for sample in run.samples],
            "interrupted": interrupted,
        },
        tables=url_tables(rows, options, prices),
        plots=url_plots(rows),
        explained=EXPLAINED,
        caveats=(*stopped, *known, *_repeats(options, runs), *_uncounted(runs), *_caveats(rows, load)),
    )
    return write_report(report, options.out, options.name)


def plan_runs(options: UrlOptions) -> list[UrlRun]:
    """The loads of a measurement: one for each rate, or that of the trace; raises as `url.plan` does."""
    prompts = chosen_prompts(options)
    if options.trace is not None:
        return [UrlRun(f"trace {options.trace.name}", trace_requests(options, prompts, options.trace, options.warmup))]
    return [
        UrlRun(f"{rate:g}/s", poisson_requests(options, prompts, rate, options.warmup + place * options.requests))
        for place, rate in enumerate(options.rates)
    ]


async def _measure(options: UrlOptions, runs: Sequence[UrlRun], found: dict[str, str]) -> None:
    async with Endpoint(options.server) as endpoint:
        await endpoint.open()
        found["model"] = endpoint.model
        with closing(_kept(options, endpoint.model, runs)) as kept:
            missing = [run for run in runs if not run.is_known]
            if missing:
                await _drive_all(endpoint, options, missing, kept)


async def _drive_all(endpoint: Endpoint, options: UrlOptions, runs: Sequence[UrlRun], kept: KeptFile) -> None:
    """Warm up, then drive one load after the other; each that has ended is kept."""
    await _warm_up(endpoint, options)
    with progress(sum(len(run.requests) for run in runs) + 1) as tell:
        tell(runs[0].setting)
        for run in runs:
            run.counters.append(await endpoint.spec_counters())
            await _drive(endpoint, options, run, tell)
            run.counters.append(await endpoint.spec_counters())
            samples = [asdict(sample) for sample in run.samples]
            kept.append({"setting": run.setting, "samples": samples, "counters": run.counters})


async def _warm_up(endpoint: Endpoint, options: UrlOptions) -> None:
    """Send the warm-up, one after the other; a failure among others shows again in the run."""
    if options.warmup:
        Console(stderr=True).line(f"warming up with {options.warmup} requests")
    samples = []
    for request in warmup_requests(options, chosen_prompts(options)):
        samples.append(UrlSample(index=request.index, slice=request.slice))
        await endpoint.send(_question(options, request), samples[-1], time.monotonic)
    if samples and not any(sample.is_ok for sample in samples):
        first = samples[0]
        raise UnavailableError(
            f"all {len(samples)} requests of the warm-up to {options.base} failed ({first.error}"
            f"{f': {first.said}' if first.said else ''}); nothing was measured"
        )


def _question(options: UrlOptions, request: UrlRequest) -> Question:
    return Question(
        text="" if request.messages else request.text,
        messages=request.messages,
        max_tokens=request.max_tokens,
        temperature=options.temperature,
        seed=options.seed + request.index,
        ignore_eos=not options.stop_at_eos,
    )


async def _drive(endpoint: Endpoint, options: UrlOptions, run: UrlRun, tell: Tell) -> None:
    """Send every request when it is due; returns after the last has ended."""
    began = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began

    async def one(request: UrlRequest, sample: UrlSample) -> None:
        try:
            await endpoint.send(_question(options, request), sample, clock)
        finally:
            sample.ended_s = sample.ended_s or clock()
        tell(run.setting)

    async with asyncio.TaskGroup() as tasks:
        for request in run.requests:
            await asyncio.sleep(max(0.0, request.arrival_s - clock()))
            sample = UrlSample(index=request.index, slice=request.slice, arrival_s=request.arrival_s)
            run.samples.append(sample)
            tasks.create_task(one(request, sample))


def _between(run: UrlRun) -> tuple[int, int] | None:
    """Drafted and accepted tokens by the endpoint's counters, from before the run to after it."""
    known = [counters for counters in run.counters if counters is not None]
    if len(known) != 2:  # the endpoint has none, or the run was interrupted
        return None
    before, after = known
    return round(after["drafted"] - before["drafted"]), round(after["accepted"] - before["accepted"])


def _repeats(options: UrlOptions, runs: Sequence[UrlRun]) -> list[str]:
    """A note where prompts come more than once."""
    sent = [*warmup_requests(options, chosen_prompts(options)), *(one for run in runs for one in run.requests)]
    num_prompts = len({request.messages or request.text for request in sent})
    if len(sent) <= num_prompts:
        return []
    return [
        f"{len(sent)} requests, warm-up included, share {num_prompts} prompts: a server that caches prefixes or drafts "
        "from earlier answers is faster on repeats. Give more prompts for figures without them."
    ]


def _uncounted(runs: Sequence[UrlRun]) -> list[str]:
    """A note where tokens are pieces of text."""
    answers = [sample for run in runs for sample in run.samples if sample.is_ok and sample.pieces]
    count = sum(not sample.is_counted for sample in answers)
    if not count:
        return []
    return [
        f"{count} of {len(answers)} answers did not say how many tokens they have (stream_options.include_usage): each "
        "piece of text counts as one, and a piece of a server that speculates holds several."
    ]


def _caveats(rows: Sequence[UrlRow], load: float) -> list[str]:
    found = []
    for row in rows:
        if row.errors:
            counts = ", ".join(f"{code} {count}" for code, count in row.errors.items())
            failed = row.num_requests - row.num_ok
            said = f' The first error: "{row.first_error}".' if row.first_error else ""
            found.append(f"{row.setting}: {failed} of {row.num_requests} requests failed ({counts}).{said}")
        if row.acceptance_rate is not None and (row.num_drafted or 0) >= _MIN_DRAFTED and row.acceptance_rate < _CHANCE:
            found.append(
                f"{row.setting}: {row.num_accepted} of {row.num_drafted} drafted tokens were accepted, which is near "
                "chance: the draft model or head does not fit the target, or was loaded in part."
            )
        if row.lag_s_p99 > _MAX_LAG_S:
            found.append(
                f"{row.setting}: 1 % of requests were sent {row.lag_s_p99:.2f} s late or more: the client was too slow."
            )
    return found + busy_caveats(load)
