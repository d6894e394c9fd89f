"""A load that changes in batch size and slice while it runs.

Each phase keeps a number of requests of one slice running: where one ends the next begins. All settings answer the same
requests. When a phase has sent its last request the next phase begins, while earlier requests still run.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from foretoken.machine.neighbours import contention_notes, is_contended
from foretoken.measure.kept import KeptFile
from foretoken.measure.load.prompts import Ask
from foretoken.measure.load.rows import num_contended
from foretoken.measure.load.run import RESUMED, announce, kept_turns, make_report, opened
from foretoken.measure.load.settings import NO_POLICIES, BatchSetting, Policies, Stage, parse_batch_settings
from foretoken.measure.options import PLAIN
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.progress import Tell, progress
from foretoken.measure.report import Report, Table, load_average
from foretoken.measure.stats import best_fixed
from studies.changing_load.options import ChangingLoadOptions, LoadPhase

EXPLAINED = (
    "Tokens per second of the whole load, prefill included, from the first step to the last token (median over "
    "repeats), and of each phase by the tokens emitted in it. Ratios are medians over repeats. The best single fixed "
    "setting is the one with the most tokens per second over the whole load among those with a fixed number of draft "
    "tokens (plain is one of them), chosen afterwards. `!` behind a setting: other processes took a tenth of the "
    "cores or more."
)
_LENGTHS = (0.5, 1.0, 1.5)  # of answers, in turn, so that requests do not end together
_MAX_REQUESTS = 2000
_OF_BATCHES = ("batches", "slices", "prompts_per_slice", "warmup")


@dataclass(frozen=True)
class LoadRequest:
    """A request of a changing load."""

    ask: Ask
    max_tokens: int
    place: int


@dataclass(frozen=True)
class LoadTurn:
    """One setting's run of the load: seconds and tokens of each phase; `contended`: whether other processes took the
    cores meanwhile, None where that is not known.
    """

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    contended: bool | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of the whole load."""
        return sum(self.tokens) / sum(self.seconds)


@dataclass(frozen=True)
class LoadRow:
    """A setting's result, ratios to plain and to the best single fixed setting; of `num_runs` runs `num_contended` were
    measured while other processes took the cores.
    """

    setting: str
    adapts: bool
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    speedup: float
    to_single_fixed: float
    phases: tuple[float, ...]
    num_runs: int
    num_contended: int | None


def run_changing_load(
    options: ChangingLoadOptions,
    command: str = "python -m studies.changing_load",
    policies: Policies = NO_POLICIES,
    remarks: Sequence[str] = (),
) -> Report:
    """Measure every setting on the phases of the load. After Ctrl-C the report holds what was measured until then.

    `policies` are made for settings of their names; `remarks` are added to the caveats.

    Raises:
        ForetokenError: a setting or model that cannot be used, a failing engine, or a folder that cannot be written.
    """
    load = load_average()
    settings, notes = parse_batch_settings(options.settings, options.draft, policies)
    most = max(phase.batch for phase in options.phases)
    names = list(dict.fromkeys(phase.slice for phase in options.phases))
    turns: dict[BatchSetting, dict[int, LoadTurn]] = {}
    interrupted = False
    longest = math.ceil(max(_LENGTHS) * options.max_tokens)
    opening = opened(options, names, max_batch=most, count=most, answer_tokens=longest, policies=policies)
    with opening as (stage, found):
        kept = kept_turns(options, found, settings, _OF_BATCHES)
        try:
            known = restored_load(kept, settings) if kept.lines else None
            one = [_jobs(phase, found, phase.batch, options.max_tokens) for phase in options.phases]
            run_through(stage, BatchSetting(PLAIN), options.phases, one)  # warm-up
            if known is None:
                sizes = size_phases(options, run_through(stage, BatchSetting(PLAIN), options.phases, one))
                kept.append({"sizes": sizes})
            else:
                sizes, turns = known
                notes += [RESUMED] if turns else []
            jobs = [
                _jobs(phase, found, size, options.max_tokens) for phase, size in zip(options.phases, sizes, strict=True)
            ]
            plain_s = len(options.phases) * options.phase_s
            num_turns = len(settings) * (options.repeats + 1)
            announce(
                f"{num_turns} runs of the load, about {max(1, round(num_turns * plain_s / 60))} min "
                "if every setting takes as long as plain"
            )
            stage.forget()
            with progress(num_turns - sum(map(len, turns.values()))) as tell:
                measure_load(stage, options, settings, (one, jobs), turns, tell, kept)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            kept.close()
    rows = summarise_load(turns)
    notes.append(
        "The policy of each setting started without measurements and kept its state from one run of the load to the "
        "next."
    )
    return make_report(
        options,
        "load",
        command,
        rows=rows,
        summary=load_summary(rows),
        tables=(_table(rows, options.phases),),
        plots=(_plot(rows),),
        explained=EXPLAINED,
        notes=(*notes, *contention_notes([(row.num_contended, row.num_runs) for row in rows], "runs"), *remarks),
        interrupted=interrupted,
        load=load,
    )


def measure_load(
    stage: Stage,
    options: ChangingLoadOptions,
    settings: Sequence[BatchSetting],
    jobs: tuple[Sequence[Sequence[LoadRequest]], Sequence[Sequence[LoadRequest]]],
    turns: dict[BatchSetting, dict[int, LoadTurn]],
    tell: Tell = lambda _words: None,
    kept: KeptFile | None = None,
) -> None:
    """Add the turns that `turns` lacks, repeat by repeat in a rotating order, and write each to `kept` as well; `jobs`
    are (warm-up, measured) requests.
    """
    for setting in settings:
        tell(f"warm-up: {setting.name}")
        run_through(stage, setting, options.phases, jobs[0])
    for repeat in range(options.repeats):
        first = repeat % len(settings)
        for setting in (*settings[first:], *settings[:first]):
            if repeat in turns.get(setting, ()):
                continue
            tell(f"load: {setting.name}")
            turn = run_through(stage, setting, options.phases, jobs[1])
            turns.setdefault(setting, {})[repeat] = turn
            if kept is not None:
                kept.append({"setting": setting.name, "repeat": repeat, "turn": asdict(turn)})


def restored_load(
    kept: KeptFile, settings: Sequence[BatchSetting]
) -> tuple[list[int], dict[BatchSetting, dict[int, LoadTurn]]]:
    """The sizes of the phases, which are the first line, and the turns that were written.

    Raises:
        StorageError: a line is none of this run's.
    """
    by_name = {setting.name: setting for setting in settings}
    sizes: list[int] = []
    turns: dict[BatchSetting, dict[int, LoadTurn]] = {}

    def read(line: Mapping[str, Any]) -> None:
        if not sizes:
            sizes.extend(line["sizes"])
            return
        raw = line["turn"]
        turn = LoadTurn(tuple(raw["seconds"]), tuple(raw["tokens"]), raw["contended"])
        turns.setdefault(by_name[line["setting"]], {})[line["repeat"]] = turn

    kept.restored(read)
    return sizes, turns


def size_phases(options: ChangingLoadOptions, plain: LoadTurn) -> list[int]:
    """Requests of each phase: as many as plain decoding answers in `phase_s`, at least as many as run at a time."""
    sizes = []
    for phase, seconds, tokens in zip(options.phases, plain.seconds, plain.tokens, strict=True):
        wanted = math.ceil(options.phase_s * tokens / max(seconds, 1e-9) / options.max_tokens)
        sizes.append(min(max(wanted, phase.batch), _MAX_REQUESTS))
    return sizes


def _jobs(phase: LoadPhase, found: Mapping[str, Sequence[Ask]], count: int, max_tokens: int) -> list[LoadRequest]:
    asks = itertools.islice(itertools.cycle(found[phase.slice]), count)
    return [
        LoadRequest(ask, max(2, round(max_tokens * _LENGTHS[place % len(_LENGTHS)])), place)
        for place, ask in enumerate(asks)
    ]


def run_through(
    stage: Stage, setting: BatchSetting, phases: Sequence[LoadPhase], jobs: Sequence[Sequence[LoadRequest]]
) -> LoadTurn:
    """Run the load under one setting; tokens count for the phase in which they are emitted.

    Raises:
        ForetokenError: an answer failed.
    """
    stage.enter(setting)
    stage.others.start()
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
                break  # all requests of this phase were sent, and one has finished
            for output in stage.llm.step():
                if output.error is not None:
                    raise output.error
                emitted += len(output.token_ids)
                running -= output.finish_reason is not None
        seconds.append(time.perf_counter() - began)
        tokens.append(emitted)
    share = stage.others.share()
    return LoadTurn(tuple(seconds), tuple(tokens), None if share is None else is_contended(share))


def summarise_load(turns: Mapping[BatchSetting, Mapping[int, LoadTurn]]) -> tuple[LoadRow, ...]:
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
            LoadRow(
                setting.name,
                setting.adapts,
                median(speeds),
                min(speeds),
                max(speeds),
                _ratio(own, plain),
                _ratio(own, turns[single]),
                tuple(median(column) for column in phases),
                len(own),
                num_contended(turn.contended for turn in own.values()),
            )
        )
    return tuple(rows)


def single_fixed(turns: Mapping[BatchSetting, Mapping[int, LoadTurn]]) -> BatchSetting:
    """The fastest setting with a fixed number of draft tokens."""
    found = best_fixed(
        turns, lambda setting: setting.adapts, lambda one: median(turn.tokens_per_s for turn in turns[one].values())
    )
    assert found is not None  # plain is there
    return found


def _ratio(own: Mapping[int, LoadTurn], others: Mapping[int, LoadTurn]) -> float:
    pairs = [turn.tokens_per_s / others[repeat].tokens_per_s for repeat, turn in own.items() if repeat in others]
    return median(pairs) if pairs else 0.0


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def load_summary(rows: Sequence[LoadRow]) -> dict[str, object]:
    """The best single fixed setting, and the ratio of every setting to it and to plain."""
    single = best_fixed(rows, lambda row: row.adapts, lambda row: row.tokens_per_s)
    return {
        "single_fixed": None if single is None else single.setting,
        "settings": {
            row.setting: {"adapts": row.adapts, "speedup": row.speedup, "to_single_fixed": row.to_single_fixed}
            for row in rows
        },
    }


def _plot(rows: Sequence[LoadRow]) -> Plot:
    """Throughput of every setting over the whole load."""
    series = tuple(Series(row.setting, (Point("whole load", row.tokens_per_s),)) for row in rows)
    return Plot("Throughput of the whole load", "tokens per second", series)


def _table(rows: Sequence[LoadRow], phases: Sequence[LoadPhase]) -> Table:
    headings = (
        "setting",
        "tokens/s",
        "min-max",
        "ratio to plain",
        "ratio to best single fixed",
        *(f"{phase.batch} {phase.slice}" for phase in phases),
    )
    lines = [
        (
            row.setting + ("!" if row.num_contended else ""),
            f"{row.tokens_per_s:.0f}",
            f"{row.tokens_per_s_min:.0f}-{row.tokens_per_s_max:.0f}",
            f"{row.speedup:.2f}",
            f"{row.to_single_fixed:.2f}",
            *(f"{speed:.0f}" for speed in row.phases),
        )
        for row in rows
    ]
    return Table("the whole load, and tokens/s of its phases", headings, tuple(lines))
