"""Calibration: step costs and acceptance from a run on prompts that the validation does not use."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from foretoken.config import SpecConfig
from foretoken.draft.lookup_tree import Lookup
from foretoken.errors import InputError
from foretoken.measure.workload import SLICES, slices
from foretoken.simulate.inputs import Job
from foretoken.simulate.sim_request import Record, Records
from studies.validation.answers import FROM_TEXT, Answer, looked_through
from studies.validation.records import record_of
from studies.validation.refine import RealStep
from studies.validation.replay import Clock, Replayed, Serving, replay

MEASURED, CALIBRATION = 0, 1  # disjoint parts of the prompts
_PARTS = 2
_PER_SLICE = 400  # texts of a slice, as far as the library has them
_FEWEST = 6  # requests per slice
_numbers = itertools.count()  # of calibrations, each with its own tenants
_LIGHT, _HEAVY = 0.1, 3.0  # load at the beginning and the end, as shares of the capacity


class Prompts:
    """Prompts from one `part` of the texts: of each slice its texts in turn, each ending somewhere in its later half.

    Both parts are cut in the same way, so that prompts of the one are like those of the other: a model goes on
    differently from where a text stops by itself than from its middle. What is asked for later is cut elsewhere.
    """

    def __init__(self, encode: Callable[[str], list[int]], part: int) -> None:
        self._encode, self._part = encode, part
        self._texts: dict[str, list[list[int]]] = {}
        self._ends: dict[str, list[list[int]]] = {}  # of each text, in a random order
        self._used: dict[str, int] = {}

    def cut(self, jobs: Sequence[Job]) -> list[list[int]]:
        """A prompt of the wanted length for every job.

        Raises:
            InputError: a job that names no slice.
        """
        return [self._next(slice_of(job), job.prompt_tokens) for job in jobs]

    def begin_anew(self) -> None:
        """Let the same prompts come again."""
        self._used.clear()

    def _next(self, name: str, length: int) -> list[int]:
        if name not in self._texts:
            self._texts[name] = [
                self._encode(prompt.text) for prompt in slices([name], _PER_SLICE)[self._part :: _PARTS]
            ]
            rng = random.Random(f"prompts {name} {self._part}")
            self._ends[name] = [
                rng.sample(range(-(-len(ids) // 2), len(ids) + 1), len(ids) // 2 + 1) for ids in self._texts[name]
            ]
        texts, number = self._texts[name], self._used.get(name, 0)
        self._used[name] = number + 1
        place, turn = number % len(texts), number // len(texts)
        ends = self._ends[name][place]
        ids = texts[place][: ends[turn % len(ends)]]
        while len(ids) < length:  # other texts before it
            place = (place + 1) % len(texts)
            ids = texts[place] + ids
        return ids[-length:]


def sample_jobs(jobs: Iterable[Job], total: int, rate: float, seed: int) -> list[Job]:
    """About `total` requests, slices and prompt lengths as in `jobs`, answers as long as the longest; they come slowly,
    then fast.

    `rate` is what the engine manages per second: from few requests at once to as many as fit, everything occurs.
    """
    by_slice: dict[str, list[Job]] = {}
    for job in jobs:
        by_slice.setdefault(slice_of(job), []).append(job)
    count = sum(map(len, by_slice.values()))
    longest = max(job.output_tokens for own in by_slice.values() for job in own)
    chosen: list[Job] = []
    for own in by_slice.values():
        ordered = sorted(own, key=lambda job: job.prompt_tokens)
        wanted = max(_FEWEST, round(total * len(own) / count))
        chosen += [
            replace(ordered[(2 * i + 1) * len(own) // (2 * wanted)], output_tokens=longest) for i in range(wanted)
        ]
    rng = random.Random(f"calibration {seed}")
    rng.shuffle(chosen)
    now = 0.0
    for index, job in enumerate(chosen):
        now += rng.expovariate(rate * (_LIGHT + (_HEAVY - _LIGHT) * index / len(chosen)))
        chosen[index] = replace(job, arrival_s=now)
    return chosen


@dataclass(frozen=True)
class Calibration:
    """A calibration run: its steps, its answers, and the run itself."""

    steps: tuple[RealStep, ...]
    answers: tuple[Answer, ...]
    run: Replayed

    def records(self) -> dict[str, Records]:
        """Records by slice, from the rounds that ran; none of plain decoding."""
        found: dict[str, list[Record]] = {}
        for index, (answer, rounds) in enumerate(zip(self.answers, self.run.rounds(), strict=True)):
            record = record_of(rounds, index)
            if record is not None:
                found.setdefault(answer.name, []).append(record)
        return {name: Records(tuple(own)) for name, own in found.items()}


def calibrate(
    llm: Serving,
    jobs: Sequence[Job],
    prompts: Sequence[Sequence[int]],
    spec: SpecConfig,
    clock: Clock | None = None,
    tell: Callable[[int], None] = lambda _finished: None,
) -> Calibration:
    """Run `jobs`; `spec.num_draft` is the budget of every round."""
    name = f"calibration {next(_numbers)}"
    done = replay(
        llm,
        jobs,
        prompts,
        [spec] * len(jobs),
        "calibration",
        clock,
        tell,
        tenant=name,
    )
    answers = tuple(
        Answer(slice_of(job), tuple(prompt), said)
        for job, prompt, said in zip(jobs, prompts, done.token_ids, strict=True)
    )
    return Calibration(real_steps(done), answers, done)


def records_from(llm: Serving, spec: SpecConfig, own: Calibration, answers: Sequence[Answer]) -> dict[str, Records]:
    """What is known of a drafter, by slice: from all `answers` if it needs only texts, else from its `own` rounds."""
    if spec.drafter not in FROM_TEXT:
        return own.records()
    (drafter,) = llm.loaded_drafters(spec)
    assert isinstance(drafter, Lookup)
    return {name: Records(tuple(found)) for name, found in looked_through(drafter, spec, answers).items()}


def real_steps(done: Replayed) -> tuple[RealStep, ...]:
    """A run's steps as the profile is asked for them; the time between steps is shared among them alike.

    Where nobody drafts, what drafters take to follow the text is part of the step.
    """
    between_s = done.outside_s / max(1, len(done.steps))
    return tuple(
        RealStep(
            one.step.num_rows,
            one.contexts,
            one.step.num_prompt_tokens,
            one.step.seconds - (one.step.draft_s if one.num_drafting else 0.0) + between_s,
            one.longest_draft,
            one.num_drafting,
            one.num_unread,
            one.step.draft_s if one.num_drafting else 0.0,
        )
        for one in done.steps
    )


def slice_of(job: Job) -> str:
    """The slice that a request's prompt is taken from.

    Raises:
        InputError: it names none.
    """
    if not isinstance(job.acceptance, str) or job.acceptance not in SLICES:
        raise InputError(
            "acceptance", job.acceptance, f"a real run needs texts: name one of the slices {', '.join(SLICES)}"
        )
    return job.acceptance
