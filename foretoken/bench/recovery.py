"""`foretoken bench --recovery`: how soon what chooses the number of guesses follows a text whose nature changes.

The target is real and so are its times. What it says is forced (one token, for ever), so that a stand-in for a drafter
can be right with a chance that is written down: none for a while, then a high one, and back, in steps of the engine.
Its guesses cost nothing. What a controller that knew the chance would choose is told by the times of steps with fixed
numbers of guesses, measured first.
"""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from foretoken.bench.batch_settings import AUTO, RIVALS, BatchSetting, Stage
from foretoken.bench.drafting import DrafterChoice
from foretoken.bench.load_options import (
    MEASURED,
    LoadOptions,
    Tell,
    announce,
    load_now,
    make_report,
    opened,
    progress,
    table_text,
)
from foretoken.bench.sheets import Sheet, SheetReport
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.policy import MOST_NUM_DRAFT
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.group import drafter_key
from foretoken.engine.request import RequestState
from foretoken.errors import InputError

GOAL_STEPS = 50
EXPLAINED = (
    "Steps from a change of the chance until the number of guesses is right: within one of the best "
    "number for the new chance, or worth at least "
    "95 % of its tokens per second, in 8 of 10 steps from there on. `never`: not before the next change. "
    "`share of the known best` is the tokens "
    "per second of the whole stretch against always guessing the best number, by the measured times of "
    "steps. The first stretch begins untaught."
)
_STAND_IN = "ngram"  # whose place in the engine the scripted drafter takes
_CHANCES = (0.0, 0.85, 0.0, 0.85)
_STRETCH_STEPS = 80
_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, MOST_NUM_DRAFT)
_TIMED_TURNS, _TIMED_STEPS = 4, 5
_GOOD_SHARE = 0.95
_WINDOW, _GOOD_IN_WINDOW = 10, 8
_TOKEN_BIAS = 100.0
_PROMPT_TOKENS = 16
_MARGIN = 1.3  # a text may grow so much beyond what is expected
_FORCED = 5  # the token that is said, whatever it means


class ScriptedDrafter:
    """Guesses the forced token with the script's chance at each place, otherwise another; counts its requests' rounds.

    `chances` holds the chance of every stretch of `stretch_steps` rounds; `chosen[request]` what it was asked for round
    by round.
    """

    name = _STAND_IN

    def __init__(self, chances: Sequence[float], stretch_steps: int, seed: int) -> None:
        self.chances, self.stretch_steps, self.seed = chances, stretch_steps, seed
        self.chosen: dict[int, list[int]] = {}

    def start(self, request: Request) -> None:
        """Its round 0 is the next one."""
        self.chosen[request.request_id] = []

    def propose(self, batch: Batch) -> Draft:
        """A chain for every request."""
        counts = [entry.num_draft for entry in batch.decoding]
        offsets = (0, *itertools.accumulate(counts))
        parents = tuple(place - 1 for count in counts for place in range(count))
        tokens = [
            token for entry in batch.decoding for token in self._guesses(entry.request.request_id, entry.num_draft)
        ]
        drafters = tuple(self.name if count else None for count in counts)
        return Draft(torch.tensor(tokens, dtype=torch.int64), parents, offsets, drafters)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """A round is over, with guesses or without."""
        for entry in batch.decoding:
            self.chosen[entry.request.request_id].append(entry.num_draft)

    def finish(self, request_id: int) -> None:
        """What was chosen is kept, to be read."""

    def _guesses(self, request_id: int, count: int) -> list[int]:
        round_number = len(self.chosen[request_id])
        chance = self.chances[min(round_number // self.stretch_steps, len(self.chances) - 1)]
        rng = random.Random(f"{self.seed} {request_id} {round_number}")
        return [_FORCED if rng.random() < chance else _FORCED + 1 for _ in range(count)]


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of a step of some batch by guesses of each request."""

    batch: int
    numbers: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, number: float) -> float:
        """Between the measured numbers on the straight line."""
        place = min(max(bisect_right(self.numbers, number), 1), len(self.numbers) - 1)
        (low, high), (low_s, high_s) = self.numbers[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (number - low) / (high - low)

    def tokens_per_s(self, number: float, chance: float) -> float:
        """Expected, of one request."""
        return expected_tokens(number, chance) / self.at(number)

    def best(self, chance: float) -> int:
        """The number of guesses that a controller would choose that knew the chance."""
        return max(range(MOST_NUM_DRAFT + 1), key=lambda number: self.tokens_per_s(number, chance))

    def is_right(self, number: float, chance: float) -> bool:
        """Whether `number` is as good as the best one, or nearly the same."""
        best = self.best(chance)
        return abs(number - best) <= 1 or self.tokens_per_s(number, chance) >= _GOOD_SHARE * self.tokens_per_s(
            best, chance
        )


def expected_tokens(number: float, chance: float) -> float:
    """Tokens of a round of `number` guesses in a chain, each of which stands with `chance` if the one before it did."""
    whole = int(number)
    tokens = sum(chance**place for place in range(whole + 1))
    return tokens + (number - whole) * chance ** (whole + 1)


@dataclass(frozen=True)
class Stretch:
    """What one setting did between two changes of the chance: `numbers` are its guesses per request, step by step."""

    setting: str
    batch: int
    repeat: int
    place: int
    chance: float
    numbers: tuple[float, ...]

    def steps_to_recover(self, times: StepTimes) -> int | None:
        """Steps until the number is right and stays so; None where it never is."""
        right = [times.is_right(number, self.chance) for number in self.numbers]
        for step in range(len(right)):
            window = right[step : step + _WINDOW]
            if right[step] and sum(window) * _WINDOW >= _GOOD_IN_WINDOW * len(window):
                return step
        return None

    def share_of_best(self, times: StepTimes) -> float:
        """Tokens per second against those of the best number for the chance."""
        tokens = sum(expected_tokens(number, self.chance) for number in self.numbers)
        return (
            tokens
            / sum(times.at(number) for number in self.numbers)
            / times.tokens_per_s(times.best(self.chance), self.chance)
        )


@dataclass(frozen=True)
class RecoveryRow:
    """A setting's stretches of one kind: the first one, those after the chance rose, those after it fell.

    `steps` lists every stretch's steps until the number of guesses was right (None: never); `num_draft` is the median
    of the second half.
    """

    setting: str
    batch: int
    change: str
    steps: tuple[int | None, ...]
    best_num_draft: int
    num_draft: float
    share_of_best: float

    @property
    def within_goal(self) -> bool:
        """Whether all of them were right within the goal."""
        return all(steps is not None and steps <= GOAL_STEPS for steps in self.steps)


def run_recovery(options: LoadOptions, command: str = "foretoken bench --recovery") -> SheetReport:
    """Measure; Ctrl-C ends it early, and the report then holds what there is and says so.

    Raises:
        InputError: a table that is yet to be measured.
        ForetokenError: a model that cannot be used, a failing engine, or a folder that cannot be written.
    """
    if options.table is None:
        raise InputError("table", MEASURED, "a table is measured on texts, and here is none; write it out")
    load = load_now()
    settings = [
        BatchSetting(AUTO, DrafterChoice(_STAND_IN), "auto"),
        *(BatchSetting(rule, DrafterChoice(_STAND_IN), "auto", rule) for rule in RIVALS),
    ]
    batches = sorted(set(options.batches))
    stretches: list[Stretch] = []
    times: dict[int, StepTimes] = {}
    interrupted = False
    with opened(options, ("random",), max(batches), 1, _most_tokens()) as (stage, _):
        try:
            for batch in batches:
                times[batch] = step_times(stage, batch)
            total = len(batches) * options.repeats * len(settings)
            one_s = sum(one.seconds[0] for one in times.values()) * _STRETCH_STEPS * len(_CHANCES)
            announce(f"{total} runs, about {max(1, round(1.2 * options.repeats * len(settings) * one_s / 60))} min")
            with progress(total) as tell:
                measure_recovery(stage, settings, batches, options.repeats, stretches, tell)
        except KeyboardInterrupt:
            interrupted = True
    rows = summarise_recovery(stretches, times)
    cut = [stretch for stretch in stretches if len(stretch.numbers) < _STRETCH_STEPS]
    notes = [
        (
            f"Each text: chances {', '.join(map(str, _CHANCES))} of a guess to stand, {_STRETCH_STEPS} steps "
            "each; guesses cost nothing to make."
        ),
        *([f"{len(cut)} stretches are shorter: the text was full."] if cut else []),
        f"The table of guesses by batch size: {table_text(stage.table)}.",
        *(f"Milliseconds of a step at batch {one.batch} by guesses: {_times_text(one)}." for one in times.values()),
    ]
    summary = {
        "goal_steps": GOAL_STEPS,
        "within_goal": {name: all(row.within_goal for row in rows if row.setting == name) for name in _names(rows)},
    }
    return make_report(
        options, "recovery", command, rows, summary, (_sheet(rows),), EXPLAINED, notes, interrupted, load
    )


def _most_tokens() -> int:
    """Room for a text in which more stands than may be expected."""
    return round(_MARGIN * _STRETCH_STEPS * sum(expected_tokens(MOST_NUM_DRAFT, chance) for chance in _CHANCES))


def step_times(stage: Stage, batch: int) -> StepTimes:
    """Times of steps in which every request guesses the same number, none of which stands; the numbers take turns."""
    timed: dict[int, list[float]] = {number: [] for number in _NUMBERS}
    for number in _NUMBERS * _TIMED_TURNS:
        script = ScriptedDrafter((0.0,), 1, stage.seed)
        timed[number] += _run(
            stage, script, BatchSetting("fixed", DrafterChoice(_STAND_IN), number), batch, _TIMED_STEPS
        )[1:]
    seconds = [median(own) for own in timed.values()]
    for place in range(1, len(seconds)):  # more rows never take less time: what says so is noise
        seconds[place] = max(seconds[place], seconds[place - 1])
    return StepTimes(batch, _NUMBERS, tuple(seconds))


def measure_recovery(
    stage: Stage,
    settings: Sequence[BatchSetting],
    batches: Sequence[int],
    repeats: int,
    stretches: list[Stretch],
    tell: Tell = lambda _words: None,
) -> None:
    """Add the stretches of every setting, each time with a policy that begins anew."""
    for batch, repeat, setting in itertools.product(batches, range(repeats), settings):
        tell(f"recovery {batch}: {setting.name}")
        stage.forget()
        script = ScriptedDrafter(_CHANCES, _STRETCH_STEPS, stage.seed + repeat)
        _run(stage, script, setting, batch, _STRETCH_STEPS * len(_CHANCES))
        steps = [sum(numbers) / batch for numbers in zip(*script.chosen.values(), strict=True)]
        for place, chance in enumerate(_CHANCES):
            own = tuple(steps[place * _STRETCH_STEPS : (place + 1) * _STRETCH_STEPS])
            if own:
                stretches.append(Stretch(setting.name, batch, repeat, place, chance, own))


def _run(stage: Stage, script: ScriptedDrafter, setting: BatchSetting, batch: int, num_steps: int) -> list[float]:
    """Decode `num_steps` steps after the prompts' own, or until a text is full; seconds of each."""
    stage.enter(setting)
    engine = stage.llm.engine
    spec = setting.spec(None)
    _stand_in(stage, spec, script)
    room = stage.llm.target.max_context_tokens - _PROMPT_TOKENS
    params = SamplingParams(max_tokens=min(_most_tokens(), room), ignore_eos=True, logit_bias={_FORCED: _TOKEN_BIAS})
    states = [
        stage.llm.submit([_FORCED + 2 + place] * _PROMPT_TOKENS, replace(params, tenant=str(place)), spec)
        for place in range(batch)
    ]
    seconds: list[float] = []
    try:
        while not all(state.origins for state in states):
            engine.step()
            _check_alive(states)
        for chosen in script.chosen.values():
            chosen.clear()  # the prompt's own round is none of the script's
        while len(seconds) < num_steps and all(state.finish_reason is None for state in states):
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
        _check_alive(states)
    finally:
        for state in states:
            engine.abort(state.request_id)
    return seconds


def _check_alive(states: Sequence[RequestState]) -> None:
    """Raise the error of a request that failed: a run that lost requests measures nothing."""
    for state in states:
        if state.error is not None:
            raise state.error


def _stand_in(stage: Stage, spec: SpecConfig, script: ScriptedDrafter) -> None:
    key = drafter_key(spec)
    assert key is not None
    stage.llm.engine.drafters.drafters[key] = script


def summarise_recovery(stretches: Sequence[Stretch], times: Mapping[int, StepTimes]) -> tuple[RecoveryRow, ...]:
    """A row for every setting, batch and kind of change."""
    groups: dict[tuple[str, int, str], list[Stretch]] = {}
    for stretch in stretches:
        groups.setdefault((stretch.setting, stretch.batch, _change(stretch)), []).append(stretch)
    return tuple(_row(change, own, times[batch]) for (_, batch, change), own in groups.items())


def _change(stretch: Stretch) -> str:
    return "start" if not stretch.place else "rise" if stretch.chance else "fall"


def _row(change: str, own: Sequence[Stretch], times: StepTimes) -> RecoveryRow:
    settled = [number for stretch in own for number in stretch.numbers[len(stretch.numbers) // 2 :]]
    return RecoveryRow(
        setting=own[0].setting,
        batch=own[0].batch,
        change=change,
        steps=tuple(stretch.steps_to_recover(times) for stretch in own),
        best_num_draft=times.best(own[0].chance),
        num_draft=median(settled),
        share_of_best=median(stretch.share_of_best(times) for stretch in own),
    )


def _names(rows: Sequence[RecoveryRow]) -> list[str]:
    return list(dict.fromkeys(row.setting for row in rows))


def _times_text(times: StepTimes) -> str:
    return ", ".join(
        f"{number}: {1e3 * seconds:.1f}" for number, seconds in zip(times.numbers, times.seconds, strict=True)
    )


def _sheet(rows: Sequence[RecoveryRow]) -> Sheet:
    headings = (
        "setting",
        "batch",
        "change",
        "steps, each time",
        f"all within {GOAL_STEPS}",
        "guesses at the end",
        "best",
        "share of the known best",
    )
    lines = [
        (
            row.setting,
            str(row.batch),
            row.change,
            " ".join("never" if steps is None else str(steps) for steps in row.steps),
            "yes" if row.within_goal else "no",
            f"{row.num_draft:.1f}",
            str(row.best_num_draft),
            f"{row.share_of_best:.2f}",
        )
        for row in rows
    ]
    return Sheet("steps until the number of guesses is right again", headings, tuple(lines))
