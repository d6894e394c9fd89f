"""How soon the number of draft tokens follows a change of acceptance.

The target and its step times are real. Its output is forced (one token, repeated), so that a scripted drafter has a
known acceptance: none for a while, then a high one, and back. Its tokens cost nothing to draft. The best number at each
acceptance comes from step times with fixed numbers of draft tokens, measured first.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from foretoken.backend.drafting import DrafterChoice
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.config import PolicyConfig
from foretoken.draft.group import drafter_key
from foretoken.engine.request import RequestState
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.load.run import announce, make_report, opened
from foretoken.measure.load.settings import AUTO, BatchSetting, Stage
from foretoken.measure.progress import Tell, progress
from foretoken.measure.report import Report, Table, load_average
from studies.recovery.scripted import FORCED, STAND_IN, ScriptedDrafter
from studies.rivals.policies import rival_policies, table_text

GOAL_STEPS = 50
EXPLAINED = (
    "Steps from a change of the acceptance until the number of draft tokens is right: within one of the best number "
    "for the new acceptance, or with at least 95 % of its tokens per second, in 8 of 10 steps from there on. `never`: "
    "not before the next change. `share of the oracle` is the tokens per second of the whole stretch against always "
    "drafting the best number, by the measured step times. The policy has no measurements in the first stretch."
)
_CHANCES = (0.0, 0.85, 0.0, 0.85)
_STRETCH_STEPS = 80
_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, PolicyConfig.max_num_draft)
_TIMED_TURNS, _TIMED_STEPS = 4, 5
_GOOD_SHARE = 0.95
_WINDOW, _GOOD_IN_WINDOW = 10, 8
_TOKEN_BIAS = 100.0
_PROMPT_TOKENS = 16
_MARGIN = 1.3  # room for more tokens than expected


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of a step at a batch size, by draft tokens of each request."""

    batch: int
    numbers: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, number: float) -> float:
        """Seconds of a step, linear between the measured numbers."""
        place = min(max(bisect_right(self.numbers, number), 1), len(self.numbers) - 1)
        (low, high), (low_s, high_s) = self.numbers[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (number - low) / (high - low)

    def tokens_per_s(self, number: float, chance: float) -> float:
        """Expected tokens per second of one request."""
        return expected_tokens(number, chance) / self.at(number)

    def best(self, chance: float) -> int:
        """The number of draft tokens with the most expected tokens per second."""
        return max(range(PolicyConfig.max_num_draft + 1), key=lambda number: self.tokens_per_s(number, chance))

    def is_right(self, number: float, chance: float) -> bool:
        """Whether `number` is within one of the best, or nearly as fast."""
        best = self.best(chance)
        return abs(number - best) <= 1 or self.tokens_per_s(number, chance) >= _GOOD_SHARE * self.tokens_per_s(
            best, chance
        )


def expected_tokens(number: float, chance: float) -> float:
    """Expected tokens of a round: a chain of `number` draft tokens, each accepted with `chance` after the previous."""
    whole = int(number)
    tokens = sum(chance**place for place in range(whole + 1))
    return tokens + (number - whole) * chance ** (whole + 1)


@dataclass(frozen=True)
class Stretch:
    """A setting between two changes of the acceptance; `numbers` are its draft tokens per request, step by step."""

    setting: str
    batch: int
    repeat: int
    place: int
    chance: float
    numbers: tuple[float, ...]

    def steps_to_recover(self, times: StepTimes) -> int | None:
        """Steps until the number is right and stays so; None for never."""
        right = [times.is_right(number, self.chance) for number in self.numbers]
        for step in range(len(right)):
            window = right[step : step + _WINDOW]
            if right[step] and sum(window) * _WINDOW >= _GOOD_IN_WINDOW * len(window):
                return step
        return None

    def share_of_best(self, times: StepTimes) -> float:
        """Tokens per second over those of always drafting the best number."""
        tokens = sum(expected_tokens(number, self.chance) for number in self.numbers)
        return (
            tokens
            / sum(times.at(number) for number in self.numbers)
            / times.tokens_per_s(times.best(self.chance), self.chance)
        )


@dataclass(frozen=True)
class RecoveryRow:
    """A setting's stretches of one kind: the first, those after a rise of the acceptance, those after a fall.

    `steps` are those until the number of draft tokens was right, by stretch (None: never); `num_draft` is the median
    over second halves.
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
        """Whether all stretches reached the goal."""
        return all(steps is not None and steps <= GOAL_STEPS for steps in self.steps)


def run_recovery(options: LoadOptions, table: Mapping[int, int], command: str = "python -m studies.recovery") -> Report:
    """Measure the engine's policy and the rival ones, `BatchTable` with `table`, at every batch size.

    After Ctrl-C the report holds what was measured until then, and says so.

    Raises:
        ForetokenError: a model that cannot be used, or a failing engine.
    """
    load = load_average()
    policies = rival_policies(table)
    settings = [
        BatchSetting(AUTO, DrafterChoice(STAND_IN), "auto"),
        *(BatchSetting(name, DrafterChoice(STAND_IN), "auto", name) for name in policies),
    ]
    batches = sorted(set(options.batches))
    stretches: list[Stretch] = []
    times: dict[int, StepTimes] = {}
    interrupted = False
    opening = opened(
        options, ("random",), max_batch=max(batches), count=1, answer_tokens=_max_tokens(), policies=policies
    )
    with opening as (stage, _):
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
    chances = ", ".join(map(str, _CHANCES))
    notes = [
        f"Each text: acceptance {chances}, {_STRETCH_STEPS} steps each; draft tokens cost no time.",
        *([f"{len(cut)} stretches are shorter: the context was full."] if cut else []),
        f"The table of draft tokens by batch size: {table_text(table)}.",
        *(
            f"Milliseconds of a step at batch {one.batch} by draft tokens: {_times_text(one)}."
            for one in times.values()
        ),
    ]
    summary = {
        "goal_steps": GOAL_STEPS,
        "within_goal": {name: all(row.within_goal for row in rows if row.setting == name) for name in _names(rows)},
    }
    return make_report(
        options,
        "recovery",
        command,
        rows=rows,
        summary=summary,
        tables=(_table(rows),),
        explained=EXPLAINED,
        notes=notes,
        interrupted=interrupted,
        load=load,
    )


def _max_tokens() -> int:
    """Room for an answer in which more is accepted than expected."""
    return round(
        _MARGIN * _STRETCH_STEPS * sum(expected_tokens(PolicyConfig.max_num_draft, chance) for chance in _CHANCES)
    )


def step_times(stage: Stage, batch: int) -> StepTimes:
    """Times of steps with the same number of draft tokens for all requests, none accepted; the numbers take turns."""
    timed: dict[int, list[float]] = {number: [] for number in _NUMBERS}
    for number in _NUMBERS * _TIMED_TURNS:
        script = ScriptedDrafter((0.0,), 1, stage.seed)
        timed[number] += _run(
            stage, script, BatchSetting("fixed", DrafterChoice(STAND_IN), number), batch, _TIMED_STEPS
        )[1:]
    seconds = [median(own) for own in timed.values()]
    for place in range(1, len(seconds)):  # fewer seconds for more rows are noise
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
    """Append the stretches of every setting, each time with a new policy."""
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
    """Decode `num_steps` steps after the prefill, or until a context is full; seconds of each step."""
    stage.enter(setting)
    engine = stage.llm.engine
    spec = setting.spec(None)
    _stand_in(stage, spec, script)
    room = stage.llm.target.max_context_tokens - _PROMPT_TOKENS
    params = SamplingParams(max_tokens=min(_max_tokens(), room), ignore_eos=True, logit_bias={FORCED: _TOKEN_BIAS})
    states = [
        stage.llm.submit([FORCED + 2 + place] * _PROMPT_TOKENS, replace(params, tenant=str(place)), spec)
        for place in range(batch)
    ]
    seconds: list[float] = []
    try:
        while not all(state.provenance for state in states):
            engine.step()
            _check_alive(states)
        for chosen in script.chosen.values():
            chosen.clear()  # the round of the prompt is not scripted
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
    """Raise the error of a request that failed: a run with missing requests is invalid."""
    for state in states:
        if state.error is not None:
            raise state.error


def _stand_in(stage: Stage, spec: SpecConfig, script: ScriptedDrafter) -> None:
    key = drafter_key(spec)
    assert key is not None
    stage.llm.put_drafters({key: script})


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


def _table(rows: Sequence[RecoveryRow]) -> Table:
    headings = (
        "setting",
        "batch",
        "change",
        "steps, each time",
        f"all within {GOAL_STEPS}",
        "draft tokens at the end",
        "best",
        "share of the oracle",
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
    return Table("steps until the number of draft tokens is right again", headings, tuple(lines))
