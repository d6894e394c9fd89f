"""`foretoken bench --trace`: a load that changes in size and kind while it runs, and what each setting makes of the
whole of it.

Each phase keeps a number of requests of one slice running: where one ends the next begins. All settings answer the same
requests. When a phase has sent its last one the next phase begins, among the requests that still run.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from foretoken.bench.batch_prompts import Ask
from foretoken.bench.batch_settings import BatchSetting, Stage, parse_batch_settings
from foretoken.bench.load_options import (
    LoadOptions,
    Phase,
    Tell,
    announce,
    load_now,
    make_report,
    opened,
    progress,
    settle_table,
)
from foretoken.bench.measure import PLAIN
from foretoken.bench.sheets import Sheet, SheetReport

EXPLAINED = (
    "Tokens per second of the whole trace, prompts included, from the first step to the last token "
    "(median over repeats), and of each phase, as "
    "far as tokens fell into it. Ratios are medians over repeats. The best single fixed setting is the "
    "one with the most tokens per second of the "
    "whole trace among those whose number of guesses never changes, plain among them, picked after the fact."
)
_LENGTHS = (0.5, 1.0, 1.5)  # of answers, in turn, so that requests do not end together
_MOST_REQUESTS = 2000


@dataclass(frozen=True)
class Job:
    """A request of a trace."""

    ask: Ask
    max_tokens: int
    place: int


@dataclass(frozen=True)
class TraceTurn:
    """One setting's way through the trace: seconds and tokens of each phase."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of the whole trace."""
        return sum(self.tokens) / sum(self.seconds)


@dataclass(frozen=True)
class TraceRow:
    """A setting's result, ratios to plain and to the best single fixed setting."""

    setting: str
    adapts: bool
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    speedup: float
    to_single_fixed: float
    phases: tuple[float, ...]


def run_trace(options: LoadOptions, command: str = "foretoken bench --trace mixed") -> SheetReport:
    """Measure; Ctrl-C ends it early, and the report then holds what there is and says so.

    Raises:
        ForetokenError: a setting or model that cannot be used, a failing engine, or a folder that cannot be written.
    """
    load = load_now()
    settings, notes = parse_batch_settings(options.settings, options.draft)
    most = max(phase.batch for phase in options.phases)
    names = list(dict.fromkeys(phase.slice for phase in options.phases))
    turns: dict[BatchSetting, dict[int, TraceTurn]] = {}
    interrupted = False
    with opened(options, names, most, most, math.ceil(max(_LENGTHS) * options.max_tokens)) as (stage, found):
        try:
            one = [_jobs(phase, found, phase.batch, options.max_tokens) for phase in options.phases]
            run_through(stage, BatchSetting(PLAIN), options.phases, one)  # whatever is only done once
            first = run_through(stage, BatchSetting(PLAIN), options.phases, one)
            jobs = size_phases(options, found, first)
            plain_s = len(options.phases) * options.phase_s
            num_turns = len(settings) * (options.repeats + 1)
            announce(
                f"{num_turns} ways through the trace, about {max(1, round(num_turns * plain_s / 60))} min "
                "if every setting takes as long as plain"
            )
            notes += settle_table(stage, options, settings, [phase.batch for phase in options.phases], found)
            stage.forget()
            with progress(num_turns) as tell:
                measure_trace(stage, options, settings, (one, jobs), turns, tell)
        except KeyboardInterrupt:
            interrupted = True
    rows = summarise_trace(turns)
    notes.append(
        "What chooses numbers of guesses began anew for each setting, and learnt from one way through "
        "the trace to the next."
    )
    sheets = (_sheet(rows, options.phases),)
    return make_report(
        options, "trace", command, rows, trace_summary(rows), sheets, EXPLAINED, notes, interrupted, load
    )


def measure_trace(
    stage: Stage,
    options: LoadOptions,
    settings: Sequence[BatchSetting],
    jobs: tuple[Sequence[Sequence[Job]], Sequence[Sequence[Job]]],
    turns: dict[BatchSetting, dict[int, TraceTurn]],
    tell: Tell = lambda _words: None,
) -> None:
    """Add every setting's turns, repeat by repeat in a rotating order; `jobs` are those of the warm-up and those that
    count.
    """
    for setting in settings:
        tell(f"warm-up: {setting.name}")
        run_through(stage, setting, options.phases, jobs[0])
    for repeat in range(options.repeats):
        first = repeat % len(settings)
        for setting in (*settings[first:], *settings[:first]):
            tell(f"trace: {setting.name}")
            turns.setdefault(setting, {})[repeat] = run_through(stage, setting, options.phases, jobs[1])


def size_phases(options: LoadOptions, found: Mapping[str, Sequence[Ask]], plain: TraceTurn) -> list[list[Job]]:
    """Requests of each phase, as many as plain decoding answers in `phase_s`, but no fewer than run at a time."""
    sized = []
    for phase, seconds, tokens in zip(options.phases, plain.seconds, plain.tokens, strict=True):
        wanted = math.ceil(options.phase_s * tokens / max(seconds, 1e-9) / options.max_tokens)
        sized.append(_jobs(phase, found, min(max(wanted, phase.batch), _MOST_REQUESTS), options.max_tokens))
    return sized


def _jobs(phase: Phase, found: Mapping[str, Sequence[Ask]], count: int, max_tokens: int) -> list[Job]:
    asks = itertools.islice(itertools.cycle(found[phase.slice]), count)
    return [
        Job(ask, max(2, round(max_tokens * _LENGTHS[place % len(_LENGTHS)])), place) for place, ask in enumerate(asks)
    ]


def run_through(
    stage: Stage, setting: BatchSetting, phases: Sequence[Phase], jobs: Sequence[Sequence[Job]]
) -> TraceTurn:
    """One setting's way through the trace; tokens count for the phase in which they come.

    Raises:
        ForetokenError: an answer failed.
    """
    stage.enter(setting)
    seconds: list[float] = []
    tokens: list[int] = []
    running = 0
    for place, phase in enumerate(phases):
        began, emitted, queue = time.perf_counter(), 0, deque(jobs[place])
        last = place == len(phases) - 1
        while queue or (last and running):
            while queue and running < phase.batch:
                job = queue.popleft()
                stage.llm.submit(
                    list(job.ask.prompt_ids),
                    stage.params(setting, job.ask, job.place, job.max_tokens),
                    stage.spec(setting),
                )
                running += 1
            if not queue and running < phase.batch and not last:
                break  # a place is free that this phase has nobody for
            for output in stage.llm.step():
                if output.error is not None:
                    raise output.error
                emitted += len(output.token_ids)
                running -= output.finish_reason is not None
        seconds.append(time.perf_counter() - began)
        tokens.append(emitted)
    return TraceTurn(tuple(seconds), tuple(tokens))


def summarise_trace(turns: Mapping[BatchSetting, Mapping[int, TraceTurn]]) -> tuple[TraceRow, ...]:
    """A row for every setting; none where plain was not measured."""
    plain = next((own for setting, own in turns.items() if setting.name == PLAIN), None)
    if plain is None:
        return ()
    single = single_fixed(turns)
    rows = []
    for setting, own in turns.items():
        speeds = [turn.tokens_per_s for turn in own.values()]
        phases = zip(
            *([_speed(*pair) for pair in zip(turn.tokens, turn.seconds, strict=True)] for turn in own.values()),
            strict=True,
        )
        rows.append(
            TraceRow(
                setting.name,
                setting.adapts,
                median(speeds),
                min(speeds),
                max(speeds),
                _ratio(own, plain),
                _ratio(own, turns[single]),
                tuple(median(column) for column in phases),
            )
        )
    return tuple(rows)


def single_fixed(turns: Mapping[BatchSetting, Mapping[int, TraceTurn]]) -> BatchSetting:
    """The fastest setting whose number of guesses never changes."""
    fixed = [setting for setting in turns if not setting.adapts]
    return max(fixed, key=lambda setting: median(turn.tokens_per_s for turn in turns[setting].values()))


def _ratio(own: Mapping[int, TraceTurn], others: Mapping[int, TraceTurn]) -> float:
    pairs = [turn.tokens_per_s / others[repeat].tokens_per_s for repeat, turn in own.items() if repeat in others]
    return median(pairs) if pairs else 0.0


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def trace_summary(rows: Sequence[TraceRow]) -> dict[str, object]:
    """The best single fixed setting, and the ratio of every setting to it and to plain."""
    fixed = [row for row in rows if not row.adapts]
    return {
        "single_fixed": max(fixed, key=lambda row: row.tokens_per_s).setting if fixed else None,
        "settings": {
            row.setting: {"adapts": row.adapts, "speedup": row.speedup, "to_single_fixed": row.to_single_fixed}
            for row in rows
        },
    }


def _sheet(rows: Sequence[TraceRow], phases: Sequence[Phase]) -> Sheet:
    headings = (
        "setting",
        "tokens/s",
        "min-max",
        "times plain",
        "times best single fixed",
        *(f"{phase.batch} {phase.slice}" for phase in phases),
    )
    lines = [
        (
            row.setting,
            f"{row.tokens_per_s:.0f}",
            f"{row.tokens_per_s_min:.0f}-{row.tokens_per_s_max:.0f}",
            f"{row.speedup:.2f}",
            f"{row.to_single_fixed:.2f}",
            *(f"{speed:.0f}" for speed in row.phases),
        )
        for row in rows
    ]
    return Sheet("the whole trace, and tokens/s of its phases", headings, tuple(lines))
